"""What an aggregator remembers of each device: what counts as a sign of life, what is kept, and what is forgotten."""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aggregator_samples import BUNDLE, contribution, manifest
from commands import run
from hypothesis import given, settings
from hypothesis import strategies as st
from postgres_server import Places

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.database import place_of
from protofleet.aggregator.monitoring import device_table
from protofleet.aggregator.monitoring.device_table import (
    COUNT_S,
    EVENTS_A_SECOND,
    EVENTS_AT_ONCE,
    KEEP_S,
    ONES_AT_ONCE,
    SETTLE_S,
    DeviceEvent,
    DeviceTable,
    device_events,
    known_devices,
)
from protofleet.aggregator.overview.fleet_state import _REASONS, RUNBOOK, read_state
from protofleet.aggregator.parts.bundle_handout import Handout
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status
from protofleet.contract.wire.rollout_messages import Request

WORDS = (("Means", ""), ("Look at", " at"), ("Do", ""), ("Not", ""))  # of each part of the runbook
FIRST, SECOND = b"process1", b"process2"
VERSIONS = {"protofleet": "0.2.0", "python": "3.12", "bundle": "3 0123abcd", "policy": "round 3: method ffc"}
FIGURES = {"rss_bytes": 5e7, "train_step_ms": 12.0, "profile_train_step_ms": 6.0, "drift_distance": 1.0}
BIRTH = Status(True, FIRST, 4, "a board", VERSIONS, FIGURES)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments are given here; how long a busy disk took to write must not postpone what is due by them."""
    monkeypatch.setattr(device_table, "_REST", 0.0)
    monkeypatch.setattr(device_table, "_COUNT_REST", 0.0)


@pytest.fixture
def store(places: Places) -> DurableStore:
    with DurableStore(places("s.sqlite"), BUNDLE, "fleet") as made:
        yield made


def kept(store: DurableStore, now: float, at: float = 0.0) -> DeviceTable:
    """What a process that begins now reads, after everything that is due by `now` was written."""
    store.devices.keep(now, at)
    return DeviceTable(store._file)


def log(store: DurableStore, device: str | None = None) -> list[tuple[str, str, str]]:
    with store.snapshot() as db:
        return [(event.device, event.what, event.detail) for event in reversed(device_events(db, device, 1_000))]


def test_a_birth_is_kept_with_what_it_says(store: DurableStore) -> None:
    store.devices.status("a", BIRTH, 300, 50.0)
    row = kept(store, 0.0).get("a")
    assert row is not None
    assert (row.first_seen, row.online, row.since, row.heard_at) == (50.0, True, 50.0, 50.0)
    assert (row.boot, row.board, row.bundle, row.up_bytes) == (4, "a board", "3 0123abcd", 300)
    assert row.software == {"protofleet": "0.2.0", "python": "3.12"}
    assert row.figures == {"rss_bytes": 5e7, "train_step_ms": 12.0, "profile_train_step_ms": 6.0}
    assert not row.confirmed  # by the process that has just begun
    assert log(store) == [("a", "first seen", "")]


def test_what_a_broker_retained_is_no_sign_of_life(store: DurableStore) -> None:
    store.devices.status("a", BIRTH, 300, 50.0, is_news=False)
    row = kept(store, 0.0).get("a")
    assert row is not None
    assert (row.online, row.confirmed, row.heard_at, row.up_bytes, row.board) == (True, False, None, 0, "a board")
    store.devices.decided("a", 10, 60.0)
    row = kept(store, COUNT_S).get("a")
    assert row is not None
    assert (row.heard_at, row.up_bytes) == (60.0, 10)
    assert store.devices.get("a").confirmed  # type: ignore[union-attr]


def test_a_device_that_only_fetches_a_bundle_lives(store: DurableStore) -> None:
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, calibrate=False), now=0.0)
    core.status("a", encode(BIRTH), 0.0, is_news=False)
    nothing: Any = None
    handout = Handout(core.parts, nothing, nothing, "fleet", lambda event: None, nothing)
    request = encode(Request(store.run, bytes(8), 0, 1_000))
    assert handout.take("a", request)
    row = store.devices.get("a")
    assert row is not None
    assert (row.confirmed, row.up_bytes) == (True, len(request))
    assert row.heard_at == pytest.approx(time.time(), abs=60)


def test_a_restarted_aggregator_and_a_restarted_broker_hear_nobody_by_what_is_retained(store: DurableStore) -> None:
    for name in ("alive", "killed with the broker", "retained"):
        store.devices.status(name, BIRTH, 1, 50.0)
    table = kept(store, 0.0)
    table.connected(10.0)
    table.status("retained", BIRTH, 1, 70.0, is_news=False)
    table.status("alive", BIRTH, 1, 71.0)
    table.keep(10.0 + SETTLE_S - 1, 80.0)
    assert [row.online for row in known_devices(store._file.connection).values()] == [True, True, True]
    table.keep(10.0 + SETTLE_S, 90.0)
    rows = known_devices(store._file.connection)
    assert {name: (row.online, row.confirmed, row.heard_at) for name, row in rows.items()} == {
        "alive": (True, True, 71.0),
        "killed with the broker": (False, False, 50.0),
        "retained": (True, False, 50.0),
    }
    assert log(store)[-1] == ("killed with the broker", "gone", "the broker knows nothing of it any more")
    table.connected(200.0)  # the same process, another connection
    assert not any(row.confirmed for row in table._rows.values())


def test_after_a_restart_the_store_says_of_nobody_that_it_was_heard(store: DurableStore) -> None:
    """Who was switched off meanwhile would be shown as online, until the broker has had its time."""
    store.devices.status("a", Status(True, b"instance", 1), 1, 1.0)
    store.devices.keep(1.0, 1.0)
    assert known_devices(store._db)["a"].confirmed
    DeviceTable(store._file).keep(2.0, 2.0)
    row = known_devices(store._db)["a"]
    assert row.online
    assert not row.confirmed


def test_a_package_that_is_no_longer_told_is_named(store: DurableStore) -> None:
    for versions in ({"protofleet": "0.2.0", "numpy": "2"}, {"protofleet": "0.2.0"}):
        store.devices.status("a", Status(True, b"instance", 1, "", versions), 1, 1.0)
    assert [(event.what, event.detail) for event in store.devices._events][1:] == [("software", "numpy no more")]


def test_a_death_counts_for_its_own_process_only(store: DurableStore) -> None:
    table = store.devices
    table.status("a", BIRTH, 1, 1.0)
    table.status("a", Status(True, SECOND, 5), 1, 2.0)
    table.status("a", Status(False, FIRST, 4), 1, 3.0)  # the will of the process before comes late
    assert table.get("a").online  # type: ignore[union-attr]
    table.status("a", Status(False, SECOND, 5), 1, 4.0)
    assert not table.get("a").online  # type: ignore[union-attr]
    table.status("a", Status(True, SECOND, 5), 1, 5.0)
    table.status("a", Status(False, SECOND, 0), 1, 6.0, is_ours=True)
    row = table.get("a")
    assert row is not None
    assert (row.online, row.since, row.heard_at) == (False, 6.0, 5.0)  # our word for it is no sign of life
    table.keep(0.0, 7.0)
    whats = [what for _, what, _ in log(store, "a")]
    assert whats == ["first seen", "started", "bundle", "software", "gone", "online", "silent"]


def test_a_clock_that_is_set_back_breaks_nothing(store: DurableStore) -> None:
    table = store.devices
    table.status("a", BIRTH, 1, 1e9)
    table.decided("a", 1, 5.0, refusal="no")
    table.decided("a", 1, 6.0, refusal="no")
    table.keep(0.0, 6.0)
    row = known_devices(store._file.connection)["a"]
    assert (row.heard_at, row.refused, row.refused_at) == (6.0, 2, 6.0)
    assert [what for _, what, _ in log(store)].count("refused") == 1


def test_counts_are_written_now_and_then_and_all_of_them_come(store: DurableStore) -> None:
    table = store.devices
    table.status("a", BIRTH, 1, 1.0)
    table.keep(0.0, 1.0)
    for moment in range(1, 10):
        table.decided("a", 100, float(moment))
        table.published("pf/v2/fleet/down/a", 7)
        table.published("pf/v2/fleet/down/nobody", 7)
        table.keep(moment * KEEP_S, 1.0)
    table.published("pf/v2/fleet/global/0", 1_000)
    table.keep(COUNT_S, 1.0)
    row = known_devices(store._file.connection)["a"]
    assert (row.up_bytes, row.down_bytes, row.heard_at) == (901, 1_063, 9.0)
    assert len(known_devices(store._file.connection)) == 1


def test_many_devices_are_written_in_statements_of_many_rows(store: DurableStore) -> None:
    for number in range(300):
        store.devices.status(f"d{number:03}", BIRTH, number, 1.0)
    store.devices.keep(0.0, 1.0)
    rows = known_devices(store._file.connection)
    assert [row.up_bytes for row in rows.values()] == list(range(300))
    assert log(store) == [(f"d{number:03}", "first seen", "") for number in range(300)]


def test_a_flood_of_names_takes_little_of_the_log_and_says_how_many_there_were(store: DurableStore) -> None:
    store.devices.status("real", BIRTH, 1, 1.0)
    names = iter(range(10**9))
    for moment in range(300):  # five minutes
        for _ in range(20):
            store.devices.decided(f"x{next(names)}", 1, 2.0)
        store.devices.keep(float(moment), 3.0)
    with store.snapshot() as db:
        (entries,) = db.execute("SELECT count(*) FROM device_event").fetchone()
        said = [int(event.detail.split()[0]) for event in device_events(db, "", 100)]
    assert EVENTS_AT_ONCE < entries <= EVENTS_AT_ONCE + 300 * EVENTS_A_SECOND + len(said)
    assert 0 < len(said) <= 300 / 60 + 1
    assert sum(said) + entries - len(said) <= 1 + 300 * 20
    assert ("real", "first seen", "") in log(store, "real")


def test_a_device_that_floods_the_log_leaves_room_for_what_happens_to_others(store: DurableStore) -> None:
    for moment in range(300):  # five minutes
        for boot in range(20):
            store.devices.status("loud", replace(BIRTH, boot=20 * moment + boot + 1), 1, 2.0)
        if moment in (100, 200):
            store.devices.status("other", replace(BIRTH, online=moment == 100), 1, 2.0)
        store.devices.keep(float(moment), 3.0)
    assert [what for _, what, _ in log(store, "other")] == ["first seen", "gone"]
    assert ONES_AT_ONCE <= len(log(store, "loud")) <= ONES_AT_ONCE + 6
    assert log(store, "")


def test_a_device_has_room_again_after_a_while(store: DurableStore) -> None:
    for start in (0.0, 7_200.0):
        before = len(log(store, "a"))
        for boot in range(100):
            store.devices.status("a", replace(BIRTH, boot=int(start) + boot + 1), 1, 2.0)
        store.devices.keep(start + 1.0, 3.0)
        store.devices.keep(start + 3_700.0, 3.0)
        assert len(log(store, "a")) - before == ONES_AT_ONCE


def test_a_name_that_moves_the_terminal_is_shown_as_text(store: DurableStore, places: Places) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\u202e"
    birth = Status(
        True,
        FIRST,
        1,
        f"board {hostile}\x00",
        {"bundle": hostile, "protofleet": hostile},
        proposed={f"{hostile}\x00": 2**32 - 1},
    )
    store.devices.status("a", birth, 1, 1.0)
    store.devices.decided("a", 1, time.time(), refusal=hostile)
    store.devices.keep(0.0, 3.0)
    place = str(store._place)
    for words in (("fleet", "list"), ("fleet", "show", "a"), ("status",), ("watch",)):
        done = run(*words, "--store", place)
        assert done.returncode == 0, done.stderr
        assert not set(done.stdout) & set("\x1b\x07\u202e\x00")
        assert "a" in done.stdout


def test_what_devices_propose_is_kept_with_their_share_and_shown_by_class(store: DurableStore, places: Places) -> None:
    def birth(share: float, proposed: dict[str, int] | None) -> Status:
        return Status(True, FIRST, 1, metrics={"unknown_share": share}, proposed=proposed)

    store.devices.status("a", birth(0.25, {"owl": 7, "[bold]<b>bat</b>": 2}), 1, 1.0)
    store.devices.status("b", birth(1.0, {"owl": 1}), 1, 1.0)
    store.devices.status("liar", birth(-1e300, {"hen": 1}), 1, 1.0)
    store.devices.decided("a", 1, 2.0)
    row = kept(store, 0.0).get("a")
    assert row is not None
    assert (row.proposed, row.figures) == ({"owl": 7, "[bold]<b>bat</b>": 2}, {"unknown_share": 0.25})
    place = str(store._place)
    state = read_state(place_of(place))
    assert list(state.proposed.items()) == [
        ("owl", {"a": 7, "b": 1}),
        ("[bold]<b>bat</b>", {"a": 2}),
        ("hen", {"liar": 1}),
    ]
    assert state.devices["liar"].figures == {}
    shown = run("fleet", "show", "a", "--store", place).stdout
    assert "25% of its photos are unlike all classes" in shown
    assert "proposed class owl: 7 photos\nproposed class [bold]<b>bat</b>: 2 photos\n" in shown
    done = run("fleet", "list", "--store", place, "--json", "-")
    assert json.loads(done.stdout)["classes_proposed"] == state.proposed
    listed = run("fleet", "list", "--store", place).stdout
    assert "proposed class owl: 8 photos of 2 devices (a 7, b 1); protofleet export --extend makes it one" in listed

    store.devices.status("a", Status(False, FIRST, 1), 1, 2.0)  # what it proposed stays
    store.devices.status("b", birth(0.5, None), 1, 2.0)  # it proposes nothing any more
    store.devices.keep(50.0, 3.0)
    with store._transaction() as db:
        db.execute("INSERT INTO refused (device, since, reason) VALUES ('liar', 1.0, 'removed')")
    assert read_state(place_of(place)).proposed == {"owl": {"a": 7}, "[bold]<b>bat</b>": {"a": 2}}


def test_forgetting_removes_the_rows_and_nothing_comes_back(store: DurableStore) -> None:
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, min_clients=1, calibrate=False), now=0.0)
    for name in ("a", "b"):
        core.status(name, encode(BIRTH), 0.0)
    core.advance(0.0, 0.0)
    core.take([(name, encode(contribution(run=store.run))) for name in ("a", "b")], 0.0)
    store.devices.keep(0.0, 1.0)
    store.devices.decided("a", 1, 2.0, refusal="too large")  # and not kept yet
    with store._transaction() as db:
        db.execute("INSERT INTO fleet_order (what, device, who, given_at) VALUES ('forget', 'a', 'ann', 1.0)")
    order = store.orders.next_order()
    assert isinstance(order, Order)
    core.advance(1.0, 3.0)
    store.devices.keep(100.0, 4.0)
    core.status("a", encode(BIRTH), 5.0)
    core.take([("a", encode(contribution(run=store.run)))], 6.0)
    store.devices.keep(200.0, 7.0)
    with store.snapshot() as db:
        for table in ("device", "device_count", "device_event"):
            assert {name for (name,) in db.execute(f"SELECT DISTINCT device FROM {table}")} == {"b"}, table
    assert store.devices.get("a") is None


def test_a_process_beside_the_leader_sends_what_it_took_as_letters(store: DurableStore) -> None:
    worker = DeviceTable(store._file, leads=False)
    store.devices.status("a", BIRTH, 10, 1.0, is_news=False)
    for name in ("a", "new", "forgotten"):
        worker.decided(name, 100, 2.0, members=3)
    worker.decided("a", 50, 2.0, refusal="not open")
    worker.published("pf/v2/fleet/down/a", 9)
    worker.keep(0.0, 2.0)
    worker.keep(KEEP_S, 2.0)  # nothing more
    store.devices.keep(0.0, 5.0, {"forgotten"}, shared=True)
    rows = known_devices(store._file.connection)
    assert set(rows) == {"a", "new"}
    a = rows["a"]
    assert (a.heard_at, a.confirmed, a.up_bytes, a.down_bytes, a.members) == (5.0, True, 150, 9, 3)
    assert (a.refused, a.refusal) == (1, "not open")
    assert not rows["new"].online
    store.devices.keep(KEEP_S, 6.0, shared=True)
    assert known_devices(store._file.connection)["a"].up_bytes == 150  # each letter once
    for moment in range(device_table._LETTERS + 5):  # nobody leads
        worker.decided("a", 1, 2.0)
        worker.keep((3 + moment) * KEEP_S, 2.0)
    (letters,) = store._file.connection.execute("SELECT count(*) FROM device_letter").fetchone()
    assert letters == device_table._LETTERS


def test_a_letter_that_is_none_is_thrown_away_and_the_next_is_read(store: DurableStore) -> None:
    with store._file.transaction() as db:
        for letter in ("[1]", "3", '{"a": [10, 0, 0, "", null, true]}'):
            db.execute("INSERT INTO device_letter (letter) VALUES (?)", (letter,))
    store.devices.keep(1.0, 1.0, shared=True)
    assert known_devices(store._db)["a"].up_bytes == 10
    (left,) = store._db.execute("SELECT count(*) FROM device_letter").fetchone()
    assert left == 0


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 40))
def test_the_log_stays_within_its_budget_and_keeps_the_newest(
    seed: int, steps: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against a list: whatever comes, in batches of whatever size."""
    rng, expected = random.Random(seed), list[DeviceEvent]()
    whole, of_one = rng.randint(1, 30), rng.randint(1, 8)
    with (
        pytest.MonkeyPatch.context() as patch,
        DurableStore(tmp_path_factory.mktemp("log") / "s", BUNDLE, "fleet") as store,
    ):
        patch.setattr(device_table, "EVENTS", whole)
        patch.setattr(device_table, "EVENTS_OF_ONE", of_one)
        for step in range(steps):
            for number in range(rng.randint(0, 12)):
                event = DeviceEvent(float(step), rng.choice("abc"), "online", str(number))
                store.devices._events.append(event)
                expected.append(event)
            store.devices.keep(step * KEEP_S, 0.0)
        with store.snapshot() as db:
            found = list(reversed(device_events(db, limit=10_000)))
    assert len(found) <= whole
    assert max(Counter(event.device for event in found).values(), default=0) <= of_one
    newest = list[DeviceEvent]()
    for event in reversed(expected[-whole:]):  # the last `whole`, less what one device has too many of
        if sum(event.device == other.device for other in newest) < of_one:
            newest.append(event)
    assert found == newest[::-1]


