"""How far a bundle is rolled out: a state machine without sockets, files or clock.

    running ──enough of the stage is healthy, and the soak is over──▶ running, in a larger stage
       │ ▲                                          └──all that are known are healthy, at 100 %──▶ complete
       ▼ │ resumed
    halted ◀── more of the stage failed than may, or an operator says so

A stage is a fraction of the devices. `protofleet.contract.wire.sampling.place` says which devices these are; those of a
smaller stage are in every larger one. A stage has at least one device: if no known device is below the fraction once
its soak is over, the fraction is raised to take in the lowest. A device is known once it has said which bundle it uses.
A device that does not say it runs a release without roll-outs.

A stage is widened when all of these hold:

- its soak is over;
- at least half of its known devices have reported;
- at least one is healthy;
- at least the share `healthy` of the devices that reported is healthy.

A device that refuses the bundle, or is still getting it, counts as one that reported. So a stage that goes badly or
slowly is not widened.

A stage is halted when more than the share 1 − `healthy` of its known devices have failed. After a resume, as many
devices must fail again.

A roll-out is complete only when its last soak is over: devices that sleep, or that come with the aggregator's start,
are known only then. A complete roll-out still stands for devices that come later.

Time is an argument, in seconds since the epoch, since a soak outlives the process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from protofleet.contract.wire.rollout_messages import WORDS, Offer, RolloutReport, bundle_tag
from protofleet.contract.wire.sampling import place

__all__ = ["STAGES", "Completed", "Halted", "Moved", "Plan", "Rollout", "State", "Widened"]

State = Literal["running", "halted", "complete"]
STAGES = (0.1, 0.5, 1.0)
_ROUNDING = 1e-9  # shares are ratios of small whole numbers
_FINAL = ("healthy", "failed")


@dataclass(frozen=True)
class Plan:
    """What is rolled out, and how carefully.

    Attributes:
        sha256, version, size_bytes: of the bundle.
        fleet: the fleet that devices go over to; empty when they stay in this one.
        soak_s: how long a stage lasts at least.
        healthy: share of a stage's devices, above 0 up to 1.
    """

    sha256: bytes
    version: int
    size_bytes: int
    fleet: str = ""
    soak_s: float = 3600.0
    healthy: float = 0.9

    @property
    def tag(self) -> str:
        """The tag that a device reports once it uses this bundle."""
        return bundle_tag(self.version, self.sha256)


@dataclass(frozen=True)
class Widened:
    """The offer is for more devices now; `devices` of them are known."""

    version: int
    fraction: float
    devices: int


@dataclass(frozen=True)
class Halted:
    """The offer has ended: too many devices failed."""

    version: int
    fraction: float
    reason: str


@dataclass(frozen=True)
class Completed:
    """All `devices` known devices are healthy with the bundle."""

    version: int
    devices: int


Moved = Widened | Halted | Completed


@dataclass
class Rollout:
    """One roll-out.

    Attributes:
        fraction: the share of the devices that it is offered to.
        stages: further fractions, rising.
        since: when the present stage began.
        reason: why it is halted.
        forgiven: how many had failed when it was resumed.
        told: the last report of each known device; None for none yet.
    """

    plan: Plan
    fraction: float
    stages: tuple[float, ...]
    since: float
    state: State = "running"
    reason: str = ""
    forgiven: int = 0
    told: dict[str, RolloutReport | None] = field(default_factory=dict)
    _places: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def offer(self) -> Offer | None:
        """The offer to announce; None while it is halted."""
        plan = self.plan
        if self.state == "halted":
            return None
        return Offer(plan.sha256, plan.version, plan.size_bytes, self.fraction, plan.fleet)

    def is_in(self, device: str) -> bool:
        """Whether a device is in the present stage, known or not."""
        return self._place(device) < self.fraction

    def _place(self, device: str) -> float:
        """See `place`; of a known device it is drawn once."""
        if device not in self.told:
            return place(device, self.plan.version, self.plan.sha256)
        if device not in self._places:
            self._places[device] = place(device, self.plan.version, self.plan.sha256)
        return self._places[device]

    def members(self) -> dict[str, RolloutReport | None]:
        """The known devices of the present stage, and their reports."""
        return {device: report for device, report in self.told.items() if self._place(device) < self.fraction}

    def counts(self) -> Mapping[str, int]:
        """How many known devices of the present stage gave each report; `waiting` for none yet."""
        tallies = Counter("waiting" if report is None else report.word for report in self.members().values())
        return {word: tallies[word] for word in ("waiting", *WORDS)}

    # ── what is heard ───────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, device: str, bundle: str, text: str, *, elsewhere: bool = False) -> RolloutReport | None:
        """Take what a device's status says under `bundle` and `rollout`; returns the report if it is news.

        Only a report about this roll-out's version counts. After `healthy` or `failed`, a report of an earlier step
        is ignored: it comes from an older status, from the other fleet, or from a broker that was away.

        Args:
            elsewhere: it is a status of the fleet that devices go over to. Devices of that fleet that never were in
                this one report no roll-out, and do not count here.
        """
        report = RolloutReport.read(text)
        if report is not None and report.version != self.plan.version:
            report = None
        if report is None and bundle == self.plan.tag and not elsewhere:
            report = RolloutReport(self.plan.version, "healthy")
        if report is None:
            if bundle and not elsewhere:
                self.told.setdefault(device, None)
            return None
        before = self.told.get(device)
        if before == report or (before is not None and before.word in _FINAL and report.word not in _FINAL):
            return None
        self.told[device] = report
        return report

    def forget(self, device: str) -> None:
        """Remove a device that is no longer part of the fleet."""
        self.told.pop(device, None)
        self._places.pop(device, None)
        self.forgiven = min(self.forgiven, self._failed())  # none of them is there to be forgiven for another

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> Moved | None:
        """Do the next step that is due and return it; None when nothing is due."""
        self.since = min(self.since, now)  # the clock may have been set back
        if self.state == "halted":
            return None
        members = self.members()
        if not members and self.told and now - self.since >= self.plan.soak_s:  # who sleeps is not known yet
            return self._widened(self._lowest(), now)
        tallies: Counter[str] = Counter(report.word for report in members.values() if report is not None)
        failed = tallies["failed"] - self.forgiven
        if failed > (1.0 - self.plan.healthy) * len(members) + _ROUNDING:
            self.state, self.reason = "halted", self._halt_reason(members, tallies["failed"])
            return Halted(self.plan.version, self.fraction, self.reason)
        if self.state == "complete" or now - self.since < self.plan.soak_s:
            return None
        if self.fraction >= 1.0 and members and tallies["healthy"] == len(members):
            self.state = "complete"
            return Completed(self.plan.version, len(members))
        further = [stage for stage in self.stages if stage > self.fraction]
        if further and self._is_healthy(members, tallies):
            return self._widened(further[0], now)
        return None

    def _is_healthy(self, members: Mapping[str, RolloutReport | None], tallies: Mapping[str, int]) -> bool:
        reported, healthy = sum(tallies.values()), tallies["healthy"]
        enough = 2 * reported >= len(members) and healthy >= 1
        return enough and healthy >= self.plan.healthy * reported - _ROUNDING

    def _widened(self, fraction: float, now: float) -> Widened:
        self.fraction, self.since = fraction, now
        self.stages = tuple(stage for stage in self.stages if stage > fraction)
        return Widened(self.plan.version, fraction, len(self.members()))

    def _lowest(self) -> float:
        """The fraction that takes in the first of the known devices, and no other."""
        return min(1.0, math.nextafter(min(map(self._place, self.told)), 2.0))

    def _halt_reason(self, members: Mapping[str, RolloutReport | None], failed: int) -> str:
        last = next(
            (report.reason for report in members.values() if report is not None and report.word == "failed"), ""
        )
        return f"{failed} of {len(members)} devices failed{f', one with: {last}' if last else ''}"

    # ── what an operator asks for ───────────────────────────────────────────────────────────────────────────────────

    def halt(self, reason: str) -> None:
        """Offer it to nobody, until it is resumed."""
        self.state, self.reason = "halted", reason

    def resume(self, now: float) -> None:
        """Continue the halted stage from its beginning. The failures until now do not halt it again."""
        self.state, self.reason, self.since, self.forgiven = "running", "", now, self._failed()

    def _failed(self) -> int:
        return sum(report is not None and report.word == "failed" for report in self.told.values())

    def widen(self, fraction: float, now: float) -> None:
        """Offer it to more devices, whatever they report. The further stages follow as planned."""
        self._widened(fraction, now)
        self.state = "running"
