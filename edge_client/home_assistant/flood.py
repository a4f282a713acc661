"""How many of somebody's messages are acted upon: so many in each stretch of time, and no more.

A pure machine: times go in, and what may be done comes out.
"""

from __future__ import annotations

from collections import deque

__all__ = ["Flood"]


class Flood:
    """Args:
    count: so many are let through in any `within_s` seconds.
    """

    def __init__(self, count: int, within_s: float) -> None:
        self._within_s = within_s
        self._times: deque[float] = deque([float("-inf")] * count, maxlen=count)

    def lets(self, now: float) -> bool:
        """Whether one more is let through.

        Args:
            now: seconds of any steady clock.
        """
        if now - self._times[0] < self._within_s:
            return False
        self._times.append(now)
        return True
