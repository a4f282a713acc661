"""How a fleet is, in one sentence, and which devices need care: for `protofleet status`, `watch` and `fleet …`.

A device needs care for the reasons in `_REASONS`, each of which has a part of docs/runbook.md. Names and texts of
devices are shown as `printable` makes them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from protofleet.aggregator.database import AnyPlace, is_taken
from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring.device_table import Device, DeviceEvent, DeviceReader
from protofleet.aggregator.overview.conditions import (
    certificate_care,
    clock_care,
    conditions_in_lines,
    disk_care,
)
from protofleet.aggregator.overview.fleet_text import Known, bundle_version, drift_in_short, read_known
from protofleet.aggregator.store.finding_tables import found_in_words
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
    "gateway_in_words",
    "heard_in_words",
    "presence_in_words",
    "proposal_in_words",
    "read_state",
    "state_facts",
    "state_in_lines",
    "state_of",
]

GONE_S = 600.0  # a device that is away for less may be starting
REFUSED_S = 86_400.0
_AHEAD_S = 60.0  # by so much a moment may be ahead of now: another machine's clock may have stamped it
_PROPOSERS = 5  # devices that are named
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
        contradicted: devices whose standing sums others contradict, and why, where they were compared.
    """

    at: float
    runs: bool
    known: Known
    contradicted: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> Mapping[str, Device]:
        return self.known.devices

    @cached_property
    def taken(self) -> dict[str, Device]:
        """The devices without those that were removed, were forgotten or withdrew: some are connected all the same."""
        return {device: row for device, row in self.devices.items() if device not in self.known.out}

    @cached_property
    def cares(self) -> list[Care]:
        """What needs care, what is of the whole fleet first; a device of which nothing is taken needs none."""
        found = [] if self.runs else [Care("", "no-aggregator", "no aggregator runs on this store")]
        for cause, reason_of in _REASONS.items():
            reasons = ((device, reason_of(self, device, row)) for device, row in self.taken.items())
            found += [Care(device, cause, reason) for device, reason in reasons if reason]
        for intruder in self.known.intruders:
            if intruder.cause not in OF_THE_DEVICE and is_within(self.at, intruder.last_at, REFUSED_S):
                found.append(Care(intruder.device, "intruder", f"intruder: {intruder.reason}"))
        return found

    @cached_property
    def proposed(self) -> dict[str, dict[str, int]]:
        """The classes that devices propose, and for how many photos each: of most devices first, then of most photos,
        and its devices likewise. What a device says of which nothing is taken does not count."""
        found: dict[str, dict[str, int]] = {}
        for device, row in self.taken.items():
            for name, photos in row.proposed.items():
                found.setdefault(name, {})[device] = photos
        order = sorted(found, key=lambda name: (-len(found[name]), -sum(found[name].values()), name))
        return {name: dict(sorted(found[name].items(), key=lambda by: (-by[1], by[0]))) for name in order}

    @cached_property
    def gateways(self) -> dict[str, int]:
        """The gateways, and of how many devices the newest sums of each are. Their names stay on its site."""
        return {device: row.members for device, row in self.taken.items() if row.members}

    @property
    def online(self) -> int:
        return sum(row.online for row in self.taken.values())

    @cached_property
    def just_gone(self) -> dict[str, Device]:
        """The devices that are away, and not for so long that they need care: they may be starting."""
        if not self.runs:
            return {}
        return {
            device: row
            for device, row in self.taken.items()
            if not row.online and is_within(self.at, row.since, GONE_S)
        }

    @property
    def sentence(self) -> str:
        """Whether all is well."""
        if not self.devices and self.runs:
            return "No device has been heard yet."
        cares = self.cares
        away = len(self.just_gone)
        unsure = sum(row.online and not row.confirmed for row in self.taken.values())
        devices = counted(len(self.taken), "device")
        present = f"{self.online:,} online" + (f", {unsure:,} of them not heard yet" if unsure else "")
        present += f", {away:,} gone for less than {in_words(GONE_S)}" if away else ""
        if not self.runs:
            present = "nobody knows who is online"
        if self.gateways:
            present += f", {sum(self.gateways.values()):,} more behind {counted(len(self.gateways), 'gateway')}"
        round = self.known.newest_round
        rounds = "" if round is None else f"; round {round.number} ({round.method}) is {round.word}"
        rollout = self.known.rollout
        if rollout is not None and rollout.state == "halted":
            rounds += f"; the roll-out of version {rollout.plan.version} is halted"
        if not cares:
            return f"All is well: {devices}, {present}{rounds}."
        names = len({care.device for care in cares if care.device})
        causes = ", ".join(f"{count:,} {cause}" for cause, count in Counter(care.cause for care in cares).items())
        needs = f"{names:,} of {devices} need care" if names else "The fleet needs care"
        return f"{needs} ({causes}); {present}{rounds}."


