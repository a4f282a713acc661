"""Progress for a person: one line for each event that matters.

`Progress` makes the lines, and logs them: a record has the event's own fields beside the line, and `event`, its name.
`Drawn` is the handler that our commands put at the logger's end: it draws the lines on a terminal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from functools import singledispatchmethod
from typing import TYPE_CHECKING

from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring import events
from protofleet.contract.console.durations import in_words
from protofleet.contract.drift import WORDS
from protofleet.contract.printable import counted, printable

if TYPE_CHECKING:  # an aggregator within a program draws nothing
    from rich.console import Console

__all__ = ["Drawn", "Progress", "log_styled"]

logger = logging.getLogger("protofleet.aggregator")

_EVERY_S = 1.0  # a flood of contributions in a large fleet, or of refusals, prints one line a second
_SMALL_FLEET = 20
_INTRUDERS = 20
_AWAY_LINES, _AWAY_EVERY_S = 20, 3600.0


class Progress:
    """Logs events. Call it with each one.

    Where the logger takes DEBUG, also what became of each message, and the link's counts at the end.
    """

    def __init__(self, logger: logging.Logger = logger) -> None:
        self._logger = logger
        self._event: events.Event | None = None
        self._printed_at: dict[type, float] = {}
        self._screened_in, self._screened = 0, 0
        self._away = 0  # attempts in a row that found no broker
        self._refused: set[str] = set()  # devices named in this round, the first ones
        self._intruders: set[tuple[str, str]] = set()  # named, the first ones
        self._failed: set[str] = set()  # devices of which a roll-out failed, the first ones

    def __call__(self, event: events.Event) -> None:
        self._event = event
        self._show(event)

    @property
    def _verbose(self) -> bool:
        return self._logger.isEnabledFor(logging.DEBUG)

    def _line(self, text: str) -> None:
        self._say("", "", text)

    def _say(self, style: str, lead: str, rest: str, level: int = logging.INFO) -> None:
        """A sentence whose beginning has a style on a terminal; what is yellow is a warning."""
        log_styled(self._logger, logging.WARNING if style == "yellow" else level, style, lead, rest, self._event)

    def _often(self, kind: type) -> bool:
        """Whether a line of this kind was printed less than a second ago; never with `verbose`."""
        if self._verbose:
            return False
        now = time.monotonic()
        if now - self._printed_at.get(kind, -_EVERY_S) < _EVERY_S:
            return True
        self._printed_at[kind] = now
        return False

    @singledispatchmethod
    def _show(self, event: object) -> None:
        raise TypeError(f"no line for {type(event).__name__}")

    @_show.register
    def _(self, event: events.LinkUp) -> None:
        self._away = 0
        self._line(f"connected to {event.address}, messages up to {event.limit_bytes:,} bytes")

    @_show.register
    def _(self, event: events.ListsCounted) -> None:
        first = " or ".join(map(str, event.shorter))
        self._line(f"{event.classes} classes; devices whose bundle has the first {first} of them count, too")

    @_show.register
    def _(self, event: events.LinkDown) -> None:
        self._say_away("broker", event)

    @_show.register
    def _(self, event: events.StoreAway) -> None:
        self._say_away("store", event)

    def _say_away(self, what: str, event: events.LinkDown | events.StoreAway) -> None:
        """Each time for some minutes, then once an hour: a broker may be away for weeks."""
        self._away += 1
        now, kind = time.monotonic(), type(event)
        if self._verbose or self._away <= _AWAY_LINES or now - self._printed_at.get(kind, 0.0) >= _AWAY_EVERY_S:
            self._printed_at[kind] = now
            self._say("yellow", f"{what} away", f" ({event.reason}), trying again in {event.retry_s:.1f} s")

    @_show.register
    def _(self, event: events.Waiting) -> None:
        why = (
            ", but no sample of them has so many: --fraction is too small for --min-clients" if event.unsampled else ""
        )
        if event.opens_in_s is not None:
            self._line(
                f"round {event.round} is due in {in_words(event.opens_in_s)}; {counted(event.online, 'device')} online"
            )
        elif event.online >= event.needed and not event.unsampled:
            self._line(
                f"{counted(event.online, 'device')} online, {event.needed} needed: the next round opens when due"
            )
        else:
            self._line(f"waiting for devices: {event.online} online, {event.needed} needed{why}")

    @_show.register
    def _(self, event: events.RoundOpened) -> None:
        self._refused.clear()
        resumed = f", {counted(event.resumed, 'contribution')} already here" if event.resumed else ""
        lasts = f" for {in_words(event.window_s)}" if event.window_s else ""
        total = "" if event.window_s else f"/{event.rounds}"
        awaited = "online" if event.window_s else "awaited"
        self._say(
            "bold",
            f"round {event.round}{total}",
            f" open{lasts}: {event.method}, {counted(event.awaited, 'device')} {awaited}{resumed}",
        )

    @_show.register
    def _(self, event: events.ContributionsIn) -> None:
        expected = event.committed + event.awaited
        if event.awaited and expected > _SMALL_FLEET and self._often(events.ContributionsIn):
            return
        self._line(f"  round {event.round}: contributions {event.committed}/{expected}")

    @_show.register
    def _(self, event: events.StillAwaited) -> None:
        self._line(
            f"  round {event.round}: {event.committed} of {event.needed} needed contributions, "
            f"still awaited: {_names(event.names, event.awaited)}"
        )

    @_show.register
    def _(self, event: events.Silent) -> None:
        self._say(
            "yellow",
            "  silent through a whole deadline",
            f", not awaited any more: {_names(event.names, event.silent)}",
        )

    @_show.register
    def _(self, event: events.Nobody) -> None:
        online = counted(event.online, "device is", "devices are")
        online_text = f"; {online} online with nothing more to send" if event.online else ""
        online_text += f"; {event.refused} were refused in this round" if event.refused else ""
        self._say(
            "yellow",
            f"  round {event.round} awaits nobody",
            f" and has {event.committed} of "
            f"{counted(event.needed, 'contribution')}: waiting for further devices{online_text}",
        )

    @_show.register
    def _(self, event: events.Answering) -> None:
        self._line(
            f"this run is finished: answering devices that still lack a receipt, for {event.seconds:g} s; "
            "more --rounds go on with it"
        )

    @_show.register
    def _(self, event: events.Refused) -> None:
        """Of a small fleet every device is named, however many at once; beyond it a flood is one line a second."""
        if self._verbose:  # it has been told as what was decided
            return
        first = event.device not in self._refused and len(self._refused) < _SMALL_FLEET
        if first:
            self._refused.add(event.device)
        if not self._often(events.Refused) or first:
            self._say("yellow", "  refused", f" {event.device}: {event.reason}")

    @_show.register
    def _(self, event: events.Decided) -> None:
        if self._verbose:
            reason = f": {event.reason}" if event.reason else ""
            method = f" ({event.method})" if event.method else ""
            self._say("", "", f"  {event.device}, round {event.round}{method}: {event.outcome}{reason}", logging.DEBUG)

    @_show.register
    def _(self, event: events.BatchTaken) -> None:
        """How long it took is for metrics."""

    @_show.register
    def _(self, event: events.Ended) -> None:
        if self._verbose:
            self._say(
                "",
                "link closed",
                f": {event.connections} connections, {event.dropped} messages dropped at QoS 0",
                logging.DEBUG,
            )

    @_show.register
    def _(self, event: events.Screened) -> None:
        if self._screened_in != event.round:
            self._screened_in, self._screened = event.round, 0
        self._screened += 1
        if self._screened <= _SMALL_FLEET:
            self._say("yellow", f"  {event.verdict}", f" {event.device}: {event.reason}")
        elif self._screened == _SMALL_FLEET + 1:
            self._say("yellow", "  and more devices", " like these")

    @_show.register
    def _(self, event: events.Warned) -> None:
        self._say("yellow", "  warning", f": round {event.round}: {event.words}")

    @_show.register
    def _(self, event: events.Noticed) -> None:
        self._say("yellow", "warning", f": {event.line}")

    @_show.register
    def _(self, event: events.RoundExtended) -> None:
        over, lasts = "deadline passed", f"for another {event.deadline_s:g} s"
        if event.is_window:
            over, lasts = "window over", "until they are there"
        self._say(
            "yellow",
            f"  {over}",
            f" with {event.committed} of {counted(event.needed, 'contribution')}: round {event.round} goes on {lasts}",
        )

    @_show.register
    def _(self, event: events.RoundClosed) -> None:
        choices = f"; {event.told}" if event.told else ""
        self._say(
            "green",
            f"  round {event.round} closed",
            f": {counted(event.committed, 'contribution')}, "
            f"{counted(event.classes, 'class', 'classes')} merged, {event.uplink_bytes:,} bytes up, "
            f"{event.seconds:.1f} s, global version {event.global_version}{choices}",
        )

    @_show.register
    def _(self, event: events.SumAsked) -> None:
        self._line(f"  round {event.round}: the helper is asked for the sum over {event.devices} devices")

    @_show.register
    def _(self, event: events.HelperAwaited) -> None:
        self._say(
            "yellow",
            f"  round {event.round} waits for the helper",
            f", who alone can open the sum over {event.devices} devices: protofleet helper",
        )

    @_show.register
    def _(self, event: events.AccuracyTold) -> None:
        part = "" if event.devices == event.contributors else f"{event.devices} of "
        over = part + counted(event.contributors, "device")
        worst = f"; fewest right: {event.worst}, {event.worst_share:.1%}" if event.devices > 1 else ""
        self._line(f"  round {event.round}: {over}, {_accuracy_in_words(event.mean, event.samples)}{worst}")

    @_show.register
    def _(self, event: events.HeadMade) -> None:
        choices = f"; {event.told}" if event.told else ""
        self._say(
            "green",
            f"global version {event.global_version}",
            f": {event.samples:,} samples of "
            f"{counted(event.devices, 'device')}, {counted(event.classes, 'class', 'classes')}{choices}",
        )
        if event.doubt:
            self._say("yellow", "  warning", f": {event.doubt}")

    @_show.register
    def _(self, event: events.SumsStand) -> None:
        if event.devices and self._often(events.SumsStand):
            return
        self._line(f"sums of {counted(event.devices, 'device')} stand, {event.online} online")

    @_show.register
    def _(self, event: events.OrderDone) -> None:
        target = "".join(f" {part}" for part in (event.device, event.detail) if part)
        self._say(
            "bold",
            f"{event.what}{target}",
            f", asked by {event.who}: {event.outcome}, global version {event.global_version}",
        )

    @_show.register
    def _(self, event: events.RolloutWidened) -> None:
        known_devices = f"{counted(event.devices, 'device')} of it known"
        self._say("green", "rollout", f" of version {event.version}: {100 * event.fraction:.3g} %, {known_devices}")

    @_show.register
    def _(self, event: events.RolloutHalted) -> None:
        self._say(
            "yellow",
            "rollout",
            f" of version {event.version} halted at {100 * event.fraction:.3g} %: "
            f"{event.reason}; protofleet rollout --store … --resume, or --end",
        )

    @_show.register
    def _(self, event: events.RolloutCompleted) -> None:
        self._say("green", "rollout", f" of version {event.version} complete: {counted(event.devices, 'device')}")

    @_show.register
    def _(self, event: events.RolloutTold) -> None:
        """One a second; beyond that who fails or refuses is named, the first ones, and once each."""
        first = event.word in ("failed", "refused") and event.device not in self._failed
        first = first and len(self._failed) < _SMALL_FLEET
        if first:
            self._failed.add(event.device)
        if not self._often(events.RolloutTold) or first:
            why = f": {event.reason}" if event.reason else ""
            self._line(f"  rollout of version {event.version}: {event.device} {event.word}{why}")

    @_show.register
    def _(self, event: events.RolloutDeaf) -> None:
        self._say(
            "yellow",
            "  warning",
            f": how devices fare in fleet {event.fleet} cannot be heard "
            f"({event.reason}): widen the roll-out by hand, rollout --stage",
        )

    @_show.register
    def _(self, event: events.DriftSuspected) -> None:
        shown = f"{event.now:.0%}" if event.figure == "unlike" else f"{event.now:.2f}"
        usual = f"{event.usual:.0%}" if event.figure == "unlike" else f"{event.usual:.2f}"
        self._say(
            "yellow",
            "drift",
            f": {event.device} departs from itself: {WORDS[event.figure]} {shown}, "
            f"usually {usual}; protofleet fleet show {event.device}",
        )

    @_show.register
    def _(self, event: events.PolicyRefused) -> None:
        if not self._often(events.PolicyRefused):
            self._say("yellow", "  refused", f" by the policy of {event.device}, {event.word}")

    @_show.register
    def _(self, event: events.IntruderTold) -> None:
        first = (event.device, event.cause) not in self._intruders and len(self._intruders) < _INTRUDERS
        if self._often(events.IntruderTold) and not first:  # anyone may invent names
            return
        if first:
            self._intruders.add((event.device, event.cause))
        received = f"{counted(event.messages, 'message')}: {event.reason}"
        if event.cause == "refuses":
            self._say("yellow", "warning", f": {event.device} refuses what it is sent, {received}")
        elif event.cause in OF_THE_DEVICE:
            self._say("yellow", "warning", f": {event.device}: {event.reason}")
        else:
            self._say("yellow", "intruder", f" as {event.device}, {received}")

    @_show.register
    def _(self, event: events.NumbersLost) -> None:
        is_helped = event.issued and not event.is_new_run
        todo = (
            "; if it is an older copy, stop and start it once with --new-run: devices repeat no round"
            if is_helped
            else ""
        )
        todo = "; it is another run, so there is nothing to be done" if event.is_new_run else todo
        self._say(
            "yellow",
            "  warning",
            f": devices have heard announcement {event.heard} of this key, and the store "
            f"knows of {event.issued or 'none'}: it was lost or is an older copy, and the clock is behind; "
            f"going on above{todo}",
        )

    @_show.register
    def _(self, event: events.ClassDriftSuspected) -> None:
        self._say(
            "yellow",
            "drift",
            f": class {event.name} departs from itself: what came of it lies "
            f"{event.now:.1f} times as far from earlier samples as chance allows, usually {event.usual:.1f}",
        )

    @_show.register
    def _(self, event: events.MetricsServed) -> None:
        self._line(f"metrics on {event.url}")
        if not event.is_local:
            self._say("yellow", "  warning", ": anyone who reaches it may read them: no password, no TLS")

    @_show.register
    def _(self, event: events.RunFinished) -> None:
        self._say(
            "bold green",
            "finished",
            f": {counted(event.rounds, 'round')}, "
            f"{counted(event.committed, 'contribution')} committed, "
            f"{event.uplink_bytes:,} bytes up",
        )


class Drawn(logging.Handler):
    """Draws records on a terminal, in its colours.

    Args:
        new: makes a console; None for standard error.
    """

    def __init__(self, new: Callable[[], Console] | None = None) -> None:
        from rich.console import Console

        super().__init__()
        self._new = new or (lambda: Console(stderr=True))
        self._console = self._new()

    def emit(self, record: logging.LogRecord) -> None:
        """Draw the sentence, as far in and with the style of its beginning that the record says."""
        from rich.text import Text

        indent, style, length = getattr(record, "drawn", (0, "", 0))
        text = Text(" " * indent + self.format(record))
        text.stylize(style, indent, indent + length)
        try:
            self._console.print(text, highlight=False, soft_wrap=True)
        except BaseException:  # a signal, maybe: half of this line is in the buffer, and would come with the next one
            self._console = self._new()
            raise


def log_styled(
    logger: logging.Logger, level: int, style: str, lead: str, rest: str, event: events.Event | None = None
) -> None:
    """Log a sentence whose beginning has a style on a terminal, with the fields of an event."""
    if logger.isEnabledFor(level):
        begins = lead or rest
        indent, length = len(begins) - len(begins.lstrip()), len(printable(lead.strip()))
        fields = {} if event is None else {"event": type(event).__name__, **vars(event)}
        if "name" in fields:  # a class's; of a record, `name` is its logger's
            fields["class"] = fields.pop("name")
        logger.log(level, printable(lead + rest).lstrip(), extra={**fields, "drawn": (indent, style, length)})


def _names(names: tuple[str, ...], all_of_them: int) -> str:
    more = f" and {all_of_them - len(names)} more" if all_of_them > len(names) else ""
    return ", ".join(names) + more


def _accuracy_in_words(mean: Mapping[str, float], samples: int) -> str:
    """The means of what devices said; only shares of one task stand side by side."""
    photos, everything = counted(samples, "test photo"), f"{mean['all_classes']:.1%}"
    if not {"classes", "own", "among_own", "own_classes"} <= mean.keys():
        return f"{everything} right on {photos} of their own"
    parts = []
    if "alone" in mean:
        parts.append(f"each can name {mean['classes']:.3g} classes now (alone {mean['own']:.3g})")
    if mean["own_classes"] != mean["all_classes"]:
        beside = _shares(mean, {"alone": "alone", "shipped": "bundle as shipped"})
        parts.append(f"{everything} right on all {photos}{beside}")
    beside = _shares(mean, {"alone_among_own": "alone", "shipped_among_own": "bundle as shipped"})
    photos_text = (
        f"{photos} of their own classes" if mean["own_classes"] == mean["all_classes"] else "their own classes"
    )
    if mean["classes"] > mean["own"]:
        line = f"on {photos_text} {mean['among_own']:.1%} right choosing among these{beside}"
        parts.append(f"{line}, {mean['own_classes']:.1%} choosing among all, which is harder")
    else:
        parts.append(f"on {photos_text} {mean['among_own']:.1%} right{beside}")
    return "; ".join(parts)


def _shares(mean: Mapping[str, float], names: Mapping[str, str]) -> str:
    shares = ", ".join(f"{title} {mean[name]:.1%}" for name, title in names.items() if name in mean)
    return f" ({shares})" if shares else ""
