"""Several processes on one store: each contribution counts once, whoever takes it and whoever dies."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aggregator_samples import BUNDLE, bundle_file, contribution, means
from aggregator_server_samples import wait
from brokers import TestBroker, make_broker
from postgres_server import need_postgres
from talker import Talker

from aggregator.database import members, place_of
from aggregator.database.members import Leader, Member, StaleError
from aggregator.events import RoundClosed
from aggregator.service import Service, settle
from aggregator.shared_store import SharedStore
from aggregator.store import Accepted, DurableStore
from aggregator.store_schema import KIND
from contract.errors import InUseError, LedError, ProtofleetError, StoreLostError, UsageError
from contract.link import Address
from contract.messages import Contribution
from contract.methods import method
from contract.rules import merge
from contract.wire import decode

FLEET = "test"


@pytest.fixture
def place() -> Iterator[str]:
    yield need_postgres().new_place()


@pytest.fixture(params=["embedded", "mosquitto"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


class Running:
    """One of several processes, on a thread of this one."""

    def __init__(self, bundle: Path, url: str, place: str, **options: Any) -> None:
        self.told: list[object] = []
        self.summary: dict[str, Any] = {}
        self.error: ProtofleetError | None = None
        settings = settle(**{"rounds": 3, "calibrate": False, "min_clients": 6, **options})
        self.service = Service([bundle], Address.parse(url), place_of(place), FLEET, settings, worker=True)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.summary = self.service.run(self.told.append, lambda *_: None)
        except ProtofleetError as error:
            self.error = error

    def stop(self) -> None:
        self.service.stop()
        self.join(30)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)
        assert not self._thread.is_alive()
        assert self.error is None, self.error

    @property
    def leads(self) -> bool:
        return any(isinstance(event, RoundClosed) for event in self.told)


def talkers(url: str, count: int) -> list[Talker]:
    made = [Talker(url, FLEET, f"d{i}", lambda a, i=i: means(i + 10 * a.round)) for i in range(count)]
    for talker in made:
        talker.start()
    return made


def expect_sums(place: str, sha256: bytes, sent: list[Talker], rounds: int) -> None:
    """Each device counts once in each round, and the sums are those of what was sent."""
    with DurableStore(place, sha256, FLEET) as store:
        records = store.rounds()
        assert [record.closed for record in records] == [True] * rounds
        assert [sorted(record.uplink_bytes) for record in records] == [sorted(t.device for t in sent)] * rounds
        last = [decode(payload) for payload in store.contributions(rounds, "fedproto")]
        found = merge(
            lambda: (m.statistic(method("fedproto").statistic, 3, 4) for m in last if isinstance(m, Contribution))
        )
        true = merge(lambda: (t.sent[rounds, "fedproto"] for t in sent))
        np.testing.assert_array_equal(found.counts, true.counts)


def test_three_share_the_work_and_one_leads(broker: TestBroker, place: str, tmp_path: Path) -> None:
    sha256 = bundle_file(tmp_path / "f.bundle")
    crew = [Running(tmp_path / "f.bundle", broker.url, place) for _ in range(3)]
    sent = talkers(broker.url, 6)
    try:
        for each in crew:
            each.join(90)
    finally:
        for talker in sent:
            talker.stop()
        for each in crew:
            each.stop()
    assert [each.leads for each in crew].count(True) == 1
    expect_sums(place, sha256, sent, 3)
    decided = [sum(type(event).__name__ == "Decided" for event in each.told) for each in crew]
    assert sum(number > 0 for number in decided) >= 2, decided  # the work was shared
