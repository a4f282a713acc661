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

    python -m benchmarks.kills.worker_kills --runs 40 [--workers 3] [--devices 8] [--seed 0] [--only leader,stopped]

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
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

import numpy as np  # noqa: E402
from aggregator_samples import bundle_file, means  # noqa: E402
from brokers import Mosquitto  # noqa: E402
from postgres_server import PostgresServer  # noqa: E402
from standing_talker import StandingTalker, unit_means  # noqa: E402
from talker import Talker  # noqa: E402

from protofleet.aggregator.coordinators.kinds import rounds_of, standing_sums  # noqa: E402
from protofleet.aggregator.database import read_only  # noqa: E402
from protofleet.aggregator.settings import Settings  # noqa: E402
from protofleet.aggregator.store.durable_store import DurableStore, newest_state  # noqa: E402
from protofleet.aggregator.store.schema import KIND  # noqa: E402
from protofleet.contract.bundle.bundle_file import extractor_of, read_bundle  # noqa: E402
from protofleet.contract.errors import ProtofleetError  # noqa: E402
from protofleet.contract.methods import method  # noqa: E402
from protofleet.contract.wire.codec import encode  # noqa: E402
from protofleet.contract.wire.global_state import GlobalState  # noqa: E402
from protofleet.contract.wire.messages import Contribution, Status  # noqa: E402

FLEET, METHOD = "kills", "fedproto"
VICTIMS = ("worker", "leader", "stopped", "postgres", "broker")
HUNG_S, STOPPED_S = 180.0, 16.0


class World:
    """A fleet, and what it runs on."""

    def __init__(self, folder: Path, workers: int, devices: int) -> None:
        self.folder, self.devices = folder, devices
        self.bundle = folder / "f.bundle"
        self.sha256 = bundle_file(self.bundle)
        self.server = PostgresServer(fsync="on", max_connections="40")
        self.place = self.server.new_place()
        self.broker = Mosquitto(folder / "broker")
        self.broker.start()
        self.processes: list[subprocess.Popen[bytes]] = []
        for number in range(workers):
            self.processes.append(self.start(number))
        self.talkers = self.made(devices)
        for talker in self.talkers:
            talker.start()

    def made(self, devices: int) -> Sequence[Talker]:
        """The devices."""
        return [
            Talker(self.broker.url, FLEET, f"d{i}", lambda a, i=i: means(1_000 * a.round + i), resend_s=2.0)
            for i in range(devices)
        ]

    @property
    def words(self) -> list[object]:
        """What the aggregator is told beside where everything is."""
        return ["--min-clients", self.devices, "--rounds", 100_000, "--no-calibrate"]

    def start(self, number: int) -> subprocess.Popen[bytes]:
        words = ["aggregate", "--worker", "--bundle", self.bundle, "--broker", self.broker.url, "--fleet", FLEET]
        words += ["--store", f"{self.place}&application_name=worker-{number}", *self.words]
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

    def awaited(self) -> Callable[[], bool]:
        """Whether it goes on, asked later."""
        rounds = self.closed() + 2
        return lambda: self.closed() >= rounds

    def goes_on(self, before: Callable[[], bool] = lambda: True) -> bool:
        """Wait until it has gone on, from now and from an earlier moment; False where that takes too long."""
        return until(before) and until(self.awaited())

    def look(self) -> Counter[str]:
        """What became of all that was sent, once all processes have ended."""
        return look(self)

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


