"""Tasks for other processes, which must be functions of a module that they can load."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from protofleet.contract.errors import DivergedError


def echo(site: Any, common: Any, item: Any) -> tuple[Any, Any, Any]:
    return site, common, item


def slow_first(site: Any, common: Any, item: int) -> int:
    time.sleep(0.3 if item == 0 else 0.0)
    return item


def die_once(site: Path, common: Any, item: int) -> int:
    """kill -9 of whoever computes item 2, the first time."""
    if item == 2 and not (site / "died").exists():
        (site / "died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item * item


def die_now_and_then(site: Path, common: Any, item: int) -> int:
    """kill -9 of whoever computes every third item, the first time, when those before it are done."""
    mark = site / f"died at {item}"
    if item % 3 == 2 and not mark.exists():
        while not all((site / f"did {each}").exists() for each in range(item)):
            time.sleep(0.01)
        time.sleep(0.1)  # what they came to is on its way
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    (site / f"did {item}").touch()
    return item


def die(site: Any, common: Any, item: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def diverge(site: Any, common: Any, item: int) -> int:
    if item >= 1:
        raise DivergedError("training diverged", expected="a finite loss", got=item, hint="a smaller lr")
    return item


def private_bytes(site: Any, common: Any, item: Any) -> tuple[int, int, float]:
    """Who computes, the memory that is its alone, and a sum that reads all of the site."""
    total = float(site.sum())
    time.sleep(0.2)  # so that the other worker takes the next one
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10
    return os.getpid(), private, total


def sleep(site: Path, common: Any, item: int) -> None:
    (site / f"{os.getpid()}").touch()
    time.sleep(600)
