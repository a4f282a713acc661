"""What benchmarks count from outside: bytes that pass a proxy; memory and processor time of trees of processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.beside_flower.flower_network import free_port, tree

__all__ = ["CountingProxy", "Watch"]


class CountingProxy:
    """Stands between clients and a server on loopback, and counts the payload of TCP either way, without its headers.

    Args:
        target: the server's port.

    Attributes:
        port: where clients connect to.
    """

    def __init__(self, target: int) -> None:
        self._target, self.port = target, free_port()
        self._log: list[tuple[float, int, int]] = [(0.0, 0, 0)]  # when, bytes up so far, bytes down so far
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        ready.wait()

    def counted(self, since: float, until: float) -> tuple[int, int]:
        """Bytes up and down between two moments, in seconds since the epoch."""
        (up, down), (up_before, down_before) = self._at(until), self._at(since)
        return up - up_before, down - down_before

    def close(self) -> None:
        """No more connections; those that are open end with the processes."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _at(self, moment: float) -> tuple[int, int]:
        return next((up, down) for at, up, down in reversed(list(self._log)) if at <= moment)

    def _serve(self, ready: threading.Event) -> None:
        self._loop.run_until_complete(asyncio.start_server(self._connected, "127.0.0.1", self.port))
        ready.set()
        self._loop.run_forever()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
            await asyncio.gather(self._pass(reader, back, True), self._pass(there, writer, False))
        writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                _, up, down = self._log[-1]
                self._log.append((time.time(), up + is_up * len(data), down + (not is_up) * len(data)))
                writer.write(data)
                await writer.drain()
        writer.close()


@dataclass
class Peak:
    """The most that a group of processes held at once.

    Attributes:
        pss_bytes: with what processes share divided among them, of all groups' members together.
        rss_bytes: of one member, its processes added up: what they share counts in each.
        processor: when, and the processor time of all members' processes until then, seconds.
    """

    pss_bytes: int = 0
    rss_bytes: int = 0
    processor: list[tuple[float, float]] = field(default_factory=list)

    def processor_s(self, since: float, until: float) -> float:
        """Between the two looks that are nearest to these moments."""
        before, after = (min(self.processor, key=lambda at: abs(at[0] - moment)) for moment in (since, until))
        return after[1] - before[1]


@dataclass
class Watch:
    """Looks at named groups of processes while it is open, each with all that its members have started.

    Args:
        groups: by name, the process ids at the roots of its members.
        every_s: between two looks: what lasts for less may be missed.
    """

    groups: Mapping[str, Sequence[int]]
    every_s: float = 1.0
    peaks: dict[str, Peak] = field(default_factory=dict)

    def __enter__(self) -> Self:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self.every_s):
            for name, roots in self.groups.items():
                trees = [tree(root) for root in roots]
                members = [[_memory(pid) for pid in pids] for pids in trees]
                peak = self.peaks.setdefault(name, Peak())
                peak.processor.append((time.time(), sum(_processor_s(pid) for pids in trees for pid in pids)))
                peak.pss_bytes = max(peak.pss_bytes, sum(pss for member in members for pss, _ in member))
                peak.rss_bytes = max(peak.rss_bytes, *(sum(rss for _, rss in member) for member in members))


def _memory(pid: int) -> tuple[int, int]:
    """PSS and RSS of a process now, bytes; 0 of one that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss:", "Rss:"))}
    return found.get("Pss", 0), found.get("Rss", 0)


def _processor_s(pid: int) -> float:
    """User and system time of a process and of its children that have ended, until now; 0 of one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
