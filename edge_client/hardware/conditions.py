"""Under which conditions this device runs: its clock, the disk of its state directory, its certificate.

They are told in each birth (`contract/conditions.py`). A birth is published anew where one of them has become another:
the clock was set, or the disk was filled or emptied. So an operator does not read for days what was true at the start.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from protofleet.contract.conditions import CERTIFICATE_SINCE, CERTIFICATE_UNTIL, CLOCK, DISK_FREE, LEAST_DISK_BYTES
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.certificates import expiries

__all__ = ["Conditions"]

_LOOK_S = 10.0
_SET_S = 60.0  # a clock that differs by more from what had passed since was set


class Conditions:
    """Those of one process.

    Args:
        address: of the broker, with the files that it is shown.
        directory: the state directory.
    """

    def __init__(self, address: Address, directory: Path) -> None:
        self._address, self._directory = address, directory
        self._look_at_s = float("-inf")
        self._told: tuple[float, bool] | None = None

    def figures(self) -> dict[str, float]:
        """What the next birth tells. What cannot be known is left out."""
        found, free = {CLOCK: time.time()}, self._free_bytes()
        if free is not None:
            found[DISK_FREE] = free
        for expiry in expiries(self._address):
            if expiry.what == "certificate":
                found |= {CERTIFICATE_UNTIL: expiry.until, CERTIFICATE_SINCE: expiry.since}
        self._told = self._now()
        return found

    def disk(self) -> dict[str, float]:
        """What a death tells: the disk, where it is what ended this process."""
        free = self._free_bytes()
        return {DISK_FREE: free} if free is not None and free < LEAST_DISK_BYTES else {}

    def is_news(self, now_s: float) -> bool:
        """Whether something is other than what was told; looks at most every ten seconds."""
        if self._told is None or now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + _LOOK_S
        (offset_s, is_low), (told_s, was_low) = self._now(), self._told
        return abs(offset_s - told_s) > _SET_S or is_low != was_low

    def _now(self) -> tuple[float, bool]:
        """How far the clock is before the time that has passed, and whether the disk is nearly full."""
        free = self._free_bytes()
        return time.time() - time.monotonic(), free is not None and free < LEAST_DISK_BYTES

    def _free_bytes(self) -> float | None:
        try:
            found = os.statvfs(self._directory)
        except OSError:
            return None
        return float(found.f_bavail * found.f_frsize)
