"""An aggregator that stays: what makes a round due, windows that close with what they promised, a week of sleepers."""

from __future__ import annotations

import heapq
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, CLASSES, WIDTH, bundle_file, contribution, extractor, gram, manifest, means
from brokers import free_port
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from pooled_head import usual_head
from postgres_server import Places

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import RoundCoordinator
from protofleet.aggregator.monitoring.events import LinkDown, RoundOpened, Waiting
from protofleet.aggregator.rounds.round_machine import Closed, Extended, Opened, Policy, Rounds
from protofleet.aggregator.rounds.schedule import Schedule
from protofleet.aggregator.server import server as server_module
from protofleet.aggregator.server.run_events import RunEvents
from protofleet.aggregator.server.service import Service
from protofleet.aggregator.settings import AggregateSettings, Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.console.durations import in_words, seconds
from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.methods import method as method_of
from protofleet.contract.mqtt.link import Link
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Status

HOUR, DAY = 3600.0, 86_400.0

# ── what makes a round due ──────────────────────────────────────────────────────────────────────────────────────────


def test_by_the_clock_missed_rounds_are_not_made_up_for() -> None:
    schedule = Schedule(every_s=100.0, when_new=0, devices=2, most=9)
    assert schedule.is_due(0.0)
    schedule.opened(0.0)
    assert (schedule.is_due(99.9), schedule.due_in_s(40.0), schedule.is_due(100.0)) == (False, 60.0, True)
    schedule.opened(1_050.0)
    assert schedule.due_in_s(1_050.0) == 100.0


@pytest.mark.parametrize(("ago_s", "due_s"), [(30.0, 70.0), (1e9, 0.0), (-1e9, 100.0)])
def test_a_clock_that_jumped_costs_one_interval_at_most(ago_s: float, due_s: float) -> None:
    schedule = Schedule(every_s=100.0, when_new=0, devices=2, most=9)
    schedule.opened(5.0, ago_s)
    assert schedule.due_in_s(5.0) == due_s


def test_by_news_of_enough_devices_whoever_is_awake() -> None:
    schedule = Schedule(every_s=0.0, when_new=10, devices=2, most=3)
    for device, new in (("a", 10), ("b", 9), ("c", float("nan")), ("a", 30)):
        schedule.heard(device, new)
    assert schedule.due_in_s(0.0) is None
    schedule.heard("b", 10)
    assert schedule.is_due(0.0)
    schedule.contributed("a")
    assert not schedule.is_due(0.0)
    for number in range(50):
        schedule.heard(f"flood-{number}", 99)
    assert len(schedule._news) == 3


def test_by_order_once() -> None:
    schedule = Schedule(every_s=0.0, when_new=1, devices=1, most=9)
    schedule.order()
    assert schedule.is_due(0.0)
    schedule.opened(0.0)
    assert not schedule.is_due(1e9)


def test_durations_as_people_write_them() -> None:
    assert [seconds("--every", given) for given in ("90", "90s", "1.5m", "6h", "7D", 0, 2.5)] == [
        90.0, 90.0, 90.0, 6 * HOUR, 7 * DAY, 0.0, 2.5,
    ]  # fmt: skip
    assert [in_words(value) for value in (7 * DAY, 6 * HOUR, 90.0, 5400.0, 0.5)] == [
        "7 d", "6 h", "90 s", "90 min", "0.5 s",
    ]  # fmt: skip
    for given in ("", "six hours", "-1h", "inf", "nan", "1e9d", "4000d", "1h30m"):
        with pytest.raises(UsageError, match="--every, expected a duration such as 90s, 10m, 6h or 7d, got"):
            seconds("--every", given)