def read_state(store: AnyPlace) -> FleetState:
    """The state of the fleet in a store, whether its aggregator runs or not.

    Raises:
        StoreError, UsageError: as `read_only`.
    """
    known = read_known(store)
    return FleetState(time.time(), is_taken(store, KIND), known)


def state_of(
    store: AnyPlace, runs: bool, devices: DeviceReader, contradicted: Mapping[str, str] | None = None
) -> FleetState:
    """As `read_state`, again and again, where it is known whether an aggregator runs, and who is contradicted."""
    return FleetState(time.time(), runs, read_known(store, devices.read), contradicted or {})


# ── reasons for care ────────────────────────────────────────────────────────────────────────────────────────────────


def _gone(state: FleetState, device: str, row: Device) -> str:
    if not state.runs or row.online or is_within(state.at, row.since, GONE_S):
        return ""
    if any(reason_of(state, device, row) for reason_of in (_certificate, _disk)):
        return ""  # which say for how long
    return f"gone for {ago(state.at, row.since)}, last heard {_when_heard(state.at, row)}"


def _certificate(state: FleetState, device: str, row: Device) -> str:
    return _of_gone(state, row, certificate_care(row.figures, state.at))


def _disk(state: FleetState, device: str, row: Device) -> str:
    return _of_gone(state, row, disk_care(row.figures, online=row.online))


def _of_gone(state: FleetState, row: Device, why: str) -> str:
    """Why a device is gone, with for how long."""
    return f"gone for {ago(state.at, row.since)}: {why}" if why and state.runs and not row.online else why


def _clock_is_wrong(state: FleetState, device: str, row: Device) -> str:
    return clock_care(row.figures)


def _apart(state: FleetState, device: str, row: Device) -> str:
    return f"takes no part: it runs {row.apart}" if row.apart else ""


def _refused(state: FleetState, device: str, row: Device) -> str:
    if row.refused_at is None or not is_within(state.at, row.refused_at, REFUSED_S):
        return ""
    return f"{counted(row.refused, 'message')} refused, last {ago(state.at, row.refused_at)} ago: {row.refusal}"


def _drifts(state: FleetState, device: str, row: Device) -> str:
    drift = drift_in_short(state.known.drift, device)
    return f"its photos drift: {drift}" if drift else ""


def _left_out(state: FleetState, device: str, row: Device) -> str:
    finding = state.known.findings.get(device)
    if finding is None or finding["verdict"] != "left out" or state.known.newest_round is None:
        return ""
    return found_in_words(finding) if finding["round"] >= state.known.newest_round.number - 1 else ""


def _contradicts(state: FleetState, device: str, row: Device) -> str:
    return state.contradicted.get(device, "")


def _rollout(state: FleetState, device: str, row: Device) -> str:
    word = state.known.said.get(device, "")
    return f"a roll-out: version {word}" if any(bad in word for bad in (" failed", " refused")) else ""


def _old_bundle(state: FleetState, device: str, row: Device) -> str:
    number, newest = bundle_version(row.bundle), state.known.newest_bundle
    if number is None or number >= newest or _goes_over(state, device, newest):
        return ""
    return f"runs bundle {row.bundle}, others {newest}"


