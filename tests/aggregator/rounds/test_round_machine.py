"""The round machine: its plan, each rule of opening and closing, and whatever order of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protofleet.aggregator.rounds import round_machine as rounds_module
from protofleet.aggregator.rounds.round_machine import Closed, Extended, Finished, Opened, Policy, Rounds, plan
from protofleet.contract.errors import MethodError, UsageError
from protofleet.contract.wire.sampling import sampled

ONE = b"instance"


def _open(policy: Policy, *devices: str, rounds: int = 2) -> Rounds:
    machine = Rounds(("fedproto",) * rounds, policy)
    for device in devices:
        machine.birth(device, ONE, 0.0)
    assert isinstance(machine.advance(0.0), Opened)
    return machine


def test_plans() -> None:
    assert plan("fedproto", 3, True) == ("fedproto", "fedproto", "fedproto", "ffc")
    assert plan("fedproto", 2, False) == ("fedproto", "fedproto")
    assert plan("fedproto", 0, True) == ("ffc",)
    assert plan("ffc", 2, True) == ("ffc", "ffc")
    assert plan("spherefed", 2, True) == ("spherefed", "spherefed", "ffc")
    with pytest.raises(UsageError, match="1 or more"):
        plan("fedproto", 0, False)
    with pytest.raises(MethodError, match="fedproto"):
        plan("fedprot", 1, False)


def test_a_round_waits_for_enough_devices_then_for_each_of_them() -> None:
    machine = Rounds(("fedproto", "ffc"), Policy(min_clients=2, deadline_s=0.0))
    machine.birth("a", ONE, 0.0)
    assert machine.advance(0.0) is None
    machine.birth("b", ONE, 0.0)
    machine.birth("c", ONE, 0.0)
    assert machine.advance(1.0) == Opened(1, "fedproto", 0)
    machine.contributed("a")
    machine.contributed("b")
    assert machine.advance(1e9) is None  # c is online and silent, and there is no deadline
    assert machine.due_in_s(1e9) is None
    machine.contributed("c")
    assert machine.advance(99.0) == Closed(1, "fedproto")
    assert machine.advance(99.0) == Opened(2, "ffc", 0)
    for device in "abc":
        machine.contributed(device)
    assert [machine.advance(100.0), machine.advance(100.0), machine.advance(100.0)] == [
        Closed(2, "ffc"),
        Finished(2),
        None,
    ]


def test_a_share_that_no_sample_fulfils_is_said_until_enough_devices_are_there() -> None:
    machine = Rounds(("fedproto",), Policy(min_clients=5, fraction=0.01))
    for device in "abcde":
        machine.birth(device, ONE, 0.0)
    assert machine.advance(0.0) is None
    assert machine.unsampled
    for number in range(1000):
        machine.birth(f"d{number}", ONE, 0.0)
    assert isinstance(machine.advance(0.0), Opened)
    assert not machine.unsampled


def test_a_refusal_under_an_id_that_is_not_awaited_is_not_kept() -> None:
    """Made-up ids cost nothing, so they must not fill the memory either."""
    machine = _open(Policy(), "a")
    machine.refused("b")
    machine.birth("b", ONE, 1.0)
    assert machine.awaited == {"a", "b"}


def test_a_device_that_dies_or_was_refused_is_not_awaited() -> None:
    machine = _open(Policy(), "a", "b", "c")
    machine.contributed("a")
    machine.death("b", ONE)
    assert machine.advance(1.0) is None
    machine.refused("c")
    assert machine.advance(1.0) == Closed(1, "fedproto")


def test_a_refused_device_that_is_born_again_is_still_not_awaited() -> None:
    machine = _open(Policy(), "a", "b")
    machine.refused("b")
    machine.birth("b", b"another1", 0.0)
    machine.contributed("a")
    assert isinstance(machine.advance(1.0), Closed)


def test_a_deadline_closes_with_enough_and_extends_with_too_few() -> None:
    machine = _open(Policy(min_clients=2, deadline_s=10.0), "a", "b", "c")
    machine.contributed("a")
    assert machine.due_in_s(4.0) == 6.0
    assert machine.advance(9.9) is None
    assert machine.advance(10.0) == Extended(1, 1)
    assert machine.advance(10.0) is None
    machine.birth("late", ONE, 12.0)
    machine.contributed("b")
    assert machine.advance(19.0) is None  # b and c were silent through a deadline, the one that came since was not
    assert machine.advance(20.0) == Closed(1, "fedproto")


def test_a_birth_without_its_will_expires_with_the_deadline_and_is_asked_for() -> None:
    machine = _open(Policy(deadline_s=10.0), "real", "ghost")
    machine.contributed("real")
    assert machine.advance(10.0) == Closed(1, "fedproto")
    assert machine.take_lost() == [("ghost", ONE)]
    assert machine.take_lost() == []
    assert machine.online == 1
    assert isinstance(machine.advance(10.0), Opened)
    assert machine.awaited == {"real"}


def test_a_device_that_is_connected_but_silent_costs_one_deadline_and_not_one_in_each_round() -> None:
    machine = _open(Policy(deadline_s=10.0), "real", "mute", rounds=4)
    machine.contributed("real")
    assert isinstance(machine.advance(10.0), Closed)
    machine.birth("mute", ONE, 10.0)  # its answer to being asked
    assert isinstance(machine.advance(10.0), Opened)
    assert (machine.online, machine.awaited) == (2, {"real"})
    machine.heard("mute", 11.0)  # what it worked at for longer than a deadline
    machine.contributed("real")
    assert isinstance(machine.advance(11.0), Closed)
    assert isinstance(machine.advance(11.0), Opened)
    assert machine.awaited == {"real", "mute"}


def test_what_is_heard_of_a_device_brings_it_back_online_without_a_birth() -> None:
    machine = _open(Policy(min_clients=2, deadline_s=10.0), "a", "slow")
    machine.contributed("a")
    assert machine.advance(10.0) == Extended(1, 1)
    assert machine.nobody
    machine.heard("slow", 15.0)
    assert machine.awaited == {"slow"}
    assert not machine.nobody
    machine.contributed("slow")
    assert isinstance(machine.advance(15.0), Closed)


def test_a_device_that_goes_on_sending_chunks_is_not_silent() -> None:
    machine = _open(Policy(min_clients=1, deadline_s=10.0), "a")
    for now in (4.0, 8.0, 12.0, 16.0):
        machine.heard("a", now)
        machine.advance(now)
    assert machine.awaited == {"a"}


def test_a_process_that_starts_anew_is_awaited_again() -> None:
    machine = _open(Policy(min_clients=2, deadline_s=10.0), "a", "b")
    machine.contributed("a")
    assert machine.advance(10.0) == Extended(1, 1)
    machine.birth("b", b"another1", 11.0)
    assert machine.awaited == {"b"}


def test_a_late_will_of_an_older_process_does_not_take_a_device_offline() -> None:
    machine = Rounds(("fedproto",), Policy())
    machine.birth("a", b"older-01", 0.0)
    machine.birth("a", b"newer-02", 0.0)
    assert not machine.death("a", b"older-01")
    assert machine.is_online("a")
    assert machine.death("a", b"newer-02")
    assert not machine.is_online("a")


def test_a_resumed_round_awaits_births_before_it_closes() -> None:
    machine = Rounds(("fedproto",), Policy())
    machine.resume(1, "fedproto", 0, contributions=["a"], refused=["c"], now=100.0, settle_s=2.0)
    assert machine.advance(100.0) is None  # nobody is known to be online yet, so nobody is awaited
    machine.birth("b", ONE, 0.0)
    machine.birth("c", ONE, 0.0)
    assert machine.advance(102.0) is None
    machine.contributed("b")
    assert machine.advance(102.0) == Closed(1, "fedproto")


def test_a_resumed_round_keeps_its_own_method_when_the_plan_changed() -> None:
    machine = Rounds(("fedproto",) * 8, Policy())
    machine.resume(6, "ffc", 0, contributions=[], now=0.0, settle_s=0.0)
    machine.birth("a", ONE, 0.0)
    machine.contributed("a")
    assert machine.advance(1.0) == Closed(6, "ffc")
    assert machine.advance(1.0) == Opened(7, "fedproto", 0)


def test_sampling_takes_the_first_seed_that_gives_enough() -> None:
    policy = Policy(min_clients=2, fraction=0.3, seed=7)
    machine = Rounds(("fedproto",), policy)
    devices = [f"device-{i}" for i in range(5)]
    for device in devices:
        machine.birth(device, ONE, 0.0)
    opened = machine.advance(0.0)
    enough = [s for s in range(7, 1000) if sum(sampled(d, 1, s, 0.3) for d in devices) >= 2]
    assert opened == Opened(1, "fedproto", enough[0])
    assert machine.awaited == {d for d in devices if sampled(d, 1, enough[0], 0.3)}


def test_a_flood_of_births_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "MAX_DEVICES", 50)
    machine = Rounds(("fedproto",), Policy())
    for i in range(500):
        machine.birth(f"d{i}", ONE, 0.0)
    assert machine.online == 50
    assert machine.birth("d3", b"reborn-1", 0.0)  # those that are followed still are


def test_a_device_that_was_lost_comes_back_also_where_no_other_finds_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "MAX_DEVICES", 2)
    machine = _open(Policy(min_clients=2, deadline_s=10.0), "a", "b")
    machine.contributed("a")
    assert machine.advance(10.0) == Extended(1, 1)
    assert not machine.birth("c", ONE, 11.0)
    assert machine.birth("b", ONE, 11.0)
    assert machine.online == 2


def test_nobody_is_lost_while_a_restarted_aggregator_waits_for_births() -> None:
    machine = Rounds(("fedproto",), Policy(deadline_s=1.0))
    machine.resume(1, "fedproto", 0, contributions=[], now=0.0, settle_s=5.0)
    machine.birth("a", ONE, 0.0)
    assert machine.advance(4.9) == Extended(1, 0)
    assert machine.take_lost() == []
    assert machine.advance(5.9) == Extended(1, 0)
    assert machine.take_lost() == [("a", ONE)]


class AnyOrder(RuleBasedStateMachine):
    """Whatever happens in whatever order: a round closes once, in turn, with enough, and never on one still awaited."""

    DEVICES = tuple(f"d{i}" for i in range(6))

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(min_clients=2, deadline_s=5.0, fraction=0.7, seed=3)
        self.machine = Rounds(plan("fedproto", 3, True), self.policy)
        self.now, self.opened_at = 0.0, 0.0
        self.online: dict[str, bytes] = {}
        self.heard_at: dict[str, float] = {}
        self.gone: dict[str, bytes] = {}  # silent through a whole deadline of a round; nobody awaits it until it speaks
        self.sent: set[str] = set()
        self.closed: list[int] = []
        self.opened: list[int] = []
        self.finished = False

    @rule(device=st.sampled_from(DEVICES), instance=st.sampled_from([b"one", b"two"]))
    def birth(self, device: str, instance: bytes) -> None:
        self.machine.birth(device, instance, self.now)
        if self.online.get(device) != instance:
            self.heard_at[device] = self.now
        if self.gone.get(device, instance) != instance:  # a process anew
            del self.gone[device]
        self.online[device] = instance

    @rule(device=st.sampled_from(DEVICES), instance=st.sampled_from([b"one", b"two"]))
    def death(self, device: str, instance: bytes) -> None:
        self.machine.death(device, instance)
        if self.online.get(device) == instance:
            del self.online[device]

    @precondition(lambda self: self.machine.phase == "open")
    @rule(device=st.sampled_from(DEVICES))
    def contribute(self, device: str) -> None:
        if self.machine.is_sampled(device):
            self.machine.heard(device, self.now)
            self.machine.contributed(device)
            self.sent.add(device)
            self.heard_at[device] = self.now
            self.gone.pop(device, None)
            if self.machine.is_online(device):  # who was lost is there again, whatever was said of it meanwhile
                self.online.setdefault(device, self.machine._online[device])

    @rule(seconds=st.sampled_from([0.0, 1.0, 6.0]))
    def advance(self, seconds: float) -> None:
        self.now += seconds
        if self.machine.phase == "open":
            silent_since = {d: max(self.heard_at.get(d, 0.0), self.opened_at) for d in self._awaited()}
            self.gone |= {d: self.online[d] for d, since in silent_since.items() if self.now - since >= 5.0}
        while (step := self.machine.advance(self.now)) is not None:
            self._observe(step)

    def _awaited(self) -> set[str]:
        """Who is online, sampled, and has not sent."""
        found = {d for d in self.online if sampled(d, self.machine.number, self.machine.seed, 0.7)}
        return found - self.sent - self.gone.keys()

    def _observe(self, step: object) -> None:
        if isinstance(step, Opened):
            assert sum(sampled(d, step.round, step.seed, 0.7) for d in self.online) >= 2
            self.opened.append(step.round)
            self.opened_at, self.sent = self.now, set()
        elif isinstance(step, Closed):
            assert len(self.sent) >= 2
            assert not self._awaited() or self.now - self.opened_at >= 5.0
            self.closed.append(step.round)
        elif isinstance(step, Finished):
            assert not self.finished
            self.finished = True

    @invariant()
    def rounds_come_in_turn(self) -> None:
        assert self.opened == list(range(1, len(self.opened) + 1))
        assert self.closed == self.opened[: len(self.closed)]
        assert len(self.opened) - len(self.closed) in (0, 1)
        assert not self.finished or len(self.closed) == 4

    def teardown(self) -> None:
        """From any state, a fleet that comes online and contributes brings the plan to its end."""
        for device in self.DEVICES:
            self.birth(device, b"last")
        for _ in range(20):
            self.advance(6.0)
            if self.machine.phase == "open":
                for device in self.DEVICES:
                    self.contribute(device)
        assert self.finished


class Liveness(RuleBasedStateMachine):
    """Ghosts, mutes, refusals, restarts and time, in any order: a round closes as soon as it can, or says that nobody
    is left to send; and no device is awaited for longer than it took to find out that it does not answer."""

    DEVICES = tuple(f"d{i}" for i in range(5))
    K = 2

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(min_clients=self.K)  # the default deadline: what is promised holds without an option
        self.machine = Rounds(("fedproto",) * 1000, self.policy)
        self.now, self.opened_at, self.enough_at = 0.0, 0.0, float("inf")
        self.heard_at: dict[str, float] = {}

    @rule(device=st.sampled_from(DEVICES), instance=st.sampled_from([b"one", b"two"]))
    def birth(self, device: str, instance: bytes) -> None:
        if self.machine.birth(device, instance, self.now):
            self.heard_at[device] = self.now

    @rule(device=st.sampled_from(DEVICES), instance=st.sampled_from([b"one", b"two"]))
    def death(self, device: str, instance: bytes) -> None:
        self.machine.death(device, instance)

    @precondition(lambda self: self.machine.phase == "open")
    @rule(device=st.sampled_from(DEVICES))
    def contribute(self, device: str) -> None:
        self.machine.heard(device, self.now)
        self.machine.contributed(device)
        self.heard_at[device] = self.now
        self._settle()

    @precondition(lambda self: self.machine.phase == "open")
    @rule(device=st.sampled_from(DEVICES))
    def refuse(self, device: str) -> None:
        self.machine.heard(device, self.now)
        self.machine.refused(device)
        self.heard_at[device] = self.now

    @rule()
    def restart(self) -> None:
        """The process dies; what was committed stands, who was online is learned anew."""
        old, self.machine = self.machine, Rounds(("fedproto",) * 1000, self.policy)
        if old.number:
            kept = set(old.contributions) if old.phase == "open" else None
            self.machine.resume(old.number, old.method, old.seed, contributions=kept, now=self.now, settle_s=2.0)
        self.enough_at = float("inf")
        self._settle()

    @rule(share=st.sampled_from([0.0, 0.004, 0.4, 1.0]))
    def time_passes(self, share: float) -> None:
        self.now += share * self.policy.deadline_s
        while (step := self.machine.advance(self.now)) is not None:
            if isinstance(step, Opened):
                self.opened_at, self.enough_at = self.now, float("inf")
                self.heard_at = dict.fromkeys(self.DEVICES, self.now)
        self._settle()

    def _settle(self) -> None:
        """Since when the open round has had enough contributions."""
        if self.machine.phase != "open" or len(self.machine.contributions) < self.K:
            self.enough_at = float("inf")
        else:
            self.enough_at = min(self.enough_at, self.now)

    @invariant()
    def who_is_awaited_is_online(self) -> None:
        assert all(self.machine.is_online(device) for device in self.machine.awaited)

    @invariant()
    def an_open_round_that_cannot_close_says_so_or_awaits_someone(self) -> None:
        machine = self.machine
        if machine.phase == "open" and len(machine.contributions) < self.K:
            assert machine.nobody or machine.awaited
            assert machine.due_in_s(self.now) is not None  # somebody looks again, without anything happening

    @rule()
    def enough_is_enough(self) -> None:
        """Whoever is awaited and never speaks: with K contributions a round is over within one more deadline."""
        if self.enough_at < float("inf"):
            closed, self.now = self.machine.number, max(self.now, self.enough_at + self.policy.deadline_s + 2.0)
            self.time_passes(0.0)
            assert self.machine.number > closed or self.machine.phase == "waiting"

    @rule()
    def silence(self) -> None:
        """Two deadlines in which nobody says a word: nobody is awaited any more."""
        for _ in range(3):
            self.time_passes(1.0)
        if self.machine.phase == "open":
            assert self.machine.nobody
            assert not self.machine.awaited

    def teardown(self) -> None:
        """From any state K devices that come and contribute bring every further round to its end, each within
        two deadlines, beside any number of ghosts."""
        for ghost in ("ghost-1", "ghost-2", "ghost-3"):
            self.birth(ghost, b"dead")
        for _ in range(3):
            self.time_passes(0.004)
            for device in self.DEVICES[: self.K]:
                self.birth(device, b"last")
            number = self.machine.number
            for _ in range(2):
                if self.machine.phase == "open":
                    for device in self.DEVICES[: self.K]:
                        self.contribute(device)
                self.time_passes(1.0)
            assert self.machine.number > number


Liveness.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLiveness = Liveness.TestCase
AnyOrder.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_who_was_silent_for_a_whole_deadline_is_not_awaited_in_the_next_round() -> None:
    """The machine above in one order that a search finds in one of many runs."""
    state = AnyOrder()
    state.birth("d0", b"one")
    state.birth("d2", b"one")
    state.advance(0.0)
    state.advance(6.0)
    for step in ("contribute", "again"):
        state.contribute("d0")
        state.contribute("d1")
        if step == "contribute":
            state.birth("d1", b"one")
            state.advance(0.0)
    state.advance(0.0)
    assert state.closed == [1, 2]
    state.teardown()


TestAnyOrder = AnyOrder.TestCase


def test_a_deadline_loses_only_who_was_silent_through_all_of_it() -> None:
    machine = _open(Policy(min_clients=2, deadline_s=10.0), "a", "b")
    machine.heard("a", 9.0)
    assert machine.advance(10.0) == Extended(1, 0)
    assert machine.take_lost() == [("b", ONE)]
    assert machine.awaited == {"a"}
