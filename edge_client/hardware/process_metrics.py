"""What a device measures of itself: memory, board, versions, the time of a training step. See docs/hardware.md.

Memory is read from Linux's own account of the process (`/proc/self/status`): `VmHWM` is the largest resident set so
far, `VmRSS` the present one. `release_memory` hands freed pages back to the system after a round, and releases code
that has run (`code_pages.py`). So a device that waits for hours does not hold what training needed for seconds.
"""

from __future__ import annotations

import ctypes
import gc
import platform
import statistics
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from protofleet.edge_client.hardware.code_pages import release_code

__all__ = [
    "StepClock",
    "board_name",
    "facts",
    "own_this_process",
    "peak_rss_bytes",
    "release_memory",
    "rest_memory",
    "rss_bytes",
    "versions",
]

_PACKAGES = ("protofleet", "numpy", "onnxruntime", "paho-mqtt")
_owned = False  # whether all of this process is a device's


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far, in bytes; 0 where the system does not tell."""
    return _status_bytes("VmHWM")


def rss_bytes() -> int:
    """The resident set of this process now, in bytes; 0 where the system does not tell."""
    return _status_bytes("VmRSS")


def board_name() -> str:
    """What the board calls itself (its device tree), else the machine and system, at most 100 characters."""
    try:
        name = Path("/proc/device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        name = ""
    return (name or f"{platform.machine()} {platform.system()} {platform.release()}")[:100]


def versions() -> dict[str, str]:
    """The versions that matter for a result: ours, Python's, numpy's, ONNX Runtime's, paho's."""
    return dict(_versions())


@cache
def _versions() -> dict[str, str]:
    """They are read once: each is a package's whole description, which Python parses."""
    by_package = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            by_package[package] = version(package)
        except PackageNotFoundError:
            continue
    return by_package


def facts() -> dict[str, object]:
    """Peak memory so far, versions and board, for a summary."""
    return {"peak_rss_bytes": peak_rss_bytes(), "versions": versions(), "board": board_name()}


def own_this_process() -> None:
    """This process runs a device, or the trial of one, and nothing else.

    What it has loaded so far stays to its end: the collections after each round need not look at that (decision 288).
    """
    global _owned
    _owned = True
    gc.collect()
    gc.freeze()


def rest_memory() -> None:
    """Give back what a piece of a device's work has left: all that `release_memory` does in a process of its own."""
    if _owned:
        release_memory()
    else:
        _trim()


def release_memory() -> None:
    """Give freed memory back to the system, and pages of code that are on the disk anyway.

    glibc would keep freed memory. With other C libraries nothing is done for it.
    """
    gc.collect()
    _trim()
    release_code()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class StepClock:
    """The median training step of a round, from the moments at which its steps ended.

    The first step pays for warming up, so it is only the starting point of the second.
    """

    def __init__(self) -> None:
        self._last_s: float | None = None
        self._steps_s: list[float] = []

    def tick(self, now_s: float) -> None:
        """A step ended at `now_s` on a monotonic clock."""
        if self._last_s is not None:
            self._steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    @property
    def step_ms(self) -> float | None:
        """Median milliseconds for a step; None with fewer than two steps."""
        return statistics.median(self._steps_s) * 1e3 if self._steps_s else None


def _status_bytes(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return 0
