"""Several processes on one store: each contribution counts once, whoever takes it and whoever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from aggregator_samples import BUNDLE, bundle_file, contribution, extractor, manifest, means
from aggregator_server_samples import wait
from brokers import TestBroker, make_broker
from commands import ROOT, one_error_line, run
from postgres_server import need_postgres, own_server
from talker import Talker
from threadpoolctl import threadpool_info, threadpool_limits

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.database import PostgresPlace, place_of
from protofleet.aggregator.database import postgres_members as members
from protofleet.aggregator.database.postgres_connection import connect
from protofleet.aggregator.database.postgres_members import Leader, Member, StaleError
from protofleet.aggregator.monitoring.events import LinkUp, RoundClosed, StoreAway
from protofleet.aggregator.rounds.round_machine import Closed, Opened
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings, Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.aggregator.workers.leadership import Leadership
from protofleet.aggregator.workers.shared_rounds import Sharing
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.contract.errors import InUseError, LedError, ProtofleetError, StoreAwayError, StoreLostError, UsageError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.chunks import bitmap, split
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution, Status

FLEET, LIMIT_BYTES = "test", 1_800
Pair = tuple[SharedStore, SharedStore]


@pytest.fixture
def place() -> str:
    return need_postgres().new_place()


@pytest.fixture
def pair(place: str) -> Iterator[Pair]:
    """Who leads, and another."""
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True) as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False) as member,
    ):
        yield leader, member


@pytest.fixture(params=["embedded", "mosquitto"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker(request.param, tmp_path)
    made.start()
    yield made
    made.stop()


class Running:
    """One of several processes, on a thread of this one."""

    def __init__(
        self,
        bundle: Path,
        url: str,
        place: str,
        *,
        sign: str | None = None,
        others: tuple[Path, ...] = (),
        **options: Any,
    ) -> None:
        self.told: list[object] = []
        self.summary: dict[str, Any] = {}
        self.error: ProtofleetError | None = None
        named = {"bundle": tuple(map(str, (bundle, *others))), "broker": url, "store": place, "fleet": FLEET}
        asked = {"rounds": 3, "calibrate": False, "min_clients": 6, "sign": sign, **options}
        self.service = Service(AggregateSettings(**named, **asked, worker=True))
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


# ── the store ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _accepted(device: str, payload: bytes = b"payload") -> Accepted:
    return Accepted(1, "fedproto", device, payload, len(payload))


def test_two_commit_the_same_and_it_counts_once(pair: Pair) -> None:
    leader, member = pair
    leader.open_round(1, "fedproto", 0, 0.0)
    leader.based_on, member.based_on = leader.changes(), member.changes()
    assert leader.commit([_accepted("b"), _accepted("a")], {(1, "late"): 1}, [(1, "z")]) == set()
    assert member.commit([_accepted("c"), _accepted("a", b"again")], {(1, "late"): 2}, [(1, "z")]) == {
        (1, "fedproto", "a")
    }
    assert list(leader.contributions(1, "fedproto")) == [b"payload"] * 3
    assert sorted(member.taken(1, "fedproto")[0]) == ["a", "b", "c"]
    assert (leader.tallies(), leader.refusals(1)) == ({(1, "late"): 3}, ["z"])


def test_what_was_decided_on_what_is_no_longer_so_is_not_written(pair: Pair) -> None:
    leader, member = pair
    changing = [
        lambda: leader.open_round(1, "fedproto", 0, 0.0),
        lambda: leader.refused_devices.refuse("a", 1.0, "it was removed"),
        lambda: leader.refused_devices.admit("a"),
        lambda: leader.enrolment.enrol("a", bytes(32), 1.0),
        lambda: leader.enrolment.revoke("a", 1.0),
        lambda: leader.begin_new_run(),
        lambda: leader.close_round(1, 1.0, 0, leader.state()),
    ]
    for change in changing:
        member.based_on = member.changes()
        change()
        with pytest.raises(StaleError):
            member.commit([_accepted("a")], {})
    assert not leader.holds(1, "fedproto", "a")
    member.based_on = member.changes()
    assert member.commit([_accepted("a")], {}) == set()


def test_workers_do_not_wait_for_each_other(place: str) -> None:
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True),
        SharedStore(place, BUNDLE, FLEET, leads=False) as one,
        SharedStore(place, BUNDLE, FLEET, leads=False) as other,
    ):
        commits = threading.Thread(target=lambda: other.commit([_accepted("a")], {}))
        with one._members.beside_others(None):
            commits.start()
            commits.join(10)
            assert not commits.is_alive()


def test_a_worker_leads_once_nobody_does(place: str) -> None:
    crew = Leadership((place, BUNDLE, FLEET), (), Settings(), threading.Event())
    leader = SharedStore(place, BUNDLE, FLEET, leads=True, settings=crew.settings)

    class Works:
        is_finished = False

        def run(self) -> str:
            leader.close()
            return "nobody leads"

    assert crew.serve(lambda store: {"epoch": store.epoch}, lambda _: Works(), dict) == {"epoch": 2}  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("options", ["", "%20-cdefault_transaction_isolation%3Dserializable"])
def test_nobody_commits_while_the_leader_is_alone(place: str, options: str) -> None:
    """What it merges is what is committed: a contribution is in the result, or was never confirmed; whatever a
    transaction sees that is begun without saying so."""
    place += options
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True) as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False) as member,
    ):
        done: list[str] = []

        def commit() -> None:
            with suppress(StaleError):
                member.commit([_accepted("a")], {})
                done.append("committed")

        trying = threading.Thread(target=commit)
        with leader.alone():
            trying.start()
            time.sleep(0.3)
            assert done == []
            leader.open_round(1, "fedproto", 0, 0.0)
        trying.join(10)
        assert done == []  # and it was decided before that round


def test_what_a_round_is_closed_with_is_settled_in_one_piece(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who commits while the leader records that the round takes no more waits, and was too late then."""
    leader, member = pair
    core = _core(leader)
    core.status("a", encode(Status(True, bytes(8), 1)), 0.0)
    assert isinstance(core.advance(0.0, 0.0), Opened)
    member.based_on, told = member.changes(), list[object]()
    member.commit([_accepted("a", encode(contribution(wide(), run=leader.run), "f64"))], {})
    core.learn(0.0)

    def late() -> None:
        try:
            told.append(member.commit([_accepted("b")], {}))
        except StaleError:
            told.append("too late")

    trying, begin = threading.Thread(target=late), leader.begin_close

    def begin_close(number: int) -> None:
        trying.start()
        trying.join(0.3)
        assert told == []
        begin(number)

    monkeypatch.setattr(leader, "begin_close", begin_close)
    core.rounds.steer("close-round")
    wait(lambda: isinstance(core.advance(1.0, 1.0), Closed))
    trying.join(10)
    assert (told, leader.taken(1, "fedproto")[0]) == (["too late"], ["a"])


