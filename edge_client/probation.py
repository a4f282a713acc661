"""Whether a bundle that a roll-out brought proves itself: what a device hears and measures, made into a verdict.

On probation, one of these ends it well: the first contribution that was made with the bundle is committed; or, where
nothing is due (sums stand and are as they were, or the run is over), a global state of the fleet was taken up and can
be true. Where the device knew how many held-out photos the fleet's state named right before, it first measures that
once more; in another fleet, what it names right alone counts where that is more, since the first devices there meet a
state without their classes. One of these ends it badly: a contribution that is rejected (unless the device is: an
operator refuses it, whatever it sends), training that diverges, an error in the work, far fewer photos named right, or
starts in a row that do not come to where they wait for work (`rollout.py`).

The verdict is on the disk before anything follows from it.
"""

from __future__ import annotations

from collections.abc import Callable

from contract.accuracy import Accuracy
from contract.errors import BundleError, DataError, LinkError, PrivacyError, ProtofleetError, StoreError, UsageError
from contract.messages import Announcement, Receipt
from edge_client import rollout
from edge_client.rollout_file import RolloutFile

__all__ = ["ProbationWatch", "is_of_the_bundle", "reason_of"]


def is_of_the_bundle(error: BaseException, *, at_start: bool = False) -> bool:
    """Whether an error that ended a client may come from its bundle: not one of the network, disk or budget, and, once
    it has started, none that its fleet or its settings are wrong for it."""
    others = (LinkError, StoreError, PrivacyError) if at_start else (LinkError, StoreError, PrivacyError, UsageError)
    ours = isinstance(error, ProtofleetError) and not isinstance(error, others)
    return ours or isinstance(error, MemoryError)


def reason_of(error: BaseException) -> str:
    """Why a bundle was given up, as the fleet is told: nothing of this device's files, photos and settings."""
    if isinstance(error, DataError | UsageError):
        return "this device's photos or settings do not fit it"
    if isinstance(error, BundleError):
        return f"{error.message.rpartition('/')[2]}: got {error.got}"
    return "not enough memory" if isinstance(error, MemoryError) else str(error)


class ProbationWatch:
    """Of the bundle that runs; does nothing where it is not on probation, but remember what is measured.

    Args:
        file: what the state directory knows of roll-outs.
        log: takes a line for a person.

    Attributes:
        is_over: whether the bundle was given up, and what ran before has to run again.
    """

    def __init__(self, file: RolloutFile, log: Callable[[str], None]) -> None:
        self._file, self._log = file, log
        self._is_committed = False
        self.is_over = False

    @property
    def is_on(self) -> bool:
        """Whether the bundle has yet to prove itself."""
        return self._file.known.probation is not None and not self.is_over

    def settled(self, receipt: Receipt) -> None:
        """A contribution came to its end. None that an earlier bundle made waits for one: these are waited for before
        another bundle takes over."""
        if not self.is_on:
            return
        if receipt.status == "rejected" and not receipt.refuses_the_device:
            self.fail(f"rejected: {receipt.reason}")
        elif receipt.status in ("committed", "duplicate"):
            self._is_committed = True
            self._prove_unless_measured()

    def reported(self, accuracy: Accuracy | None) -> None:
        """A contribution was reported on: the device has tested itself with the fleet's state, or, None, could not."""
        known = self._file.known
        if accuracy is None:
            if self.is_on and self._is_committed:
                self._prove()
            return
        right = self._right_with_it(accuracy)
        if self.is_on and rollout.has_fallen(known, right, accuracy.samples):
            before = known.probation.accuracy if known.probation is not None else None
            self.fail(f"{right:.1%} of the held-out photos right, {before:.1%} before")
            return
        self._file.put(rollout.with_accuracy(known, accuracy.all_classes))
        if self.is_on and self._is_committed:
            self._prove()

    def _right_with_it(self, accuracy: Accuracy) -> float:
        """The share that counts for or against the bundle.

        In another fleet, what the device names right alone where that is more: who comes early meets a state without
        this device's classes, which says nothing of the bundle.
        """
        known = self._file.known
        moved = known.active is not None and known.previous is not None and known.active.fleet != known.previous.fleet
        return max(accuracy.all_classes, accuracy.alone or 0.0) if moved else accuracy.all_classes

    def rested(self, announcement: Announcement | None, *, settled: bool, plausible: bool) -> None:
        """The client waits for work.

        Args:
            announcement: the fleet's newest; until there is one, nothing is known.
            settled: whether no contribution waits for a receipt.
            plausible: whether a global state of the fleet is taken up.
        """
        if announcement is None or not self.is_on:
            return
        self._file.change(rollout.got_through)
        nothing_due = settled and announcement.phase in ("standing", "finished")
        if nothing_due and plausible:
            self._prove()

    def fail(self, reason: str) -> None:
        """The bundle is given up; the client is to end, so that what ran before runs again."""
        seat = self._file.known.active
        if self.is_on and seat is not None:
            self._file.change(rollout.rolled_back, reason)
            self.is_over = True
            self._log(f"bundle {rollout.tag(seat)} is rolled back: {reason}")

    def ended(self, error: BaseException | None, *, at_start: bool = False) -> None:
        """The client ended, with this error if with one; or could not start."""
        if not self.is_on:
            return
        if error is not None and is_of_the_bundle(error, at_start=at_start):
            self._log(str(error))
            self.fail(reason_of(error))
        else:
            self._file.change(rollout.got_through)

    def _prove_unless_measured(self) -> None:
        probation = self._file.known.probation
        if probation is not None and probation.accuracy is None:
            self._prove()

    def _prove(self) -> None:
        known, seat = self._file.known, self._file.known.active
        assert seat is not None
        self._file.change(rollout.proved, seat)
        self._log(f"bundle {rollout.tag(seat)} is healthy")
        if known.previous is not None and known.previous.directory != seat.directory:
            self._file.drop_caches(known.previous)
        self._file.tidy()
