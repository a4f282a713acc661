"""A fleet under any order of faults: nothing is lost, doubled or mixed up, and it comes to its end once they stop.

Device cores, the aggregator's own server with its store, and a broker that loses, repeats and reorders what MQTT allows
it to (`attacks/lossy_broker.py`); connections break, and every process is killed between and within what it does. The
rounds alone have machines of their own (`aggregator/rounds/test_round_machine.py`), so has the connection
(`contract/mqtt/test_connection.py`).
"""

from __future__ import annotations

import random
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

from protofleet.aggregator.store.durable_store import newest_state
from protofleet.contract.heads.ridge import FIXED
from protofleet.contract.heads.spectrum import RIDGES
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.journal.journal import FINAL
from tests.attacks.fleet_model import CLASSES, ROUNDS, WIDTH, Clock, DeviceProcess, ServerProcess, statistic_of
from tests.attacks.guard import in_memory
from tests.attacks.lossy_broker import Killed, LossyBroker, ModelLink

DEVICES = ("a", "b", "c")
MANY_STEPS = 400  # in which a fleet without faults has to come to its end


class Faults(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=in_memory()))
        self.broker, self.clock = LossyBroker(), Clock()
        self.devices: dict[str, DeviceProcess] = {}
        self.server: ServerProcess | None = None
        self.stores = self.starts = 0
        self.closed: set[tuple[bytes, int]] = set()

    @initialize()
    def everyone_starts(self) -> None:
        self.start_server()
        for name in DEVICES:
            self.start_device(name)
        for link in self.broker.links:
            self.broker.connect(link)
        for _ in range(6):  # until the seat is taken, and a round is open
            self.a_good_moment()

    # ── processes ───────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def _store(self) -> Path:
        return self.folder / f"store-{self.stores}"

    @precondition(lambda self: self.server is None)
    @rule()
    def start_server(self) -> None:
        self.server = ServerProcess(self._store, self.broker, self.clock)

    @precondition(lambda self: self.server is not None)
    @rule(will=st.booleans())
    def kill_server(self, will: bool) -> None:
        assert self.server is not None
        self.broker.gone(self.server.link, will=will)
        self.server.kill()
        self.server = None

    @precondition(lambda self: self.server is None and self.stores < 2)
    @rule()
    def begin_another_run(self) -> None:
        """The store is lost; what devices still have to send is of a run that nobody knows."""
        self.stores += 1

    @rule(name=st.sampled_from(DEVICES))
    def start_device(self, name: str) -> None:
        if name not in self.devices:
            self.starts += 1
            instance = self.starts.to_bytes(8, "big")
            self.devices[name] = DeviceProcess(name, self.folder, self.broker, self.clock, instance)

    @rule(name=st.sampled_from(DEVICES), will=st.booleans())
    def kill_device(self, name: str, will: bool) -> None:
        device = self.devices.pop(name, None)
        if device is not None:
            self.broker.gone(device.link, will=will)
            device.kill()

    # ── what they do ────────────────────────────────────────────────────────────────────────────────────────────────

    @rule(name=st.sampled_from(DEVICES), dies_after=st.sampled_from([None, None, None, 0, 1, 2]))
    def step_device(self, name: str, dies_after: int | None) -> None:
        device = self.devices.get(name)
        if device is None:
            return
        device.link.dies_after = dies_after
        try:
            device.step()
        except Killed:
            self.kill_device(name, True)
        else:
            device.link.dies_after = None

    @precondition(lambda self: self.server is not None)
    @rule(dies_after=st.sampled_from([None, None, None, 0, 1, 2, 3, 5]))
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

    @rule(seconds=st.sampled_from([0.1, 1.0, 5.0, 31.0]))
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

    @rule(at=st.integers(0, 3), will=st.booleans())
    def a_connection_breaks(self, at: int, will: bool) -> None:
        if self.broker.links:
            self.broker.cut(self.broker.links[at % len(self.broker.links)], will=will)

    @rule(forgets=st.booleans())
    def the_broker_is_killed(self, forgets: bool) -> None:
        self.broker.killed(forgets=forgets)

    # ── what must hold ──────────────────────────────────────────────────────────────────────────────────────────────

    @invariant()
    def what_is_counted_is_what_devices_sent_each_once(self) -> None:
        if self.server is None:
            return
        store, run = self.server.store, self.server.core.parts.run
        for record in store.rounds():
            counted: dict[str, Contribution] = {}
            for device, payload in zip(
                record.uplink_bytes, store.contributions(record.number, record.method), strict=True
            ):
                message = decode(payload)
                assert isinstance(message, Contribution)
                assert (message.run, message.round, message.method) == (run, record.number, record.method)
                counted[device] = message
            for device, message in counted.items():
                kind = method_of(record.method).statistic
                sent = statistic_of(device, (run, record.number, record.method))
                assert _same(message.statistic(kind, CLASSES, WIDTH), sent), "not what the device had to say"
            if record.closed and (run, record.number) not in self.closed:
                assert len(counted) >= 2
                self.closed.add((run, record.number))

    @invariant()
    def what_a_device_has_done_waits_or_was_answered(self) -> None:
        """A round that is done is never done again: without its contribution it would be lost."""
        for device in self.devices.values():
            waits = {pending.key for pending in device.journal.pending()}
            assert len(device.outbox) == len(waits), "something is sent for ever, or never"
            for key in device.done - waits:
                assert device.journal.outcome(key) is not None, "done, and nothing was kept to send"

    @invariant()
    def what_a_device_believes_to_be_counted_is(self) -> None:
        if self.server is None:
            return
        run = self.server.core.parts.run
        for name, device in self.devices.items():
            for record in self.server.store.rounds():
                found = device.journal.outcome((run, record.number, record.method))
                counts = found is not None and found[0] in ("committed", "duplicate")
                if found is not None:
                    assert counts == (name in record.uplink_bytes), f"{found[0]}, as the device was told"

    @invariant()
    def the_newest_state_is_the_sum_of_what_was_committed(self) -> None:
        if self.server is None or self.server.core.state.version == 0:
            return
        core, store = self.server.core, self.server.store
        state = newest_state(store._db, core.parts.run)
        assert (state.version, state.round) == (core.state.version, core.state.round)
        record = store.record(state.round)
        assert record.closed
        made = [statistic_of(device, (core.parts.run, state.round, record.method)) for device in record.uplink_bytes]
        pooled = made[0]
        for other in made[1:]:
            pooled = pooled.merge(other)
        if record.method == "ffc":
            ffc, head = method_of("ffc"), state.rows["head"].rows
            hypers = [core.parts.terms.hyper(ffc) | {"ridge": ridge} for ridge in ("auto", FIXED, *RIDGES)]
            solved = (ffc.next_rows({}, pooled, hyper)["head"].rows for hyper in hypers)
            # where the criterion is flat, the order in which sums are added decides which ridge of the grid is taken
            assert any(np.allclose(head, each, rtol=1e-6, atol=1e-12) for each in solved)
        else:
            np.testing.assert_allclose(state.rows["prototypes"].rows, pooled.means, rtol=1e-9, atol=1e-12)

    def teardown(self) -> None:
        try:
            if self.starts:
                self._comes_to_its_end()
        finally:
            if self.server is not None:
                self.kill_server(False)
            for name in DEVICES:
                self.kill_device(name, False)
            shutil.rmtree(self.folder)

    def _comes_to_its_end(self) -> None:
        """Liveness: without further faults every round closes and every contribution gets its receipt."""
        for step in range(MANY_STEPS):
            if self.server is None:
                self.start_server()
            for name in DEVICES:
                self.start_device(name)
            self.everyone_is_connected()
            self.a_good_moment()
            self.clock.now += 0.0 if step < MANY_STEPS // 2 else 60.0
            if self._is_done():
                break
        assert self._is_done(), f"not over after {MANY_STEPS} steps without a fault"
        assert self.server is not None
        assert [record.closed for record in self.server.store.rounds()] == [True] * ROUNDS
        self.what_is_counted_is_what_devices_sent_each_once()
        self.what_a_device_believes_to_be_counted_is()
        self.the_newest_state_is_the_sum_of_what_was_committed()
        for device in self.devices.values():
            outcomes = device.journal.outcomes()
            assert outcomes["sent"] == sum(outcomes[name] for name in FINAL)
        self._everyone_knows_after_a_restart()

    def _everyone_knows_after_a_restart(self) -> None:
        """What is retained tells a device that took part that the run is over; one that did not waits for another."""
        assert self.server is not None
        for name in DEVICES:
            self.kill_device(name, True)
            self.start_device(name)
        self.everyone_is_connected()
        for _ in range(3):
            self.a_good_moment()
        for device in self.devices.values():
            took_part = any(run == self.server.core.parts.run for run, _, _ in device.done)
            assert (device.follower.finished, device.follower.stale) == (took_part, not took_part)

    def a_good_moment(self) -> None:
        """Everyone who runs does one thing, all messages arrive, and a second passes."""
        if self.server is not None:
            self.step_server(None)
        for name in DEVICES:
            self.step_device(name, None)
        self.broker.flow()
        self.clock.now += 1.0

    def _is_done(self) -> bool:
        server = self.server
        settled = all(not device.journal.pending() for device in self.devices.values())
        return settled and server is not None and server.core.rounds.phase == "finished"