def _goes_over(state: FleetState, device: str, newest: int) -> bool:
    """Whether a roll-out of that version has not come to a device, or has only just, and it has not refused it."""
    rollout = state.known.rollout
    if rollout is None or rollout.plan.version != newest or _rollout(state, device, state.devices[device]):
        return False
    return not rollout.is_in(device) or is_within(state.at, rollout.since, GONE_S)


def _slow(state: FleetState, device: str, row: Device) -> str:
    step_ms, profiled_ms = (row.figures.get(name) for name in ("train_step_ms", "profile_train_step_ms"))
    if not step_ms or not profiled_ms or step_ms < SLOWER * profiled_ms:
        return ""
    return f"a training step takes {step_ms:.3g} ms, {step_ms / profiled_ms:.1f} times its profile"


def _memory(state: FleetState, device: str, row: Device) -> str:
    names = ("peak_rss_bytes", "profile_memory_at_most_bytes", "profile_memory_samples")
    peak, most, samples = (row.figures.get(name, 0.0) for name in names)
    if not most or peak <= most:
        return ""
    beside = f" with {samples:,.0f} photos" if samples else ""
    return f"its client has had {peak / 1e6:.1f} MB, and {most / 1e6:.1f} MB at most were predicted{beside}"


_REASONS: Mapping[str, Callable[[FleetState, str, Device], str]] = {
    "gone": _gone,
    "certificate": _certificate,
    "disk": _disk,
    "clock": _clock_is_wrong,
    "apart": _apart,
    "refused": _refused,
    "left-out": _left_out,
    "contradicts": _contradicts,
    "roll-out": _rollout,
    "old-bundle": _old_bundle,
    "drifts": _drifts,
    "slow": _slow,
    "memory": _memory,
}


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_within(now: float, at: float, most_s: float) -> bool:
    """Whether a moment is less than `most_s` from now. One that lies far ahead is not: the clock was set back since."""
    return abs(now - at) < most_s


def ago(now: float, at: float) -> str:
    """How long ago, for a person; nobody knows it where the clock was set back since."""
    return "an unknown time" if at - now > _AHEAD_S else in_words(max(0.0, round(now - at)))


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
    conditions = ", ".join(conditions_in_lines(figures, state.at))
    if conditions:
        yield conditions
    new = figures.get("samples_new")
    if new is not None:
        yield f"{new:.0f} samples came or went since its last contribution"
    share = figures.get("unknown_share")
    if share is not None:
        yield f"{share:.0%} of its photos are unlike all classes"
    for name, photos in row.proposed.items():
        yield f"proposed class {printable(name)}: {counted(photos, 'photo')}"
    yield f"{row.up_bytes:,} bytes up, {row.down_bytes:,} bytes down"
    if row.members:
        yield gateway_in_words(row.members)
    if row.refused:
        yield f"{counted(row.refused, 'message')} refused, the last at {_clock(row.refused_at)}: {row.refusal}"


_MEMORY = {
    "rss_bytes": "now",
    "peak_rss_bytes": "at most",
    "profile_train_step_peak_rss_bytes": "profiled",
    "profile_memory_predicted_bytes": "predicted",
    "profile_memory_at_most_bytes": "predicted at most",
}
_TIMES = {
    "train_step_ms": "training step",
    "profile_train_step_ms": "profiled",
    "profile_train_step_predicted_ms": "predicted",
    "profile_inference_ms": "inference profiled",
}


def proposal_in_words(name: str, devices: Mapping[str, int]) -> str:
    """A class of `FleetState.proposed`, and the first of the devices that propose it."""
    by = ", ".join(f"{printable(device)} {photos:,}" for device, photos in list(devices.items())[:_PROPOSERS])
    more = f" and {len(devices) - _PROPOSERS} more" if len(devices) > _PROPOSERS else ""
    of = f"{counted(sum(devices.values()), 'photo')} of {counted(len(devices), 'device')}"
    return f"proposed class {printable(name)}: {of} ({by}{more})"


def gateway_in_words(members: int) -> str:
    """What is known of the devices behind a gateway."""
    return f"a gateway: its newest sums are of {counted(members, 'device')}, {_ON_ITS_SITE}"


_ON_ITS_SITE = "whose names stay on its site, where protofleet fleet list has them, with the gateway's own --store"


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
