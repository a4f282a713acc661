"""A fleet of real processes over the embedded broker, on small real images, for the tests of whole methods."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import commands
import numpy as np
import pytest
import shared
from brokers import Embedded, TestBroker, make_broker
from browser import Visitor

from protofleet.aggregator.page.fleet_content import COLUMNS
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution, Status

FLEET, CLASSES, SHAPE = "methods", 5, (14, 14, 1)
LABELS = tuple(f"class-{index}" for index in range(CLASSES))
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
PAYLOADS = "SELECT c.round, c.method, c.device, p.bytes FROM contribution c JOIN payload p ON p.id = c.payload"
Samples = tuple[np.ndarray, np.ndarray]


@cache
def _fashion() -> Samples:
    from protofleet.lab.data.datasets import load_dataset

    train = load_dataset("fashion_mnist_subset").train
    return train.x, train.y


def share(index: int, classes: Sequence[int], count: int = 40, *, whole: bool = False) -> Samples:
    """Device `index`'s images of these classes, every other pixel of them unless `whole`."""
    x, y = _fashion()
    rows = np.flatnonzero(np.isin(y, classes))
    chosen = np.random.default_rng(7).permutation(rows)[index * count : (index + 1) * count]
    assert len(chosen) == count
    return (x[chosen] if whole else x[chosen][:, ::2, ::2]), y[chosen]


def bundle(out: Path, method: str, backbone: str = "small_cnn", **options: Any) -> Path:
    """A bundle of five classes, for 14×14 images unless `options`, which are `build_bundle`'s, say otherwise."""
    told = {"labels": LABELS, "input_shape": SHAPE, **options}
    shutil.copy(shared.exported(backbone=backbone, method_name=method, **told), out)
    return out


def run(*words: object) -> tuple[int, str]:
    """One command to its end, in this process: the exit code and what it said."""
    done = commands.run(*words)
    return done.returncode, done.stdout + done.stderr


def error_line(said: str) -> str:
    """The one line that a failed command ends with; nothing of it may be a traceback."""
    assert "Traceback" not in said, said
    lines = [line for line in said.splitlines() if "error: " in line]
    assert len(lines) == 1, said
    assert said.rstrip().endswith(lines[0]), said
    return lines[0]


@dataclass
class Processes:
    """Commands that run at once, each with a log of its own in `folder`."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: object) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            command = [sys.executable, "-m", "protofleet", *map(str, words)]
            self.processes[name] = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, name: str, text: str, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while re.search(text, self.log(name)) is None:
            assert time.monotonic() < deadline, f"no {text!r} in\n{self.log(name)}"
            time.sleep(0.02)

    def finish(self, timeout_s: float = 60.0) -> dict[str, int]:
        """Exit codes by name, once all have ended."""
        deadline = time.monotonic() + timeout_s
        for name, process in self.processes.items():
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                pytest.fail(f"{name} did not end:\n" + "\n---\n".join(map(self.log, self.processes)))
        return {name: process.returncode for name, process in self.processes.items()}

    def end(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


@dataclass(kw_only=True)
class Fleet(Processes):
    """A broker, processes around it, and what they leave behind in `folder`."""

    url: str

    def aggregator(self, bundles: Sequence[Path], *options: object) -> None:
        chosen = [word for path in bundles for word in ("--bundle", path)]
        told = ("--store", self.folder / "store.sqlite", "--json", self.folder / "summary.json")
        self._join("aggregator", "aggregate", *chosen, *told, *options)

    def client(self, name: str, bundle: Path, data: Samples, *options: object) -> None:
        path = self.folder / f"{name}.npz"
        np.savez(path, x=data[0], y=data[1])
        state = ("--state", self.folder / f"state-{name}", "--json", self.folder / f"{name}.json")
        if not {"--test", "--hold-out"} & set(options):  # what is compared with pooled data is all of it
            state += ("--hold-out", 0)
        self._join(
            name, "client", "--until-finished", "--id", name, "--bundle", bundle, "--data", path, *state, *options
        )

    def told(self, name: str) -> dict[str, Any]:
        """What a process wrote as JSON: `summary` is the aggregator's."""
        return json.loads((self.folder / f"{name}.json").read_text())

    def payloads(self, round: int) -> dict[str, bytes]:
        """What the store holds of a round, by device."""
        with sqlite3.connect(self.folder / "store.sqlite") as db:
            rows = db.execute(f"{PAYLOADS} WHERE c.round = ? ORDER BY c.device", (round,))
            found = {device: bytes(payload) for *_, device, payload in rows}
        db.close()
        return found

    def messages(self, round: int) -> list[Contribution]:
        """The same, decoded."""
        found = [decode(payload) for payload in self.payloads(round).values()]
        assert all(isinstance(message, Contribution) for message in found)
        return found  # type: ignore[return-value]

    def sent(self, name: str) -> dict[int, tuple[bytes, str]]:
        """What a device's journal says that it sent, and how it ended, by round."""
        with sqlite3.connect(self.folder / f"state-{name}" / "journal.sqlite") as db:
            rows = db.execute("SELECT round, payload, outcome FROM contributions").fetchall()
        db.close()
        return {round: (bytes(payload), outcome) for round, payload, outcome in rows}

    def state(self, identity: bytes) -> GlobalState:
        """The global state that came out, for the bundle (or bundles together) of this sha256."""
        with DurableStore(self.folder / "store.sqlite", identity, FLEET) as store:
            return store.state()

    def _join(self, name: str, command: str, *options: object) -> None:
        self.start(name, command, "--broker", self.url, "--fleet", FLEET, *options)


