"""What it costs to join chunks through the store: processor time of a contribution, whole or in chunks at two workers.

    python -m benchmarks.server.worker_chunks [--devices 60] [--width 8192]

A contribution of three classes is committed through the code of a worker to a real PostgreSQL, in one message, in
chunks that one worker gets, and in chunks that two get in turn. Processor time of this process and of the server's,
the least of three repetitions.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from aggregator_samples import BUNDLE, contribution, manifest  # noqa: E402
from postgres_server import PostgresServer  # noqa: E402

from protofleet.aggregator.coordinators.kinds import rounds_of  # noqa: E402
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator  # noqa: E402
from protofleet.aggregator.settings import Settings  # noqa: E402
from protofleet.aggregator.workers.shared_rounds import Sharing  # noqa: E402
from protofleet.aggregator.workers.shared_store import SharedStore  # noqa: E402
from protofleet.contract.sums.statistics import ClassMeans  # noqa: E402
from protofleet.contract.wire.chunks import split  # noqa: E402
from protofleet.contract.wire.codec import encode  # noqa: E402
from protofleet.contract.wire.messages import Status  # noqa: E402

LIMIT_BYTES = 65_536


def server_s(server: PostgresServer) -> float:
    """Processor time of the server's processes that are there."""
    assert server._process is not None
    own = psutil.Process(server._process.pid)
    times = [each.cpu_times() for each in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def once(server: PostgresServer, devices: int, width: int, way: str) -> tuple[float, float]:
    """Seconds of this process and of the server, for all devices' contributions to one round."""
    place = server.new_place()
    limit = 1 << 24 if way == "whole" else LIMIT_BYTES
    with (
        SharedStore(place, BUNDLE, "f", leads=True) as leader,
        SharedStore(place, BUNDLE, "f", leads=False) as member,
    ):
        settings = Settings(rounds=1, calibrate=False, limit_bytes=limit)

        def core(store: SharedStore) -> RoundCoordinator:
            store.based_on = store.changes()
            return rounds_of(store, manifest(width=width), BUNDLE, settings, now=0.0)

        opening = core(leader)
        opening.status("a", encode(Status(True, bytes(8), 1)), 0.0)
        opening.advance(0.0, 0.0)
        both = [Sharing(core(store), store) for store in (leader, member)]
        sent = []
        for index in range(devices):
            rows = np.random.default_rng(index).normal(size=(3, width))
            made = encode(contribution(ClassMeans.from_means(rows, [10, 11, 12]), run=leader.run), "f32")
            chunks = [encode(c) for c in split(made, limit, run=leader.run, round=1, method="fedproto")]
            sent.append([made] if way == "whole" else chunks)
        began, server_began = time.process_time(), server_s(server)
        for index, messages in enumerate(sent):
            for number, message in enumerate(messages):
                both[number % 2 if way == "two" else 0].take([(f"d{index}", message)], 1.0)
        took = time.process_time() - began, server_s(server) - server_began
        assert len(leader.taken(1, "fedproto")[0]) == devices
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=60)
    parser.add_argument("--width", type=int, default=8_192)
    args = parser.parse_args()
    server = PostgresServer()
    try:
        print(f"{3 * 4 * args.width:,} bytes of numbers, {LIMIT_BYTES:,} in a chunk at most, {args.devices} devices")
        for way in ("whole", "one", "two"):
            took = [once(server, args.devices, args.width, way) for _ in range(3)]
            ours, theirs = (1000 * min(each[i] for each in took) / args.devices for i in (0, 1))
            print(f"{way:6} {ours:6.2f} ms of this process, {theirs:6.2f} ms of the server, a contribution")
    finally:
        server.stop()


if __name__ == "__main__":
    main()
