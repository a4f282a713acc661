"""Sums that stand, taken by several processes: what one aggregator would answer and hold, whoever takes what."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, bundle_file, extractor, manifest, unassigned
from aggregator_server_samples import wait
from brokers import TestBroker, make_broker
from postgres_server import need_postgres
from standing_talker import StandingTalker, unit_means

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.database import read_only
from protofleet.aggregator.database.postgres_members import StaleError
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.monitoring.events import HeadMade
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore, newest_state
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_standing import SharedStanding
from protofleet.aggregator.workers.shared_standing_tables import _add_taken
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.errors import StoreLostError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution
from tests.aggregator.merging.test_exact_sums import expect_head_of, means, message
from tests.aggregator.workers.test_worker import FLEET as TEST_FLEET
from tests.aggregator.workers.test_worker import Running

FLEET, EVERY_S = "fleet", 60.0


@pytest.fixture
def place() -> str:
    return need_postgres().new_place()


class Process:
    """One of several on a store, without its link: it does what `aggregator/workers/worker.py` and the server's loop
    do."""

    def __init__(self, place: str, *, leads: bool, method: str = "ncm", width: int = WIDTH) -> None:
        self._settings = Settings(method=method, standing=True, every=EVERY_S, encoding="f64", sums_encoding="f64")
        self._width = width
        self.store = SharedStore(place, BUNDLE, FLEET, leads=leads)
        self.read()

    def read(self) -> None:
        self.store.based_on = self.store.changes()
        if not self.store.leads:
            self.store.check_version()
        about = {"now": 0.0, "wall": lambda: 1000.0, "keep": partial(SharedStanding, store=self.store)}
        self.core = standing_sums(self.store, manifest(width=self._width), BUNDLE, self._settings, **about)  # type: ignore[arg-type]
        self.sharing = Sharing(self.core, self.store)

    def take(self, *given: tuple[str, bytes], now: float = 0.0) -> list[Decision]:
        if self.store.leads:
            return self.sharing.take_as_leader(given, now)
        while True:
            try:
                if self.store.changes() != self.store.based_on:
                    self.read()
                return self.sharing.take(given, now)
            except StaleError:
                continue

    def advance(self, now: float) -> None:
        while self.core.learn(now):
            pass
        while self.core.advance(now, 1000.0 + now) is not None:
            pass

    def expect_total_of_the_store(self) -> None:
        """All that is committed, added up anew."""
        while self.core.learn(0.0):
            pass
        core, total = self.core, ExactSum.zero(self.core.method.statistic, CLASSES, self._width)
        present = dict(self.store.standing.payloads())
        for payload in present.values():
            total = total.add(ExactSum.sent_in(held_by(payload), core.method.statistic, CLASSES, self._width))
        assert core.standing.total.equal(total)
        assert core.standing.present == present.keys()


@pytest.fixture
def crew(place: str) -> Iterator[list[Process]]:
    with ExitStack() as undo:
        made = [Process(place, leads=leads) for leads in (True, False, False)]
        for each in made:
            undo.callback(lambda each=each: each.store.close())
        yield made


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 30))])
def test_a_history_is_answered_as_by_one_and_comes_to_the_same_bits(
    place: str, crew: list[Process], tmp_path: Path, seed: int
) -> None:
    """Generations, repetitions, withdrawals, orders of operators; who leads dies; the head is that of one on a file."""
    rng = np.random.default_rng(seed)
    with DurableStore(tmp_path / "s", BUNDLE, FLEET) as file:
        settings = Settings(method="ncm", standing=True, every=EVERY_S, encoding="f64")
        one = standing_sums(file, manifest(), BUNDLE, settings, now=0.0, wall=lambda: 1000.0)
        for step in range(60):
            now, what = 100.0 * step, rng.integers(0, 20)
            if what == 0:
                crew[0].store.close()
                crew[0] = Process(place, leads=True)
            elif what <= 3:
                order = ("forget", "admit", "remove", "forget class", "admit class")[rng.integers(0, 5)]
                device = "" if order.endswith("class") else "abcd"[rng.integers(0, 4)]
                detail = "" if device else f"class-{rng.integers(0, CLASSES)}"
                for store in (place, tmp_path / "s"):
                    give(store, order, device, "me", detail=detail)
            if what <= 8:
                crew[0].advance(now)
                while one.advance(now, 1000.0 + now) is not None:
                    pass
                assert crew[0].core.standing.total.equal(one.standing.total)
                assert crew[0].core.standing.generations == one.standing.generations
                for kind, rows in one.state.rows.items():
                    np.testing.assert_array_equal(crew[0].core.state.rows[kind].rows, rows.rows)
                continue
            drawn = [(int(rng.integers(0, 4)), int(rng.integers(1, 2 + step // 3))) for _ in range(3)]
            withdraws = rng.random() < 0.1
            device_of = lambda index: "abcd"[index]  # noqa: E731
            sent = [(device_of(d), g, None if withdraws else 10 * g + d) for d, g in drawn]
            taker = crew[rng.integers(0, 3)]
            ours = taker.take(*(message(taker.core, *each) for each in sent), now=now)
            theirs = one.take([message(one, *each) for each in sent], now)
            assert [(d.outcome, d.receipt.held) for d in ours] == [(d.outcome, d.receipt.held) for d in theirs]  # type: ignore[union-attr]
        crew[0].expect_total_of_the_store()
        assert unassigned(crew[0].store) == unassigned(file)


def test_many_at_once_lose_and_double_nothing(place: str, crew: list[Process]) -> None:
    """Each takes the same generations of the same devices in its own order, while the leader learns."""
    told: list[tuple[str, int]] = []

    def work(process: Process, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(40):
            chosen = [("abcdef"[rng.integers(0, 6)], int(rng.integers(1, 12))) for _ in range(4)]
            sent = [message(process.core, device, g, 100 * g + ord(device)) for device, g in chosen]
            made = process.take(*sent)
            told.extend(each for each, d in zip(chosen, made, strict=True) if d.outcome == "committed")
            if process.store.leads:
                process.core.learn(0.0)

    threads = [threading.Thread(target=work, args=(process, seed)) for seed, process in enumerate(crew)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(told) == len(set(told))  # each generation was committed once, whoever got it
    newest = {device: max(g for name, g in told if name == device) for device, _ in told}
    assert crew[0].store.standing.generations() == newest
    crew[0].expect_total_of_the_store()
    crew[0].advance(1000.0)
    expect_head_of(crew[0].core, *(100 * g + ord(device) for device, g in newest.items()))


def test_what_nobody_learned_of_when_the_leader_died_is_in_the_next_ones_total(place: str, crew: list[Process]) -> None:
    leader, member, _ = crew
    member.take(message(member.core, "a", 1, 1), message(member.core, "b", 1, 2))
    leader.advance(0.0)
    member.take(message(member.core, "a", 2, 3))
    leader.store.close()
    member.take(message(member.core, "b", 2, None))
    crew[0] = Process(place, leads=True)
    assert crew[0].core.learn(0.0) is False
    crew[0].expect_total_of_the_store()
    crew[0].advance(100.0)
    expect_head_of(crew[0].core, 3)
    assert [o.what for o in _done(place)] == ["withdraw"]


def _done(place: str) -> list[Order]:
    with read_only(place, KIND) as db:
        return orders(db, "WHERE done_at IS NOT NULL")


def test_a_withdrawal_that_one_took_binds_all(crew: list[Process]) -> None:
    leader, member, other = crew
    member.take(message(member.core, "a", 1, 1))
    assert member.take(message(member.core, "a", 2, None))[0].outcome == "committed"
    for each in (other, leader):
        (refused,) = each.take(message(each.core, "a", 3, 1))
        assert (refused.outcome, refused.cause) == ("rejected", "refused-device")
        (again,) = each.take(message(each.core, "a", 2, None))
        assert again.outcome == "duplicate"
    leader.advance(100.0)
    assert leader.core.standing.present == set()


def test_rows_of_a_forgotten_class_that_several_took_out_are_all_known(place: str, crew: list[Process]) -> None:
    leader, member, other = crew
    give(place, "forget class", "", "me", detail="class-1")
    leader.advance(0.0)
    for process, device in ((member, "a"), (other, "b")):  # of clients that do not heed it
        assert process.take(message(process.core, device, 1, 1))[0].outcome == "committed"
    assert leader.store.standing.classes_taken() == {"class-1": {"a": 1, "b": 1}}
    give(place, "admit class", "", "me", detail="class-1")
    leader.advance(100.0)
    assert leader.store.standing.classes_taken() == {"": {"a": 1, "b": 1}}
    leader.expect_total_of_the_store()


def test_rows_that_two_take_out_at_once_are_both_known(place: str, crew: list[Process]) -> None:
    """Who comes second waits for what the first has written, and adds to it."""
    leader, member, other = crew
    give(place, "forget class", "", "me", detail="class-1")
    leader.advance(0.0)
    tables, based_on = other.store.standing_beside, other.store.changes()
    second = threading.Thread(target=lambda: tables.put([], Counter(), 0.0, {"class-1": {"b": 1}}, based_on))
    with member.store._members.beside_others(None) as db:
        _add_taken(db, {"class-1": {"a": 1}})
        second.start()
        second.join(0.3)
        assert second.is_alive()
    second.join(10)
    assert leader.store.standing.classes_taken() == {"class-1": {"a": 1, "b": 1}}


def test_what_a_forgotten_class_has_changed_is_answered_as_by_one(place: str, crew: list[Process]) -> None:
    """What is held is other bytes under the same generation: who took it, and knew its digest, looks again."""
    leader, member, _ = crew
    sent = message(leader.core, "a", 1, 1)
    for process in (leader, member):
        assert process.take(sent)[0].outcome in ("committed", "duplicate")
    give(place, "forget class", "", "me", detail="class-1")
    leader.advance(0.0)
    for process in (leader, member):
        assert [d.outcome for d in process.take(sent)] == ["late"]


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (1, 1, 0, 0)])
def test_chunks_of_sums_that_different_processes_got_are_one(place: str, order: tuple[int, ...]) -> None:
    with ExitStack() as undo:
        both = [Process(place, leads=leads, method="ffc", width=16) for leads in (True, False)]
        for each in both:
            undo.callback(lambda each=each: each.store.close())
        core = both[0].core
        key = {"run": core.parts.run, "round": 5, "method": "ffc", "bundle": BUNDLE, "extractor": extractor("ffc")}
        rng, name = np.random.default_rng(1), {"run": core.parts.run, "round": 5, "method": "ffc"}
        sums = FeatureGram.of(unit_rows(rng.normal(size=(30, 16))), rng.integers(0, CLASSES, 30), CLASSES)
        payload = encode(Contribution.of(sums, **key, standing="present"), "f64")
        chunks = [encode(chunk) for chunk in split(payload, 1_024, **name)]
        assert len(chunks) >= 2
        made = [d for at, chunk in zip(order, chunks, strict=False) for d in both[at].take(("a", chunk))]
        assert [d.outcome for d in made].count("committed") == 1
        again = [d for at, chunk in zip(order, chunks, strict=False) for d in both[1 - at].take(("a", chunk))]
        assert {d.outcome for d in again} <= {"partial", "duplicate"}
        both[0].expect_total_of_the_store()
        assert both[0].core.standing.generations == {"a": 5}


def test_workers_leave_a_store_to_an_aggregator_that_has_it_for_itself(place: str, crew: list[Process]) -> None:
    """It takes all contributions alone, and would not learn of theirs."""
    leader, member, _ = crew
    leader.store.close()
    why = "got an aggregator without --worker, which has the store for itself"
    with DurableStore(place, BUNDLE, FLEET), pytest.raises(StoreLostError, match=why):
        member.take(message(member.core, "a", 1, 1))
    crew[0] = Process(place, leads=True)
    assert member.take(message(member.core, "a", 1, 1))[0].outcome == "committed"


def test_the_leaders_total_is_what_one_device_sends_whatever_was_before(crew: list[Process]) -> None:
    leader, member, _ = crew
    for generation in range(1, 6):  # of which the leader learns of the last alone
        member.take(message(member.core, "a", generation, generation))
    assert leader.core.learn(0.0)
    assert not leader.core.learn(0.0)
    assert leader.core.standing.total.equal(ExactSum.of(means(5)))


# ── over a broker ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(params=["embedded", "mosquitto"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


def test_sums_stand_with_two_and_go_on_when_who_leads_ends(broker: TestBroker, place: str, tmp_path: Path) -> None:
    sha256 = bundle_file(tmp_path / "f.bundle")
    options = {"method": "ncm", "standing": True, "every": "0.1s", "encoding": "f64", "rounds": None}
    options |= {"calibrate": None, "min_clients": 1}
    crew = [Running(tmp_path / "f.bundle", broker.url, place, **options) for _ in range(2)]
    sent = [
        StandingTalker(broker.url, TEST_FLEET, f"d{i}", lambda n, i=i: unit_means(100 * n + i), pause_s=0.02)
        for i in range(4)
    ]
    heads = lambda each: [event for event in each.told if isinstance(event, HeadMade)]  # noqa: E731
    try:
        for talker in sent:
            talker.start()
        wait(lambda: all(talker.confirmed >= 5 for talker in sent), 60)
        first, second = crew if heads(crew[0]) else crew[::-1]
        assert heads(first)
        assert not heads(second)
        first.stop()
        before = [talker.confirmed for talker in sent]
        wait(lambda: all(t.confirmed > n + 3 for t, n in zip(sent, before, strict=True)) and heads(second), 60)
        for talker in sent:
            talker.holds = True
        wait(lambda: all(talker.confirmed == talker.generation for talker in sent))
        true = [ExactSum.of(t.sent[t.generation, "ncm"]) for t in sent]  # type: ignore[attr-defined]
        total = functools.reduce(ExactSum.add, true)
        wait(lambda: heads(second)[-1].samples == total.counts.sum() and _head_is_of(place, sha256, total))
    finally:
        for talker in sent:
            talker.stop()
        for each in crew:
            each.stop()
    decided = [sum(type(event).__name__ == "Decided" for event in each.told) for each in crew]
    assert min(decided) > 0
    assert [talker.overtaken for talker in sent] == [0] * 4


def _head_is_of(place: str, sha256: bytes, total: ExactSum) -> bool:
    """Whether the global state in the store is, bit for bit, what one aggregator makes of this total."""
    found, hyper = method("ncm"), method("ncm").resolve({})
    ((kind, expected),) = found.next_rows({}, total.statistic(found.statistic, 4), hyper).items()
    with read_only(place, KIND) as db:
        state = newest_state(db, bytes(4))
    return np.array_equal(state.rows[kind].rows, expected.rows)
