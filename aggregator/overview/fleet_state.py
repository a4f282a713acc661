"""How a fleet is, in one sentence, and which devices need care: for `protofleet status`, `watch` and `fleet …`.

A device needs care for the reasons in `_REASONS`, each of which has a part of docs/runbook.md. Names and texts of
devices are shown as `printable` makes them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from protofleet.aggregator.database import AnyPlace, is_taken
from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring.device_table import Device, DeviceEvent, DeviceReader
from protofleet.aggregator.overview.fleet_text import Known, drift_in_short, read_known
from protofleet.aggregator.store.finding_tables import found_in_short
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.console.durations import in_words
from protofleet.contract.printable import counted, printable

__all__ = [
    "RUNBOOK",
    "Care",
    "FleetState",
    "accuracy_in_words",
    "ago",
    "event_in_words",
    "heard_in_words",
    "presence_in_words",
    "read_state",
    "state_facts",
    "state_in_lines",
    "state_of",
]

GONE_S = 600.0  # a device that is away for less may be starting
REFUSED_S = 86_400.0
SLOWER = 1.5  # times as long as `profile --measure` has found
RUNBOOK = "docs/runbook.md"


@dataclass(frozen=True)
class Care:
    """What somebody should look at.

    Attributes:
        device: its name; empty for what is of the whole fleet.
        cause: one of a few words, which docs/runbook.md has a part for.
        reason: in words.
    """

    device: str
    cause: str
    reason: str

    @property
    def line(self) -> str:
        name = f"{printable(self.device)}: " if self.device else ""
        return f"{name}{printable(self.reason)}  ({RUNBOOK}#{self.cause})"


@dataclass(frozen=True)
class FleetState:
    """A fleet at one moment.

    Attributes:
        at: that moment, seconds since the epoch.
        runs: whether an aggregator has the store. If not, nobody knows who is online.
        known: what the store knows.
    """

    at: float
    runs: bool
    known: Known

    @property
    def devices(self) -> Mapping[str, Device]:
        return self.known.devices

    @cached_property
    def cares(self) -> list[Care]:
        """What needs care, what is of the whole fleet first."""
        found = [] if self.runs else [Care("", "no-aggregator", "no aggregator runs on this store")]
        for cause, reason_of in _REASONS.items():
            reasons = ((device, reason_of(self, device, row)) for device, row in self.devices.items())
            found += [Care(device, cause, reason) for device, reason in reasons if reason]
        for intruder in self.known.intruders:
            if intruder.cause not in OF_THE_DEVICE and abs(self.at - intruder.last_at) < REFUSED_S:
                found.append(Care(intruder.device, "intruder", f"intruder: {intruder.reason}"))
        return found

    @property
    def online(self) -> int:
        return sum(row.online for row in self.devices.values())

    @property
    def sentence(self) -> str:
        """Whether all is well."""
        devices = counted(len(self.devices), "device")
        if not self.devices and self.runs:
            return "No device has been heard yet."
        cares = self.cares
        unsure = sum(row.online and not row.confirmed for row in self.devices.values())
        present = f"{self.online} online" + (f", {unsure} of them not heard yet" if unsure else "")
        if not self.runs:
            present = "nobody knows who is online"
        round = self.known.newest_round
        rounds = "" if round is None else f"; round {round.number} ({round.method}) is {round.word}"
        if not cares:
            return f"All is well: {devices}, {present}{rounds}."
        names = len({care.device for care in cares if care.device})
        causes = ", ".join(f"{count} {cause}" for cause, count in Counter(care.cause for care in cares).items())
        needs = f"{names} of {devices} need care" if names else "The fleet needs care"
        return f"{needs} ({causes}); {present}{rounds}."


def read_state(store: AnyPlace) -> FleetState:
    """The state of the fleet in a store, whether its aggregator runs or not.

    Raises:
        StoreError, UsageError: as `read_only`.
    """
    known = read_known(store)
    return FleetState(time.time(), is_taken(store, KIND), known)


def state_of(store: AnyPlace, runs: bool, devices: DeviceReader) -> FleetState:
    """As `read_state`, again and again, where it is known whether an aggregator runs."""
    return FleetState(time.time(), runs, read_known(store, devices.read))


# ── reasons for care ────────────────────────────────────────────────────────────────────────────────────────────────


def _gone(state: FleetState, device: str, row: Device) -> str:
    if not state.runs or row.online or state.at - row.since < GONE_S or device in state.known.out:
        return ""
    return f"gone for {ago(state.at, row.since)}, last heard {_when_heard(state.at, row)}"


def _apart(state: FleetState, device: str, row: Device) -> str:
    return f"takes no part: it runs {row.apart}" if row.apart else ""


def _refused(state: FleetState, device: str, row: Device) -> str:
    if row.refused_at is None or state.at - row.refused_at >= REFUSED_S or device in state.known.out:
        return ""
    return f"{counted(row.refused, 'message')} refused, last {ago(state.at, row.refused_at)} ago: {row.refusal}"


def _drifts(state: FleetState, device: str, row: Device) -> str:
    drift = drift_in_short(state.known.drift, device)
    return f"its photos drift: {drift}" if drift else ""


def _left_out(state: FleetState, device: str, row: Device) -> str:
    finding = state.known.findings.get(device)
    if finding is None or finding["verdict"] != "left out" or state.known.newest_round is None:
        return ""
    return found_in_short(finding) if finding["round"] >= state.known.newest_round.number - 1 else ""


def _rollout(state: FleetState, device: str, row: Device) -> str:
    word = state.known.said.get(device, "")
    return f"a roll-out: version {word}" if any(bad in word for bad in (" failed", " refused")) else ""


def _old_bundle(state: FleetState, device: str, row: Device) -> str:
    number, newest = _version(row.bundle), state.known.newest_bundle
    return f"runs bundle {row.bundle}, others {newest}" if number is not None and number < newest else ""


def _slow(state: FleetState, device: str, row: Device) -> str:
    step_ms, profiled_ms = (row.figures.get(name) for name in ("train_step_ms", "profile_train_step_ms"))
    if not step_ms or not profiled_ms or step_ms < SLOWER * profiled_ms:
        return ""
    return f"a training step takes {step_ms:.3g} ms, {step_ms / profiled_ms:.1f} times its profile"


_REASONS: Mapping[str, Callable[[FleetState, str, Device], str]] = {
    "gone": _gone,
    "apart": _apart,
    "refused": _refused,
    "left-out": _left_out,
    "roll-out": _rollout,
    "old-bundle": _old_bundle,
    "drifts": _drifts,
    "slow": _slow,
}


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def ago(now: float, at: float) -> str:
    """How long ago, for a person; a clock that was set back gives 0."""
    return in_words(max(0.0, round(now - at)))


def presence_in_words(state: FleetState, device: str) -> str:
    """Whether a device is online, in a word or two; empty where nothing is known."""
    row = state.devices.get(device)
    if row is None:
        return ""
    if not state.runs:
        return "unknown"
    if not row.online:
        return f"gone {ago(state.at, row.since)}"
    return "online" if row.confirmed else "online?"


def _when_heard(now: float, row: Device) -> str:
    return "never" if row.heard_at is None else f"{ago(now, row.heard_at)} ago"


def heard_in_words(state: FleetState, device: str) -> str:
    """When a device was heard last; empty where nothing is known."""
    row = state.devices.get(device)
    return "" if row is None else _when_heard(state.at, row)


def state_facts(state: FleetState, device: str) -> dict[str, Any] | None:
    """What is known of a device, for JSON; `online` is null where no aggregator runs, and nobody knows."""
    row = state.devices.get(device)
    if row is None:
        return None
    return asdict(row) | ({} if state.runs else {"online": None, "confirmed": False})


def state_in_lines(state: FleetState, device: str) -> Iterator[str]:
    """What is known of a device, for a person."""
    row = state.devices.get(device)
    if row is None:
        return
    word = {"online?": "online, says the broker; not heard since the aggregator connected"}
    presence = presence_in_words(state, device)
    since = f" since {_clock(row.since)}" if state.runs else ""
    heard, first = _when_heard(state.at, row), _clock(row.first_seen)
    yield f"{word.get(presence, presence)}{since}; heard {heard}; known since {first}"
    if row.board or row.boot:
        software = ", ".join(f"{name} {text}" for name, text in row.software.items())
        yield f"{row.board or 'unknown board'}, boot {row.boot}, bundle {row.bundle or 'unknown'}; {software}"
    figures = row.figures
    memory = [f"{name} {figures[key] / 1e6:.1f} MB" for key, name in _MEMORY.items() if key in figures]
    if memory:
        yield f"memory: {', '.join(memory)}"
    times = [f"{name} {figures[key]:.3g} ms" for key, name in _TIMES.items() if key in figures]
    if times:
        yield f"times: {', '.join(times)}"
    new = figures.get("samples_new")
    if new is not None:
        yield f"{new:.0f} samples came or went since its last contribution"
    yield f"{row.up_bytes:,} bytes up, {row.down_bytes:,} bytes down" + (
        f"; a gateway for {counted(row.members, 'device')}" if row.members else ""
    )
    if row.refused:
        yield f"{counted(row.refused, 'message')} refused, the last at {_clock(row.refused_at)}: {row.refusal}"


_MEMORY = {"rss_bytes": "now", "peak_rss_bytes": "at most", "profile_train_step_peak_rss_bytes": "profiled"}
_TIMES = {
    "train_step_ms": "training step",
    "profile_train_step_ms": "profiled",
    "profile_train_step_predicted_ms": "predicted",
    "profile_inference_ms": "inference profiled",
}


def accuracy_in_words(reports: Sequence[Mapping[str, Any]]) -> str:
    """What a device said of its accuracy after the newest rounds, the newest first."""
    return "accuracy: " + ", ".join(f"round {each['round']} {100 * each['all_classes']:.0f} %" for each in reports)


def event_in_words(event: DeviceEvent) -> str:
    name = f"{printable(event.device)}: " if event.device else ""
    return f"{_clock(event.at)} {name}{printable(event.what)}{': ' if event.detail else ''}{printable(event.detail)}"


def _clock(at: float | None) -> str:
    try:
        return "never" if at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _version(bundle: str) -> int | None:
    word = bundle.partition(" ")[0]
    return int(word) if word.isdecimal() and len(word) < 10 else None
