"""What the table of devices costs an aggregator that takes contributions, as a share of its processor time.

    python -m benchmarks.server.remembering [--devices 10000] [--rounds 12] [--store PLACE] [--json FILE]

Each device sends class means of 10 classes and width 512 (20 KB) in each round, as in `benchmarks.server.ingest`, to
the coordinator that the server runs, in batches of 256; then its receipt is counted, and the table writes what is due
(`aggregator/monitoring/device_table.py`). The processor time of noting, counting and writing is put beside that of
deciding, committing and merging. So is the time by the clock, which the disk's or the server's part of writing is in.
The target is 2 %. Then the store is read as `protofleet status` does. `--store` takes a server's URL; its schema must
be new.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.server.ingest import BUNDLE, Stopwatch, manifest, payloads
from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.overview.fleet_state import read_state
from protofleet.aggregator.rounds.round_machine import Closed, Opened
from protofleet.aggregator.server.server import BATCH
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.topics import down

TARGET = 0.02
VERSIONS = {
    "protofleet": "0.2.0",
    "python": "3.12.1",
    "numpy": "2.1.0",
    "onnxruntime": "1.20.0",
    "bundle": "3 0123abcd",
}
FIGURES = {"rss_bytes": 5e7, "peak_rss_bytes": 9e7, "train_step_ms": 12.5, "profile_train_step_ms": 11.9}


def run(devices: int, rounds: int, place: str) -> dict[str, float]:
    """Seconds of remembering and of everything: of the processor, and by the clock."""
    with DurableStore(place, BUNDLE, "b") as store:
        settings = Settings(rounds=rounds, calibrate=False, min_clients=devices, suspects="ignore")
        core = rounds_of(store, manifest(), BUNDLE, settings, now=0.0)
        names = [f"device-{i:06d}" for i in range(devices)]
        topics = [down("b", name) for name in names]
        birth = encode(Status(True, b"instance", 1, "Raspberry Pi 4 Model B", VERSIONS, FIGURES))
        for name in names:
            core.status(name, birth, 0.0)
        store.devices.keep(time.monotonic(), time.time())
        parts, table, remembers = core.parts, store.devices, Stopwatch()

        def count(ids: range) -> None:
            for i in ids:
                table.published(topics[i], 60)

        noted, kept, counted = (remembers.around(each) for each in (type(parts).decided, table.keep, count))
        type(parts).decided = noted  # type: ignore[method-assign]
        messages = [decode(payload) for payload in payloads(store.run)]
        total_s = cpu_s = 0.0
        for number in range(1, rounds + 1):
            assert isinstance(core.advance(0.0, 0.0), Opened)
            sent = [encode(message.__class__(**{**vars(message), "round": number})) for message in messages]
            began, cpu_began = time.perf_counter(), time.process_time()
            for start in range(0, devices, BATCH):
                ids = range(start, min(start + BATCH, devices))
                core.take([(names[i], sent[i % len(sent)]) for i in ids], 0.0)
                counted(ids)
                kept(time.monotonic(), time.time())
            assert isinstance(core.advance(0.0, 0.0), Closed), "not every contribution was committed"
            total_s, cpu_s = total_s + time.perf_counter() - began, cpu_s + time.process_time() - cpu_began
        began = time.perf_counter()
        sentence = read_state(place).sentence
        assert str(devices) in sentence
        took_s = time.perf_counter() - began
        return {
            "read_s": took_s,
            "remember_cpu_s": remembers.cpu_s,
            "cpu_s": cpu_s,
            "remember_s": remembers.s,
            "s": total_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--store", help="where the store is made; by default a file in a folder that is removed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    with tempfile.TemporaryDirectory(dir=".") as folder:
        took = run(options.devices, options.rounds, options.store or str(Path(folder) / "s"))
    share, of_clock = took["remember_cpu_s"] / took["cpu_s"], took["remember_s"] / took["s"]
    each_us = 1e6 * took["remember_cpu_s"] / (options.devices * options.rounds)
    print(f"{options.devices} devices, {options.rounds} rounds: {took['cpu_s']:.2f} s of processor time in all")
    print(f"  remembering {took['remember_cpu_s']:.3f} s, {each_us:.1f} µs a contribution: {share:.1%} of it", end="")
    print(f", target {TARGET:.0%}")
    print(f"  by the clock {took['remember_s']:.3f} of {took['s']:.2f} s: {of_clock:.1%}")
    print(f"  reading the store for `status` {took['read_s']:.2f} s")
    if options.json:
        content = {"schema": "protofleet.benchmark.remembering/1", **took, "share": share, "share_of_clock": of_clock}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
