"""Which leader's announcements count, where several processes take turns at leading a run.

Each process that begins to lead takes the next epoch, and says it in every announcement. A process that was stopped and
wakes late may still announce what it believed. That announcement has a lower epoch, and is ignored while the newer
leader speaks. An epoch is forgotten after a while, because anybody may announce one on an open broker. So a forged
epoch silences nobody for long.
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["Epochs"]

OUTLIVES_S = 600.0  # above what a leader that wakes needs to find out that it is none
_RUNS_KEPT = 4


class Epochs:
    """The highest epoch of each run that was heard lately."""

    def __init__(self) -> None:
        self._newest: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def counts(self, run: bytes, epoch: int, now: float) -> bool:
        """Whether an announcement of this epoch is to be heeded; it is remembered then.

        Args:
            epoch: 0 where one process alone has the store.
            now: seconds of a steady clock.
        """
        newest, heard_at = self._newest.get(run, (0, now))
        if epoch < newest and now - heard_at < OUTLIVES_S:
            return False
        if epoch:
            self._newest[run] = epoch, now
            self._newest.move_to_end(run)
            while len(self._newest) > _RUNS_KEPT:
                self._newest.popitem(last=False)
        return True
