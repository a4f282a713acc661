"""What the fleet wants of this device: follows announcements and global states, and says what to do next. No I/O.

An announcement is retained, so the newest one has all there is to know. It becomes a task when all of these hold:

- Its round is open.
- This device is sampled, and has not done the round yet.
- The global state that the round starts from is here.

Parts of a global state are collected for each run on its own, because a broker may still retain parts of an older run.
They come in any order. A version far above the announced one is refused: it would keep every true one out.

A client that stays no longer than its run ends when a run is announced as finished. This holds only for a run that this
device has seen open or took part in. So what a broker still retains of last week's run does not end a device that came
for today's. A client that stays waits for the next run, also while a run of other bundles is under way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.methods import METHODS, method
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import Announcement, GlobalPart
from protofleet.contract.wire.sampling import sampled
from protofleet.edge_client.journal.journal import Key

__all__ = ["Follower", "Task", "largest_message_bytes"]

_RUNS_KEPT = 4
_MESSAGE_BYTES = 1 << 20  # more than any message takes, but for the class rows in it
_STATE_MESSAGES = 16  # that take as much as the whole of a global state
_AHEAD = 16  # versions of a global state that may come before the announcement that names them


@dataclass(frozen=True, eq=False)
class Task:
    """A round to take part in now, and the global state that it starts from."""

    announcement: Announcement
    state: GlobalState

    @property
    def key(self) -> Key:
        return (self.announcement.run, self.announcement.round, self.announcement.method)


def largest_message_bytes(manifest: Manifest) -> int:
    """The largest message that is of any use to a device of this bundle: one with all rows of a kind, also of a list of
    classes that is twice as long."""
    return _MESSAGE_BYTES + 2 * 8 * manifest.classes * max(manifest.features, 2 * manifest.classes)


class Follower:
    """Follows one fleet.

    Args:
        device_id: decides the sampling.
        bundle: this device's.
        is_done: whether a round was committed before, also by an earlier process.
        took_part: whether any round of a run was.
        was_rejected: whether the aggregator refused what this device sent for a round.
        stays: whether a run of another bundle is waited out, instead of being an error.
    """

    def __init__(
        self,
        device_id: str,
        bundle: Bundle,
        *,
        is_done: Callable[[Key], bool],
        took_part: Callable[[bytes], bool],
        was_rejected: Callable[[Key], bool] = lambda key: False,
        stays: bool = False,
    ) -> None:
        self._stays, self._foreign = stays, False
        self._apart = ""
        self._device_id, self._bundle = device_id, bundle
        self._is_done, self._took_part, self._was_rejected = is_done, took_part, was_rejected
        self._announcement: Announcement | None = None
        self._opened_runs: OrderedDict[bytes, None] = OrderedDict()
        self._runs: OrderedDict[bytes, tuple[GlobalCollector, GlobalState | None]] = OrderedDict()

    @property
    def announcement(self) -> Announcement | None:
        """The newest one."""
        return self._announcement

    @property
    def finished(self) -> bool:
        """Whether a run that this device belongs to is over."""
        a = self._announcement
        return a is not None and a.phase == "finished" and self._belongs(a.run)

    @property
    def apart(self) -> str:
        """Why this device takes no part in what is announced, in a few words for the operator; empty where it does."""
        return self._apart

    @property
    def stale(self) -> bool:
        """Whether what is announced is the end of a run that this device never saw."""
        a = self._announcement
        return a is not None and a.phase == "finished" and not self._belongs(a.run)

    def announced(self, announcement: Announcement) -> None:
        """Take in an announcement.

        Raises:
            UsageError: the run under way is for another bundle than this device's. If the device stays, it then waits
                for a run that is for its own.
        """
        self._announcement, self._foreign = announcement, False
        if self._is_absurd(announcement.run, self._collected(announcement.run)):
            del self._runs[announcement.run]
        if announcement.phase == "finished":
            return
        self._apart = self._why_apart(announcement)
        if self._apart:
            if self._stays:
                self._announcement, self._foreign = None, True
            fleet = (announcement.bundle, *announcement.others)
            self._check_lists(announcement)
            raise UsageError(
                "the fleet runs another bundle",
                expected="sha256 " + " or ".join(f"{sha256.hex()[:12]}…" for sha256 in fleet[:4]),
                got=f"{self._bundle.sha256.hex()[:12]}…",
                hint="copying a bundle of the aggregator's to this device",
            )
        self._opened_runs[announcement.run] = None
        while len(self._opened_runs) > _RUNS_KEPT:
            self._opened_runs.popitem(last=False)

    def _why_apart(self, announcement: Announcement) -> str:
        if self._is_of_bundle(announcement):
            return ""
        if announcement.bundle in self._bundle.manifest.extended:
            return "more classes than the fleet's"
        return "other classes" if self._shares_extractor(announcement) else "another bundle"

    def _is_of_bundle(self, announcement: Announcement) -> bool:
        fleet = (announcement.bundle, *announcement.others)
        return self._bundle.sha256 in fleet or (
            self._shares_extractor(announcement) and self._shares_classes(announcement)
        )

    def _shares_classes(self, announcement: Announcement) -> bool:
        """Whether this device's list of classes is one of the fleet's; an older aggregator does not say."""
        return not announcement.class_lists or list_digest(self._bundle.manifest.labels) in announcement.class_lists

    def _check_lists(self, announcement: Announcement) -> None:
        """Raise an error that says so, where only the list of classes keeps this device away."""
        m = self._bundle.manifest
        if announcement.bundle in m.extended:
            raise UsageError(
                "the fleet does not know all classes of this device's bundle",
                expected=f"an aggregator with {m.classes} classes",
                got=f"one with the first {m.extended[announcement.bundle]}",
                hint="starting it with this bundle",
            )
        if self._shares_extractor(announcement) and not self._shares_classes(announcement):
            raise UsageError(
                "the fleet has other classes, or has them in another order",
                expected=" or ".join(f"{digest.hex()}…" for digest in announcement.class_lists[:4]),
                got=f"{list_digest(m.labels).hex()}… of {', '.join(m.labels[:4])}{', …' * (m.classes > 4)}",
                hint="export --extend of the fleet's bundle",
            )

    def _shares_extractor(self, announcement: Announcement) -> bool:
        """Whether the round sums features of one extractor, and this device's bundle has that."""
        if not announcement.extractor or announcement.method not in METHODS:
            return False
        return self._bundle.extractor(method(announcement.method)) == announcement.extractor

    def part(self, part: GlobalPart) -> None:
        """Take in a part of a global state.

        Raises:
            WireError: it contradicts the parts before it, or is of a version far above the one that is announced.
        """
        if self._is_absurd(part.run, part.version):
            assert self._announcement is not None
            expected = f"version {self._announcement.global_version}, as announced"
            raise WireError("global state", expected=expected, got=f"version {part.version}")
        collector, state = self._runs.pop(part.run, (self._collector(), None))
        try:
            whole = collector.add(part)
        finally:
            self._runs[part.run] = (collector, state)
        if whole is not None:
            self._runs[part.run] = (collector, whole)
        while len(self._runs) > _RUNS_KEPT:
            self._runs.popitem(last=False)

    def _collected(self, run: bytes) -> int:
        """The version of the parts that came of a run."""
        return self._runs[run][0].version if run in self._runs else 0

    def _is_absurd(self, run: bytes, version: int) -> bool:
        a = self._announcement
        return a is not None and a.run == run and version > a.global_version + _AHEAD

    def state(self, run: bytes) -> GlobalState | None:
        """The newest whole global state of a run, if there is one yet."""
        return self._runs[run][1] if run in self._runs else None

    @property
    def newest_state(self) -> GlobalState | None:
        """The newest whole global state of the announced run, where that is of this device's bundle."""
        a = self._announcement
        return self.state(a.run) if a is not None and self._is_of_bundle(a) else None

    def restore(self, state: GlobalState) -> None:
        """Begin with a global state that an earlier process kept."""
        self._runs[state.run] = (self._collector(), state)

    def _collector(self) -> GlobalCollector:
        return GlobalCollector(_STATE_MESSAGES * largest_message_bytes(self._bundle.manifest))

    @property
    def is_called(self) -> bool:
        """Whether a round is open that this device is sampled for and has not done."""
        a = self._announcement
        if a is None or a.phase != "open" or a.round < 1 or self._is_done((a.run, a.round, a.method)):
            return False
        return sampled(self._device_id, a.round, a.seed, a.fraction)

    @property
    def standing(self) -> Announcement | None:
        """The announcement under which sums stand; None where there are rounds."""
        a = self._announcement
        return a if a is not None and a.phase == "standing" else None

    def task(self) -> Task | None:
        """What to do now, if anything."""
        a = self._announcement
        if a is None or not self.is_called:
            return None
        if a.global_version == 0:
            return Task(a, GlobalState(a.run, 0, 0))
        state = self.state(a.run)
        return Task(a, state) if state is not None and state.version == a.global_version else None

    def waits_for(self) -> str:
        """What this device waits for, for a person; empty when it has something to do, or nothing to wait for."""
        a = self._announcement
        if self._foreign:
            return "waiting for a run of this device's bundle"
        if a is None:
            return "waiting for an aggregator: no round has been announced"
        what = f"round {a.round} ({a.method})"
        if a.phase == "standing":
            return ""
        if a.phase == "finished":
            return "waiting for the next run" if self._stays else ""
        if a.phase == "closed" or a.round < 1:
            return f"waiting for round {a.round + 1} to open"
        if self._is_done((a.run, a.round, a.method)):
            how = "and done here"
            if self._was_rejected((a.run, a.round, a.method)):
                how = "but what this device sent was rejected"
            return f"{what} is open {how}: waiting for the next round"
        if not self.is_called:
            return f"{what} is open, this device was not sampled: waiting for the next round"
        state = self.state(a.run)
        if state is not None and state.version > a.global_version:
            return (
                f"{what} starts from global version {a.global_version}, this device has version {state.version} "
                "already: was the aggregator's store restored from a backup? Its --new-run goes on"
            )
        return "" if self.task() is not None else f"{what} is open: waiting for global version {a.global_version}"

    def _belongs(self, run: bytes) -> bool:
        return run in self._opened_runs or self._took_part(run)