def test_options_of_an_aggregator_that_stays() -> None:
    policy = Settings(every="6h", min_clients=20).policy
    assert (policy.stays, policy.window_s, policy.to_open, policy.limit_s) == (True, HOUR, 1, HOUR)
    assert Settings(every="10m").policy.window_s == 600.0
    assert Settings(when_new=50).policy.window_s == HOUR
    plain = Settings(min_clients=3).policy
    assert (plain.stays, plain.to_open, plain.limit_s) == (False, 3, 600.0)
    assert Settings(min_clients=3, open_clients=1).policy.to_open == 1
    for wrong, line in (
        ({"window": "1h"}, "--window, expected --every or --when-new beside it, got neither"),
        ({"max_clients": 3}, "--max-clients, expected --every or --when-new beside it, got neither"),
        ({"every": "1h", "window": "2h"}, r"--window, expected above 0, up to --every \(60 min\), got 2 h"),
        ({"every": "1h", "window": "0"}, "--window, expected above 0"),
        ({"every": "1h", "min_clients": 5, "max_clients": 4}, "--max-clients, expected 5 or more, got 4"),
        ({"when_new": -1}, "--when-new, expected 0 or more"),
        ({"every": "soon"}, "--every, expected a duration"),
        ({"open_clients": 0}, "--open-clients, expected 1 or more"),
    ):
        with pytest.raises(UsageError, match=line):
            Settings(**wrong)  # type: ignore[arg-type]


# ── windows ─────────────────────────────────────────────────────────────────────────────────────────────────────────

ONE = b"instance"


def window(**changes: object) -> Rounds:
    """A machine whose first window is open since 0, with device `a` online."""
    given = {"min_clients": 2, "open_clients": 1, "every_s": 100.0, "window_s": 20.0, **changes}
    machine = Rounds(("ncm", "ffc"), Policy(**given))  # type: ignore[arg-type]
    machine.birth("a", ONE, 0.0)
    assert machine.advance(0.0) == Opened(1, "ncm", 0)
    return machine


def test_a_window_is_open_to_its_end_whoever_is_online_and_the_plan_begins_anew() -> None:
    machine = window()
    machine.contributed("a")
    machine.death("a", ONE)
    assert not machine.nobody  # whoever sleeps will come
    machine.contributed("b")  # it came and went between two looks
    assert (machine.advance(19.9), machine.due_in_s(15.0), machine.nobody) == (None, 5.0, False)
    assert machine.advance(20.0) == Closed(1, "ncm")
    machine.birth("c", ONE, 30.0)
    assert (machine.advance(99.9), machine.due_in_s(60.0), machine.opens_in_s(60.0)) == (None, 40.0, 40.0)
    assert machine.advance(100.0) == Opened(2, "ffc", 0)
    machine.contributed("a")
    machine.contributed("c")
    assert machine.advance(120.0) == Closed(2, "ffc")
    assert machine.advance(200.0) == Opened(3, "ncm", 0)


def test_a_window_with_too_few_goes_on_until_they_are_there() -> None:
    machine = window()
    machine.contributed("a")
    assert machine.advance(20.0) == Extended(1, 1)
    assert machine.advance(25.0) is None
    machine.contributed("b")
    assert machine.advance(25.0) == Closed(1, "ncm")


def test_a_window_closes_before_its_end_when_all_that_are_asked_for_are_in() -> None:
    machine = window(max_clients=3)
    for device in "ab":
        machine.contributed(device)
    assert machine.advance(1.0) is None
    machine.contributed("c")
    assert machine.advance(1.0) == Closed(1, "ncm")


def test_a_round_is_opened_and_closed_by_order() -> None:
    machine = window()
    assert not machine.close()  # nothing to merge
    machine.contributed("a")
    assert machine.close()
    assert machine.advance(1.0) == Closed(1, "ncm")
    assert not machine.close()
    machine.schedule.order()
    assert machine.advance(2.0) == Opened(2, "ffc", 0)
    assert machine.advance(2.0) is None  # the order of before was for round 1


def test_news_that_a_contribution_holds_open_no_further_round() -> None:
    machine = Rounds(("ncm",), Policy(when_new=10, window_s=20.0))
    machine.birth("a", ONE, 0.0)
    machine.schedule.heard("a", 10)
    assert machine.advance(0.0) == Opened(1, "ncm", 0)
    machine.contributed("a")
    assert (machine.advance(20.0), machine.advance(21.0)) == (Closed(1, "ncm"), None)


def test_a_clock_that_was_set_back_lengthens_no_window() -> None:
    machine = Rounds(("ncm",), Policy(every_s=100.0, window_s=20.0))
    machine.resume(1, "ncm", 0, contributions=[], now=5.0, settle_s=0.0, age_s=-1000.0)
    assert machine.due_in_s(5.0) == 20.0