def test_a_leader_that_was_followed_writes_nothing(place: str) -> None:
    where = place_of(place)
    with closing(Leader(where, KIND)) as old:  # type: ignore[arg-type]
        with pytest.raises(InUseError):
            Leader(where, KIND)  # type: ignore[arg-type]
        old.connection.execute("SELECT pg_advisory_unlock_all()")  # as behind a pooler, whose sessions are anybody's
        with closing(Leader(where, KIND)) as new:  # type: ignore[arg-type]
            assert new.epoch == old.epoch + 1
            for write in (lambda: old.beat(), lambda: _write(old), lambda: _beside(old)):
                with pytest.raises(LedError, match=f"expected epoch {old.epoch}, got epoch {new.epoch}"):
                    write()
            new.beat()


def _write(leader: Leader) -> None:
    with leader.transaction() as db:
        db.execute("INSERT INTO meta VALUES ('x', ?)", (b"y",))


def _beside(leader: Leader) -> None:
    with leader.beside_others(None) as db:
        db.execute("INSERT INTO meta VALUES ('x', ?)", (b"y",))


def test_a_leader_that_says_nothing_is_followed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = place_of(place)
    monkeypatch.setattr(members, "SILENT_S", 0.5)
    monkeypatch.setattr(members, "BUSY_S", 0.5)
    for busy in (False, True):
        with closing(_leader(where)) as stopped, closing(Member(where, KIND)) as member:  # type: ignore[arg-type]
            stopped.beat()
            assert not member.may_lead()
            if busy:  # in the middle of a transaction
                stopped.connection.link.execute("BEGIN")
                stopped.connection.execute("SELECT 1")
            assert not member.may_lead()
            wait(member.may_lead)
            with closing(_leader(where)), pytest.raises(StoreLostError):
                stopped.beat()


