"""The newest global state of the fleet, put on the disk so that answers need no broker, if it can be true."""

from __future__ import annotations

import logging
import time

from protofleet.edge_client.device.device import Device
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.rounds.round_follower import Follower

__all__ = ["KeptState"]

logger = logging.getLogger(__name__)

_SAID_S = 60.0  # between two lines that say so
_LAST_STATE_S = 5.0  # how long a finished run's last global state may take to arrive


class KeptState:
    """The global state that one client keeps on the disk. It starts with what an earlier process has kept.

    Args:
        anew: whether what was kept is judged again, because another bundle may have kept it.

    Attributes:
        is_plausible: whether the newest one is kept.
    """

    def __init__(self, device: Device, journal: Journal, follower: Follower, *, anew: bool = False) -> None:
        self._device, self._journal, self._follower = device, journal, follower
        self._newest_seen: tuple[bytes, int] | None = None  # run and version of the newest global state
        self._said_s, self._unsaid = float("-inf"), 0  # when one was said last, and a version that is to be said
        self.is_plausible = False
        kept = journal.kept_global()
        if kept is not None:
            follower.restore(kept)
            self._newest_seen = None if anew else (kept.run, kept.version)

    def keep(self) -> bool:
        """Put a new global state on the disk; False when there is none.

        A state that cannot be true does not replace one that can be.

        Raises:
            StoreError: the disk refused.
        """
        self._say()
        state = self._follower.newest_state
        if state is None or (state.run, state.version) == self._newest_seen:
            return False
        self._newest_seen = (state.run, state.version)
        self.is_plausible = not self._device.judge(state).refused
        if self.is_plausible:
            self._journal.keep_global(state)
            self._unsaid = state.version
            self._say()
        return True

    def _say(self) -> None:
        """Where sums stand, a version may come every few seconds: not each is a line, but the last one is."""
        now_s = time.monotonic()
        if self._unsaid and now_s - self._said_s >= _SAID_S:
            logger.info(f"the fleet's global version {self._unsaid} is here")
            self._said_s, self._unsaid = now_s, 0

    def has_last_state(self, waited_s: float) -> bool:
        """Whether the state that the announced run ends with is here, or has been waited for long enough."""
        a = self._follower.announcement
        if a is None:
            return False
        state = self._follower.state(a.run)
        has_come = a.global_version == 0 or (state is not None and state.version >= a.global_version)
        return has_come or waited_s > _LAST_STATE_S
