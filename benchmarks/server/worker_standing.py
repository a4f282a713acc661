"""What sums that stand cost with workers: who takes them, the server, and the leader that follows with its total.

    python -m benchmarks.server.worker_standing [--method ncm] [--devices 256] [--classes 10] [--width 512] [--batch 32]

Each device sends its first sums, and then others in their place, through the code of a worker to a real PostgreSQL; the
leader then learns of them. Processor time for each contribution of this process, as a worker and as the leader, and of
the server's; beside it one aggregator on a file. The least of three repetitions.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

import numpy as np  # noqa: E402
from aggregator_samples import BUNDLE, manifest  # noqa: E402
from postgres_server import PostgresServer  # noqa: E402

from benchmarks.server.worker_chunks import server_s  # noqa: E402
from protofleet.aggregator.coordinators.kinds import standing_sums  # noqa: E402
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator  # noqa: E402
from protofleet.aggregator.settings import Settings  # noqa: E402
from protofleet.aggregator.store.durable_store import DurableStore  # noqa: E402
from protofleet.aggregator.workers.shared_rounds import Sharing  # noqa: E402
from protofleet.aggregator.workers.shared_standing import SharedStanding  # noqa: E402
from protofleet.aggregator.workers.shared_store import SharedStore  # noqa: E402
from protofleet.contract.heads.sphere import unit_rows  # noqa: E402
from protofleet.contract.methods import method  # noqa: E402
from protofleet.contract.wire.codec import encode  # noqa: E402
from protofleet.contract.wire.messages import Contribution  # noqa: E402

_SAMPLES, _LIMIT_BYTES = 50, 1 << 24


class Fleet:
    """What is sent."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.found = args, method(args.method)
        self.manifest = manifest(classes=args.classes, width=args.width)
        self.settings = Settings(method=args.method, standing=True, limit_bytes=_LIMIT_BYTES)
        self.batch = args.batch

    def messages(self, core: StandingCoordinator, generation: int) -> list[tuple[str, bytes]]:
        """One generation of each device."""
        told, made = core.announcement(), []
        for device in range(self.args.devices):
            rng = np.random.default_rng([generation, device])
            labels = rng.integers(0, self.args.classes, _SAMPLES)
            rows = unit_rows(rng.normal(size=(_SAMPLES, self.args.width)))
            sums = self.found.statistic.of(rows, labels, self.args.classes)  # type: ignore[attr-defined]
            key = {"run": told.run, "round": generation, "method": told.method, "bundle": BUNDLE}
            sent = Contribution.of(sums, **key, extractor=told.extractor, standing="present")
            made.append((f"d{device}", encode(sent, told.encoding)))
        return made

    def ms(self, take: Callable[[Sequence[tuple[str, bytes]]], object], sent: list[tuple[str, bytes]]) -> float:
        """Milliseconds of this process for each contribution."""
        began = time.thread_time()
        for at in range(0, len(sent), self.batch):
            take(sent[at : at + self.batch])
        return 1000 * (time.thread_time() - began) / len(sent)


def shared(fleet: Fleet, server: PostgresServer) -> list[tuple[float, float, float]]:
    """Of the first and of the second generation: as a worker, as the leader, of the server."""
    place, found = server.new_place(), []
    with SharedStore(place, BUNDLE, "f", leads=True) as leader, SharedStore(place, BUNDLE, "f", leads=False) as member:
        cores = [
            standing_sums(
                store, fleet.manifest, BUNDLE, fleet.settings, now=0.0, keep=partial(SharedStanding, store=store)
            )
            for store in (leader, member)
        ]
        member.based_on = member.changes()
        worker = Sharing(cores[1], member)
        for generation in (1, 2):
            sent, before = fleet.messages(cores[1], generation), server_s(server)
            took = fleet.ms(lambda batch: worker.take(batch, 0.0), sent)
            began = time.thread_time()
            while cores[0].learn(0.0):
                pass
            learned = 1000 * (time.thread_time() - began) / len(sent)
            found.append((took, learned, 1000 * (server_s(server) - before) / len(sent)))
        assert len(cores[0].standing.present) == len(sent)
    return found


def alone(fleet: Fleet) -> list[float]:
    """Of the first and of the second generation, by one aggregator on a file."""
    with tempfile.TemporaryDirectory() as folder, DurableStore(Path(folder) / "s", BUNDLE, "f") as store:
        core = standing_sums(store, fleet.manifest, BUNDLE, fleet.settings, now=0.0)
        return [fleet.ms(lambda batch: core.take(batch, 0.0), fleet.messages(core, n)) for n in (1, 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("ncm", "ffc"), default="ncm")
    parser.add_argument("--devices", type=int, default=256)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=32)
    fleet = Fleet(parser.parse_args())
    server = PostgresServer()
    try:
        together, single = [shared(fleet, server) for _ in range(3)], [alone(fleet) for _ in range(3)]
        for at, name in enumerate(("first", "in place of others")):
            worker, leader, theirs = (min(each[at][part] for each in together) for part in range(3))
            one = min(each[at] for each in single)
            print(
                f"{name:18} worker {worker:.2f}, leader {leader:.2f}, server {theirs:.2f}; one on a file {one:.2f} ms"
            )
    finally:
        server.stop()


if __name__ == "__main__":
    main()
