"""How long an aggregator stays after its plan is done: until the devices that may lack a receipt have left. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["GRACE_S", "LATECOMERS_S", "Ending"]

GRACE_S = 40.0  # after the last round: a device without a receipt asks at once, then after 5 to 10 s, then 10 to 20
QUIET_S = 1.0
LATECOMERS_S = 60.0  # a store that was finished before: as long as the client's --patience


class Ending:
    """The end of one process.

    Args:
        missing: contributors of the last round that were offline when it ended: they may come back for a receipt.
        was_finished: whether the plan was done before this process began.
        now: seconds of a steady clock, when the plan was done; or, if it was done before, when we started.

    Attributes:
        least_s: the process stays at least that long.
    """

    def __init__(self, missing: Iterable[str], *, was_finished: bool, now: float) -> None:
        self._missing, self.least_s = set(missing), LATECOMERS_S if was_finished else 0.0
        self._since = self._heard_at = now

    def heard(self, now: float) -> None:
        """A message came."""
        self._heard_at = now

    def note_online(self, device: str) -> None:
        """A device is online."""
        self._missing.discard(device)

    def is_over(self, online: int, now: float) -> bool:
        """Whether all devices have left, or have had enough time.

        Args:
            online: how many devices are online.
        """
        if now - self._since < self.least_s:
            return False
        everybody_left = not self._missing and online == 0 and now - self._heard_at >= QUIET_S
        return everybody_left or now - self._since >= self.least_s + GRACE_S
