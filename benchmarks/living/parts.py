"""The processes of a simulated month: a broker, aggregators, workers with devices, whole devices. See month.py.

Every one of them can be killed with SIGKILL and started again; none may end by itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kills.faults import Part
from protofleet.aggregator.server.broker import EmbeddedBroker

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "protofleet"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}


def mosquitto() -> str | None:
    return shutil.which("mosquitto", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


class Process(Part):
    """A command, in an environment that may be its own."""

    environment = ENVIRONMENT

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self.environment)

    @property
    def runs(self) -> bool:
        assert self._process is not None
        return self._process.poll() is None

    def runs_as(self, command: list[str]) -> None:
        """From its next start on."""
        self._command = command


def broker(kind: str, folder: Path) -> tuple[Process, str]:
    """A broker on a port of its own, not started, and its address."""
    with EmbeddedBroker() as probe:
        port = probe.port
    command = [*COMMAND, "broker", "--listen", f"127.0.0.1:{port}"]
    if kind == "mosquitto":
        config = folder / "mosquitto.conf"
        config.write_text(
            f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence true\nmax_queued_messages 0\n"
            f"persistence_location {folder}/\nautosave_interval 1\n" + ("user root\n" if os.geteuid() == 0 else "")
        )
        command = [mosquitto() or "mosquitto", "-c", str(config)]
    return Process("broker", command, folder / "logs"), f"mqtt://127.0.0.1:{port}"


class Worker:
    """A process with many devices (`worker.py`), at work and killable."""

    def __init__(self, index: int, look_s: float, logs: Path) -> None:
        self.name, self._look_s, self._logs = f"worker-{index}", look_s, logs
        self.told: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.jobs = set[int]()

    def start(self) -> None:
        command = [sys.executable, "-m", "benchmarks.living.worker", str(self._look_s), str(self._logs)]
        self.jobs = set()
        with open(self._logs / f"{self.name}.log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=ENVIRONMENT, cwd=ROOT
            )
        threading.Thread(target=self._hear, args=(self._process,), daemon=True).start()

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.endswith(b"\n"):  # a killed process may leave half a one
                self.told.put(json.loads(line))

    def ask(self, what: str, job: int, **given: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is found out in a moment
            self._process.stdin.write(json.dumps({"do": what, "job": job, **given}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def runs(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def tail(self) -> str:
        return f"exit code {self._process.poll()}\n" + "\n".join(
            (self._logs / f"{self.name}.log").read_text().splitlines()[-5:]
        )


class Aggregator(Process):
    """`protofleet aggregate`, whose options may change while it is away."""

    def __init__(self, name: str, url: str, store: Path, logs: Path, *options: str) -> None:
        super().__init__(name, [], logs)
        self.store, self._told = store, ["--broker", url, "--fleet", name, "--store", str(store), *options]

    def serves(self, *bundles: Path) -> Aggregator:
        given = [word for path in bundles for word in ("--bundle", str(path))]
        self._command = [*COMMAND, "aggregate", *given, *self._told]
        return self

    @property
    def rss_mb(self) -> float:
        """Resident memory now."""
        assert self._process is not None
        for line in Path(f"/proc/{self._process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) / 1024
        return float("nan")

    @property
    def store_mb(self) -> tuple[float, float]:
        """The file, and its write-ahead log."""
        found = [self.store.parent / (self.store.name + beside) for beside in ("", "-wal")]
        file, log = (path.stat().st_size / 1e6 if path.exists() else 0.0 for path in found)
        return round(file, 2), round(log, 2)


class StalledError(Exception):
    """Something was waited for too long, or refused: the month cannot go on."""


def command(*words: object, timeout_s: float = 120.0, streams: int = 2) -> str:
    """One command to its end; what it printed, to standard output alone or to both streams."""
    try:
        done = subprocess.run(
            [*COMMAND, *map(str, words)], capture_output=True, text=True, timeout=timeout_s, env=ENVIRONMENT
        )
    except subprocess.TimeoutExpired:
        raise StalledError(f"protofleet {words[0]} did not end in {timeout_s:g} s") from None
    if done.returncode:
        raise StalledError(f"protofleet {' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout + (done.stderr if streams == 2 else "")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float, turn: Callable[[], None]) -> None:
    """Until it holds, or the run fails with a line."""
    import time

    until = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until:
            raise StalledError(f"{what} within {timeout_s:g} s")
        turn()
        time.sleep(0.02)
