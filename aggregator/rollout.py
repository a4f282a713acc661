"""How far a bundle is rolled out: a state machine without sockets, files or clock.

    running ──enough of the stage is healthy, and the soak is over──▶ running, in a larger stage
       │ ▲                                          └──all that are known are healthy, at 100 %──▶ complete
       ▼ │ resumed
    halted ◀── more of the stage failed than may, or an operator says so

A stage is a fraction of the devices, and which these are `contract.sampling.place` says; those of a smaller stage are
in every larger one. It has at least one device: where none that is known stands below the fraction once its soak is
over, the fraction is raised to take in the lowest. Known are the devices that said which bundle they use: one that
does not say it is of a release without roll-outs.

A stage is widened when its soak is over, at least half of its known devices have said how it goes, at least one is
healthy, and of those that said something at least the share `healthy` is. A device that refuses the bundle, or is still
getting it, counts among those that said something: a stage that goes badly or slowly is not widened. It is halted, in
whatever stage, when more than the share 1 − `healthy` of its known devices have failed; once resumed, when so many more
have. It is complete when the last soak is over, too, since devices that sleep or come with the aggregator's start are
known only then. A roll-out that is complete still stands for devices that come later.

Time is an argument, in seconds since the epoch, since a soak outlives the process.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from contract.offers import WORDS, Offer, Told, bundle_tag
from contract.sampling import place

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
        fleet: that devices go over to; empty in this one.
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
        """What a device says of its bundle once it uses this one."""
        return bundle_tag(self.version, self.sha256)


@dataclass(frozen=True)
class Widened:
    """The offer is for more devices now: `devices` that are known."""

    version: int
    fraction: float
    devices: int


@dataclass(frozen=True)
class Halted:
    """Nothing is offered any more: too many failed."""

    version: int
    fraction: float
    reason: str


@dataclass(frozen=True)
class Completed:
    """All `devices` that are known are healthy with it."""

    version: int
    devices: int


Moved = Widened | Halted | Completed


@dataclass
class Rollout:
    """One roll-out.

    Attributes:
        fraction: of the devices, that it is offered to.
        stages: further fractions, rising.
        since: when the present stage began.
        reason: why it is halted.
        forgiven: how many had failed when it was resumed.
        told: of each known device what it said last; None for nothing yet.
    """

    plan: Plan
    fraction: float
    stages: tuple[float, ...]
    since: float
    state: State = "running"
    reason: str = ""
    forgiven: int = 0
    told: dict[str, Told | None] = field(default_factory=dict)
    _places: dict[str, float] = field(default_factory=dict, repr=False)

    @property
    def offer(self) -> Offer | None:
        """What is announced; None while it is halted."""
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

    def members(self) -> dict[str, Told | None]:
        """The known devices of the present stage, and what they said."""
        return {device: told for device, told in self.told.items() if self._place(device) < self.fraction}

    def counts(self) -> Mapping[str, int]:
        """Known devices of the present stage by what they said, all words and `waiting` for nothing yet."""
        said = Counter("waiting" if told is None else told.word for told in self.members().values())
        return {word: said[word] for word in ("waiting", *WORDS)}

    # ── what is heard ───────────────────────────────────────────────────────────────────────────────────────────────

    def hear(self, device: str, bundle: str, said: str, *, elsewhere: bool = False) -> Told | None:
        """What a device's status says under `bundle` and `rollout`; what is news of it.

        A word is of this roll-out's version, or nothing. Healthy or failed stands against a word of the way there: that
        is an older status, of the other fleet, or of a broker that was away.

        Args:
            elsewhere: it is a status of the fleet that devices go over to. Devices of that fleet that never were in
                this one say nothing of a roll-out, and are none of ours.
        """
        told = Told.read(said)
        if told is not None and told.version != self.plan.version:
            told = None
        if told is None and bundle == self.plan.tag and not elsewhere:
            told = Told(self.plan.version, "healthy")
        if told is None:
            if bundle and not elsewhere:
                self.told.setdefault(device, None)
            return None
        before = self.told.get(device)
        if before == told or (before is not None and before.word in _FINAL and told.word not in _FINAL):
            return None
        self.told[device] = told
        return told

    def forget(self, device: str) -> None:
        """A device is no part of the fleet any more."""
        self.told.pop(device, None)
        self._places.pop(device, None)
        self.forgiven = min(self.forgiven, self._failed())  # none of them is there to be forgiven for another

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> Moved | None:
        """The next thing that is due, done; None when nothing is."""
        self.since = min(self.since, now)  # the clock may have been set back
        if self.state == "halted":
            return None
        members = self.members()
        if not members and self.told and now - self.since >= self.plan.soak_s:  # who sleeps is not known yet
            return self._widened(self._lowest(), now)
        said: Counter[str] = Counter(told.word for told in members.values() if told is not None)
        failed = said["failed"] - self.forgiven
        if failed > (1.0 - self.plan.healthy) * len(members) + _ROUNDING:
            self.state, self.reason = "halted", self._why(members, said["failed"])
            return Halted(self.plan.version, self.fraction, self.reason)
        if self.state == "complete" or now - self.since < self.plan.soak_s:
            return None
        if self.fraction >= 1.0 and members and said["healthy"] == len(members):
            self.state = "complete"
            return Completed(self.plan.version, len(members))
        further = [stage for stage in self.stages if stage > self.fraction]
        if further and self._is_healthy(members, said):
            return self._widened(further[0], now)
        return None

    def _is_healthy(self, members: Mapping[str, Told | None], said: Mapping[str, int]) -> bool:
        reported, healthy = sum(said.values()), said["healthy"]
        enough = 2 * reported >= len(members) and healthy >= 1
        return enough and healthy >= self.plan.healthy * reported - _ROUNDING

    def _widened(self, fraction: float, now: float) -> Widened:
        self.fraction, self.since = fraction, now
        self.stages = tuple(stage for stage in self.stages if stage > fraction)
        return Widened(self.plan.version, fraction, len(self.members()))

    def _lowest(self) -> float:
        """The fraction that takes in the first of the known devices, and no other."""
        return min(1.0, math.nextafter(min(map(self._place, self.told)), 2.0))

    def _why(self, members: Mapping[str, Told | None], failed: int) -> str:
        last = next((told.reason for told in members.values() if told is not None and told.word == "failed"), "")
        return f"{failed} of {len(members)} devices failed{f', one with: {last}' if last else ''}"

    # ── what an operator asks for ───────────────────────────────────────────────────────────────────────────────────

    def halt(self, reason: str) -> None:
        """Offer it to nobody, until it is resumed."""
        self.state, self.reason = "halted", reason

    def resume(self, now: float) -> None:
        """Go on with the stage that it was halted in, from its beginning; who failed so far does not halt it again."""
        self.state, self.reason, self.since, self.forgiven = "running", "", now, self._failed()

    def _failed(self) -> int:
        return sum(told is not None and told.word == "failed" for told in self.told.values())

    def widen(self, fraction: float, now: float) -> None:
        """Offer it to more, whatever they say; further stages follow as planned."""
        self._widened(fraction, now)
        self.state = "running"
