"""What a leader of several processes does at its beginning, after a pause, and when one before it wakes late."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aggregator_samples import BUNDLE, bundle_file
from aggregator_server_samples import Listener, wait
from brokers import TestBroker, make_broker
from postgres_server import need_postgres

from protofleet.aggregator.database import place_of
from protofleet.aggregator.database import postgres_members as members
from protofleet.aggregator.database.postgres_members import Leader, Member
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.workers import shared_rounds
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, Status
from tests.aggregator.workers.test_worker import FLEET, Running, _core


@pytest.fixture
def place() -> str:
    return need_postgres().new_place()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("embedded", tmp_path)
    made.start()
    yield made
    made.stop()


def test_what_a_leader_that_wakes_late_says_does_not_stay_on_the_broker(
    broker: TestBroker, place: str, tmp_path: Path
) -> None:
    """Who comes later would take the retained announcement for the newest."""
    bundle_file(tmp_path / "f.bundle")
    leading = Running(tmp_path / "f.bundle", broker.url, place)
    topic = topics.round_(FLEET)
    try:
        with Listener(broker.url, topic) as listener:
            told = listener.until(lambda m: isinstance(m, Announcement))
            assert isinstance(told, Announcement)
            listener.link.publish(topic, encode(replace(told, epoch=told.epoch - 1)), retain=True)
            assert listener.until(lambda m: isinstance(m, Announcement) and m.epoch < told.epoch)
            listener.until(lambda m: m == told)
        with Listener(broker.url, topic, name="newcomer") as newcomer:
            assert newcomer.until(lambda m: isinstance(m, Announcement)) == told
    finally:
        leading.stop()


def test_a_leader_that_reads_what_there_is_has_time_for_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a store that is read slowly would be left to one after the other, and to none for long enough."""
    where = place_of(place)
    monkeypatch.setattr(members, "SILENT_S", 0.2)
    with closing(Leader(where, KIND)) as reads, closing(Member(where, KIND)) as member:  # type: ignore[arg-type]
        for _ in range(4):
            time.sleep(0.1)
            assert not member.may_lead()
        reads.beat()
        wait(member.may_lead)


def test_what_a_leader_begins_with_is_few_questions_however_many_rounds_there_were(place: str) -> None:
    def asked(store: SharedStore) -> int:
        count, link = 0, store._db
        real = link.execute

        def execute(*given: Any) -> Any:
            nonlocal count
            count += 1
            return real(*given)

        link.execute = execute  # type: ignore[method-assign]
        store.rounds()
        del link.execute
        return count

    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader:
        found = []
        for number in range(1, 7):
            leader.open_round(number, "fedproto", 0, 0.0)
            leader.based_on = leader.changes()
            leader.commit([Accepted(number, "fedproto", "a", b"payload", 7)], {})
            leader.close_round(number, 1.0, 0, leader.state())
            found.append(asked(leader))
        assert len(set(found)) == 1
        assert [record.uplink_bytes for record in leader.rounds(after=4)] == [{"a": 7}] * 2


def test_a_look_in_whose_middle_the_leader_was_stopped_is_soon_followed_by_another(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(shared_rounds, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader:
        core = _core(leader)
        core.status("a", encode(Status(True, bytes(8), 1)), 0.0)
        core.advance(0.0, 0.0)
        made, count = Sharing(core, leader), leader.taken_count

        def stopped(*of: Any) -> tuple[int, int]:
            found = count(*of)
            now[0] += 16.0
            return found

        leader.taken_count = stopped  # type: ignore[method-assign]
        made.learn(100.0)
        leader.based_on = leader.changes()
        leader.commit([Accepted(1, "fedproto", "a", b"payload", 7)], {})
        assert made.learn(now[0] + 3.0)
