"""What other processes take of this machine while something is measured.

The kernel counts how long each processor was busy (`/proc/stat`), and a process its own processor time. What is busy
and not ours is others'. Where the system tells nothing, as outside Linux, it is None.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from protofleet.contract.errors import UsageError

__all__ = ["BUSY", "Load", "Watch", "check_idle"]

BUSY = 0.2  # processors that others may take before a time is not to be trusted
_STAT = Path("/proc/stat")
_LOOK_S = 0.5


@dataclass(frozen=True)
class Load:
    """Over one stretch of time.

    Attributes:
        average: of the machine's run queue over the last minute, at the end.
        others: processors that other processes kept busy; 1.0 is one processor all the time.
        own_s: processor time of this process, all its threads.
    """

    average: float | None
    others: float | None
    own_s: float

    @property
    def busy(self) -> bool | None:
        """Whether others took so much that a time is not to be trusted."""
        return None if self.others is None else self.others > BUSY


class Watch:
    """Begins now; `load` says what happened since."""

    def __init__(self) -> None:
        self._clock, self._own, self._busy = time.perf_counter(), time.process_time(), _busy_s()

    def load(self) -> Load:
        """From the beginning until now."""
        own_s, busy_s = time.process_time() - self._own, _busy_s()
        average = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        elapsed_s = time.perf_counter() - self._clock
        if busy_s is None or self._busy is None or elapsed_s <= 0:
            return Load(average, None, own_s)
        return Load(average, max(0.0, (busy_s - self._busy - own_s) / elapsed_s), own_s)


def check_idle(seconds: float = _LOOK_S, option: str = "--measure") -> None:
    """Look at the machine for a moment.

    Raises:
        UsageError: other processes are busy.
    """
    watch = Watch()
    time.sleep(seconds)
    load = watch.load()
    if load.busy:
        raise UsageError(
            option, expected=f"other processes that take at most {BUSY:g} of a processor",
            got=f"{load.others:.2f} processors taken, load average {load.average:.2f}",
            hint="ending them, or --under-load to measure all the same: the result is then marked",
        )  # fmt: skip


def _busy_s() -> float | None:
    """Seconds that the processors this process may run on were busy, all together, since the machine started."""
    try:
        lines = _STAT.read_text(encoding="ascii").splitlines()
        mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for line in lines:
            name, *fields = line.split()
            if name in mine:
                user, nice, system, _, _, interrupts, soft, stolen = map(int, fields[:8])
                ticks += user + nice + system + interrupts + soft + stolen  # stolen by other virtual machines
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
