"""How the aggregator's store grows with a run, and what the summary after a round costs at its end.

    python benchmarks/store_growth.py --rounds 200 --devices 1000 --payload-bytes 2000

Every round commits a contribution of each device, in batches as the server does, and closes. Printed, as one JSON line:
the size of the file, and of it what keys and counters take once payloads are dropped; the seconds that one round's
commits take in the beginning and at the end; the seconds that the last round's summary takes in a process that has
written the one before, and in one that has just started; and the size of what is written.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from aggregator.report import Summary
from aggregator.store import KEEP_BYTES, Accepted, SqliteStore
from contract.json_output import write_json

BUNDLE, METHOD, BATCH = bytes(32), "fedproto", 256


def one_round(store: SqliteStore, number: int, devices: int, payload_bytes: int) -> float:
    """Open, fill and close a round; the seconds that it took."""
    payload = os.urandom(payload_bytes)
    accepted = [Accepted(number, METHOD, f"device-{i:05d}", payload, payload_bytes) for i in range(devices)]
    began = time.perf_counter()
    store.open_round(number, METHOD, 0, 0.0)
    for start in range(0, devices, BATCH):
        store.commit(accepted[start : start + BATCH], {(number, "late"): 1})
    store.close_round(number, 1.0, 0, store.state())
    return time.perf_counter() - began


def timed(summary: Summary, path: Path) -> float:
    """Seconds to put the summary together and to write it."""
    began = time.perf_counter()
    write_json(path, summary.content(finished=False, global_version=0))
    return time.perf_counter() - began


def measure(rounds: int, devices: int, payload_bytes: int, keep_bytes: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name:
        path, out = Path(name) / "s.sqlite", Path(name) / "out.json"
        with SqliteStore(path, BUNDLE, "b", keep_bytes=keep_bytes) as store:
            seconds = [one_round(store, number, devices, payload_bytes) for number in range(1, rounds)]
            warm = Summary(store, "b", BUNDLE)
            timed(warm, out)
            seconds.append(one_round(store, rounds, devices, payload_bytes))
            after_a_round, after_a_start = timed(warm, out), timed(Summary(store, "b", BUNDLE), out)
            (kept,) = store._db.execute("SELECT sum(length(bytes)) FROM payload").fetchone()
            store._db.execute("DELETE FROM payload")
            store._db.execute("VACUUM")
            (pages,) = store._db.execute("PRAGMA page_count").fetchone()
            (page_bytes,) = store._db.execute("PRAGMA page_size").fetchone()
            whole = path.stat().st_size  # VACUUM writes to the log: the file is as large as it was
        return {
            "rounds": rounds,
            "devices": devices,
            "payload_bytes": payload_bytes,
            "file_mb": round(whole / 1e6, 1),
            "payloads_kept_mb": round(kept / 1e6, 1),
            "keys_bytes_per_device_round": round(pages * page_bytes / rounds / devices, 1),
            "first_rounds_s": round(statistics.median(seconds[:10]), 3),
            "last_rounds_s": round(statistics.median(seconds[-10:]), 3),
            "summary_after_a_round_s": round(after_a_round, 3),
            "summary_after_a_start_s": round(after_a_start, 3),
            "summary_mb": round(out.stat().st_size / 1e6, 1),
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--payload-bytes", type=int, default=2000)
    parser.add_argument("--keep-mb", type=float, default=KEEP_BYTES / 1e6)
    told = parser.parse_args()
    print(json.dumps(measure(told.rounds, told.devices, told.payload_bytes, int(told.keep_mb * 1e6))))
