"""How much time has passed, by a clock that cannot be set back, or forward, to make it seem more.

While the system runs, its own count since it started (`CLOCK_BOOTTIME`, suspension included) says so, which nobody
sets. Over a restart of the system only the wall clock can say, and is held to what can be true: time does not go back,
and none has passed for a clock that is behind the latest that was ever seen. So a clock that was set back gains
nothing; one that was set forward gains once, over a restart of the system, and nothing more until that time has come.
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
