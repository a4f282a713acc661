"""Commit, receipt, acknowledgement: in this order, as the broker saw it, and none of them when the store fails."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from aggregator_samples import bundle_file, means
from aggregator_server_samples import FLEET, Listener, Running, wait
from broker_log import Witness

from protofleet.aggregator.monitoring import events
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.records import Accepted, Tally
from protofleet.contract.errors import StoreError
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Receipt, Status

ONE = Settings(rounds=1, calibrate=False, min_clients=2)
UP, DOWN, AGGREGATOR = topics.up(FLEET, "d"), topics.down(FLEET, "d"), f"pf-{FLEET}-aggregator"


class SlowDisk(DurableStore):
    """Takes a second to commit, and notes that nothing was acknowledged meanwhile; it may then refuse."""

    witness: Witness
    refuses = False
    early: list[int | None]

    def commit(self, accepted: Sequence[Accepted], tally: Tally, refusals: Sequence[tuple[int, str]] = ()) -> None:
        if accepted:
            time.sleep(1.0)
            self.early = [self.witness.acknowledged(AGGREGATOR, m, after=at) for at, m in self._arrived()]
            if self.refuses:
                raise StoreError("store", expected="a disk that takes it", got="one that does not")
        super().commit(accepted, tally, refusals)

    def _arrived(self) -> list[tuple[int, int]]:
        return self.witness.delivered(AGGREGATOR, UP)


@pytest.fixture
def witness(tmp_path: Path) -> Iterator[Witness]:
    made = Witness(tmp_path / "m")
    made.start()
    yield made
    made.stop()


def _contribute(witness: Witness, store: SlowDisk, bundle: bytes, server: Running, device: Listener) -> None:
    for name in ("d", "e"):
        device.link.publish(topics.status(FLEET, name), encode(Status(True, b"instance", 1)), retain=True)
    wait(lambda: server.told(events.RoundOpened))
    sent = Contribution.of(means(), run=store.run, round=1, method="fedproto", bundle=bundle)
    device.link.publish(UP, encode(sent))


def test_nothing_is_acknowledged_that_is_not_committed(witness: Witness, tmp_path: Path) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with SlowDisk(tmp_path / "s", bundle, FLEET) as store, Listener(witness.url, DOWN) as device:
        store.witness, store.refuses = witness, True
        server = Running(witness.url, store, bundle, ONE)
        _contribute(witness, store, bundle, server, device)
        server.join(20)
        assert isinstance(server.error, StoreError)
        assert store.early == [None]
        ((at, packet),) = witness.delivered(AGGREGATOR, UP)
        time.sleep(0.3)
        assert witness.acknowledged(AGGREGATOR, packet, after=at) is None
        assert witness.published(AGGREGATOR, DOWN) is None  # and no receipt was given


def test_the_receipt_goes_out_after_the_commit_and_the_acknowledgement_after_the_receipt(
    witness: Witness, tmp_path: Path
) -> None:
    bundle = bundle_file(tmp_path / "f.bundle")
    with SlowDisk(tmp_path / "s", bundle, FLEET) as store, Listener(witness.url, DOWN) as device:
        store.witness = witness
        server = Running(witness.url, store, bundle, ONE)
        _contribute(witness, store, bundle, server, device)
        assert device.until(lambda m: isinstance(m, Receipt)).status == "committed"
        assert store.early == [None]
        ((at, packet),) = witness.delivered(AGGREGATOR, UP)
        wait(lambda: witness.acknowledged(AGGREGATOR, packet, after=at))
        receipt = witness.published(AGGREGATOR, DOWN)
        assert at < receipt < witness.acknowledged(AGGREGATOR, packet, after=at)
