"""What several workers take, and who pays for it: workers, broker and PostgreSQL apart, in processor time.

    python -m benchmarks.server.workers [--workers 1,2,4] [--devices 1000,4000] [--connections 2000] [--json FILE]

For each number of workers and of devices: a PostgreSQL server (`fsync` on), a Mosquitto and so many processes of
`protofleet aggregate --worker`; one process speaks for all devices over one connection, as in `many_devices.py`, and
sends each one's class means (C = 10, D = 512, float32: 20 KB) once the round is open. From the first contribution to
the last receipt: how many were committed and how many a second, and the processor time of the workers, of the broker
and of PostgreSQL for each, which says what another machine would hold where this one has too few cores for all of
them. Then until the round is closed: processor time of merging, and the peak memory of the process that leads. With
`--connections`, what an idle connection takes of Mosquitto's memory.

It needs the extra `dev` (PostgreSQL comes from a package) and Mosquitto. `sizing.py` reads what `--json` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

import psutil  # noqa: E402
from brokers import Mosquitto  # noqa: E402
from postgres_server import PostgresServer  # noqa: E402

from benchmarks.server.many_devices import FLEET, Crowd, bundle_file, peak_rss_mb  # noqa: E402
from protofleet.aggregator.database import read_only  # noqa: E402
from protofleet.aggregator.store.schema import KIND  # noqa: E402
from protofleet.contract.errors import ProtofleetError  # noqa: E402

SCHEMA = "protofleet.benchmark.workers/1"
_CONNECT = b"\0\4MQTT\5\2\1\x2c\0"  # version 5, clean start, keepalive 300 s, no properties


class World:
    """A server, a broker and workers, whose processor time is known by part."""

    def __init__(self, folder: Path, server: PostgresServer, workers: int, devices: int, suspects: str) -> None:
        self.server, self.place = server, server.new_place()
        bundle_file(folder / "b.bundle")
        self.broker = Mosquitto(folder / "broker")
        self.broker.start()
        words = ["aggregate", "--worker", "--bundle", folder / "b.bundle", "--broker", self.broker.url]
        words += ["--store", self.place, "--fleet", FLEET, "--rounds", 1, "--no-calibrate", "--quiet"]
        words += ["--min-clients", devices, "--deadline", 0, "--suspects", suspects]
        command = [sys.executable, "-m", "protofleet", *map(str, words)]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.workers = [subprocess.Popen(command, env=surroundings) for _ in range(workers)]

    def spent(self) -> dict[str, float]:
        """Seconds of processor time so far."""
        assert self.broker._process is not None
        assert self.server._process is not None
        return {
            "workers": processor_s([worker.pid for worker in self.workers]),
            "broker": processor_s([self.broker._process.pid]),
            "postgres": processor_s([self.server._process.pid]),
        }

    def is_closed(self) -> bool:
        try:
            with read_only(self.place, KIND) as db:
                return bool(db.execute("SELECT count(*) FROM round WHERE closed = 1").fetchone()[0])
        except ProtofleetError:
            return False

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.wait()
        self.broker.stop()


class Watched(Crowd):
    """The devices, and what had been spent when they began, when all had receipts, and when the round was closed."""

    def __init__(self, world: World, devices: int) -> None:
        super().__init__(world.broker.url, devices)
        self.world, self.at = world, list[dict[str, float]]()

    def _payloads(self, announcement):  # type: ignore[no-untyped-def]
        made = super()._payloads(announcement)
        self.at.append(self.world.spent())
        self.began = time.perf_counter()
        return made

    def _hear(self, timeout_s: float) -> None:
        super()._hear(timeout_s)
        if not self._waiting and len(self.at) == 1:
            self.ended = time.perf_counter()
            self.at.append(self.world.spent())
            while not self.world.is_closed():
                time.sleep(0.1)
            self.at.append(self.world.spent())


def processor_s(pids: Iterable[int]) -> float:
    """Of processes and of all that they have started."""
    total = 0.0
    for pid in pids:
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def measure(server: PostgresServer, workers: int, devices: int, suspects: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        world = World(Path(name), server, workers, devices, suspects)
        try:
            crowd = Watched(world, devices)
            _, receipts = crowd.run()
            with read_only(world.place, KIND) as db:
                (committed,) = db.execute("SELECT count(*) FROM contribution WHERE round = 1").fetchone()
                (size,) = db.execute(
                    "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class c"
                    " WHERE c.relkind = 'r' AND c.relnamespace = current_schema()::regnamespace"
                ).fetchone()
            peak_mb = max(peak_rss_mb(worker.pid) for worker in world.workers)
        finally:
            world.close()
    first, taken, closed = crowd.at
    found = {"workers": workers, "devices": devices, "committed": committed, "rejected": receipts.get("rejected", 0)}
    found |= {f"{part}_ms": 1e3 * (taken[part] - first[part]) / devices for part in first}
    found |= {f"closing_{part}_ms": 1e3 * (closed[part] - taken[part]) / devices for part in first}
    return found | {"seconds": crowd.ended - crowd.began, "store_bytes": int(size), "peak_rss_mb": peak_mb}


@contextmanager
def connected(port: int, count: int) -> Iterator[None]:
    """So many idle MQTT 5 connections."""
    open_ = []
    try:
        for number in range(count):
            name = b"idle-%06d" % number
            body = _CONNECT + struct.pack(">H", len(name)) + name
            sock = socket.create_connection(("127.0.0.1", port))
            sock.sendall(bytes((0x10, len(body))) + body)
            assert sock.recv(64)[3] == 0
            open_.append(sock)
        yield
    finally:
        for sock in open_:
            sock.close()


def bytes_of_a_connection(count: int) -> float:
    with tempfile.TemporaryDirectory() as name:
        broker = Mosquitto(Path(name))
        broker.start()
        assert broker._process is not None
        process = psutil.Process(broker._process.pid)
        try:
            before = process.memory_info().rss
            with connected(broker.port, count):
                return (process.memory_info().rss - before) / count
        finally:
            broker.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--devices", default="1000,4000")
    parser.add_argument("--connections", type=int, default=2_000)
    parser.add_argument("--suspects", default="leave-out", help="as `aggregate --suspects`: most of what closing costs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list[dict[str, float]]()
    server = PostgresServer(fsync="on", full_page_writes="on", shared_buffers="128MB")
    try:
        print("workers devices committed   per s   ms of processor for each: workers broker postgres  closing  peak MB")
        for workers in map(int, options.workers.split(",")):
            for devices in map(int, options.devices.split(",")):
                row = measure(server, workers, devices, options.suspects)
                rows.append(row)
                parts = "   ".join(f"{row[f'{part}_ms']:.2f}" for part in ("workers", "broker", "postgres"))
                closing = row["closing_workers_ms"] + row["closing_postgres_ms"]
                print(
                    f"{workers:7} {devices:7} {row['committed']:9} {devices / row['seconds']:7.0f}"
                    f"   {parts}   {closing:.2f}   {row['peak_rss_mb']:.0f}",
                    flush=True,
                )
        idle = bytes_of_a_connection(options.connections)
        print(f"an idle connection takes {idle:.0f} bytes of Mosquitto's memory")
    finally:
        server.stop()
    if options.json:
        content = {"schema": SCHEMA, "cores": os.cpu_count(), "connection_bytes": idle, "rows": rows}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