def test_a_due_round_waits_for_a_device() -> None:
    machine = window()
    machine.contributed("a")
    machine.contributed("b")
    machine.death("a", ONE)
    assert machine.advance(20.0) == Closed(1, "ncm")
    assert (machine.advance(500.0), machine.opens_in_s(500.0), machine.due_in_s(500.0)) == (None, None, None)
    machine.birth("b", ONE, 501.0)
    assert machine.advance(501.0) == Opened(2, "ffc", 0)


class Windows(RuleBasedStateMachine):
    """Devices that come, go, contribute and report, orders, and time, in any order."""

    DEVICES = tuple(f"d{i}" for i in range(6))
    K, MOST, EVERY, WINDOW, NEW = 2, 4, 100.0, 20.0, 5

    def __init__(self) -> None:
        super().__init__()
        policy = Policy(
            min_clients=self.K, open_clients=1, every_s=self.EVERY, window_s=self.WINDOW, when_new=self.NEW,
            max_clients=self.MOST,
        )  # fmt: skip
        self.machine = Rounds(("fedproto", "ffc"), policy)
        self.now, self.opened_at = 0.0, float("-inf")
        self.online: set[str] = set()
        self.lost: set[str] = set()  # silent through a whole window: online again when it speaks
        self.sent: set[str] = set()
        self.news: set[str] = set()
        self.ordered = self.closing = False
        self.opened = self.closed = 0

    @rule(device=st.sampled_from(DEVICES))
    def birth(self, device: str) -> None:
        self.machine.birth(device, ONE, self.now)
        self.online.add(device)

    @rule(device=st.sampled_from(DEVICES))
    def death(self, device: str) -> None:
        self.machine.death(device, ONE)
        self.online.discard(device)

    @rule(device=st.sampled_from(DEVICES), new=st.integers(0, 9))
    def report(self, device: str, new: int) -> None:
        self.machine.schedule.heard(device, new)
        (self.news.add if new >= self.NEW else self.news.discard)(device)

    @precondition(lambda self: self.machine.phase == "open")
    @rule(device=st.sampled_from(DEVICES))
    def contribute(self, device: str) -> None:
        self.machine.heard(device, self.now)
        self.machine.contributed(device)
        self.sent.add(device)
        self.news.discard(device)

    @rule()
    def order(self) -> None:
        self.machine.schedule.order()
        self.ordered = True

    @precondition(lambda self: self.machine.phase == "open")
    @rule()
    def close(self) -> None:
        assert self.machine.close() == bool(self.sent)
        self.closing = bool(self.sent)

    @rule(seconds=st.sampled_from([0.0, 1.0, 7.0, 21.0, 101.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        while (step := self.machine.advance(self.now)) is not None:
            self._observe(step)
        if self.machine.phase == "open":  # what a window has promised does not outlast its end
            assert len(self.sent) < self.K or self.now < self.opened_at + self.WINDOW

    def _observe(self, step: object) -> None:
        over = self.now >= self.opened_at + self.WINDOW
        if isinstance(step, Opened):
            due = self.ordered or self.now >= self.opened_at + self.EVERY or len(self.news) >= self.K
            assert due
            assert self.online
            assert step.round == self.opened + 1 == self.closed + 1
            assert step.method == ("fedproto", "ffc")[self.opened % 2]
            self.opened, self.opened_at, self.sent = step.round, self.now, set()
            self.ordered = self.closing = False
        elif isinstance(step, Closed):
            assert self.sent == self.machine.contributions
            assert self.closing or (len(self.sent) >= self.K and (over or len(self.sent) >= self.MOST))
            self.closed = step.round
        else:
            assert isinstance(step, Extended)
            assert over
            assert len(self.sent) < self.K

    def teardown(self) -> None:
        """From any state a fleet that is there now and then gets a round in each interval."""
        for _ in range(4):
            before = self.closed
            self.birth(self.DEVICES[0])
            self.advance(101.0)
            self.birth(self.DEVICES[1])  # whoever was silent through the window is asked, and answers
            self.advance(0.0)
            if self.machine.phase == "open":
                for device in self.DEVICES[:3]:
                    self.contribute(device)
            self.death(self.DEVICES[0])
            self.advance(21.0)
            assert self.closed > before


Windows.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestWindows = Windows.TestCase

# ── a week of a hundred devices that are awake five minutes an hour ─────────────────────────────────────────────────


def week(policy: Policy, *, devices: int = 100, days: int = 7, awake_s: float = 300.0) -> dict[str, list[float]]:
    """The real machine over simulated time; each device wakes at a minute of its own, and takes up to 2 minutes for a
    round. Returns when rounds opened, how many were online then, and how many contributions each closed with."""
    rng, machine = random.Random(1), Rounds(("ncm",), policy)
    found: dict[str, list[float]] = {"opened": [], "online": [], "closed": []}
    sent: dict[str, int] = {}  # by device, the newest round that it has done
    times: list[tuple[float, int, str, str]] = []
    for number in range(devices):
        wakes = rng.uniform(0, HOUR)
        for hour in range(24 * days):
            at = wakes + hour * HOUR
            for what, later in (("wakes", 0.0), ("sends", rng.uniform(10.0, 120.0)), ("sleeps", awake_s)):
                heapq.heappush(times, (at + later, len(times), what, f"d{number}"))
    while times:
        now, _, what, device = heapq.heappop(times)
        if what == "wakes":
            machine.birth(device, ONE, now)
        elif what == "sleeps":
            machine.death(device, ONE)
        elif what == "sends" and machine.phase == "open" and sent.get(device) != machine.number:
            machine.contributed(device)
            sent[device] = machine.number
        while (step := machine.advance(now)) is not None:
            if isinstance(step, Opened):
                found["opened"].append(now)
                found["online"].append(machine.online)
            elif isinstance(step, Closed):
                found["closed"].append(len(machine.contributions))
        due_s = machine.due_in_s(now)
        if due_s and times and now + due_s < times[0][0]:
            heapq.heappush(times, (now + due_s, len(times) + 10**9, "time", ""))
    return found


def test_a_week_of_a_hundred_sleepers_misses_no_window_and_nobody() -> None:
    found = week(Policy(min_clients=20, open_clients=1, every_s=6 * HOUR, window_s=HOUR + 300.0))
    assert found["closed"] == [100] * 28  # four a day
    assert max(found["online"]) < 20
    assert all(gap < 6 * HOUR + 600 for gap in map(lambda a, b: b - a, found["opened"], found["opened"][1:]))


def test_what_opens_with_as_many_online_as_close_it_never_opens_in_that_week() -> None:
    assert week(Policy(min_clients=20))["opened"] == []


# ── over a store ────────────────────────────────────────────────────────────────────────────────────────────────────

SETTINGS = Settings(
    method="fedproto", rounds=1, calibrate=False,
    min_clients=2, open_clients=1, every=6 * HOUR, window=HOUR,
)  # fmt: skip


def core_of(store: DurableStore, now: float, wall: float) -> RoundCoordinator:
    return rounds_of(store, manifest(), BUNDLE, SETTINGS, now=now, wall=wall)


def send(core: RoundCoordinator, device: str, now: float) -> str:
    made = contribution(means(ord(device)), run=core.parts.run, round=core.rounds.number, method="fedproto")
    (decision,) = core.take([(device, encode(made, "f64"))], now)
    return decision.outcome


def test_a_restart_in_the_middle_of_a_window_goes_on_with_what_is_left_of_it(places: Places) -> None:
    birth, said = encode(Status(True, ONE, 1)), list[object]()
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = core_of(store, 0.0, 1e9)
        core.status("a", birth, 0.0)
        assert isinstance(core.advance(0.0, 1e9), Opened)
        assert core.announcement().deadline_s == HOUR
        assert send(core, "a", 10.0) == "committed"
    with DurableStore(places("s"), BUNDLE, "fleet") as store:  # another steady clock, 20 minutes later
        core = core_of(store, 5_000.0, 1e9 + 1_200)
        assert not core.is_finished
        RunEvents(core, said.append).resumed()
        assert isinstance(said[0], RoundOpened)
        assert (said[0].resumed, said[0].window_s) == (1, HOUR)
        assert send(core, "a", 5_000.0) == "duplicate"
        assert send(core, "b", 5_000.0) == "committed"
        assert core.advance(5_000.0 + 2_399.0, 1e9 + 3_599) is None
        assert isinstance(core.advance(5_000.0 + 2_400.0, 1e9 + 3_600), Closed)
        assert send(core, "c", 7_500.0) == "late"
    with DurableStore(places("s"), BUNDLE, "fleet") as store:  # between windows, one of an hour ago
        core = core_of(store, 0.0, 1e9 + 2 * HOUR)
        teller = RunEvents(core, said.append)
        for _ in range(3):
            core.status("a", birth, 1.0)
            teller.waits(1.0)
            core.status("a", encode(Status(False, ONE, 1)), 1.0)
            teller.waits(1.0)
        assert said[1:] == [Waiting(2, 1, 1, opens_in_s=4 * HOUR - 1.0)]  # told once, whoever comes and goes
        core.status("a", birth, 1.0)
        assert core.advance(4 * HOUR - 1, 0.0) is None
        assert core.advance(4 * HOUR, 0.0) == Opened(2, "fedproto", 0)


def test_news_in_a_status_opens_a_round(places: Places) -> None:
    stays = {"min_clients": 2, "open_clients": 1, "when_new": 10, "window": HOUR}
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        asked = Settings(method="fedproto", rounds=1, calibrate=False, **stays)  # type: ignore[arg-type]
        core = rounds_of(store, manifest(), BUNDLE, asked, now=0.0)
        for device, new in (("a", 30.0), ("b", 3.0)):
            core.status(device, encode(Status(True, ONE, 1, "", {}, {"samples_new": new})), 0.0)
            assert core.advance(0.0, 0.0) is None
        core.status("b", encode(Status(True, ONE, 1, "", {}, {"samples_new": 10.0})), 5.0)
        assert isinstance(core.advance(5.0, 5.0), Opened)


# ── what comes too late ─────────────────────────────────────────────────────────────────────────────────────────────


def sums_of(core: RoundCoordinator, device: str, round: int, *, method: str = "ffc", **changes: object) -> bytes:
    """What a device sends for a round: sums of its own that are others in each round."""
    statistic = gram(100 * round + ord(device)) if method == "ffc" else means(100 * round + ord(device))
    told = {"run": core.parts.run, "round": round, "method": method, "extractor": extractor(method), **changes}
    return encode(contribution(statistic, **told), "f64")  # type: ignore[arg-type]


def opened(core: RoundCoordinator, now: float) -> None:
    assert isinstance(core.advance(now, now), Opened)


def closed(core: RoundCoordinator, now: float, *expected: tuple[str, int]) -> None:
    """The round closes with just these: device, and the round that its sums were made for."""
    assert isinstance(core.advance(now, now), Closed)
    pooled = FeatureGram.zero(CLASSES, WIDTH)
    for device, round in expected:
        pooled = pooled.merge(gram(100 * round + ord(device)))
    ridge = method_of("ffc").hyper["ridge"].default
    np.testing.assert_allclose(core.state.head.rows, usual_head(pooled, ridge), rtol=1e-9)
    assert sorted(core.record(core.rounds.number).uplink_bytes) == sorted(device for device, _ in expected)


def test_a_late_contribution_stands_in_until_its_devices_own_comes_and_never_beside_it(places: Places) -> None:
    asked = Settings(method="ffc", rounds=1, calibrate=False, min_clients=2, open_clients=1, every=100.0, window=20.0)

    def says(core: RoundCoordinator, device: str, round: int, now: float, **changes: object) -> str:
        return core.take([(device, sums_of(core, device, round, **changes))], now)[0].outcome

    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, asked, now=0.0)
        core.status("a", encode(Status(True, ONE, 1)), 0.0)
        opened(core, 0.0)
        assert [says(core, device, 1, 1.0) for device in "ab"] == ["committed"] * 2
        closed(core, 20.0, ("a", 1), ("b", 1))
        assert [says(core, device, 1, 30.0) for device in "cde"] == ["late"] * 3
        assert says(core, "f", 1, 30.0, method="fedproto") == "late"  # over its own extractor
        assert says(core, "g", 1, 30.0, extractor=bytes(32)) == "late"  # over another
        opened(core, 100.0)
        assert says(core, "c", 1, 101.0) == "late"
        assert [says(core, device, 2, 102.0) for device in "acd"] == ["committed"] * 3
        closed(core, 120.0, ("a", 2), ("c", 2), ("d", 2), ("e", 1))
        assert [says(core, device, 2, 130.0) for device in "ac"] == ["duplicate"] * 2
        assert says(core, "e", 2, 130.0) == "late"  # what the store has of it in round 2 is of round 1
        assert says(core, "e", 1, 131.0) == "late"  # and an older one does not take its place
        opened(core, 200.0)
        assert [says(core, device, 3, 201.0) for device in "ab"] == ["committed"] * 2
        closed(core, 220.0, ("a", 3), ("b", 3), ("e", 2))
        opened(core, 300.0)
        assert [says(core, device, 4, 301.0) for device in "ab"] == ["committed"] * 2
        closed(core, 320.0, ("a", 4), ("b", 4))  # for one round only


def test_what_stands_in_waits_for_a_round_of_its_method_and_goes_with_its_device(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, every=100.0, window=20.0), now=0.0)
        core.status("a", encode(Status(True, ONE, 1)), 0.0)
        for number, name in enumerate(("fedproto", "ffc", "fedproto", "ffc"), 1):
            now, own = 100.0 * number, extractor(name) if name == "ffc" else b""
            assert core.advance(now, now) == Opened(number, name, 0)
            sums = gram(number) if own else means(number)
            given = encode(contribution(sums, run=core.parts.run, round=number, method=name, extractor=own), "f64")
            assert core.take([("a", given)], now)[0].outcome == "committed"
            assert core.advance(now + 20.0, now) == Closed(number, name)
            if number < 3:
                late = core.take([(device, given) for device in ("cde" if number == 1 else "cd")], now + 30.0)
                assert {decision.outcome for decision in late} == {"late"}
            if number == 2:
                give(places("s"), "forget", "d", "me")
                assert isinstance(core.advance(now + 40.0, now), Obeyed)
        assert [sorted(core.record(number).uplink_bytes) for number in (1, 2, 3)] == [["a"]] * 3
        assert sorted(core.record(4).uplink_bytes) == ["a", "c"]
        assert store.totals(4)[0] == 5


def test_what_stands_in_does_not_close_a_round_and_is_bounded(places: Places) -> None:
    asked = Settings(method="ffc", rounds=1, calibrate=False, min_clients=2, open_clients=1, every=100.0, window=20.0)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        core = rounds_of(store, manifest(), BUNDLE, asked, now=0.0)
        core.status("a", encode(Status(True, ONE, 1)), 0.0)
        opened(core, 0.0)
        core.take([(device, sums_of(core, device, 1)) for device in "ab"], 1.0)
        closed(core, 20.0, ("a", 1), ("b", 1))
        core.books.late._budget_bytes = 2 * len(sums_of(core, "c", 1))
        core.take([(device, sums_of(core, device, 1)) for device in "cdefgh"], 30.0)
        opened(core, 100.0)
        core.take([("a", sums_of(core, "a", 2))], 101.0)
        assert core.advance(120.0, 120.0) == Extended(2, 1)
        core.take([("b", sums_of(core, "b", 2))], 121.0)
        closed(core, 121.0, ("a", 2), ("b", 2), ("c", 1), ("d", 1))


def test_it_waits_for_a_broker_without_a_limit_and_without_haste(
    tmp_path: Path, places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a window that should have ended: who cannot speak for the fleet has nothing to do."""
    bundle, looks, told = tmp_path / "f.bundle", list[float](), list[object]()
    sha256 = bundle_file(bundle)
    with DurableStore(places("s"), sha256, "fleet") as store:
        store.open_round(1, "fedproto", 0, 0.0)
    receive = Link.receive

    def counted(self: Link, timeout_s: float) -> object:
        if threading.current_thread() is running:  # another test's link may still be closing
            looks.append(timeout_s)
        return receive(self, timeout_s)

    monkeypatch.setattr(Link, "receive", counted)
    monkeypatch.setattr(server_module, "PATIENCE_S", 0.1)
    named = {"bundle": (str(bundle),), "broker": f"mqtt://127.0.0.1:{free_port()}"}
    service = Service(AggregateSettings(**named, store=places("s"), every="1h", calibrate=False))  # type: ignore[arg-type]
    running = threading.Thread(target=lambda: service.run(told.append, lambda content, finished: None), daemon=True)
    running.start()
    while sum(isinstance(event, LinkDown) for event in told) < 3:
        time.sleep(0.02)
    assert running.is_alive()
    assert len([wait_s for wait_s in looks if 0 < wait_s < 0.5]) <= 3
    service.stop()
    running.join(10)
    assert not running.is_alive()
    service = Service(AggregateSettings(**named, store=tmp_path / "t"))  # type: ignore[arg-type]
    with pytest.raises(LinkError, match=r"no broker at .* within 0\.1 s"):
        service.run(told.append, lambda content, finished: None)
