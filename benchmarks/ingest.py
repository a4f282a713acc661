"""How many contributions a second one aggregator takes: decode → validate → commit → merge, on one core.

    python benchmarks/ingest.py [--devices 10000] [--json FILE]

Each device sends class means of C = 10 classes and width D = 512 in float32 (20 KB). The real ingest, store and merge
run, as the server runs them: batches, one durable SQLite transaction for each, then the streaming count-weighted mean
over the committed rows. MQTT is left out. The store is made beside `--dir` and removed. Prints the rate beside the
target of 5,000/s, and the peak RSS of this process beside 150 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from aggregator.ingest import Ingest, View
from aggregator.rules import merge
from aggregator.server import BATCH
from aggregator.store import SqliteStore
from contract.messages import Contribution
from contract.statistics import ClassMeans, Statistic
from contract.wire import decode, encode

CLASSES, WIDTH = 10, 512
TARGET_PER_S, TARGET_RSS_MB = 5_000, 150
BUNDLE = bytes(32)


def payloads(run: bytes, kinds: int = 64) -> list[bytes]:
    """Encoded contributions; a few different ones, since making 10,000 is not what is measured."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(kinds):
        statistic = ClassMeans.from_means(rng.normal(size=(CLASSES, WIDTH)), rng.integers(1, 600, CLASSES))
        made.append(encode(Contribution.of(statistic, run=run, round=1, method="fedproto", bundle=BUNDLE)))
    return made


def run_once(devices: int, directory: str) -> dict[str, float]:
    """Ingest and merge one round; seconds by stage, rate, and bytes."""
    with tempfile.TemporaryDirectory(dir=directory) as folder, SqliteStore(Path(folder) / "s", BUNDLE, "b") as store:
        messages = payloads(store.run)
        store.open_round(1, "fedproto", 0, 0.0)
        view = View(store.run, BUNDLE, CLASSES, WIDTH, 1, "fedproto", open=True)
        ingest = Ingest(store.holds)
        began = time.perf_counter()
        for start in range(0, devices, BATCH):
            ids = range(start, min(start + BATCH, devices))
            made = [ingest.decide(f"device-{i:06d}", messages[i % len(messages)], view, 0.0) for i in ids]
            store.commit([d.accepted for d in made if d.accepted], Counter())
            ingest.forget_accepted()
        committed = time.perf_counter()

        def statistics() -> Iterator[Statistic]:
            for payload in store.contributions(1, "fedproto"):
                message = decode(payload)
                assert isinstance(message, Contribution)
                yield message.statistic(CLASSES, WIDTH)

        merged = merge(statistics)
        ended = time.perf_counter()
        expected = sum(int(decode(messages[i % len(messages)]).counts.sum()) for i in range(devices))
        assert int(merged.counts.sum()) == expected, "the merge does not hold every contribution"
        return {
            "devices": devices,
            "payload_bytes": len(messages[0]),
            "commit_s": committed - began,
            "merge_s": ended - committed,
            "per_s": devices / (ended - began),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--dir", default=".", help="where the store is made: the disk that is measured")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    result = run_once(options.devices, options.dir)
    result["peak_rss_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    result["ratio_to_target"] = result["per_s"] / TARGET_PER_S
    print(f"{options.devices} contributions of {result['payload_bytes']} bytes, one core")
    print(f"  decode, validate, commit {result['commit_s']:.2f} s, merge {result['merge_s']:.2f} s")
    print(f"  {result['per_s']:.0f}/s, target {TARGET_PER_S}/s, ratio {result['ratio_to_target']:.2f}")
    print(f"  peak RSS {result['peak_rss_mb']:.0f} MB, target at most {TARGET_RSS_MB} MB")
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.ingest/1", **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
