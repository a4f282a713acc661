"""One process among several on a store: what it asks devices for, what it leaves behind, what others did meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, contribution, extractor
from postgres_server import need_postgres

from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.mqtt.link import Address, Connected, Disconnected, Event, Received
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution, Status
from tests.aggregator.workers.test_shared_standing import Process
from tests.aggregator.workers.test_worker import FLEET, LIMIT_BYTES, _core, wide

CHUNKS = "SELECT device FROM protofleet_chunk ORDER BY device"


@pytest.fixture
def place() -> str:
    return need_postgres().new_place()


@pytest.fixture
def pair(place: str) -> Iterator[list[SharedStore]]:
    """The leader's and a member's."""
    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader, SharedStore(place, BUNDLE, FLEET, leads=False) as one:
        yield [leader, one]


def opened(pair: list[SharedStore]) -> list[Sharing]:
    core = _core(pair[0])
    core.status("a", encode(Status(True, bytes(8), 1)), 0.0)
    assert core.advance(0.0, 0.0) is not None
    return [Sharing(core, pair[0]), Sharing(_core(pair[1]), pair[1])]


def pieces(store: SharedStore) -> list[tuple[str, bytes]]:
    payload = encode(contribution(wide(), run=store.run), "f64")
    return [("a", encode(c)) for c in split(payload, LIMIT_BYTES, run=store.run, round=1, method="fedproto")]


def sums_in_pieces(process: Process, generation: int) -> list[tuple[str, bytes]]:
    core = process.core
    key: dict[str, Any] = {"run": core.parts.run, "round": generation, "method": "ffc"}
    rng = np.random.default_rng(generation)
    sums = FeatureGram.of(unit_rows(rng.normal(size=(30, 16))), rng.integers(0, CLASSES, 30), CLASSES)
    told = {"bundle": BUNDLE, "extractor": extractor("ffc"), "standing": "present"}
    payload = encode(Contribution.of(sums, **key, **told), "f64")
    return [("a", encode(chunk)) for chunk in split(payload, 1_024, **key)]


@pytest.fixture
def both(place: str) -> Iterator[list[Process]]:
    with ExitStack() as undo:
        made = [Process(place, leads=leads, method="ffc", width=16) for leads in (True, False)]
        for each in made:
            undo.callback(each.store.close)
        yield made


def test_a_leader_takes_up_missing_chunks_also_when_somebody_was_enrolled_meanwhile(pair: list[SharedStore]) -> None:
    leader, member = pair
    leads, works = opened(pair)
    first, *rest = pieces(leader)
    leads.take_as_leader([first], 1.0)
    found = [(device, works._core.chunk_of(device, payload), payload) for device, payload in rest]
    member.put_chunks([(device, chunk, payload) for device, chunk, payload in found if chunk is not None])  # and dies
    member.enrolment.enrol("b", bytes(32), 1.0)
    assert "committed" in [d.outcome for d in leads.stalled(7.0)]
    assert leader.taken(1, "fedproto")[0] == ["a"]


def test_nobody_is_asked_for_chunks_of_sums_that_another_process_has_taken(both: list[Process]) -> None:
    first, *rest = sums_in_pieces(both[0], 5)
    both[1].take(first)
    assert "committed" in [d.outcome for d in both[0].take(*rest)]
    assert both[1].sharing.stalled(7.0) == []
    both[0].expect_total_of_the_store()


def test_nothing_stays_of_chunks_that_may_be_of_a_forgotten_class(place: str, both: list[Process]) -> None:
    leader, member = both
    member.take(sums_in_pieces(member, 5)[0])
    assert leader.store._db.execute(CHUNKS).fetchall() == [("a",)]
    give(place, "forget class", "", "me", detail="class-1")
    leader.advance(100.0)
    assert leader.store._db.execute(CHUNKS).fetchall() == []


def test_of_what_two_have_committed_one_payload_stays(pair: list[SharedStore]) -> None:
    opened(pair)
    for store in pair:
        store.based_on = store.changes()
        store.commit([Accepted(1, "fedproto", "a", b"payload", 7)], {})
    assert pair[0]._db.execute("SELECT count(*) FROM payload").fetchone() == (1,)


def test_chunks_of_a_round_that_is_over_go_once_the_next_is_open(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = pair
    leads, works = opened(pair)
    works.take(pieces(leader)[:1], 1.0)
    leads.learn(1.0)
    assert member._db.execute(CHUNKS).fetchall() == [("a",)]
    leads._core.rounds.number, swept = 2, list[object]()  # as once round 1 is closed
    drop = leader.drop_chunks
    monkeypatch.setattr(leader, "drop_chunks", lambda *given: swept.append(given) or drop(*given))
    for now in (10.0, 20.0):
        leads.learn(now)
    assert member._db.execute(CHUNKS).fetchall() == []
    assert len(swept) == 1  # and nothing is asked of the server after that


# ── one turn of a worker ────────────────────────────────────────────────────────────────────────────────────────────


class Turns:
    """A worker whose broker says what the test says, and what it did, in order."""

    def __init__(self, store: SharedStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.events, self.did = store, list[Event](), list[str]()
        told = {"listener": lambda event: None, "signer": None, "stopping": threading.Event()}
        address = Address.parse("mqtt://127.0.0.1:1")
        self.worker = Worker(store, lambda: _core(store), address, FLEET, **told, manager=ServiceManager({}))  # type: ignore[arg-type]
        link = self.worker._link
        monkeypatch.setattr(link, "receive", lambda timeout_s: self.events.pop(0) if self.events else None)
        monkeypatch.setattr(link, "publish", lambda *given, **named: self.did.append("receipt") or 1)
        monkeypatch.setattr(link, "acknowledge", lambda received: self.did.append("acknowledged"))

    def turn(self, *events: Event) -> bool:
        self.events.extend(events)
        return self.worker._turn()

    def came(self) -> Received:
        payload = encode(contribution(wide(), run=self.store.run), "f64")
        return Received(f"pf/v2/{FLEET}/up/a", payload, False, 1, 1)


def test_a_worker_acknowledges_once_its_receipts_are_on_their_way(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(pair)
    made = Turns(pair[1], monkeypatch)
    made.turn(Connected(65_536), made.came())
    assert made.did == ["receipt", "acknowledged"]
    assert pair[0].taken(1, "fedproto")[0] == ["a"]


def test_a_worker_takes_nothing_of_a_connection_that_is_gone(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(pair)
    made = Turns(pair[1], monkeypatch)
    made.turn(Connected(65_536), made.came(), Disconnected("gone", 1.0))
    assert made.did == []
    assert pair[0].taken(1, "fedproto")[0] == []


def test_a_worker_wants_to_lead_only_where_it_hears_its_broker(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(pair)
    made = Turns(pair[1], monkeypatch)
    pair[0].close()
    assert not made.turn()
    assert not made.turn(Connected(65_536), Disconnected("gone", 1.0))
    assert made.turn(Connected(65_536))


def test_a_worker_reads_what_has_changed_also_where_nobody_sends(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would not know that the plan is done, and would lead it once more."""
    opened(pair)
    made = Turns(pair[1], monkeypatch)
    assert not made.worker.is_finished
    pair[0].close_round(1, 2.0, 0, pair[0].state())
    made.turn()
    assert made.worker.is_finished


def test_a_worker_decides_again_when_something_has_changed_before_its_commit(
    pair: list[SharedStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(pair)
    made, commit, tries = Turns(pair[1], monkeypatch), pair[1].commit, list[int]()

    def late(*decided: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            pair[0].enrolment.enrol("b", bytes(32), 1.0)
        return commit(*decided)

    monkeypatch.setattr(pair[1], "commit", late)
    made.turn(Connected(65_536), made.came())
    assert len(tries) == 2
    assert pair[0].taken(1, "fedproto")[0] == ["a"]


def test_an_order_is_done_of_all_that_is_committed_also_of_what_the_leader_has_not_learned(
    place: str, both: list[Process]
) -> None:
    leader, member = both
    member.take(*sums_in_pieces(member, 5))
    give(place, "forget", "a", "me")
    assert leader.core.advance(100.0, 1100.0) is not None
    leader.expect_total_of_the_store()
    assert leader.core.standing.generations == {"a": 5}
