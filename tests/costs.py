"""What each test costs in processor time, its processes included: `python -m pytest --costs FILE` (conftest.py).

A worker appends a line of JSON for each test to FILE: where it is, seconds on the clock, processor seconds of the
worker, and of children that have ended. A process that outlives its test counts where it is waited for. At the end a
table says what each room and the dearest files took. Seconds on the clock depend on what else runs; processor seconds
hardly do.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

DEAREST = 25
Costs = tuple[float, float, float]


def _now() -> Costs:
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.perf_counter(), own.ru_utime + own.ru_stime, ended.ru_utime + ended.ru_stime


class Recorder:
    """One line for each test, in a worker or where there are none."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        before = _now()
        done = yield
        spent = [round(now - then, 4) for now, then in zip(_now(), before, strict=True)]
        with self._file.open("a") as lines:
            lines.write(json.dumps([item.nodeid, *spent]) + "\n")
        return done


class Table:
    """The sums, once all is done."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rooms, files = defaultdict[str, list[Costs]](list), defaultdict[str, list[Costs]](list)
        for line in self._file.read_text().splitlines() if self._file.exists() else ():
            place, *spent = json.loads(line)
            file = place.split("::")[0]
            files[file].append(tuple(spent))
            rooms["/".join(file.split("/")[:2])].append(tuple(spent))
        for title, found in (("rooms", rooms), ("dearest files", files)):
            terminalreporter.section(f"processor seconds: {title}")
            rows = [(place, len(each), *map(sum, zip(*each, strict=True))) for place, each in found.items()]
            for place, count, clock, own, ended in sorted(rows, key=lambda row: -row[3] - row[4])[:DEAREST]:
                figures = (
                    f"{own + ended:8.1f} = {own:7.1f} own + {ended:7.1f} of processes, {clock:8.1f} s by the clock"
                )
                terminalreporter.write_line(f"{figures}, {count:5} tests  {place}")