def _leader(where: object, within_s: float = 60.0) -> Leader:
    """One that leads: a session that was closed keeps its lock until the server has noticed."""
    until = time.monotonic() + within_s
    while True:
        try:
            return Leader(where, KIND)  # type: ignore[arg-type]
        except InUseError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def test_a_leader_in_the_middle_of_something_has_longer(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing meanwhile. A worker has a quarter of a minute there: the leader waits for it."""
    monkeypatch.setattr(members, "SILENT_S", 0.0)
    where = place_of(place)
    with closing(Leader(where, KIND)) as leader, closing(Member(where, KIND)) as member:  # type: ignore[arg-type]
        with leader.alone():
            for _ in range(2):
                time.sleep(0.05)
                assert not member.may_lead()
            leader.changed()
        assert leader.changes() == member.changes()
        shown = "SHOW idle_in_transaction_session_timeout"
        assert member.connection.execute(shown).fetchone() == ("15s",)
        assert leader.connection.execute(shown).fetchone() == ("2min",)


def test_one_aggregator_alone_is_never_ended(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "SILENT_S", 0.0)
    where = place_of(place)
    leader = Leader(where, KIND)  # type: ignore[arg-type]
    with closing(Member(where, KIND)) as member:  # type: ignore[arg-type]
        leader.close()
        with DurableStore(place, BUNDLE, FLEET) as alone:
            for _ in range(3):
                time.sleep(0.05)
                assert not member.may_lead()
            assert alone.last_round() == 0


def test_each_computes_on_one_thread(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several processes would wait for each other."""

    def threads(_: object = None) -> dict[str, Any]:
        return {"threads": {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}}

    def told_by_leader() -> dict[str, Any]:
        until = time.monotonic() + 60.0
        while True:  # a session that was closed keeps its lock until the server has noticed
            crew = Leadership((place, BUNDLE, FLEET), (), Settings(), threading.Event())
            try:
                return crew.serve(threads, lambda _: pytest.fail("it does not lead"), threads)
            except pytest.fail.Exception:
                if time.monotonic() > until:
                    raise
                time.sleep(0.05)

    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    with threadpool_limits(2, user_api="blas"):
        assert told_by_leader() == {"threads": {1}}
        assert threads() == {"threads": {2}}  # a program that goes on
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        assert told_by_leader() == {"threads": {2}}


@pytest.mark.parametrize("name", ["ncm", "fedcof"])
def test_rounds_of_several_come_to_the_bits_of_one(place: str, tmp_path: Path, name: str) -> None:
    """What devices send comes to one of three processes each, in any order, and to one aggregator alone."""
    rng, settings = np.random.default_rng(5), Settings(rounds=2, method=name, calibrate=False, min_clients=6)
    kind, devices = method(name).statistic, [f"d{index}" for index in range(6)]
    with (
        DurableStore(tmp_path / "s", BUNDLE, FLEET) as file,
        SharedStore(place, BUNDLE, FLEET, leads=True) as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False) as second,
        SharedStore(place, BUNDLE, FLEET, leads=False) as third,
    ):
        one = rounds_of(file, manifest(), BUNDLE, settings, now=0.0)
        several = rounds_of(leader, manifest(), BUNDLE, settings, now=0.0)
        for core in (one, several):
            for device in devices:
                core.status(device, encode(Status(True, device.encode().ljust(8), 1)), 0.0)
            assert isinstance(core.advance(0.0, 0.0), Opened)
        for round in (1, 2):
            crew = [Sharing(several, leader)]
            for store in (second, third):
                store.based_on = store.changes()
                crew.append(Sharing(rounds_of(store, manifest(), BUNDLE, settings, now=0.0), store))
            for number, at in enumerate(rng.permutation(6)):
                z, y = unit_rows(rng.normal(size=(40, 4))), rng.integers(0, 3, 40)
                made, key = kind.of(z, y, 3), {"round": round, "method": name, "extractor": extractor(name)}  # type: ignore[attr-defined]
                for core, take in (
                    (one, one.take),
                    (several, (crew[0].take_as_leader, *(c.take for c in crew[1:]))[number % 3]),
                ):
                    payload = encode(contribution(made, run=core.parts.run, **key), "f32")  # type: ignore[arg-type]
                    assert [d.outcome for d in take([(devices[at], payload)], 1.0)] == ["committed"]
            crew[0].learn(float(round))
            for core in (one, several):
                wait(lambda core=core, now=float(round): isinstance(core.advance(now, 1.0), Closed))
                core.advance(float(round), 1.0)
            assert several.state.version == one.state.version == round
            for sort, rows in one.state.rows.items():
                assert several.state.rows[sort].rows.tobytes() == rows.rows.tobytes()
                np.testing.assert_array_equal(several.state.rows[sort].classes, rows.classes)


