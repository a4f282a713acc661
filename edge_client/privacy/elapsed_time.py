"""How much time has passed, by a clock that nobody can set to make it seem more.

- While the system runs, its count since the start of the system decides (`CLOCK_BOOTTIME`, suspension included). Nobody
  can set this count.
- Over a restart of the system only the wall clock can tell. Time does not go back: if the clock is behind the latest
  time that was ever seen, no time has passed.

So a clock that is set back gains nothing. A clock that is set forward gains once, over a restart of the system, and
nothing more until that time has come.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Moment", "moment", "passed_s"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Moment:
    """When something was, by all clocks.

    Attributes:
        boot: which start of the system; empty where it does not tell.
        uptime_s: seconds since that.
        wall_s: seconds since the epoch, as the wall clock has it.
    """

    boot: str
    uptime_s: float
    wall_s: float


def moment() -> Moment:
    """Now."""
    try:
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        boot = ""
    return Moment(boot, time.clock_gettime(time.CLOCK_BOOTTIME), time.time())


def passed_s(before: Moment, now: Moment) -> float:
    """Seconds from one to the other, never less than 0.

    Args:
        before: with the latest wall clock that was ever seen.
    """
    if before.boot and before.boot == now.boot:
        return max(0.0, now.uptime_s - before.uptime_s)
    return max(0.0, now.wall_s - before.wall_s)