class StandingWorld(World):
    """The same without rounds."""

    talkers: Sequence[StandingTalker]

    def __init__(self, folder: Path, workers: int, devices: int) -> None:
        self.compared: Counter[str] = Counter()
        super().__init__(folder, workers, devices)

    def made(self, devices: int) -> Sequence[StandingTalker]:
        return [
            StandingTalker(self.broker.url, FLEET, f"d{i}", lambda n, i=i: unit_means(1_000 * n + i), resend_s=2.0)
            for i in range(devices)
        ]

    @property
    def words(self) -> list[object]:
        return ["--standing", "--method", "ncm", "--every", "0.3s"]

    def heads(self) -> int:
        """The version of the newest head; -1 while nobody can say."""
        try:
            with read_only(self.place, KIND) as db:
                return int(db.execute("SELECT coalesce(max(version), 0) FROM global").fetchone()[0])
        except ProtofleetError:
            return -1

    def awaited(self) -> Callable[[], bool]:
        heads, receipts = self.heads() + 2, [talker.confirmed + 2 for talker in self.talkers]
        return lambda: (
            all(t.confirmed >= n for t, n in zip(self.talkers, receipts, strict=True)) and self.heads() >= heads
        )

    def goes_on(self, before: Callable[[], bool] = lambda: True) -> bool:
        if not super().goes_on(before):
            return False
        self.hold(True)
        try:
            quiet = until(lambda: all(talker.confirmed == talker.generation for talker in self.talkers))
            one = self.alone()
            found = quiet and until(lambda: self.head_is_of(one))
        finally:
            self.hold(False)
        self.compared["totals compared"] += 1
        self.compared["unlike one aggregator's"] += not found
        return found

    def hold(self, holds: bool) -> None:
        for talker in self.talkers:
            talker.holds = holds

    def alone(self) -> tuple[str, GlobalState]:
        """What one aggregator on a file comes to with what each device has sent last: its total, and the head."""
        path = self.folder / "alone.sqlite"
        path.unlink(missing_ok=True)
        with DurableStore(path, self.sha256, FLEET) as store:
            settings = Settings(method="ncm", standing=True, every=0.1)
            core = standing_sums(store, read_bundle(self.bundle).manifest, self.sha256, settings, now=0.0)
            sent = [(t.device, t.message(t.generation, core.announcement())) for t in self.talkers]
            assert [decision.outcome for decision in core.take(sent, 0.0)] == ["committed"] * len(sent)
            while core.advance(1.0, 1.0) is not None:
                pass
            digest = store.meta.get("standing solved")
            assert digest is not None
            return digest, core.state

    def head_is_of(self, one: tuple[str, GlobalState]) -> bool:
        """Whether the newest head in the store is of the same integers, and bit for bit the same."""
        try:
            with read_only(self.place, KIND) as db:
                (solved,) = db.execute("SELECT value FROM meta WHERE name = 'standing solved'").fetchone()
                state = newest_state(db, bytes(4))
        except ProtofleetError:
            return False
        return bytes(solved).decode() == one[0] and same_rows(state, one[1])

    def look(self) -> Counter[str]:
        found = self.compared
        with DurableStore(self.place, self.sha256, FLEET) as store:
            found["heads"] = store.state().version
            stands, generations = dict(store.standing.payloads()), store.standing.generations()
            told = SimpleNamespace(
                run=store.run, method="ncm", bundle=self.sha256, extractor=self.extractor, encoding="f32"
            )
            for talker in self.talkers:
                found["confirmed"] += sum(
                    bool({"committed", "duplicate"} & set(said)) for said in talker.receipts.values()
                )
                found["lost"] += generations[talker.device] < talker.confirmed
                true = talker.message(generations[talker.device], told)
                found["other bytes"] += stands[talker.device] != true
                found["rejected"] += sum("rejected" in said for said in talker.receipts.values())
                found["overtaken"] += talker.overtaken
        return found

    @property
    def extractor(self) -> bytes:
        return extractor_of(read_bundle(self.bundle).manifest, self.sha256, method("ncm"))


def until(condition: Callable[[], bool]) -> bool:
    """Wait; False where that takes too long."""
    deadline = time.monotonic() + HUNG_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.2)
    return False


def same_rows(state: GlobalState, other: GlobalState) -> bool:
    """Whether two global states hold the same, bit for bit."""
    return state.rows.keys() == other.rows.keys() and all(
        np.array_equal(rows.rows, other.rows[kind].rows) and np.array_equal(rows.classes, other.rows[kind].classes)
        for kind, rows in state.rows.items()
    )


def payload_of(talker: Talker, number: int, run: bytes, sha256: bytes) -> bytes:
    """What a device sends in a round of a run."""
    origin = {"run": run, "bundle": sha256, "extractor": b""}
    return encode(Contribution.of(talker.sent[number, METHOD], round=number, method=METHOD, **origin), "f32")


def alone(world: World, rounds: int) -> GlobalState:
    """What one aggregator on a file comes to with the same contributions."""
    with DurableStore(world.folder / "alone.sqlite", world.sha256, FLEET) as store:
        settings = Settings(rounds=rounds, calibrate=False, min_clients=world.devices)
        core = rounds_of(store, read_bundle(world.bundle).manifest, world.sha256, settings, now=0.0)
        for talker in world.talkers:
            core.status(talker.device, encode(Status(True, bytes(8), 1)), 0.0)
        for number in range(1, rounds + 1):
            now = 10.0 * number
            while core.advance(now, now) is not None:
                pass
            core.take([(t.device, payload_of(t, number, core.parts.run, world.sha256)) for t in world.talkers], now)
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
    found["sums unlike one aggregator's"] = int(state.version != one.version or not same_rows(state, one))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--standing", action="store_true", help="a fleet without rounds, whose sums stand")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(VICTIMS), help="which of the five, with commas")
    parser.add_argument("--keep", type=Path, help="leave the processes' logs here")
    args = parser.parse_args()
    victims, rng, hung = args.only.split(","), random.Random(args.seed), 0
    struck: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(dir=args.keep) as folder:
        world = (StandingWorld if args.standing else World)(Path(folder), args.workers, args.devices)
        try:
            if not until(world.awaited()):
                print("nothing goes on before anything is killed")
                return 1
            for number in range(args.runs):
                victim, before, began = victims[number % len(victims)], world.awaited(), time.monotonic()
                time.sleep(rng.uniform(0.0, 1.0))
                world.strike(victim, rng)
                went_on = world.goes_on(before)
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
            found = world.look()
        finally:
            if args.keep is not None:
                for log in Path(folder).glob("*.log"):
                    (args.keep / log.name).write_bytes(log.read_bytes())
            world.close()
    print(", ".join(f"{count} {victim}" for victim, count in struck.items()))
    print(f"{hung} hung, " + ", ".join(f"{count} {name}" for name, count in found.items()))
    bad = ("incomplete", "doubled", "other bytes", "lost", "rejected", "sums unlike one aggregator's")
    bad += ("unlike one aggregator's", "overtaken")
    return int(bool(hung or any(found[name] for name in bad)))


if __name__ == "__main__":
    sys.exit(main())
