"""Progress for a person: one line for each event that matters, on standard error."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import singledispatchmethod

from rich.console import Console
from rich.markup import escape

from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring import events
from protofleet.contract.console.durations import in_words
from protofleet.contract.drift import WORDS
from protofleet.contract.printable import counted, printable

__all__ = ["Progress"]

_EVERY_S = 1.0  # a flood of contributions in a large fleet, or of refusals, prints one line a second
_SMALL_FLEET = 20
_INTRUDERS = 20
_AWAY_LINES, _AWAY_EVERY_S = 20, 3600.0


class Progress:
    """Prints events. Call it with each one.

    Args:
        console: where to.
        verbose: also what became of each message, and the link's counts at the end.
    """

    def __init__(self, console: Console, *, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
        self._printed_at: dict[type, float] = {}
        self._screened_in, self._screened = 0, 0
        self._away = 0  # attempts in a row that found no broker
        self._refused: set[str] = set()  # devices named in this round, the first ones
        self._intruders: set[tuple[str, str]] = set()  # named, the first ones
        self._failed: set[str] = set()  # devices of which a roll-out failed, the first ones

    def __call__(self, event: events.Event) -> None:
        self._show(event)

    def _line(self, text: str) -> None:
        """The one way to the terminal: what a device calls itself, its method or its reason cannot style or move it."""
        self._console.print(printable(text), highlight=False, soft_wrap=True)

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
            self._line(f"[yellow]{what} away[/yellow] ({escape(event.reason)}), trying again in {event.retry_s:.1f} s")

    @_show.register
    def _(self, event: events.Waiting) -> None:
        why = (
            ", but no sample of them has so many: --fraction is too small for --min-clients" if event.unsampled else ""
        )
        if event.opens_in_s is not None:
            self._line(
                f"round {event.round} is due in {in_words(event.opens_in_s)}; {counted(event.online, 'device')} online"
            )
        else:
            self._line(f"waiting for devices: {event.online}/{event.needed} online{why}")

    @_show.register
    def _(self, event: events.RoundOpened) -> None:
        self._refused.clear()
        resumed = f", {counted(event.resumed, 'contribution')} already here" if event.resumed else ""
        lasts = f" for {in_words(event.window_s)}" if event.window_s else ""
        total = "" if event.window_s else f"/{event.rounds}"
        awaited = "online" if event.window_s else "awaited"
        self._line(
            f"[bold]round {event.round}{total}[/bold] open{lasts}: {event.method}, "
            f"{counted(event.awaited, 'device')} {awaited}{resumed}"
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
        self._line(
            f"  [yellow]silent through a whole deadline[/yellow], not awaited any more: "
            f"{_names(event.names, event.silent)}"
        )

    @_show.register
    def _(self, event: events.Nobody) -> None:
        online = counted(event.online, "device is", "devices are")
        online_text = f"; {online} online with nothing more to send" if event.online else ""
        online_text += f"; {event.refused} were refused in this round" if event.refused else ""
        self._line(
            f"  [yellow]round {event.round} awaits nobody[/yellow] and has {event.committed} of "
            f"{counted(event.needed, 'contribution')}: waiting for further devices{online_text}"
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
            self._line(f"  [yellow]refused[/yellow] {escape(event.device)}: {escape(event.reason)}")

    @_show.register
    def _(self, event: events.Decided) -> None:
        if self._verbose:
            reason = f": {event.reason}" if event.reason else ""
            method = f" ({event.method})" if event.method else ""
            self._line(escape(f"  {event.device}, round {event.round}{method}: {event.outcome}{reason}"))

    @_show.register
    def _(self, event: events.BatchTaken) -> None:
        """How long it took is for metrics."""

    @_show.register
    def _(self, event: events.Ended) -> None:
        if self._verbose:
            self._line(f"link closed: {event.connections} connections, {event.dropped} messages dropped at QoS 0")

    @_show.register
    def _(self, event: events.Screened) -> None:
        if self._screened_in != event.round:
            self._screened_in, self._screened = event.round, 0
        self._screened += 1
        if self._screened <= _SMALL_FLEET:
            self._line(f"  [yellow]{event.verdict}[/yellow] {escape(event.device)}: {escape(event.reason)}")
        elif self._screened == _SMALL_FLEET + 1:
            self._line("  [yellow]and more devices[/yellow] like these")

    @_show.register
    def _(self, event: events.Warned) -> None:
        self._line(f"  [yellow]warning[/yellow]: round {event.round}: {escape(event.words)}")

    @_show.register
    def _(self, event: events.Noticed) -> None:
        self._line(f"[yellow]warning[/yellow]: {escape(event.line)}")

    @_show.register
    def _(self, event: events.RoundExtended) -> None:
        over, lasts = "deadline passed", f"for another {event.deadline_s:g} s"
        if event.is_window:
            over, lasts = "window over", "until they are there"
        self._line(
            f"  [yellow]{over}[/yellow] with {event.committed} of {counted(event.needed, 'contribution')}: "
            f"round {event.round} goes on {lasts}"
        )

    @_show.register
    def _(self, event: events.RoundClosed) -> None:
        choices = f"; {escape(event.told)}" if event.told else ""
        self._line(
            f"  [green]round {event.round} closed[/green]: {counted(event.committed, 'contribution')}, "
            f"{counted(event.classes, 'class', 'classes')} merged, {event.uplink_bytes:,} bytes up, "
            f"{event.seconds:.1f} s, global version {event.global_version}{choices}"
        )

    @_show.register
    def _(self, event: events.SumAsked) -> None:
        self._line(f"  round {event.round}: the helper is asked for the sum over {event.devices} devices")

    @_show.register
    def _(self, event: events.HelperAwaited) -> None:
        self._line(
            f"  [yellow]round {event.round} waits for the helper[/yellow], who alone can open the sum over "
            f"{event.devices} devices: protofleet helper"
        )

    @_show.register
    def _(self, event: events.AccuracyTold) -> None:
        part = "" if event.devices == event.contributors else f"{event.devices} of "
        over = part + counted(event.contributors, "device")
        worst = f"; fewest right: {escape(event.worst)}, {event.worst_share:.1%}" if event.devices > 1 else ""
        self._line(f"  round {event.round}: {over}, {_accuracy_in_words(event.mean, event.samples)}{worst}")

    @_show.register
    def _(self, event: events.HeadMade) -> None:
        choices = f"; {escape(event.told)}" if event.told else ""
        self._line(
            f"[green]global version {event.global_version}[/green]: {event.samples:,} samples of "
            f"{counted(event.devices, 'device')}, {counted(event.classes, 'class', 'classes')}{choices}"
        )
        if event.doubt:
            self._line(f"  [yellow]warning[/yellow]: {escape(event.doubt)}")

    @_show.register
    def _(self, event: events.SumsStand) -> None:
        if event.devices and self._often(events.SumsStand):
            return
        self._line(f"sums of {counted(event.devices, 'device')} stand, {event.online} online")

    @_show.register
    def _(self, event: events.OrderDone) -> None:
        target = "".join(f" {escape(part)}" for part in (event.device, event.detail) if part)
        self._line(
            f"[bold]{escape(event.what)}{target}[/bold], asked by {escape(event.who)}: {escape(event.outcome)}, "
            f"global version {event.global_version}"
        )

    @_show.register
    def _(self, event: events.RolloutWidened) -> None:
        known_devices = f"{counted(event.devices, 'device')} of it known"
        self._line(f"[green]rollout[/green] of version {event.version}: {100 * event.fraction:.3g} %, {known_devices}")

    @_show.register
    def _(self, event: events.RolloutHalted) -> None:
        self._line(
            f"[yellow]rollout[/yellow] of version {event.version} halted at {100 * event.fraction:.3g} %: "
            f"{escape(event.reason)}; protofleet rollout --store … --resume, or --end"
        )

    @_show.register
    def _(self, event: events.RolloutCompleted) -> None:
        self._line(f"[green]rollout[/green] of version {event.version} complete: {counted(event.devices, 'device')}")

    @_show.register
    def _(self, event: events.RolloutTold) -> None:
        """One a second; beyond that who fails or refuses is named, the first ones, and once each."""
        first = event.word in ("failed", "refused") and event.device not in self._failed
        first = first and len(self._failed) < _SMALL_FLEET
        if first:
            self._failed.add(event.device)
        if not self._often(events.RolloutTold) or first:
            why = f": {escape(event.reason)}" if event.reason else ""
            self._line(f"  rollout of version {event.version}: {escape(event.device)} {event.word}{why}")

    @_show.register
    def _(self, event: events.RolloutDeaf) -> None:
        self._line(
            f"  [yellow]warning[/yellow]: how devices fare in fleet {escape(event.fleet)} cannot be heard "
            f"({escape(event.reason)}): widen the roll-out by hand, rollout --stage"
        )

    @_show.register
    def _(self, event: events.DriftSuspected) -> None:
        shown = f"{event.now:.0%}" if event.figure == "unlike" else f"{event.now:.2f}"
        usual = f"{event.usual:.0%}" if event.figure == "unlike" else f"{event.usual:.2f}"
        self._line(
            f"[yellow]drift[/yellow]: {escape(event.device)} departs from itself: {WORDS[event.figure]} {shown}, "
            f"usually {usual}; protofleet fleet show {escape(event.device)}"
        )

    @_show.register
    def _(self, event: events.PolicyRefused) -> None:
        if not self._often(events.PolicyRefused):
            self._line(
                f"  [yellow]refused[/yellow] by the policy of {escape(event.device)}, {escape(printable(event.word))}"
            )

    @_show.register
    def _(self, event: events.IntruderTold) -> None:
        first = (event.device, event.cause) not in self._intruders and len(self._intruders) < _INTRUDERS
        if self._often(events.IntruderTold) and not first:  # anyone may invent names
            return
        if first:
            self._intruders.add((event.device, event.cause))
        received = f"{counted(event.messages, 'message')}: {escape(event.reason)}"
        if event.cause == "refuses":
            self._line(f"[yellow]warning[/yellow]: {escape(event.device)} refuses what it is sent, {received}")
        elif event.cause in OF_THE_DEVICE:
            self._line(f"[yellow]warning[/yellow]: {escape(event.device)}: {escape(event.reason)}")
        else:
            self._line(f"[yellow]intruder[/yellow] as {escape(event.device)}, {received}")

    @_show.register
    def _(self, event: events.NumbersLost) -> None:
        is_helped = event.issued and not event.is_new_run
        older = "; no device repeats a round: an older copy goes on with --new-run" if is_helped else ""
        self._line(
            f"  [yellow]warning[/yellow]: devices have heard announcement {event.heard} of this key, and the store "
            f"knows of {event.issued or 'none'}: it was lost or is an older copy, and the clock is behind; "
            f"going on above{older}"
        )

    @_show.register
    def _(self, event: events.ClassDriftSuspected) -> None:
        self._line(
            f"[yellow]drift[/yellow]: class {escape(event.name)} departs from itself: what came of it lies "
            f"{event.now:.1f} times as far from earlier samples as chance allows, usually {event.usual:.1f}"
        )

    @_show.register
    def _(self, event: events.MetricsServed) -> None:
        self._line(f"metrics on {event.url}")
        if not event.is_local:
            self._line("  [yellow]warning[/yellow]: anyone who reaches it may read them: no password, no TLS")

    @_show.register
    def _(self, event: events.RunFinished) -> None:
        self._line(
            f"[bold green]finished[/bold green]: {counted(event.rounds, 'round')}, "
            f"{counted(event.committed, 'contribution')} committed, "
            f"{event.uplink_bytes:,} bytes up"
        )


def _names(names: tuple[str, ...], all_of_them: int) -> str:
    more = f" and {all_of_them - len(names)} more" if all_of_them > len(names) else ""
    return escape(", ".join(names)) + more


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
