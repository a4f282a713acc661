"""Whether a bundle that a roll-out brought proves itself: a verdict from what the device hears and measures.

Probation ends well with one of these:

- The first contribution that was made with the bundle is committed.
- Nothing is due (sums stand and are as they were, or the run is over), and a global state of the fleet was taken up
  that can be true.

If the device knew how many held-out photos the fleet's state named right before, it first measures that once more. In
another fleet it takes what it names right alone, where that is more, because the first devices there meet a state
without their classes.

Probation ends badly with one of these:

- A contribution is rejected. It does not count if the device itself is refused: an operator refuses such a device,
  whatever it sends.
- Training diverges.
- The client ends with an error in its work.
- Far fewer photos are named right than before.
- Too many starts in a row do not get to where the client waits for work (`rollout_decisions.py`).

The verdict is on the disk before anything follows from it.
"""

from __future__ import annotations

import logging

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.console.logs import private
from protofleet.contract.errors import (
    BundleError,
    DataError,
    LinkError,
    PrivacyError,
    ProtofleetError,
    StoreError,
    UsageError,
)
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.rollout_file import RolloutFile

__all__ = ["ProbationWatch", "is_of_the_bundle", "reason_of"]

logger = logging.getLogger(__name__)


def is_of_the_bundle(error: BaseException, *, at_start: bool = False) -> bool:
    """Whether an error that ended a client may come from its bundle.

    An error of the network, the disk or the budget does not. Once the client has started, neither does an error that
    its fleet or its settings cause.
    """
    others = (LinkError, StoreError, PrivacyError) if at_start else (LinkError, StoreError, PrivacyError, UsageError)
    ours = isinstance(error, ProtofleetError) and not isinstance(error, others)
    return ours or isinstance(error, MemoryError)


def reason_of(error: BaseException) -> str:
    """Why a bundle was given up, as the fleet is told. It tells nothing of this device's files, photos and settings."""
    if isinstance(error, DataError | UsageError):
        return "this device's photos or settings do not fit it"
    if isinstance(error, BundleError):
        return f"{error.message.rpartition('/')[2]}: got {error.got}"
    return "not enough memory" if isinstance(error, MemoryError) else str(error)


class ProbationWatch:
    """The probation of the bundle that runs. For a bundle that is not on probation it only remembers what is measured.

    Args:
        file: what the state directory knows of roll-outs.

    Attributes:
        is_over: whether the bundle was given up, and what ran before has to run again.
    """

    def __init__(self, file: RolloutFile) -> None:
        self._file = file
        self._is_committed = False
        self.is_over = False

    @property
    def is_on(self) -> bool:
        """Whether the bundle has yet to prove itself."""
        return self._file.known.probation is not None and not self.is_over

    def on_final_receipt(self, receipt: Receipt) -> None:
        """A contribution has its final receipt.

        It is always of the bundle that runs: another bundle takes over only when no contribution waits for a receipt.
        """
        if not self.is_on:
            return
        if receipt.status == "rejected" and not receipt.refuses_the_device:
            self.fail(f"rejected: {receipt.reason}")
        elif receipt.status in ("committed", "duplicate"):
            self._is_committed = True
            self._prove_unless_measured()

    def reported(self, accuracy: Accuracy | None) -> None:
        """A contribution was reported on.

        Args:
            accuracy: of the device's test with the fleet's state; None where it could not test.
        """
        known = self._file.known
        if accuracy is None:
            if self.is_on and self._is_committed:
                self._prove()
            return
        right = self._right_with_it(accuracy)
        if self.is_on and rollout_decisions.has_fallen(known, right, accuracy.samples):
            before = known.probation.accuracy if known.probation is not None else None
            self.fail(f"{right:.1%} of the held-out photos right, {before:.1%} before")
            return
        self._file.put(rollout_decisions.with_accuracy(known, accuracy.all_classes))
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
        self._file.change(rollout_decisions.got_through)
        nothing_due = settled and announcement.phase in ("standing", "finished")
        if nothing_due and plausible:
            self._prove()

    def fail(self, reason: str) -> None:
        """The bundle is given up; the client is to end, so that what ran before runs again."""
        installed = self._file.known.active
        if self.is_on and installed is not None:
            self._file.change(rollout_decisions.rolled_back, reason)
            self.is_over = True
            logger.warning(f"bundle {rollout_decisions.tag(installed)} is rolled back: {reason}")

    def ended(self, error: BaseException | None, *, at_start: bool = False) -> None:
        """The client ended, or could not start.

        Args:
            error: that it ended with; None for an end without one.
        """
        if not self.is_on:
            return
        if error is not None and is_of_the_bundle(error, at_start=at_start):
            logger.warning("%s", private(error))
            self.fail(reason_of(error))
        else:
            self._file.change(rollout_decisions.got_through)

    def _prove_unless_measured(self) -> None:
        probation = self._file.known.probation
        if probation is not None and probation.accuracy is None:
            self._prove()

    def _prove(self) -> None:
        known, installed = self._file.known, self._file.known.active
        assert installed is not None
        self._file.change(rollout_decisions.proved, installed)
        logger.info(f"bundle {rollout_decisions.tag(installed)} is healthy")
        if known.previous is not None and known.previous.directory != installed.directory:
            self._file.drop_caches(known.previous)
        self._file.tidy()
