"""How many contributions a second one aggregator takes: decode → validate → commit → merge, on one core.

    python -m benchmarks.server.ingest [--devices 10000] [--held 10] [--json FILE]

Each device sends class means of C = 10 classes, or of `--held` of them, and width D = 512 in float32 (20 KB), around
centres that all share. The coordinator runs as the server runs it: batches, one durable SQLite transaction for each,
then receipts could go out; after the last of them the round closes: the streaming count-weighted mean over the
committed rows and the next global state, and before it, as by default, the comparison of each device with 256 others
(`aggregator/screening/contradictions.py`; `--suspects ignore` leaves it out). MQTT is left out. The store is made in
`--dir` and removed. Prints the rate of committing and merging beside the target of 5,000/s, what comparing takes by
itself, and the peak RSS of this process beside 150 MB.

The limit is a bare loop over the same bytes: `cbor2.loads`, one insert each into a table of SQLite with the store's
settings, as many in a transaction, and read and loaded again: no check, no numbers, no sum. It runs before, in this
process, and is compared by processor time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import resource
import sqlite3
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import cbor2
import numpy as np

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.rounds.round_machine import Closed, Opened
from protofleet.aggregator.screening import outliers
from protofleet.aggregator.screening.outliers import SUSPECTS, Suspects
from protofleet.aggregator.server.server import BATCH
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store import durable_store as store_module
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.schema import PAGE_BYTES
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Status

CLASSES, WIDTH = 10, 512
TARGET_PER_S, TARGET_RSS_MB = 5_000, 150
BUNDLE = bytes(32)


def payloads(run: bytes, kinds: int = 64, held: int = CLASSES) -> list[bytes]:
    """Encoded contributions of so many classes each; a few different ones, since making 10,000 is not measured."""
    rng = np.random.default_rng(0)
    centres, made = rng.normal(size=(CLASSES, WIDTH)), []
    for _ in range(kinds):
        counts = rng.integers(1, 600, CLASSES)
        own = rng.normal(size=(CLASSES, WIDTH)) / np.sqrt(counts)[:, None]
        counts[[] if held == CLASSES else rng.permutation(CLASSES)[held:]] = 0
        statistic = ClassMeans.from_means(centres + own, counts)
        made.append(encode(Contribution.of(statistic, run=run, round=1, method="fedproto", bundle=BUNDLE)))
    return made


def bare_loop(messages: Sequence[bytes], devices: int, directory: str) -> float:
    """Seconds of processor time of the least that could be done with these bytes."""
    with tempfile.TemporaryDirectory(dir=directory) as folder:
        db = sqlite3.connect(Path(folder) / "bare", isolation_level=None)
        for name, value in store_module.KIND.pragmas.items():
            db.execute(f"PRAGMA {name} = {value}")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("CREATE TABLE payload (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, bytes BLOB NOT NULL)")
        db.execute("PRAGMA journal_mode = WAL")
        began = time.process_time()
        for start in range(0, devices, BATCH):
            sent = [messages[i % len(messages)] for i in range(start, min(start + BATCH, devices))]
            for payload in sent:
                cbor2.loads(payload)
            db.execute("BEGIN IMMEDIATE")
            db.executemany("INSERT INTO payload (round, bytes) VALUES (1, ?)", [(payload,) for payload in sent])
            db.execute("COMMIT")
        for (payload,) in db.execute("SELECT bytes FROM payload ORDER BY id"):
            cbor2.loads(payload)
        took = time.process_time() - began
        db.close()
        return took


def run_once(devices: int, directory: str, suspects: Suspects, held: int = CLASSES) -> dict[str, float]:
    """One round through the coordinator that the server runs: seconds by stage, rate, and bytes."""
    with tempfile.TemporaryDirectory(dir=directory) as folder, DurableStore(Path(folder) / "s", BUNDLE, "b") as store:
        settings = Settings(rounds=1, calibrate=False, min_clients=devices, suspects=suspects)
        core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
        birth = encode(Status(True, b"instance", 1))
        for i in range(devices):
            core.status(f"device-{i:06d}", birth, 0.0)
        assert isinstance(core.advance(0.0, 0.0), Opened)
        messages = payloads(store.run, held=held)
        bare = bare_loop(messages, devices, directory)
        compares = Stopwatch()
        outliers.contradicted = compares.around(outliers.contradicted)  # type: ignore[assignment]
        began, cpu_began = time.perf_counter(), time.process_time()
        for start in range(0, devices, BATCH):
            ids = range(start, min(start + BATCH, devices))
            core.take([(f"device-{i:06d}", messages[i % len(messages)]) for i in ids], 0.0)
        committed, cpu_committed = time.perf_counter(), time.process_time()
        assert isinstance(core.advance(0.0, 0.0), Closed), "not every contribution was committed"
        ended, cpu_ended = time.perf_counter(), time.process_time()
        assert len(store.record(1).uplink_bytes) == devices
        cpu = cpu_ended - cpu_began - compares.cpu_s
        return {
            "devices": devices,
            "payload_bytes": len(messages[0]),
            "commit_s": committed - began,
            "merge_s": ended - committed - compares.s,
            "compare_s": compares.s,
            "per_s": devices / (ended - began - compares.s),
            "cpu_share": (cpu_ended - cpu_began) / (ended - began),
            "commit_cpu_s": cpu_committed - cpu_began,
            "compare_cpu_s": compares.cpu_s,
            "per_cpu_s": devices / cpu,
            "bare_cpu_s": bare,
            "times_bare": cpu / bare,
        }


class Stopwatch:
    """How long a function took in all: by the clock, and of the processor."""

    def __init__(self) -> None:
        self.s = self.cpu_s = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*given: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.process_time()
            found = function(*given)
            self.s += time.perf_counter() - began
            self.cpu_s += time.process_time() - cpu_began
            return found

        return timed


def manifest() -> Manifest:
    """All that a coordinator reads of a bundle."""
    row = method("fedproto")
    return Manifest(
        schema=SCHEMA,
        version=1,
        protofleet="0",
        backbone="opaque",
        provenance="made for a benchmark",
        method=row.name,
        head="local",
        hyper=row.resolve({}),
        labels=tuple(str(i) for i in range(CLASSES)),
        features=WIDTH,
        input_shape=(8, 8, 1),
        mean=(0.5,),
        std=(0.5,),
        batch=8,
        opset=18,
        state=(),
        members={},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--dir", default=".", help="where the store is made: the disk that is measured")
    parser.add_argument("--page-bytes", type=int, default=PAGE_BYTES, help="SQLite's page, of a new store")
    parser.add_argument("--suspects", choices=SUSPECTS, default="leave-out", help="as of aggregate")
    parser.add_argument("--held", type=int, default=CLASSES, help="how many classes a device has, drawn at random")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    pragmas = {**store_module.KIND.pragmas, "page_size": options.page_bytes}
    store_module.KIND = dataclasses.replace(store_module.KIND, pragmas=pragmas)
    result = run_once(options.devices, options.dir, options.suspects, options.held)
    result["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["ratio_to_target"] = result["per_s"] / TARGET_PER_S
    print(f"{options.devices} contributions of {result['payload_bytes']} bytes, one core")
    total_s, times = result["devices"] / result["per_cpu_s"], result["times_bare"]
    print(f"  decode, validate, commit {result['commit_s']:.2f} s, merge {result['merge_s']:.2f} s; processor time")
    print(f"  {result['commit_cpu_s']:.2f} of {total_s:.2f} s, bare loop {result['bare_cpu_s']:.2f}, ratio {times:.1f}")
    print(f"  {result['per_s']:.0f}/s, target {TARGET_PER_S}/s, ratio {result['ratio_to_target']:.2f}")
    print(
        f"  {result['per_cpu_s']:.0f} for each second of processor time, of which this process had a share of ", end=""
    )
    print(f"{result['cpu_share']:.2f}; what is missing to 1 went to the disk or to other processes")
    print(f"  comparing the devices, once, as the round closes: {result['compare_cpu_s']:.1f} s of processor time")
    print(f"  peak RSS {result['peak_rss_mb']:.0f} MB, target at most {TARGET_RSS_MB} MB")
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.ingest/2", **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