# ── chunks ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def wide() -> ClassMeans:
    return ClassMeans.from_means(np.random.default_rng(1).normal(size=(3, 400)), [10, 11, 12])


def _core(store: SharedStore) -> RoundCoordinator:
    store.based_on = store.changes()
    settings = Settings(rounds=1, calibrate=False, encoding="f64", limit_bytes=LIMIT_BYTES)
    return rounds_of(store, manifest(width=400), BUNDLE, settings, now=0.0)


def opened(pair: Pair) -> list[Sharing]:
    """Both take part in a round that is open, and a device is there."""
    core = _core(pair[0])
    core.status("a", encode(Status(True, bytes(8), 1)), 0.0)
    assert core.advance(0.0, 0.0) is not None
    return [Sharing(_core(store), store) for store in pair]


@pytest.mark.parametrize("order", [(0, 1, 0, 1, 1, 0), (1, 0, 0, 0, 0, 1), (0, 0, 1, 1, 0, 1)])
def test_chunks_that_different_processes_got_are_one_contribution(pair: Pair, order: tuple[int, ...]) -> None:
    leader, _ = pair
    both = opened(pair)
    payload = encode(contribution(wide(), run=leader.run), "f64")
    chunks = list(map(encode, split(payload, LIMIT_BYTES, run=leader.run, round=1, method="fedproto")))
    assert len(chunks) >= 4
    made = []
    for index, chunk in enumerate(chunks):
        made += both[order[index]].take([("a", chunk)], 1.0)
    assert [d.outcome for d in made].count("committed") == 1
    assert "need-chunks" not in [d.outcome for d in made]  # the others had them
    assert list(leader.contributions(1, "fedproto")) == [payload]
    again = []
    for index, chunk in enumerate(chunks):  # all of it once more, the other way round
        again += both[1 - order[index]].take([("a", chunk)], 2.0)
    assert {d.outcome for d in again} == {"partial", "duplicate"}
    assert list(leader.contributions(1, "fedproto")) == [payload]
    assert leader._db.execute("SELECT count(*) FROM protofleet_chunk").fetchone() == (0,)


def test_nobody_is_asked_for_chunks_of_what_another_process_has_taken(pair: Pair) -> None:
    leader, _ = pair
    both = opened(pair)
    payload = encode(contribution(wide(), run=leader.run), "f64")
    first, *rest = map(encode, split(payload, LIMIT_BYTES, run=leader.run, round=1, method="fedproto"))
    both[1].take([("a", first)], 1.0)
    made = both[0].take([("a", each) for each in rest], 1.0)
    assert "committed" in [d.outcome for d in made]
    assert both[1].stalled(7.0) == []


