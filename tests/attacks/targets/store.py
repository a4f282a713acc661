"""A store that somebody has changed: the aggregator refuses it in one line, or goes on from it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from aggregator_samples import BUNDLE, RUN, contribution, manifest, means

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.stored_run import stored_run
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from tests.attacks.choices import Choices
from tests.attacks.damaged_sqlite import write_damaged
from tests.attacks.guard import scratch
from tests.attacks.promises import may_refuse

LONGEST_BYTES = 512
SETTINGS = Settings(rounds=3, calibrate=False, min_clients=1)


def run(data: bytes) -> None:
    with scratch() as folder:
        path = folder / "s"
        write_damaged(path, good_store(), Choices(data))
        for act in (lambda: _read(path), lambda: _serve(path), lambda: _read(path)):
            may_refuse(act, ProtofleetError)


def _read(path: Path) -> None:
    """As who looks into a store beside its aggregator."""
    with stored_run(path) as stored:
        stored.state()
        for number, method, _ in stored.closed_rounds():
            for _device, message in stored.contributions(number, method):
                assert message.method
            stored.screening(method)


def _serve(path: Path) -> None:
    """As the aggregator that goes on with it: a birth, a contribution, and what is due."""
    with DurableStore(path, BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, SETTINGS, now=0.0, wall=200.0)
        core.announcement()
        core.status("b", encode(Status(True, b"instance", 1)), 0.0)
        payload = encode(contribution(means(4), run=core.parts.run, round=max(core.rounds.number, 1)))
        for now in (10.0, 1000.0, 2000.0):
            core.take([("b", payload)], now)
            for _ in range(20):
                if core.advance(now, 200.0 + now) is None:
                    break
            core.stalled(now)
        encode(core.announcement())


@functools.cache
def good_store() -> bytes:
    """A store with a closed round, an open one, and something in most tables."""
    with scratch() as folder:
        with DurableStore(folder / "s", BUNDLE, "fleet") as store:
            core = rounds_of(store, manifest(), BUNDLE, SETTINGS, now=0.0, wall=100.0)
            for device in "ac":
                core.status(device, encode(Status(True, b"instance", 1)), 0.0)
            core.advance(0.0, 100.0)
            for device, seed in (("a", 1), ("c", 2)):
                core.take([(device, encode(contribution(means(seed), run=core.parts.run, round=1)))], 1.0)
            for now in (1.0, 2.0):
                while core.advance(now, 100.0 + now) is not None:
                    pass
            core.take([("a", encode(contribution(means(3), run=core.parts.run, round=2)))], 2.0)
            store.refused_devices.refuse("z", 1.0, "for a reason")
            store.meta.put("classes forgotten", "[]")
        return (folder / "s").read_bytes()


def seeds() -> Iterable[bytes]:
    assert len(RUN) == 4
    yield b"\0\0"
    for table in range(16):
        for what in (0, 8):
            yield bytes([1, 0, table, what, table, what + 1, 0, 7, 3, 9, 2, 1])