@contextmanager
def fleet_in(folder: Path) -> Iterator[Fleet]:
    """A fleet whose broker runs; what still runs at the end is ended."""
    broker = Embedded()
    broker.start()
    made = Fleet(folder=folder, url=broker.url)
    try:
        yield made
    finally:
        made.end()
        broker.stop()


# ── a store with devices in it, and the operator's page on it ───────────────────────────────────────────────────────

SHIPPED_BUNDLE = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
ORCHARD = "orchard"
TOKEN = "correct-horse-battery"  # of anna, where the page takes orders
EVIL = "</script><img src=x onerror=alert(1)>"
_FIGURES = {"train_step_ms": 30.0, "profile_train_step_ms": 10.0, "peak_rss_bytes": 9e7}
_FIGURES |= {"profile_train_step_predicted_ms": 11.0}
_FIGURES |= {"profile_train_step_peak_rss_bytes": 5e7}
_FIGURES |= {"profile_memory_predicted_bytes": 6e7, "profile_memory_at_most_bytes": 8e7}
_FIGURES |= {"profile_memory_samples": 1_000.0}
Holds = Callable[[dict[str, Any], dict[str, Any]], object]


def stocked(path: Path | str, devices: int = 5, fleet: str = ORCHARD) -> Path | str:
    """A store of `devices` devices: `d0` is slow and has more memory than was predicted, `d1` runs an old bundle, `d2`
    is gone for two days, `d3` was left out and has script in its words, and so has the name of a last one. `d3` and
    `d4` propose classes, and `d4` has photos that are unlike all."""
    now = time.time()
    with DurableStore(path, read_bundle(SHIPPED_BUNDLE).sha256, fleet) as store:
        names = [*(f"d{i}" for i in range(devices)), EVIL]
        for name in names:
            board = EVIL if name == "d3" else "Raspberry Pi 5"
            versions = {"protofleet": "0.2.0", "bundle": "1 89abcdef" if name == "d1" else "2 0123abcd"}
            figures = _FIGURES if name == "d0" else {"unknown_share": 0.4} if name == "d4" else {}
            proposed = {"d3": {EVIL: 3, "barn owl": 2}, "d4": {"barn owl": 7}}.get(name)
            status = Status(True, b"instance", 1, board, versions, figures, proposed=proposed)
            store.devices.status(name, status, 100, now - 200_000.0)
        store.devices.status("d2", Status(False, b"instance", 1), 10, now - 190_000.0)
        store.devices.decided("d3", 1_000, now - 100.0, refusal=EVIL)
        store.devices.keep(0.0, now)
        with store._file.transaction() as db:
            for number in (1, 2):
                db.execute(
                    "INSERT INTO round (number, method, seed, opened_at, closed) VALUES (?, 'ncm', 1, ?, 1)",
                    (number, now - 3_600.0),
                )
                db.executemany(
                    "INSERT INTO accuracy (round, device, samples, all_classes) VALUES (?, ?, 50, ?)",
                    [(number, f"d{i}", 0.5 + 0.1 * i) for i in range(4)],
                )
            db.execute("INSERT INTO finding VALUES (2, 'd3', 'left out', ?)", (f"it contradicts 2 of 3: {EVIL}",))
    return path


class Served:
    """A command that serves the page, as a process."""

    def __init__(self, folder: Path, name: str, *words: object) -> None:
        self.processes, self.name = Processes(folder), name
        self.processes.start(name, *words)
        self.processes.wait_for(name, r"page at https?://[\d.]+:\d+/")
        scheme, port = re.findall(r"page at (https?)://[\d.]+:(\d+)/", self.said())[0]
        self.scheme, self.port = str(scheme), int(port)

    @classmethod
    def aggregator(
        cls, folder: Path, broker: TestBroker, store: Path | str, *more: object, fleet: str = ORCHARD
    ) -> Served:
        """An aggregator with its page."""
        about = (
            "--bundle",
            SHIPPED_BUNDLE,
            "--broker",
            broker.url,
            "--fleet",
            fleet,
            "--store",
            store,
            "--every",
            "1h",
        )
        return cls(folder, "aggregator", "aggregate", *about, "--page", "0", *more)

    @classmethod
    @contextmanager
    def with_control(cls, folder: Path, devices: int) -> Iterator[Served]:
        """An aggregator of so many devices, on a broker of its own, whose page takes anna's orders by `TOKEN`."""
        broker = make_broker("embedded", folder)
        broker.start()
        tokens = folder / "tokens"
        tokens.write_text(f"anna:{TOKEN}\n")
        tokens.chmod(0o600)
        found = cls.aggregator(folder, broker, stocked(folder / "store", devices), "--allow-control", tokens)
        yield found
        found.end()
        broker.stop()

    def said(self) -> str:
        return self.processes.log(self.name)

    def visitor(self) -> Visitor:
        """A browser that has not been here."""
        return Visitor(self.port, self.scheme)

    def until(
        self, visitor: Visitor, holds: Callable[[dict[str, Any], dict[str, Any]], object], since: int = -1
    ) -> dict[str, Any]:
        """The parts of the page that were told, once `holds(parts, rows)` is true."""
        ask = f"GET /events?since={since} HTTP/1.1\r\nHost: {visitor.host}\r\nCookie: {visitor.cookie}\r\n\r\n"
        parts: dict[str, Any] = {}
        rows: dict[str, Any] = {}
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as stream:
            stream.sendall(ask.encode())
            for line in stream.makefile("rb"):
                if not line.startswith(b"data: "):
                    continue
                news = json.loads(line[6:])
                rows |= {cells[0]: dict(zip(COLUMNS, cells, strict=True)) for cells in news["rows"]}
                parts |= news
                if holds(parts, rows):
                    return parts
        raise AssertionError(parts)

    def end(self) -> None:
        self.processes.end()