def test_status_says_who_needs_care(places: Places) -> None:
    place = places("s.sqlite")
    with DurableStore(place, BUNDLE, "fleet") as store:
        _check_cares(store, place)
    told = json.loads(run("status", "--store", place, "--json", "-").stdout)
    assert (told["aggregator_runs"], told["online"]) == (False, None)
    causes = {care["cause"] for care in told["cares"]}
    assert causes == {"no-aggregator", "old-bundle", "slow"}  # nobody knows who is gone


def _check_cares(store: DurableStore, place: str) -> None:
    store.devices.status("slow", BIRTH, 1, 1.0)
    store.devices.status("old", Status(True, FIRST, 1, "", {"bundle": "2 00aabbcc"}), 1, 1.0)
    store.devices.status("gone", BIRTH, 1, 1.0)
    store.devices.status("gone", Status(False, FIRST, 4), 1, 2.0)
    store.devices.keep(0.0, 3.0)
    told = json.loads(run("status", "--store", place, "--json", "-").stdout)
    assert {(care["device"], care["cause"]) for care in told["cares"]} == {
        ("slow", "slow"),
        ("gone", "slow"),
        ("old", "old-bundle"),
        ("gone", "gone"),
    }
    assert (told["aggregator_runs"], told["devices"], told["online"], told["well"]) == (True, 3, 2, False)
    assert told["sentence"].startswith("3 of 3 devices need care (1 gone, 1 old-bundle, 2 slow); 2 online")