def test_nothing_stays_of_chunks_of_a_device_that_is_forgotten_or_of_a_round_that_is_over(place: str) -> None:
    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader:
        core = _core(leader)
        for device in "ab":
            core.status(device, encode(Status(True, bytes(8), 1)), 0.0)
        core.advance(0.0, 0.0)
        sharing = Sharing(core, leader)
        payload = encode(contribution(wide(), run=leader.run), "f64")
        first, *_ = map(encode, split(payload, LIMIT_BYTES, run=leader.run, round=1, method="fedproto"))
        sharing.take([("a", first), ("b", first)], 1.0)
        left = "SELECT device FROM protofleet_chunk ORDER BY device"
        assert leader._db.execute(left).fetchall() == [("a",), ("b",)]
        give(place, "forget", "a", "me")
        while core.advance(2.0, 2.0) is not None:
            pass
        assert leader._db.execute(left).fetchall() == [("b",)]
        leader.drop_chunks((), "", 2)
        assert leader._db.execute(left).fetchall() == []


def test_a_device_is_asked_for_chunks_that_nobody_has(pair: Pair) -> None:
    leader, _ = pair
    both = opened(pair)
    payload = encode(contribution(wide(), run=leader.run), "f64")
    first, second, *rest = map(encode, split(payload, LIMIT_BYTES, run=leader.run, round=1, method="fedproto"))
    both[0].take([("a", first)], 1.0)
    both[1].take([("a", each) for each in rest], 1.0)
    assert both[1].stalled(2.0) == []
    (asked,) = both[1].stalled(7.0)
    assert asked.receipt is not None
    assert asked.receipt.missing[0] & 0b11 == 0b10  # the first one is there, with the other
    (made,) = (d for d in both[0].take([("a", second)], 8.0) if d.outcome != "partial")
    assert made.outcome == "committed"


@pytest.mark.parametrize("again", [(0, 0, 0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1, 1, 1), (0, 1, 0, 1, 1, 0, 0, 1)])
def test_a_forged_chunk_costs_one_resending_whoever_hears_it(place: str, again: tuple[int, ...]) -> None:
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True) as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False) as member,
    ):
        core = _core(leader)
        core.status("a", encode(Status(True, bytes(8), 1)), 0.0)
        assert core.advance(0.0, 0.0) is not None
        both = [Sharing(_core(store), store) for store in (leader, member)]
        payload = encode(contribution(wide(), run=leader.run), "f64")
        chunks = split(payload, LIMIT_BYTES, run=leader.run, round=1, method="fedproto")
        forged = replace(chunks[1], data=bytes(len(chunks[1].data)))
        made = both[0].take([("a", encode(forged))], 1.0)
        for chunk in chunks[:1] + chunks[2:]:
            made += both[0].take([("a", encode(chunk))], 1.0)
        (asked,) = (d for d in made if d.outcome != "partial")
        assert asked.receipt is not None
        assert (asked.outcome, asked.receipt.missing) == ("need-chunks", bitmap(set(range(len(chunks))), len(chunks)))
        made = []
        for index, chunk in zip(again, chunks, strict=False):
            made += both[index].take([("a", encode(chunk))], 2.0)
        assert [d.outcome for d in made].count("committed") == 1, [d.outcome for d in made]
        assert list(leader.contributions(1, "fedproto")) == [payload]


# ── what cannot be ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_several_cannot_do_is_one_line(place: str, tmp_path: Path) -> None:
    bundle_file(tmp_path / "f.bundle")
    words = ("aggregate", "--worker", "--bundle", tmp_path / "f.bundle", "--broker", "mqtt://127.0.0.1:1")
    line = one_error_line(run(*words, "--store", tmp_path / "s"))
    assert "--worker, expected --store postgresql://…, which several can work on" in line
    assert not (tmp_path / "s").exists()


