"""The roll-out's machine: when a stage is widened, when it halts, and that it never widens while unhealthy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from protofleet.aggregator.rollout.rollout_stages import STAGES, Completed, Halted, Plan, Rollout, Widened
from protofleet.contract.wire.rollout_messages import WORDS, RolloutReport
from protofleet.contract.wire.sampling import place

SHA = bytes(range(32))
OLD = "6 00000000"


def rollout(devices: int = 20, *, fraction: float = 0.1, stages=STAGES, soak_s=60.0, healthy=0.9) -> Rollout:
    made = Rollout(Plan(SHA, 7, 1000, soak_s=soak_s, healthy=healthy), fraction, stages, since=0.0)
    for number in range(devices):
        made.hear(f"d{number}", OLD, "")
    return made


def all_say(made: Rollout, word: str) -> None:
    for device in list(made.members()):
        made.hear(device, OLD, f"7 {word}")


def test_it_widens_stage_by_stage_and_completes():
    made, sizes = rollout(40), []
    for start in (0.0, 60.0, 120.0):
        sizes.append(len(made.members()))
        assert made.advance(start + 59.0) is None
        all_say(made, "probation")
        assert made.advance(start + 59.9) is None
        all_say(made, "healthy")
        if made.fraction < 1.0:
            assert made.advance(start + 59.9) is None
            assert isinstance(made.advance(start + 60.0), Widened)
    assert made.advance(179.9) is None
    assert made.advance(180.0) == Completed(7, 40)
    assert sizes == sorted(sizes)
    assert sizes[-1] == 40
    assert made.offer.fraction == 1.0
    made.hear("later", OLD, "")
    assert made.offer is not None
    assert made.advance(190.0) is None


def test_a_stage_has_at_least_one_device():
    """Once its soak is over: just after a start only who is awake is known, and that may be anybody."""
    made = rollout(3, fraction=1e-9)
    assert made.advance(59.0) is None
    moved = made.advance(60.0)
    assert isinstance(moved, Widened)
    assert moved.devices == 1
    first = min(made.told, key=lambda device: place(device, 7, SHA))
    assert list(made.members()) == [first]
    assert rollout(0).advance(0.0) is None


def test_a_stage_that_nobody_is_known_in_is_not_widened_however_long_it_lasts():
    made = rollout(0)
    assert made.advance(1e6) is None
    assert made.fraction == 0.1


def test_it_is_complete_when_all_are_healthy_and_not_before():
    made = rollout(20, fraction=1.0, stages=())
    all_say(made, "healthy")
    made.told["d3"] = RolloutReport(7, "probation")
    assert made.advance(60.0) is None
    all_say(made, "healthy")
    assert made.advance(60.0) == Completed(7, 20)


def test_a_stage_that_is_resumed_begins_anew():
    made = rollout(40, fraction=0.5)
    all_say(made, "healthy")
    made.halt("somebody")
    made.resume(1000.0)
    assert made.advance(1059.0) is None
    assert isinstance(made.advance(1060.0), Widened)


def test_too_many_failures_halt_it_and_nothing_is_offered():
    made = rollout(40, fraction=0.5)
    members = list(made.members())
    made.hear(members[0], OLD, "7 failed: self-test: NaN")
    assert made.advance(0.0) is None
    for device in members[1:4]:
        made.hear(device, OLD, "7 failed: accuracy fell")
    moved = made.advance(1.0)
    assert isinstance(moved, Halted)
    assert moved.reason.startswith(f"4 of {len(members)} devices failed, one with: ")
    assert made.offer is None
    all_say(made, "healthy")
    assert made.advance(1e6) is None


def test_one_that_is_resumed_is_halted_by_further_failures_and_not_by_those_before():
    made = rollout(10, fraction=1.0, stages=())
    for device in ("d0", "d1"):
        made.hear(device, OLD, "7 failed")
    assert isinstance(made.advance(0.0), Halted)
    made.resume(5.0)
    assert made.advance(5.0) is None
    assert made.offer is not None
    made.hear("d2", OLD, "7 failed")
    assert made.advance(6.0) is None
    made.forget("d2")
    for device in ("d0", "d1"):
        made.forget(device)
        made.hear(f"{device}-anew", OLD, "7 failed")
    assert isinstance(made.advance(7.0), Halted)


@pytest.mark.parametrize("word", ["fetching", "testing", "probation", "refused"])
def test_who_is_not_healthy_yet_holds_the_stage_back(word: str):
    made = rollout(40, fraction=0.5)
    all_say(made, "healthy")
    for device in list(made.members())[: len(made.members()) // 5]:
        made.told[device] = RolloutReport(7, word)
    assert made.advance(1000.0) is None
    all_say(made, "healthy")
    assert isinstance(made.advance(1000.0), Widened)


def test_half_of_a_stage_must_have_said_how_it_goes():
    made = rollout(40, fraction=0.5)
    members = list(made.members())
    for device in members[: (len(members) - 1) // 2]:
        made.hear(device, OLD, "7 healthy")
    assert made.advance(1000.0) is None
    for device in members[(len(members) - 1) // 2 :][:2]:
        made.hear(device, OLD, "7 healthy")
    assert isinstance(made.advance(1000.0), Widened)


def test_a_device_that_says_no_bundle_is_not_counted_and_one_that_has_it_is_healthy():
    made = rollout(0, fraction=1.0)
    assert made.hear("of-an-older-release", "", "") is None
    assert made.told == {}
    assert made.hear("has-it", f"7 {SHA[:4].hex()}", "6 healthy") == RolloutReport(7, "healthy")
    assert made.hear("on-its-way", f"7 {SHA[:4].hex()}", "7 probation") == RolloutReport(7, "probation")


def test_an_older_status_takes_nothing_back():
    made = rollout(1, fraction=1.0)
    assert made.hear("d0", OLD, "7 testing") == RolloutReport(7, "testing")
    assert made.hear("d0", OLD, "7 healthy", elsewhere=True) == RolloutReport(7, "healthy")
    assert made.hear("d0", OLD, "7 testing") is None
    assert made.hear("d0", OLD, "6 failed") is None
    assert made.told["d0"].word == "healthy"
    assert made.hear("stranger", f"7 {SHA[:4].hex()}", "", elsewhere=True) is None
    assert "stranger" not in made.told


def test_a_clock_that_is_set_back_delays_nothing_by_more_than_a_soak():
    made = rollout(4, fraction=0.9)
    made.since = 1e9
    all_say(made, "healthy")
    assert made.advance(100.0) is None
    assert isinstance(made.advance(160.0), Widened)


class Fleet(RuleBasedStateMachine):
    """Devices say anything at any time, operators interfere, and the clock goes on."""

    @initialize(
        healthy=st.sampled_from([0.5, 0.75, 0.9, 1.0]),
        stages=st.sampled_from([STAGES, (1.0,), (0.3, 0.6), (0.01, 0.02, 1.0)]),
        devices=st.integers(1, 30),
    )
    def begin(self, healthy, stages, devices):
        self.made = rollout(devices, fraction=stages[0], stages=stages, healthy=healthy)
        self.now = 0.0

    @rule(number=st.integers(0, 40), word=st.sampled_from(WORDS))
    def say(self, number, word):
        self.made.hear(f"d{number}", OLD, f"7 {word}")

    @rule(word=st.sampled_from(WORDS))
    def all_of_them_say(self, word):
        all_say(self.made, word)

    @rule(number=st.integers(0, 40))
    def forget(self, number):
        self.made.forget(f"d{number}")

    @rule()
    def halt(self):
        self.made.halt("an operator")

    @precondition(lambda self: self.made.state == "halted")
    @rule()
    def resume(self):
        self.made.resume(self.now)

    @rule(passed=st.floats(0.0, 100.0))
    def time_passes(self, passed):
        self.now += passed
        made = self.made
        before, since = dict(made.members()), made.since
        state, fraction = made.state, made.fraction
        said = Counter(told.word for told in before.values() if told is not None)
        moved = made.advance(self.now)
        assert made.fraction >= fraction
        assert set(before) <= set(made.members())
        if state == "halted":
            assert moved is None
        if isinstance(moved, Widened) and before:
            assert self.now - since >= 60.0
            assert said["healthy"] >= max(1, made.plan.healthy * sum(said.values()) - 1e-9)
            assert 2 * sum(said.values()) >= len(before)
        if isinstance(moved, Widened) and not before:
            assert moved.devices >= 1
        if isinstance(moved, Halted):
            assert said["failed"] > (1 - made.plan.healthy) * len(before) - 1e-9
        if isinstance(moved, Completed):
            assert all(told.word == "healthy" for told in made.told.values())

    @invariant()
    def the_offer_is_there_unless_it_is_halted(self):
        if hasattr(self, "made"):
            assert (self.made.offer is None) == (self.made.state == "halted")
            assert 0 < self.made.fraction <= 1.0
            assert sum(self.made.counts().values()) == len(self.made.members())

    def teardown(self):
        """Once all are healthy and nobody halts it, it comes to the end of its stages."""
        if not hasattr(self, "made") or not self.made.told:
            return
        made = self.made
        made.resume(self.now)
        for _ in range(10):
            for device in list(made.told):
                made.hear(device, OLD, "7 healthy")
            self.now += 61.0
            made.advance(self.now)
        assert not made.stages or made.fraction >= made.stages[-1]
        assert made.state == ("complete" if made.fraction >= 1.0 else "running")


Fleet.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestFleet = Fleet.TestCase