def test_who_was_removed_is_not_counted_as_gone(store: DurableStore) -> None:
    for name in ("here", "away", "removed"):
        store.devices.status(name, BIRTH, 1, 1.0, is_news=name == "here")
    for name in ("away", "removed"):
        store.devices.status(name, Status(False, FIRST, 4), 1, 2.0)
    store.devices.status("retained", BIRTH, 1, 2.0, is_news=False)
    store.devices.keep(0.0, 3.0, {"removed"})
    assert store.devices.counts == {"known": 4, "gone": 1, "unconfirmed": 1}


def test_a_gateway_and_how_many_devices_are_behind_it(places: Places) -> None:
    place = places("s.sqlite")
    with DurableStore(place, BUNDLE, "fleet") as store:
        for name in ("site-1", "site-2", "site-3", "cam"):
            store.devices.status(name, BIRTH, 1, 1.0)
        store.devices.decided("site-1", 10, 1.0, members=3)
        store.devices.decided("site-1", 10, 1.0, refusal="another message")  # which has no sums
        store.devices.decided("site-2", 10, 1.0, members=1)
        store.devices.decided("site-3", 10, 1.0, members=7)
        store.devices.decided("site-3", 10, 1.0, members=0)  # all of them have withdrawn
        store.devices.decided("cam", 10, 1.0, members=0)
        store.devices.keep(0.0, 3.0)
        state = read_state(place_of(place))
        listed = run("fleet", "list", "--store", place, "--json", "-")
        shown = run("fleet", "show", "site-1", "--store", place).stdout
    assert state.gateways == json.loads(listed.stdout)["gateways"] == {"site-1": 3, "site-2": 1}
    where = "whose names stay on its site, where protofleet fleet list has them, with the gateway's own --store"
    assert f"site-1: a gateway: its newest sums are of 3 devices, {where}\n" in listed.stderr
    assert f"site-2: a gateway: its newest sums are of 1 device, {where}\n" in listed.stderr
    assert "site-3: a gateway" not in listed.stderr
    assert f"a gateway: its newest sums are of 3 devices, {where}\n" in shown
    assert "4 online, 4 more behind 2 gateways" in state.sentence