def moved_about(fleet: Any, seed: int, faulty: bool, devices: Sequence[str]) -> None:
    """Whoever runs does what there is to do, and messages move one by one, in an order that a number stands for; where
    it is faulty some come twice, and some of those that may never come do not."""
    rng = random.Random(seed)
    for _ in range(30):
        what = rng.random()
        if what < 0.7:
            _move(fleet.broker, rng, rng.choice(("once", "once", "twice", "never")) if faulty else "once")
        elif what < 0.85:
            fleet.step_device(rng.choice(devices), None)
        elif what < 0.95 and fleet.server is not None:
            fleet.step_server(None)
        else:
            fleet.clock.now += 1.0


def _move(broker: LossyBroker, rng: random.Random, how: str) -> None:
    both = [(link, up) for link in broker.links for up in (True, False)]
    ways = [(link, topic, up) for link, up in both for topic in _topics(link, up)]
    if not ways:
        return
    link, topic, up = rng.choice(ways)
    if up:
        broker.take(link, topic, drop=how == "never")
    else:
        broker.deliver(link, topic, twice=how == "twice", drop=how == "never")


def _topics(link: ModelLink, up: bool) -> list[str]:
    return list(link.outgoing if up else link.coming)


def _same(one: object, other: object) -> bool:
    """Whether two statistics are the same, to the last bit of what travels as f64."""
    fields = defaultdict(list)
    for each in (one, other):
        for name, value in vars(each).items():
            if isinstance(value, np.ndarray):
                fields[name].append(value)
    return bool(fields) and all(len(pair) == 2 and np.allclose(*pair, rtol=1e-12, atol=0) for pair in fields.values())


def test_no_order_of_faults_loses_doubles_or_stops_anything() -> None:
    run_state_machine_as_test(Faults, settings=settings(max_examples=8, stateful_step_count=25, derandomize=True))


@pytest.mark.slow
def test_no_order_of_faults_in_many_runs() -> None:
    run_state_machine_as_test(Faults, settings=settings(max_examples=400, stateful_step_count=80, derandomize=True))
