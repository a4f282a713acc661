"""How the aggregator's store grows with a run, and what the summary after a round costs at its end.

    python -m benchmarks.server.store_growth --rounds 200 --devices 1000 --payload-bytes 2000
    python -m benchmarks.server.store_growth --standing --generations 365 --devices 200 --payload-bytes 50000

Every round commits a contribution of each device, in batches as the server does, and closes; then each device says how
accurate it is. Printed, as one JSON line: the size of the file, and of it what keys and counters, and what accuracy
takes for each device and round once payloads are dropped; the seconds that one round's commits take in the beginning
and at the end; the seconds that the last round's summary takes in a process that has written the one before, and in one
that has just started; and the size of what is written.

With `--standing` each device replaces its sums `--generations` times and reports drift each time: the size of the file
after the first, in the middle and at the end; of it what there is beside the newest payloads; and what orders take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from protofleet.aggregator.monitoring.accuracy import AccuracyReport
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.store.durable_store import KEEP_BYTES, DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.drift import Drift
from protofleet.contract.files.json_output import write_json

BUNDLE, METHOD, BATCH = bytes(32), "fedproto", 256


def one_round(store: DurableStore, number: int, devices: int, payload_bytes: int) -> float:
    """Open, fill and close a round; the seconds that it took."""
    payload = os.urandom(payload_bytes)
    accepted = [Accepted(number, METHOD, f"device-{i:05d}", payload, payload_bytes) for i in range(devices)]
    began = time.perf_counter()
    store.open_round(number, METHOD, 0, 0.0)
    for start in range(0, devices, BATCH):
        store.commit(accepted[start : start + BATCH], {(number, "late"): 1})
    store.close_round(number, 1.0, 0, store.state())
    seconds = time.perf_counter() - began
    store.keep_accuracy(
        [AccuracyReport(number, a.device, Accuracy(100, 0.9, 0.95, shipped=0.5, alone=0.4)) for a in accepted]
    )
    return seconds


def packed_bytes(store: DurableStore, *emptied: str) -> int:
    """What the file would take without these tables, and without room to spare."""
    for table in emptied:
        store._db.execute(f"DELETE FROM {table}")
    store._db.execute("VACUUM")
    sizes = [store._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size")]
    return int(sizes[0] * sizes[1])


def timed(summary: Summary, path: Path) -> float:
    """Seconds to put the summary together and to write it."""
    began = time.perf_counter()
    write_json(path, summary.content(finished=False, global_version=0))
    return time.perf_counter() - began


def measure(rounds: int, devices: int, payload_bytes: int, keep_bytes: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "s.sqlite", Path(name) / "out.json"
        with DurableStore(path, BUNDLE, "b", keep_bytes=keep_bytes) as store:
            seconds = [one_round(store, number, devices, payload_bytes) for number in range(1, rounds)]
            warm = Summary(store, "b", BUNDLE)
            timed(warm, out)
            seconds.append(one_round(store, rounds, devices, payload_bytes))
            after_a_round, after_a_start = timed(warm, out), timed(Summary(store, "b", BUNDLE), out)
            (kept,) = store._db.execute("SELECT sum(length(bytes)) FROM payload").fetchone()
            whole = path.stat().st_size
            without_payloads, keys = packed_bytes(store, "payload"), packed_bytes(store, "accuracy")
        return {
            "rounds": rounds,
            "devices": devices,
            "payload_bytes": payload_bytes,
            "file_mb": round(whole / 1e6, 1),
            "payloads_kept_mb": round(kept / 1e6, 1),
            "keys_bytes_per_device_round": round(keys / rounds / devices, 1),
            "accuracy_bytes_per_device_round": round((without_payloads - keys) / rounds / devices, 1),
            "first_rounds_s": round(statistics.median(seconds[:10]), 3),
            "last_rounds_s": round(statistics.median(seconds[-10:]), 3),
            "summary_after_a_round_s": round(after_a_round, 3),
            "summary_after_a_start_s": round(after_a_start, 3),
            "summary_mb": round(out.stat().st_size / 1e6, 1),
        }


def one_generation(store: DurableStore, number: int, devices: int, payload_bytes: int) -> None:
    """Every device replaces its sums, and tells of its newest photos."""
    payload = os.urandom(payload_bytes)
    newer = [Stands(f"device-{i:05d}", number, payload, payload_bytes) for i in range(devices)]
    for start in range(0, devices, BATCH):
        store.standing.commit(newer[start : start + BATCH], {(0, "duplicate"): 1}, float(number))
        for stands in newer[start : start + BATCH]:
            store.drift.hear(stands.device, Drift(20 + number, 0.05, 1.0).metrics(), max_samples=10**6)
        store.drift.commit_heard(float(number))


def measure_standing(generations: int, devices: int, payload_bytes: int, orders: int = 1000) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        path, files_mb = Path(name) / "s.sqlite", []
        for number in range(1, generations + 1):
            with DurableStore(path, BUNDLE, "b") as store:
                one_generation(store, number, devices, payload_bytes)
            if number in (1, generations // 2, generations):
                files_mb.append(round(path.stat().st_size / 1e6, 2))  # closed: the log is in it
        with DurableStore(path, BUNDLE, "b") as store:
            for _ in range(orders):
                give(path, "remove", "device-00001", "operator")
            with_orders, without = packed_bytes(store), packed_bytes(store, "fleet_order")
            drift_free, bare = packed_bytes(store, "drift"), packed_bytes(store, "standing")
        return {
            "generations": generations,
            "devices": devices,
            "payload_bytes": payload_bytes,
            "file_mb_after_first_middle_last": files_mb,
            "standing_bytes_per_device": round((drift_free - bare) / devices),
            "drift_bytes_per_device": round((without - drift_free) / devices),
            "order_bytes": round((with_orders - without) / orders),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--payload-bytes", type=int, default=2000)
    parser.add_argument("--keep-mb", type=float, default=KEEP_BYTES / 1e6)
    parser.add_argument("--standing", action="store_true")
    parser.add_argument("--generations", type=int, default=365)
    told = parser.parse_args()
    if told.standing:
        print(json.dumps(measure_standing(told.generations, told.devices, told.payload_bytes)))
    else:
        print(json.dumps(measure(told.rounds, told.devices, told.payload_bytes, int(told.keep_mb * 1e6))))
