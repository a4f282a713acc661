"""Workers, leader, PostgreSQL and broker killed at random moments: what is lost, doubled or hung, and the sums.

A fleet of real `protofleet aggregate --worker` processes on one PostgreSQL server and one Mosquitto, and devices that
train nothing, in this process. Each run picks one of:

    worker      kill -9 of a process that works; it is started again
    leader      kill -9 of the one that leads; another must lead
    stopped     SIGSTOP of the one that leads, for longer than the others wait; then SIGCONT, and it wakes late
    postgres    kill -9 of the whole server; it is started again on the same data
    broker      kill -9 of the broker; it is started again on the same data

and passes when two further rounds have closed with every device in them. In the end all rounds are looked at: each
device once in each; whatever a device was told is committed is there, with the very bytes that it sent; and the global
state is, bit for bit, that of one aggregator without a server that was given the same contributions.

    python benchmarks/worker_kills.py --runs 40 [--workers 3] [--devices 8] [--seed 0] [--only leader,stopped]

It needs the extra `dev` (PostgreSQL comes from a package) and Mosquitto.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT)]

import numpy as np  # noqa: E402
from aggregator_samples import bundle_file, means  # noqa: E402
from brokers import Mosquitto  # noqa: E402
from postgres_server import PostgresServer  # noqa: E402
from talker import Talker  # noqa: E402

from aggregator.coordinator import Coordinator  # noqa: E402
from aggregator.database import read_only  # noqa: E402
from aggregator.rounds import Policy  # noqa: E402
from aggregator.service import settle  # noqa: E402
from aggregator.store import DurableStore  # noqa: E402
from aggregator.store_schema import KIND  # noqa: E402
from contract.bundle import read_bundle  # noqa: E402
from contract.errors import ProtofleetError  # noqa: E402
from contract.messages import Contribution, Status  # noqa: E402
from contract.state import GlobalState  # noqa: E402
from contract.wire import encode  # noqa: E402

FLEET, METHOD = "kills", "fedproto"
VICTIMS = ("worker", "leader", "stopped", "postgres", "broker")
HUNG_S, STOPPED_S = 180.0, 16.0


class World:
    """A fleet, and what it runs on."""

    def __init__(self, folder: Path, workers: int, devices: int, rounds: int) -> None:
        self.folder, self.devices, self.rounds = folder, devices, rounds
        self.bundle = folder / "f.bundle"
        self.sha256 = bundle_file(self.bundle)
        self.server = PostgresServer(fsync="on", max_connections="40")
        self.place = self.server.new_place()
        self.broker = Mosquitto(folder / "broker")
        self.broker.start()
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(workers):
            self.processes.append(self.start(number))
        self.talkers = [
            Talker(self.broker.url, FLEET, f"d{i}", lambda a, i=i: means(1_000 * a.round + i), resend_s=2.0)
            for i in range(devices)
        ]
        for talker in self.talkers:
            talker.start()

    def start(self, number: int) -> subprocess.Popen[bytes]:
        words = ["aggregate", "--worker", "--bundle", self.bundle, "--broker", self.broker.url, "--fleet", FLEET]
        words += [
            "--store",
            f"{self.place}&application_name=worker-{number}",
            "--min-clients",
            self.devices,
            "--rounds",
            self.rounds,
            "--no-calibrate",
        ]
        with open(self.folder / f"worker-{number}.log", "ab") as log:
            command = [sys.executable, "-m", "protofleet", *map(str, words)]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "COLUMNS": "200"})

    def close(self) -> None:
        for talker in self.talkers:
            talker.stop()
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
        self.broker.stop()
        self.server.stop()

    def closed(self) -> int:
        """How many rounds have closed; -1 while nobody can say."""
        try:
            with read_only(self.place, KIND) as db:
                return int(db.execute("SELECT count(*) FROM round WHERE closed = 1").fetchone()[0])
        except ProtofleetError:
            return -1

    def leader(self) -> int | None:
        """Which of the processes leads."""
        with self.server.connect() as db:
            found = db.execute(
                "SELECT a.application_name FROM pg_locks l JOIN pg_stat_activity a USING (pid)"
                " WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted AND l.classid::bigint = %s",
                (KIND.application_id,),
            ).fetchone()
        return None if found is None else int(found[0].rpartition("-")[2])

    def until(self, rounds: int) -> bool:
        """Wait for so many closed rounds; False where that takes too long."""
        deadline = time.monotonic() + HUNG_S
        while time.monotonic() < deadline:
            if self.closed() >= rounds:
                return True
            time.sleep(0.2)
        return False

    def strike(self, victim: str, rng: random.Random) -> None:
        if victim == "postgres":
            self.server.kill()
            time.sleep(rng.uniform(0.0, 2.0))
            self.server.start()
        elif victim == "broker":
            self.broker.kill()
            time.sleep(rng.uniform(0.0, 2.0))
            self.broker.start()
        else:
            leader = self.leader()
            others = [n for n in range(len(self.processes)) if n != leader]
            number = rng.choice(others) if victim == "worker" or leader is None else leader
            if victim == "stopped":
                self.processes[number].send_signal(signal.SIGSTOP)
                time.sleep(STOPPED_S)
                self.processes[number].send_signal(signal.SIGCONT)
                return
            self.processes[number].kill()
            self.processes[number].wait()
            time.sleep(rng.uniform(0.0, 1.0))
            self.processes[number] = self.start(number)


def payload_of(talker: Talker, number: int, run: bytes, sha256: bytes) -> bytes:
    """What a device sends in a round of a run."""
    origin = {"run": run, "bundle": sha256, "extractor": b""}
    return encode(Contribution.of(talker.sent[number, METHOD], round=number, method=METHOD, **origin), "f32")


def alone(world: World, rounds: int) -> GlobalState:
    """What one aggregator on a file comes to with the same contributions."""
    with DurableStore(world.folder / "alone.sqlite", world.sha256, FLEET) as store:
        policy = Policy(min_clients=world.devices)
        settings = replace(settle(rounds=rounds, calibrate=False), policy=policy)
        core = Coordinator(store, read_bundle(world.bundle).manifest, world.sha256, settings, now=0.0)
        for talker in world.talkers:
            core.status(talker.device, encode(Status(True, bytes(8), 1)), 0.0)
        for number in range(1, rounds + 1):
            now = 10.0 * number
            while core.advance(now, now) is not None:
                pass
            core.take([(t.device, payload_of(t, number, core.run, world.sha256)) for t in world.talkers], now)
            while core.rounds.phase == "open":
                core.advance(now + 1.0, now)
        return core.state


def look(world: World) -> Counter[str]:
    """What became of all that was sent."""
    found: Counter[str] = Counter()
    with DurableStore(world.place, world.sha256, FLEET) as store:
        records = [record for record in store.rounds() if record.closed]
        devices = sorted(talker.device for talker in world.talkers)
        found["rounds"] = len(records)
        for record in records:
            found["incomplete"] += sorted(record.uplink_bytes) != devices
            kept = list(store.contributions(record.number, METHOD))
            found["doubled"] += max(0, len(kept) - len(devices))
            true = {payload_of(t, record.number, store.run, world.sha256) for t in world.talkers}
            found["other bytes"] += len(set(kept) - true)
        for talker in world.talkers:
            for (number, name), said in talker.receipts.items():
                confirmed = {"committed", "duplicate"} & set(said)
                found["confirmed"] += bool(confirmed)
                found["lost"] += bool(confirmed) and not store.holds(number, name, talker.device)
                found["rejected"] += "rejected" in said
        state = store.state()
    one = alone(world, len(records))
    same = state.version == one.version and all(
        np.array_equal(rows.rows, one.rows[kind].rows) and np.array_equal(rows.classes, one.rows[kind].classes)
        for kind, rows in state.rows.items()
    )
    found["sums unlike one aggregator's"] = int(not same)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(VICTIMS), help="which of the five, with commas")
    parser.add_argument("--keep", type=Path, help="leave the processes' logs here")
    args = parser.parse_args()
    victims, rng, hung = args.only.split(","), random.Random(args.seed), 0
    struck: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=args.keep) as folder:
        world = World(Path(folder), args.workers, args.devices, 100_000)
        try:
            if not world.until(2):
                print("no round closes before anything is killed")
                return 1
            for number in range(args.runs):
                victim, before, began = victims[number % len(victims)], world.closed(), time.monotonic()
                time.sleep(rng.uniform(0.0, 1.0))
                world.strike(victim, rng)
                went_on = world.until(max(before, world.closed()) + 2)
                hung += not went_on
                struck[victim] += 1
                took_s = time.monotonic() - began
                print(f"{number + 1:4} {victim:9} {'went on' if went_on else 'HUNG'} after {took_s:.1f} s", flush=True)
                if not went_on:
                    break
            for talker in world.talkers:
                talker.stop()
            for process in world.processes:
                process.kill()
                process.wait()
            found = look(world)
        finally:
            if args.keep is not None:
                for log in Path(folder).glob("*.log"):
                    (args.keep / log.name).write_bytes(log.read_bytes())
            world.close()
    print(", ".join(f"{count} {victim}" for victim, count in struck.items()))
    print(f"{hung} hung, " + ", ".join(f"{count} {name}" for name, count in found.items()))
    bad = ("incomplete", "doubled", "other bytes", "lost", "rejected", "sums unlike one aggregator's")
    return int(bool(hung or any(found[name] for name in bad)))


if __name__ == "__main__":
    sys.exit(main())
