"""Who needs care and who does not: clocks, disks, certificates; who is gone for a moment; who waits for a roll-out."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from commands import run

from protofleet.aggregator.database import place_of
from protofleet.aggregator.monitoring.device_table import CLOCK_AHEAD, DeviceTable
from protofleet.aggregator.overview.fleet_state import FleetState, read_state
from protofleet.aggregator.page.fleet_content import KeptRows, look_at
from protofleet.aggregator.rollout.rollout_stages import Plan, Rollout
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.wire.messages import Status

ONE, DAY = b"process1", 86_400.0


def born(name: str, metrics: dict[str, float], bundle: str = "") -> Status:
    return Status(True, ONE, 1, "a board", {"bundle": bundle} if bundle else {}, metrics)


@pytest.fixture
def store(tmp_path: Path) -> DurableStore:
    with DurableStore(tmp_path / "s.sqlite", bytes(32), "fleet") as made:
        yield made


def state_of(store: DurableStore) -> FleetState:
    store.devices.keep(float("inf"), time.time())
    return read_state(place_of(str(store._place)))


def reasons(state: FleetState) -> dict[tuple[str, str], str]:
    return {(care.device, care.cause): care.reason for care in state.cares}


def test_a_wrong_clock_a_full_disk_and_a_certificate_that_ends_need_care(store: DurableStore) -> None:
    now = time.time()
    year = {"certificate_since_s": now - 165 * DAY, "certificate_until_s": now + 199.5 * DAY}
    figures = {
        "right": {"clock_s": now + 2, "disk_free_bytes": 9e9, **year},
        "ahead": {"clock_s": now + 3 * DAY},
        "behind": {"clock_s": now - 3_600},
        "full": {"disk_free_bytes": 4096.0},
        "nearly": {"disk_free_bytes": 2e6},
        "expired": {"certificate_since_s": now - 365 * DAY, "certificate_until_s": now - 60},
        "soon": {"certificate_since_s": now - 355 * DAY, "certificate_until_s": now + 9.5 * DAY},
        "short": {"certificate_since_s": now - DAY / 4, "certificate_until_s": now + DAY / 4},
        "liar": {"certificate_until_s": 1e300, "disk_free_bytes": 1e300, "clock_s": now},
    }  # fmt: skip
    for name, said in figures.items():
        store.devices.status(name, born(name, said), 1, now)
    found = reasons(state_of(store))
    assert found == {
        ("expired", "certificate"): "its certificate expired on "
        + time.strftime("%Y-%m-%d", time.gmtime(now - 60))
        + "; the broker lets it in no more",
        ("soon", "certificate"): "its certificate expires in 9 days, on "
        + time.strftime("%Y-%m-%d", time.gmtime(now + 9.5 * DAY)),
        ("full", "disk"): "its disk is full",
        ("nearly", "disk"): "its disk is nearly full: 2.0 MB are free",
        ("ahead", "clock"): "its clock is wrong: 3 d ahead",
        ("behind", "clock"): "its clock is wrong: 60 min behind",
    }
    shown = run("fleet", "show", "right", "--store", str(store._place)).stdout
    assert "clock 2 s ahead, disk: 9.0 GB free, certificate expires in 199 days" in shown


def test_a_retained_birth_says_nothing_of_the_clock_and_one_of_today_corrects_it(store: DurableStore) -> None:
    now, wrong = time.time(), {"clock_s": time.time() - DAY}
    store.devices.status("a", born("a", wrong), 1, now, is_news=False)
    assert CLOCK_AHEAD not in state_of(store).devices["a"].figures
    store.devices.status("a", born("a", wrong), 1, now)
    assert state_of(store).devices["a"].figures[CLOCK_AHEAD] == pytest.approx(-DAY, abs=1)
    again = DeviceTable(store._file)  # the aggregator was started again, and the broker retained that birth
    again.status("a", born("a", wrong), 1, now + 2 * DAY, is_news=False)
    row = again.get("a")
    assert row is not None
    assert row.figures[CLOCK_AHEAD] == pytest.approx(-DAY, abs=1)
    store.devices.status("a", born("a", {"clock_s": now}), 1, now)
    assert reasons(state_of(store)) == {}


def test_a_device_that_ends_at_a_full_disk_says_it_in_its_death(store: DurableStore) -> None:
    now = time.time()
    store.devices.status("a", born("a", {"disk_free_bytes": 9e9}), 1, now)
    store.devices.status("a", Status(False, ONE, 1, "a board", metrics={"disk_free_bytes": 0.0}), 1, now)
    state = state_of(store)
    top = json.loads(look_at(place_of(str(store._place)), state, KeptRows()).parts["top"])
    assert (len(state.just_gone), top["leaving"]) == (1, [])  # the line about its disk says more
    assert reasons(state) == {("a", "disk"): "gone for 0 s: its disk was full when it ended"}
    store.devices.status("a", born("a", {"disk_free_bytes": 9e9}), 1, now)
    assert reasons(state_of(store)) == {}


def test_who_is_gone_for_long_has_one_line_with_why(store: DurableStore) -> None:
    now = time.time()
    expired = {"certificate_since_s": now - 365 * DAY, "certificate_until_s": now - 700}
    store.devices.status("a", born("a", expired), 1, now - 1_000)
    store.devices.status("a", Status(False, ONE, 1), 1, now - 700.0)
    found = reasons(state_of(store))
    assert list(found) == [("a", "certificate")]
    assert found["a", "certificate"].startswith("gone for 11.7 min: its certificate expired on ")


def test_who_is_gone_for_a_moment_is_named_and_needs_no_care_yet(store: DurableStore) -> None:
    now = time.time()
    for name, gone_s in (("here", None), ("away", 40.0), ("long", 700.0)):
        store.devices.status(name, born(name, {}), 1, now - 1_000)
        if gone_s is not None:
            store.devices.status(name, Status(False, ONE, 1), 1, now - gone_s)
    state = state_of(store)
    assert list(state.just_gone) == ["away"]
    assert [care.device for care in state.cares] == ["long"]
    assert state.sentence.endswith("1 online, 1 gone for less than 10 min.")
    top = json.loads(look_at(place_of(str(store._place)), state, KeptRows()).parts["top"])
    assert top["leaving"] == [["away", round(now - 40.0)]]
    assert top["away"] == 1
    assert replace(state, runs=False).just_gone == {}
    with store._file.transaction() as db:
        db.execute("INSERT INTO refused (device, since, reason) VALUES ('away', ?, 'removed')", (now,))
    assert state_of(store).just_gone == {}  # who was removed a moment ago is not missed


def test_who_was_removed_is_not_counted_though_its_connection_is_still_there(store: DurableStore) -> None:
    for name in "ab":
        store.devices.status(name, born(name, {}), 1, time.time())
    with store._file.transaction() as db:
        db.execute("INSERT INTO refused (device, since, reason) VALUES ('b', ?, 'removed')", (time.time(),))
    assert state_of(store).sentence == "All is well: 1 device, 1 online."


def test_a_halted_roll_out_is_said(store: DurableStore) -> None:
    store.devices.status("a", born("a", {}), 1, time.time())
    state, plan = state_of(store), Plan(bytes(32), 7, 100)
    for word, said in (("running", ""), ("halted", "; the roll-out of version 7 is halted")):
        known = state.known._replace(rollout=Rollout(plan, 0.1, (), 0.0, word))
        assert replace(state, known=known).sentence == f"All is well: 1 device, 1 online{said}."


def test_many_that_are_gone_for_a_moment_are_counted_and_the_first_are_named(store: DurableStore) -> None:
    now = time.time()
    for number in range(1_234):
        store.devices.status(f"d{number}", born(f"d{number}", {}), 1, now - 100)
        store.devices.status(f"d{number}", Status(False, ONE, 1), 1, now - 40)
    state = state_of(store)
    assert state.sentence == "All is well: 1,234 devices, 0 online, 1,234 gone for less than 10 min."
    top = json.loads(look_at(place_of(str(store._place)), state, KeptRows()).parts["top"])
    assert (len(top["leaving"]), top["away"]) == (20, 1_234)


@pytest.mark.parametrize(("figures", "causes"), [
    ({"train_step_ms": 14.9, "profile_train_step_ms": 10.0}, []),
    ({"train_step_ms": 15.1, "profile_train_step_ms": 10.0}, ["slow"]),
    ({"train_step_ms": 15.1, "profile_train_step_ms": 0.0}, []),
    ({"peak_rss_bytes": 1.0e8, "profile_memory_at_most_bytes": 1.0e8}, []),
    ({"peak_rss_bytes": 1.1e8, "profile_memory_at_most_bytes": 1.0e8}, ["memory"]),
    ({"disk_free_bytes": 33e6}, []),
    ({"disk_free_bytes": 31e6}, ["disk"]),
])  # fmt: skip
def test_a_figure_needs_care_beyond_its_limit_and_not_before(
    store: DurableStore, figures: dict[str, float], causes: list[str]
) -> None:
    store.devices.status("a", born("a", figures), 1, time.time())
    assert [care.cause for care in state_of(store).cares] == causes


@pytest.mark.parametrize(("ahead_s", "causes"), [(299.0, []), (301.0, ["clock"]), (-299.0, []), (-301.0, ["clock"])])
def test_a_clock_may_differ_by_five_minutes(store: DurableStore, ahead_s: float, causes: list[str]) -> None:
    now = time.time()
    store.devices.status("a", born("a", {"clock_s": now + ahead_s}), 1, now)
    assert [care.cause for care in state_of(store).cares] == causes


def test_a_refusal_needs_care_for_a_day_and_being_left_out_for_a_round(store: DurableStore) -> None:
    now = time.time()
    for name in ("a", "b"):
        store.devices.status(name, born(name, {}), 1, now)
    store.devices.decided("a", 1, now - DAY - 60, refusal="of another bundle")
    store.devices.decided("b", 1, now - DAY + 60, refusal="of another bundle")
    found = reasons(state_of(store))
    assert list(found) == [("b", "refused")]

    def at_round(newest: int) -> set[str]:
        with store._file.transaction() as db:
            db.execute("DELETE FROM round")
            db.execute("DELETE FROM finding")
            db.execute(
                "INSERT INTO round (number, method, seed, opened_at, closed) VALUES (?, 'ncm', 1, 1.0, 1)", (newest,)
            )
            db.execute("INSERT INTO finding VALUES (3, 'a', 'left out', 'it contradicts 2 of 3')")
        return {care.cause for care in state_of(store).cares if care.device == "a"}

    assert at_round(3) == {"left-out"}
    assert at_round(4) == {"left-out"}  # the round that is open now
    assert at_round(5) == set()


def test_an_old_bundle_needs_care_once_a_roll_out_has_come_to_it(store: DurableStore) -> None:
    now = time.time()
    names = [f"d{number}" for number in range(8)]
    store.devices.status("first", born("first", {}, "2 aabbccdd"), 1, now)
    for name in names:
        store.devices.status(name, born(name, {}, "2 aabbccdd" if name == "d0" else "1 00112233"), 1, now)
    old = state_of(store)
    assert {care.device for care in old.cares} == set(names[1:])

    def during(fraction: float, age_s: float, **said: str) -> set[str]:
        rollout = Rollout(Plan(bytes(32), 2, 100, "", 1.0, 0.9), fraction, (), now - age_s)
        state = replace(old, known=old.known._replace(rollout=rollout, said=said))
        return {care.device for care in state.cares if care.cause == "old-bundle"}

    plan = Rollout(Plan(bytes(32), 2, 100, "", 1.0, 0.9), 0.5, (), now)
    inside = {name for name in names[1:] if plan.is_in(name)}
    assert 0 < len(inside) < 7
    assert during(0.5, 10.0) == set()
    assert during(0.5, 3_600.0) == inside
    one = min(inside)
    assert during(0.5, 10.0, **{one: "2 refused: no roll-outs wanted here"}) == {one}
    assert during(1.0, 3_600.0) == set(names[1:])


def test_what_one_device_alone_says_of_its_version_makes_no_other_device_look_old(store: DurableStore) -> None:
    """Otherwise a single liar would paint the whole fleet red."""
    now = time.time()

    def old(**bundles: str) -> set[str]:
        for name, bundle in bundles.items():
            store.devices.status(name, born(name, {}, bundle), 1, now)
        return {care.device for care in state_of(store).cares if care.cause == "old-bundle"}

    assert old(a="2 aabbccdd", b="2 aabbccdd", liar="999999999 deadbeef") == set()
    assert old(a="3 11223344") == set()  # alone, too
    assert old(b="3 11223344", c="2 aabbccdd") == {"c"}  # two say so
    assert old(liar="4 00000000", d="1 01010101") == {"a", "b", "c", "d"}  # of the store's own bundle
    assert old(liar="999999999 00000000", d="4 00000000") == {"a", "b", "c"}  # of what is said of that, the least
    with store._file.transaction() as db:
        for name in ("d", "liar"):
            db.execute("INSERT INTO refused (device, since, reason) VALUES (?, ?, 'removed')", (name, now))
    assert old() == {"c"}  # what devices say of which nothing is taken does not count


def test_one_device_runs_what_is_rolled_out_and_who_should_does_not_is_old(store: DurableStore) -> None:
    now = time.time()
    for name, bundle in (("a", "2 aabbccdd"), ("b", "1 00112233"), ("c", "1 00112233")):
        store.devices.status(name, born(name, {}, bundle), 1, now)
    with store._file.transaction() as db:
        db.execute(
            "INSERT INTO rollout (sha256, version, size_bytes, fleet, soak_s, healthy, fraction, stages, since, state,"
            " reason, forgiven) VALUES (?, 2, 1, '', 1.0, 0.9, 1.0, '[]', ?, 'running', '', 0)",
            (bytes(32), now - 3_600.0),
        )
    assert {care.device for care in state_of(store).cares} == {"b", "c"}


def test_a_device_of_which_nothing_is_taken_needs_no_care(store: DurableStore) -> None:
    """It may be another one's by now, and its last words would be red for good."""
    now, wrong = time.time(), {"train_step_ms": 30.0, "profile_train_step_ms": 10.0, "clock_s": 0.0}
    wrong |= {"disk_free_bytes": 0.0, "peak_rss_bytes": 9e9, "profile_memory_at_most_bytes": 1e9}
    wrong |= {"certificate_since_s": now - 9 * DAY, "certificate_until_s": now - DAY}
    for name, bundle in (("a", "2 aabbccdd"), ("b", "2 aabbccdd"), ("sold", "1 00112233")):
        store.devices.status(name, born(name, wrong if name == "sold" else {}, bundle), 1, now - 9_000)
    store.devices.decided("sold", 1, now, refusal="no contribution")
    store.devices.status("sold", Status(False, ONE, 1), 1, now - 8_000)
    expected = {"certificate", "clock", "disk", "memory", "old-bundle", "refused", "slow"}
    assert {care.cause for care in state_of(store).cares} == expected
    with store._file.transaction() as db:
        db.execute("INSERT INTO refused (device, since, reason) VALUES ('sold', ?, 'removed')", (now,))
    assert state_of(store).cares == []


def test_a_clock_of_the_aggregator_that_was_set_back_hides_nobody_who_is_gone(store: DurableStore) -> None:
    """A machine without a battery began years ahead, and what it stamped then lies in the future now."""
    then = time.time() + 4 * 365 * DAY
    store.devices.status("a", born("a", {}), 1, then)
    store.devices.status("a", Status(False, ONE, 1), 1, then)
    store.devices.status("b", born("b", {}), 1, then)
    store.devices.decided("b", 1, then, refusal="no contribution")
    state = state_of(store)
    assert reasons(state) == {("a", "gone"): "gone for an unknown time, last heard an unknown time ago"}
    assert list(state.just_gone) == []
    soon = replace(state, at=then - 30.0)  # another machine's clock may be ahead by some seconds
    assert list(soon.just_gone) == ["a"]
    assert ("b", "refused") in reasons(soon)
