"""The newest global state of the fleet, put on the disk so that answers need no broker, if it can be true."""

from __future__ import annotations

from edge_client.device import Device
from edge_client.journal import Journal
from edge_client.rounds import Follower

__all__ = ["KeptState"]

_LAST_STATE_S = 5.0  # how long a finished run's last global state may take to arrive


class KeptState:
    """Of one client; takes up what an earlier process has kept.

    Args:
        anew: whether what was kept is looked at once more: another bundle may have kept it.

    Attributes:
        is_plausible: whether the newest one is kept.
    """

    def __init__(self, device: Device, journal: Journal, follower: Follower, *, anew: bool = False) -> None:
        self._device, self._journal, self._follower = device, journal, follower
        self._looked_at: tuple[bytes, int] | None = None  # run and version of the newest global state
        self.is_plausible = False
        kept = journal.kept_global()
        if kept is not None:
            follower.restore(kept)
            self._looked_at = None if anew else (kept.run, kept.version)

    def keep(self) -> bool:
        """Put a new global state on the disk; False when there is none.

        One that cannot be true does not take the place of one that can.

        Raises:
            StoreError: the disk refused.
        """
        state = self._follower.newest_state
        if state is None or (state.run, state.version) == self._looked_at:
            return False
        self._looked_at = (state.run, state.version)
        self.is_plausible = not self._device.judge(state).refused
        if self.is_plausible:
            self._journal.keep_global(state)
        return True

    def is_last_here(self, waited_s: float) -> bool:
        """Whether the state that the announced run ends with is here, or has been waited for long enough."""
        a = self._follower.announcement
        if a is None:
            return False
        state = self._follower.state(a.run)
        here = a.global_version == 0 or (state is not None and state.version >= a.global_version)
        return here or waited_s > _LAST_STATE_S