def test_who_leads_is_told_by_others_how_many_are_behind_a_gateway(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        other = device_table.DeviceTable(store._file, leads=False)
        found = []
        for number, members in enumerate((5, None, 0), 1):
            other.decided("site-1", 10, 1.0, members=members)
            other.keep(10.0 * number, 1.0)
            store.devices.keep(10.0 * number, 1.0, shared=True)
            row = store.devices.get("site-1")
            assert row is not None
            found.append((row.members, row.up_bytes))
    assert found == [(5, 10), (5, 20), (0, 30)]


@pytest.mark.parametrize(("peak", "cares"), [(1.3e8, ["memory"]), (1.2e8, []), (None, [])])
def test_memory_is_told_beside_its_prediction(tmp_path: Path, peak: float | None, cares: list[str]) -> None:
    place = str(tmp_path / "s.sqlite")
    predicted = {"profile_memory_predicted_bytes": 9e7, "profile_memory_at_most_bytes": 1.2e8}
    predicted["profile_memory_samples"] = 700.0
    figures = predicted | ({} if peak is None else {"peak_rss_bytes": peak})
    with DurableStore(place, BUNDLE, "fleet") as store:
        store.devices.status("a", Status(True, FIRST, 1, "", {}, figures), 1, 1.0)
        store.devices.keep(0.0, 3.0)
        told = json.loads(run("status", "--store", place, "--json", "-").stdout)["cares"]
        listed = json.loads(run("fleet", "list", "--store", place, "--json", "-").stdout)
        shown = run("fleet", "show", "a", "--store", place).stdout
    assert [care["cause"] for care in told] == cares
    if cares:
        words = "its client has had 130.0 MB, and 120.0 MB at most were predicted with 700 photos"
        assert [care["reason"] for care in told] == [words]
        assert "memory: at most 130.0 MB, predicted 90.0 MB, predicted at most 120.0 MB" in shown
    assert listed["devices"][0]["state"]["figures"] == figures


def test_each_reason_for_care_has_a_part_of_the_runbook() -> None:
    page = (Path(__file__).parents[3] / RUNBOOK).read_text()
    parts = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.M | re.S))
    assert {*_REASONS, "no-aggregator", "intruder"} <= parts.keys()
    for name, text in parts.items():
        assert re.findall(r"^\*\*(\w+( at)?)\*\*", text, re.M) == [(word, at) for word, at in WORDS], name


def test_a_slow_disk_is_written_to_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 5 % of the time for what devices say, as long as writing takes."""
    monkeypatch.setattr(device_table, "_REST", 20.0)
    clock = iter([0.0, 2.0])  # writing takes two seconds
    with DurableStore(tmp_path / "s.sqlite", BUNDLE, "fleet") as store:
        store.devices.status("a", BIRTH, 300, 1.0, is_news=True)
        monkeypatch.setattr(device_table.time, "perf_counter", lambda: next(clock))
        store.devices.keep(0.0, 0.0)
        monkeypatch.undo()
        store.devices.status("b", BIRTH, 300, 2.0, is_news=True)
        store.devices.keep(39.0, 0.0)
        assert DeviceTable(store._file).get("b") is None
        store.devices.keep(40.0, 0.0)
        assert DeviceTable(store._file).get("b") is not None
