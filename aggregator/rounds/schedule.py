"""When the next round of an aggregator that stays is due: by the clock, by news, by order. No clock, no I/O.

- By the clock: a fixed time after the last round opened. Missed rounds are not made up for; one is due at once.
- By news: enough devices have said, since they last contributed, that they have enough new photos. A report also counts
  while its device is away: the device sends it in its status, and takes part when it is awake.
- By order: an operator asked. The order holds until a round opens.

Time is an argument, in seconds of any steady clock. A wall clock that jumps changes only one value: how long ago the
last round opened before a restart. That is taken to be between zero and one interval.
"""

from __future__ import annotations

__all__ = ["Schedule"]


class Schedule:
    """The state machine of the schedule.

    Args:
        every_s: how long after a round opened the next one is due; 0 for never.
        when_new: how many new photos of a device are news; 0 for no news.
        devices: how many devices' news make a round due.
        most: how many devices are followed at most: a flood of statuses must not use up the memory.
    """

    def __init__(self, every_s: float, when_new: int, devices: int, most: int) -> None:
        self._every_s, self._when_new, self._devices, self._most = every_s, when_new, devices, most
        self._next_s = float("-inf") if every_s else float("inf")
        self._news: set[str] = set()
        self._ordered = False

    def opened(self, now: float, ago_s: float = 0.0) -> None:
        """A round opened, `ago_s` before `now`."""
        self._ordered = False
        if self._every_s:
            self._next_s = now - min(max(ago_s, 0.0), self._every_s) + self._every_s

    def heard(self, device: str, samples_new: float) -> None:
        """A device says how many photos came or went since it last contributed."""
        if not self._when_new or not samples_new >= self._when_new:  # NaN is not
            self._news.discard(device)
        elif len(self._news) < self._most:
            self._news.add(device)

    def contributed(self, device: str) -> None:
        """What was new of a device is in a contribution."""
        self._news.discard(device)

    def order(self) -> None:
        """A round is due now."""
        self._ordered = True

    def is_due(self, now: float) -> bool:
        """Whether a round is to open."""
        return self._ordered or now >= self._next_s or (self._when_new > 0 and len(self._news) >= self._devices)

    def due_in_s(self, now: float) -> float | None:
        """Seconds until a round is due if nothing is heard; None for never."""
        if self.is_due(now):
            return 0.0
        return None if self._next_s == float("inf") else self._next_s - now
