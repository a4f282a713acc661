"""A fleet whose sums stand, under any order of faults: what stands is what devices have sent, each once, and then what
they hold.

As `attacks/test_lossy_fleet.py`, and further: photos come and go, a state directory is an older copy again, devices
withdraw, are forgotten and admitted, and the store is lost.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.store.durable_store import newest_state
from protofleet.aggregator.store.operator_orders import FORGOTTEN
from protofleet.aggregator.store.standing_tables import WITHDREW
from protofleet.contract.methods import method
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.wire.codec import decode
from tests.attacks.fleet_model import CLASSES, Clock
from tests.attacks.guard import in_memory
from tests.attacks.lossy_broker import Killed, LossyBroker
from tests.attacks.standing_model import STANDING, PhotoDevice, StandingServer, Withdrawal, give_order, photos, sums_of
from tests.attacks.test_lossy_fleet import moved_about

DEVICES = ("a", "b")
SETS = ((0, 1, 2), (0, 1, 2, 3, 4), (5, 6, 7), (), (2, 2, 3))
MANY_STEPS = 300


class Standing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=in_memory()))
        self.broker, self.clock = LossyBroker(), Clock()
        self.here: dict[str, PhotoDevice | Withdrawal] = {}
        self.server: StandingServer | None = None
        self.stores = self.starts = 0
        self.holds = dict.fromkeys(DEVICES, SETS[0])
        self.sent: dict[str, set[bytes]] = {name: set() for name in DEVICES}
        self.newest: dict[tuple[bytes, str], int] = {}
        self.withdrawn: set[tuple[bytes, str]] = set()  # of which the command said that nothing stands
        self.admitted = False

    @initialize()
    def everyone_starts(self) -> None:
        self.start_server()
        for name in DEVICES:
            self.start_device(name)
        self.everyone_is_connected()
        for _ in range(6):
            self.a_good_moment()

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _store(self) -> Path:
        return self.folder / f"store-{self.stores}"

    @precondition(lambda self: self.server is None)
    @rule()
    def start_server(self) -> None:
        self.server = StandingServer(self._store, self.broker, self.clock)

    @precondition(lambda self: self.server is not None)
    @rule(will=st.booleans())
    def kill_server(self, will: bool) -> None:
        assert self.server is not None
        self.broker.gone(self.server.link, will=will)
        self.server.kill()
        self.server = None

    @precondition(lambda self: self.server is None and self.stores < 1)
    @rule()
    def begin_another_run(self) -> None:
        """The store is lost."""
        self.stores += 1

    @rule(name=st.sampled_from(DEVICES))
    def start_device(self, name: str) -> None:
        if name not in self.here:
            self.starts += 1
            data, instance = photos(self.holds[name]), self.starts.to_bytes(8, "big")
            self.here[name] = PhotoDevice(name, self.folder, self.broker, self.clock, instance, data, self.sent[name])

    @rule(name=st.sampled_from(DEVICES), will=st.booleans())
    def kill_device(self, name: str, will: bool) -> None:
        process = self.here.pop(name, None)
        if process is not None:
            self.broker.gone(process.link, will=will)
            process.kill()

    @rule(name=st.sampled_from(DEVICES))
    def withdraw(self, name: str) -> None:
        """Its owner ends the client, and starts the other command."""
        self.kill_device(name, True)
        self.here[name] = Withdrawal(name, self.folder, self.broker, self.clock)

    # ── what happens to them ────────────────────────────────────────────────────────────────────────────────────────

    @rule(name=st.sampled_from(DEVICES), which=st.sampled_from(SETS))
    def photos_change(self, name: str, which: tuple[int, ...]) -> None:
        self.holds[name] = which
        process = self.here.get(name)
        if isinstance(process, PhotoDevice):
            process.core.samples = photos(which)

    @rule(name=st.sampled_from(DEVICES))
    def a_copy_is_made(self, name: str) -> None:
        """Of a state directory that nothing runs on."""
        if name not in self.here:
            shutil.rmtree(self.folder / f"copy-{name}", ignore_errors=True)
            shutil.copytree(self.folder / name, self.folder / f"copy-{name}")

    @rule(name=st.sampled_from(DEVICES))
    def the_copy_is_put_back(self, name: str) -> None:
        if name not in self.here and (self.folder / f"copy-{name}").is_dir():
            shutil.rmtree(self.folder / name)
            shutil.copytree(self.folder / f"copy-{name}", self.folder / name)

    @precondition(lambda self: self._store.exists())
    @rule(name=st.sampled_from(DEVICES), what=st.sampled_from(["forget", "admit", "remove"]))
    def an_order_is_given(self, name: str, what: str) -> None:
        give_order(self._store, what, name)
        self.admitted = self.admitted or what == "admit"

    # ── what they do ────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(name=st.sampled_from(DEVICES), dies_after=st.sampled_from([None, None, 0, 1, 2]))
    def step_device(self, name: str, dies_after: int | None) -> None:
        process = self.here.get(name)
        if process is None:
            return
        process.link.dies_after = dies_after
        try:
            process.step()
        except Killed:
            self.kill_device(name, True)
            return
        process.link.dies_after = None
        if isinstance(process, Withdrawal) and process.over:
            if process.done and process.run is not None:
                self.withdrawn.add((process.run, name))
            self.kill_device(name, True)

    @precondition(lambda self: self.server is not None)
    @rule(dies_after=st.sampled_from([None, None, 0, 1, 2, 3, 5]))
    def step_server(self, dies_after: int | None) -> None:
        assert self.server is not None
        self.server.link.dies_after = dies_after
        try:
            self.server.step()
        except Killed:
            self.kill_server(True)
            return
        self.server.link.dies_after = None
        if self.server.over is not None:
            self.kill_server(True)

    @rule(seconds=st.sampled_from([1.0, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    # ── the network ─────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(seed=st.integers(0, 2**16), faulty=st.booleans())
    def a_while(self, seed: int, faulty: bool) -> None:
        moved_about(self, seed, faulty, DEVICES)

    @rule()
    def all_messages_move(self) -> None:
        self.broker.flow()

    @rule()
    def everyone_is_connected(self) -> None:
        for link in self.broker.links:
            if not link.up:
                self.broker.connect(link)

    @rule(at=st.integers(0, 2), will=st.booleans())
    def a_connection_breaks(self, at: int, will: bool) -> None:
        if self.broker.links:
            self.broker.cut(self.broker.links[at % len(self.broker.links)], will=will)

    @rule(forgets=st.booleans())
    def the_broker_is_killed(self, forgets: bool) -> None:
        self.broker.killed(forgets=forgets)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def what_stands_is_what_devices_sent_and_the_total_is_its_sum(self) -> None:
        if self.server is None:
            return
        core, total = self.server.core, ExactSum.zero(UnitMeans, CLASSES, STANDING.features)
        present = set()
        for name, payload in self.server.store.standing.payloads():
            present.add(name)
            assert payload in self.sent[name], "sums that this device never made"
            message = decode(payload)
            assert (message.run, message.round) == (core.parts.run, core.standing.held(name))
            total = total.add(ExactSum.of(message.statistic(UnitMeans, CLASSES, STANDING.features)))
        assert core.standing.total.equal(total)
        assert core.standing.present == present
        refused = self.server.store.refused_devices.reasons()
        assert not present & {name for name, why in refused.items() if why in (FORGOTTEN, WITHDREW)}

    def _all_orders_are_done(self) -> bool:
        assert self.server is not None
        return self.server.store.orders.next_order() is None

    @invariant()
    def no_generation_goes_back(self) -> None:
        if self.server is None:
            return
        run, core = self.server.core.parts.run, self.server.core
        for name in DEVICES:
            held = core.standing.held(name)
            assert held >= self.newest.get((run, name), 0)
            self.newest[run, name] = held

    @invariant()
    def who_has_withdrawn_is_in_no_sum_until_it_is_admitted(self) -> None:
        if self.server is None or self.admitted:
            return
        for run, name in self.withdrawn:
            if run == self.server.core.parts.run:
                assert name not in self.server.core.standing.present, "it was told that nothing of it stands"

    @invariant()
    def what_a_device_believes_to_be_counted_was(self) -> None:
        if self.server is None:
            return
        run = self.server.core.parts.run
        for name, process in self.here.items():
            held = self.server.core.standing.held(name)
            for outcome in ("committed", "duplicate"):
                row = process.journal._row(
                    "SELECT max(round) FROM contributions WHERE run = ? AND outcome = ?", run, outcome
                )
                assert row is not None
                withdrew = (
                    run,
                    name,
                ) in self.withdrawn  # a withdrawal of what is out is a duplicate, whatever its number
                assert withdrew or (row[0] or 0) <= held, "the device has forgotten what nobody holds"

    def teardown(self) -> None:
        try:
            if self.starts:
                self._comes_to_rest()
        finally:
            if self.server is not None:
                self.kill_server(False)
            for name in DEVICES:
                self.kill_device(name, False)
            shutil.rmtree(self.folder)

    def _comes_to_rest(self) -> None:
        """Liveness: once everyone is admitted and no further faults come, what stands is what each device holds."""
        if self.server is None:
            self.start_server()
        for step in range(MANY_STEPS):
            self._admit_everyone()
            if self.server is None:
                self.start_server()
            for name in DEVICES:
                self.start_device(name)
            self.everyone_is_connected()
            self.a_good_moment()
            self.clock.now += 0.0 if step < MANY_STEPS // 2 else 60.0
            if self._is_at_rest():
                break
        self.what_stands_is_what_devices_sent_and_the_total_is_its_sum()
        assert self._is_at_rest(), f"not at rest after {MANY_STEPS} steps without a fault: {self._why_not()}"

    def _admit_everyone(self) -> None:
        """Whoever is refused; a withdrawal that was on its way makes that so again."""
        if self.server is not None and self._all_orders_are_done():
            for name in self.server.store.refused_devices.reasons():
                self.an_order_is_given(name, "admit")

    def a_good_moment(self) -> None:
        if self.server is not None:
            self.step_server(None)
        for name in DEVICES:
            self.step_device(name, None)
        self.broker.flow()
        self.clock.now += 1.0

    def _is_at_rest(self) -> bool:
        return not self._why_not()

    def _why_not(self) -> str:
        server = self.server
        if server is None or not self._all_orders_are_done():
            return "orders wait"
        stands = dict(server.store.standing.payloads())
        for name in DEVICES:
            process = self.here.get(name)
            if not isinstance(process, PhotoDevice) or process.journal.pending():
                return f"{name} waits for a receipt"
            if name not in stands:
                return f"nothing of {name} stands: {process.sums.waits_for()}"
            held = decode(stands[name]).statistic(UnitMeans, CLASSES, STANDING.features)
            if not ExactSum.of(held).equal(ExactSum.of(sums_of(photos(self.holds[name])))):
                return f"what stands of {name} is not what it holds: {process.sums.waits_for()}"
            state = process.follower.newest_state
            if state is None or state.version != server.core.state.version:
                return f"{name} has not got the newest head"
        return "" if self._is_solved() else "the head is not that of what stands"

    def _is_solved(self) -> bool:
        assert self.server is not None
        core, found = self.server.core, method("ncm")
        if self.server.store.meta.get("standing solved") != core.sums.digest():
            return False
        merged = core.standing.total.statistic(UnitMeans, STANDING.features)
        state = newest_state(self.server.store._db, core.parts.run)
        made = found.next_rows({}, merged, core.sums.settled)
        for kind, rows in made.items():
            np.testing.assert_allclose(state.rows[kind].rows, rows.rows, rtol=1e-12)
        return True


def rested(fleet: Standing) -> None:
    """Without a fault, until what stands is what devices hold."""
    for _ in range(60):
        fleet.everyone_is_connected()
        fleet.a_good_moment()
        fleet.clock.now += 10.0
        fleet.what_stands_is_what_devices_sent_and_the_total_is_its_sum()
        if fleet._is_at_rest():
            return
    raise AssertionError(fleet._why_not())


def test_a_device_whose_state_and_photos_are_those_of_an_older_copy_sends_again() -> None:
    """As when a card is written anew from an image: nothing has changed since what it sent last, as far as it knows."""
    fleet = Standing()
    fleet.everyone_starts()
    rested(fleet)
    fleet.kill_device("a", True)
    fleet.a_copy_is_made("a")
    fleet.photos_change("a", SETS[2])
    fleet.start_device("a")
    rested(fleet)
    fleet.kill_device("a", True)
    fleet.the_copy_is_put_back("a")
    fleet.photos_change("a", SETS[0])
    fleet.start_device("a")
    assert "what stands of a is not what it holds" in fleet._why_not()
    rested(fleet)
    fleet.teardown()


def test_each_thing_that_happens_to_standing_sums_once() -> None:
    """What random histories may miss: withdrawn twice, forgotten, admitted, and killed before the head is made."""
    fleet = Standing()
    fleet.everyone_starts()
    rested(fleet)
    for _ in range(2):  # the second one takes out what is out
        fleet.withdraw("a")
        process = fleet.here["a"]
        assert isinstance(process, Withdrawal)
        for _ in range(10):
            fleet.everyone_is_connected()
            fleet.a_good_moment()
        assert process.done
    fleet.kill_server(True)
    fleet.start_server()
    fleet.start_device("a")
    for _ in range(10):
        fleet.everyone_is_connected()
        fleet.a_good_moment()
    assert fleet._why_not() == "nothing of a stands: refused by the aggregator: waiting to be admitted again"
    for what in ("admit", "forget", "admit", "remove", "admit"):
        fleet.an_order_is_given("a", what)
        for _ in range(8):
            fleet.everyone_is_connected()
            fleet.a_good_moment()
            fleet.clock.now += 5.0
        assert fleet.server is not None
        assert ("a" in fleet.server.core.standing.present) == (what != "forget"), what
        fleet.what_stands_is_what_devices_sent_and_the_total_is_its_sum()
    rested(fleet)
    for which in SETS[1:3]:  # a head at once, then none for half a minute
        fleet.photos_change("a", which)
        for _ in range(5):
            fleet.a_good_moment()
    assert fleet._why_not() in ("a has not got the newest head", "the head is not that of what stands")
    fleet.kill_server(True)
    fleet.start_server()
    rested(fleet)
    fleet.teardown()


def test_no_order_of_faults_leaves_other_sums_standing_than_devices_hold() -> None:
    run_state_machine_as_test(Standing, settings=settings(max_examples=8, stateful_step_count=25, derandomize=True))


@pytest.mark.slow
def test_no_order_of_faults_in_many_fleets_whose_sums_stand() -> None:
    run_state_machine_as_test(Standing, settings=settings(max_examples=400, stateful_step_count=80, derandomize=True))