def test_a_leader_decides_again_when_a_worker_has_enrolled_somebody_meanwhile(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader, member = pair
    core = _core(leader)
    for device in "ab":
        core.status(device, encode(Status(True, bytes(8), 1)), 0.0)
    assert core.advance(0.0, 0.0) is not None
    leader.based_on = leader.changes()
    commit, tries = leader.commit, list[int]()

    def late(*decided: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            member.enrolment.enrol("a", bytes(32), 1.0)
        return commit(*decided)

    monkeypatch.setattr(leader, "commit", late)
    payload = encode(contribution(ClassMeans.from_means(np.ones((3, 400)), [1, 1, 1]), run=leader.run), "f64")
    made = Sharing(core, leader).take_as_leader([("a", payload), ("b", payload)], 1.0)
    assert {d.device: d.outcome for d in made} == {"a": "rejected", "b": "committed"}
    assert leader.taken(1, "fedproto")[0] == ["b"]


def test_none_works_beside_an_aggregator_that_is_alone(place: str) -> None:
    """It would take what the other knows nothing of."""
    alone = pytest.raises(StoreLostError, match="got an aggregator without --worker, which has the store for itself")
    leader = SharedStore(place, BUNDLE, FLEET, leads=True)
    with SharedStore(place, BUNDLE, FLEET, leads=False) as member:
        member.check_version()
        leader.close()
        with DurableStore(place, BUNDLE, FLEET):
            assert member.changes() != member.based_on  # so it looks
            with alone:
                member.check_version()
        member.check_version()  # the other is gone


def test_a_worker_of_other_options_or_another_release_is_one_line(
    broker: TestBroker, place: str, tmp_path: Path
) -> None:
    bundle_file(tmp_path / "f.bundle")
    words = ("aggregate", "--worker", "--bundle", tmp_path / "f.bundle", "--broker", broker.url, "--fleet", FLEET)
    leading = Running(tmp_path / "f.bundle", broker.url, place)
    try:
        wait(lambda: any(isinstance(event, LinkUp) for event in leading.told))
        line = one_error_line(run(*words, "--store", place, "--quiet", "--min-samples", "7"))
        assert "--worker, expected the options of the process that leads, got others" in line
        name = place.rsplit("%3D", 1)[1]
        with need_postgres().connect() as db:
            db.execute(f"UPDATE {name}.protofleet SET version = version + 1, changes = changes + 1")
        line = one_error_line(run(*words, "--store", place, "--quiet"))
        assert "of the release that leads, try the same release of Protofleet for all of them" in line
    finally:
        leading.stop()


# ── settings that others brought into force ─────────────────────────────────────────────────────────────────────────


def _woken(place: str) -> SharedStore:
    """A worker's store; since it was opened another process with other settings leads, and it has read what changed."""
    kind: dict[str, Any] = {"path": place, "bundle": BUNDLE, "fleet": FLEET}
    leader = SharedStore(**kind, leads=True, settings="yesterday's")
    member = SharedStore(**kind, leads=False, settings="yesterday's")
    member.enrolment.invite("b", b"token", 1e12)
    leader.close()
    newer = _next_leader(kind)
    newer.open_round(1, "fedproto", 0, 0.0)
    member._newer = newer  # type: ignore[attr-defined]
    member.based_on = member.changes()
    return member


def _next_leader(kind: dict[str, Any]) -> SharedStore:
    """The server may take a moment to give back what a closed connection had."""
    until = time.monotonic() + 60
    while True:
        try:
            return SharedStore(**kind, leads=True, settings="today's")
        except InUseError:
            if time.monotonic() >= until:
                raise
            time.sleep(0.02)


WRITES: dict[str, Callable[[SharedStore], object]] = {
    "a contribution": lambda s: s.commit([_accepted("a")], {}),
    "a refusal": lambda s: s.commit([], {(1, "rejected"): 1}, [(1, "a")]),
    "a share": lambda s: s.commit(
        [replace(_accepted("a"), message=cast("Contribution", SimpleNamespace(seed=bytes(32))))], {}
    ),
    "chunks": lambda s: s.put_chunks(
        ("a", chunk, b"piece")
        for chunk in split(encode(contribution(wide()), "f64"), LIMIT_BYTES, run=s.run, round=1, method="fedproto")
    ),
    "sums that stand": lambda s: s.standing_beside.put(
        [Stands("a", 1, b"payload", 7)], {}, 1.0, {}, s.based_on
    ),
    "a withdrawal": lambda s: s.standing_beside.put([Stands("a", 1, None, 7)], {}, 1.0, {}, s.based_on),
    "a device by its token": lambda s: s.enrolment.enrol("b", bytes(32), 1.0, by_token=True),
}  # fmt: skip


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_nothing_is_committed_by_settings_that_are_no_longer_in_force(
    place: str, write: Callable[[SharedStore], object]
) -> None:
    member = _woken(place)
    with closing(member), closing(member._newer):  # type: ignore[attr-defined]
        before = _rows_of(place)
        with pytest.raises(UsageError, match="--worker, expected the options of the process that leads, got others"):
            write(member)
        assert _rows_of(place) == before
        with pytest.raises(UsageError, match="--worker, expected the options of the process that leads, got others"):
            member.check_version()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_by_those_that_are_it_is(place: str, write: Callable[[SharedStore], object]) -> None:
    member = _woken(place)
    with closing(member), closing(member._newer):  # type: ignore[attr-defined]
        member._members.settings = "today's"
        before = _rows_of(place)
        write(member)
        assert _rows_of(place) != before


def _rows_of(place: str) -> dict[str, list[tuple[str]]]:
    server, schema = need_postgres(), place.rsplit("%3D", 1)[1]
    with server.connect() as db:
        names = db.execute("SELECT tablename FROM pg_tables WHERE schemaname = %s", (schema,)).fetchall()
        return {
            name: sorted(db.execute(f"SELECT row::text FROM {schema}.{name} AS row").fetchall()) for (name,) in names
        }


def test_who_has_worked_by_other_settings_does_not_lead_by_them(place: str) -> None:
    """It was stopped while another began to lead and ended: what that one brought into force is newer."""
    whose, words = (place, BUNDLE, FLEET), "expected the options of the process that leads, got others"
    crew = Leadership(whose, (), Settings(), threading.Event())
    first = SharedStore(*whose, leads=True, settings=crew.settings)

    class Works:
        is_finished = False

        def run(self) -> str:
            first.close()
            Leadership(whose, (), Settings(max_samples=7), threading.Event()).serve(
                lambda _: {}, lambda _: Works(), dict
            )  # type: ignore[arg-type, return-value]
            return "nobody leads"

    with pytest.raises(UsageError, match=words):
        crew.serve(lambda _: {}, lambda _: Works(), dict)  # type: ignore[arg-type, return-value]
    started = Leadership(whose, (), Settings(), threading.Event())
    assert started.serve(lambda _: {"leads": True}, lambda _: Works(), dict) == {"leads": True}  # type: ignore[arg-type, return-value]


def test_which_bundles_are_extended_is_a_setting_too_in_whatever_order_they_are_named() -> None:
    whose, one, other = ("postgresql://h/d", BUNDLE, FLEET), bytes(32), b"1" * 32
    digests = [
        Leadership(whose, extends, Settings(), threading.Event()).settings
        for extends in ((), (one, other), (other, one))
    ]
    assert (digests[0] == digests[1], digests[1] == digests[2]) == (False, True)


def test_an_aggregator_alone_leaves_no_settings_in_force(place: str) -> None:
    """Who has slept through its life decided by those of before it."""
    kind: dict[str, Any] = {"path": place, "bundle": BUNDLE, "fleet": FLEET, "settings": "yesterday's"}
    leader = SharedStore(**kind, leads=True)
    with SharedStore(**kind, leads=False) as member:
        leader.close()
        DurableStore(place, BUNDLE, FLEET).close()
        member.based_on = member.changes()
        with pytest.raises(StoreLostError, match="got an aggregator without --worker"):
            member.commit([_accepted("a")], {})


def test_a_store_from_before_settings_were_stated_is_taken_up(place: str) -> None:
    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader:
        leader._db.execute("ALTER TABLE protofleet DROP COLUMN settings")
    with (
        SharedStore(place, BUNDLE, FLEET, leads=True, settings="today's") as leader,
        SharedStore(place, BUNDLE, FLEET, leads=False, settings="today's") as member,
    ):
        leader.open_round(1, "fedproto", 0, 0.0)
        member.based_on = member.changes()
        assert member.commit([_accepted("a")], {}) == set()


# ── a server that is not there yet ──────────────────────────────────────────────────────────────────────────────────


def test_a_worker_waits_for_a_server_that_was_never_there(tmp_path: Path) -> None:
    bundle_file(tmp_path / "f.bundle")
    broker = make_broker("embedded", tmp_path)
    broker.start()
    with own_server() as server:
        place = server.new_place()
        server.kill()
        waits = Running(tmp_path / "f.bundle", broker.url, place)
        try:
            wait(lambda: any(isinstance(event, StoreAway) for event in waits.told))
            server.start()
            wait(lambda: any(isinstance(event, LinkUp) for event in waits.told))
        finally:
            waits.stop()
            broker.stop()


def test_a_worker_that_waits_for_a_server_says_so_and_ends_when_it_is_told_to(tmp_path: Path) -> None:
    bundle_file(tmp_path / "f.bundle")
    words = ["aggregate", "--worker", "--bundle", tmp_path / "f.bundle", "--broker", "mqtt://127.0.0.1:1"]
    words += ["--store", "postgresql://protofleet@127.0.0.1:1/pets"]
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    try:
        wait(lambda: "store away" in (tmp_path / "log").read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    finally:
        process.kill()
        process.wait()
    impatient = one_error_line(run(*words, "--quiet", "--patience", "0.1"))
    assert "expected a PostgreSQL server that lets us in" in impatient


def test_a_server_that_refuses_a_worker_is_not_waited_for(tmp_path: Path) -> None:
    """Whatever language it says that in: libpq knows that it speaks to us and takes others."""
    bundle_file(tmp_path / "f.bundle")
    words = ("aggregate", "--worker", "--bundle", tmp_path / "f.bundle", "--broker", "mqtt://127.0.0.1:1", "--quiet")
    with own_server() as server:
        rules = server.folder / "data" / "pg_hba.conf"
        rules.write_text("local all guarded scram-sha-256\n" + rules.read_text())
        with server.connect() as db:
            db.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
            db.execute("SELECT pg_reload_conf()")
        wrong = server.url().replace("protofleet@", "guarded:wrong@")
        wait(lambda: isinstance(_refusal(wrong), StoreLostError))  # the rules are read
        for url in (
            wrong,
            server.url().replace("protofleet@", "nobody_we_know@"),
            server.url().replace("/postgres?", "/none?"),
        ):
            refused = one_error_line(run(*words, "--store", url))
            assert "expected a PostgreSQL server that lets us in" in refused
            assert "wrong@" not in refused
            assert not isinstance(_refusal(url), StoreAwayError)


def test_a_server_that_stops_or_starts_lets_nobody_in_and_is_waited_for() -> None:
    with own_server() as server:
        assert _refusal(server.url()) is None
        with server.connect() as db:
            pid = db.execute("SELECT pg_backend_pid()").fetchone()
            assert server._process is not None
            server._process.send_signal(signal.SIGTERM)  # it waits for who is connected, and takes nobody else
            wait(lambda: _refusal(server.url()) is not None)
            assert isinstance(_refusal(server.url()), StoreAwayError)
            assert db.execute("SELECT pg_backend_pid()").fetchone() == pid
        server._process.wait(timeout=60)
        assert isinstance(_refusal(server.url()), StoreAwayError)


def _refusal(url: str) -> ProtofleetError | None:
    """Why there is no connection; None where there is one."""
    where = place_of(url)
    assert isinstance(where, PostgresPlace)
    try:
        connect(where, KIND).link.close()
    except ProtofleetError as error:
        return error
    return None
