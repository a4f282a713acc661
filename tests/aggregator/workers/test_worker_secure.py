"""Keys, signatures and roll-outs where several processes serve a fleet: whoever takes a message, the answer is one."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from aggregator_samples import BUNDLE, bundle_file, manifest
from aggregator_server_samples import Listener, wait
from brokers import TestBroker, make_broker
from postgres_server import need_postgres
from rollout_samples import Fetcher, new_bundle, old_bundle
from standing_talker import unit_means

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.coordinators.standing_coordinator import StandingCoordinator
from protofleet.aggregator.enrolment.gate import Gate
from protofleet.aggregator.monitoring.events import IntruderTold, LinkUp, RolloutCompleted
from protofleet.aggregator.overview.fleet_state import read_state
from protofleet.aggregator.rollout.rollout_stages import Plan
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.operator_orders import await_done, give
from protofleet.aggregator.store.rollout_tables import give_rollout
from protofleet.aggregator.workers.shared_standing import SharedStanding
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import UsageError
from protofleet.contract.identity.signatures import Keyring, Signer, enrolment_of, invitation_key
from protofleet.contract.identity.tokens import draw_token
from protofleet.contract.mqtt.link import Address
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt, Request, Signed, Status
from tests.aggregator.workers.test_worker import FLEET, Running

KEY, OTHER, AGGREGATOR = Signer(bytes(range(32))), Signer(bytes(32)), Signer(b"g" * 32)
UP, DOWN, ROUND = topics.up(FLEET, "a"), topics.down(FLEET, "a"), topics.round_(FLEET)
WALL = 1.8e9
STANDING = {"method": "ncm", "standing": True, "every": "0.1s", "rounds": None, "calibrate": None, "min_clients": 1}


@pytest.fixture
def place() -> str:
    return need_postgres().new_place()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    made = make_broker("mosquitto", tmp_path)
    made.start()
    yield made
    made.stop()


# ── keys ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_asks_again_is_enrolled_whoever_hears_it(place: str) -> None:
    """The one that hears the repetition has not learned yet that another has enrolled the device."""
    token = draw_token()
    message = enrolment_of(FLEET, "a", KEY.public_key, token)
    stolen = enrolment_of(FLEET, "a", OTHER.public_key, token)
    with SharedStore(place, BUNDLE, FLEET, leads=True) as one, SharedStore(place, BUNDLE, FLEET, leads=False) as two:
        one.enrolment.invite("a", invitation_key(token), WALL + 60)
        first, second = Gate(FLEET, one.enrolment), Gate(FLEET, two.enrolment)
        assert first.enrol("a", message, encode(message), b"run1", WALL).status == "committed"
        assert second.enrol("a", message, encode(message), b"run1", WALL).status == "committed"
        assert second.enrol("a", stolen, encode(stolen), b"run1", WALL).status == "rejected"
        assert one.enrolment.keys() == {"a": KEY.public_key}


def test_a_token_is_used_once_though_two_take_it_at_once(place: str) -> None:
    token, said = draw_token(), list[str]()
    with SharedStore(place, BUNDLE, FLEET, leads=True) as one, SharedStore(place, BUNDLE, FLEET, leads=False) as two:
        one.enrolment.invite("a", invitation_key(token), WALL + 60)

        def take(gate: Gate, signer: Signer) -> None:
            message = enrolment_of(FLEET, "a", signer.public_key, token)
            found.wait(10)
            said.append(gate.enrol("a", message, encode(message), b"run1", WALL).status)

        found = threading.Barrier(2)
        gates = (Gate(FLEET, one.enrolment), KEY), (Gate(FLEET, two.enrolment), OTHER)
        threads = [threading.Thread(target=take, args=each) for each in gates]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert sorted(said) == ["committed", "rejected"]


def test_both_that_enrol_the_same_key_at_once_say_so(place: str) -> None:
    token = draw_token()
    message = enrolment_of(FLEET, "a", KEY.public_key, token)
    with SharedStore(place, BUNDLE, FLEET, leads=True) as one, SharedStore(place, BUNDLE, FLEET, leads=False) as two:
        one.enrolment.invite("a", invitation_key(token), WALL + 60)
        gate, read = Gate(FLEET, two.enrolment), two.enrolment.invitation

        def meanwhile(device: str) -> object:
            found = read(device)
            assert one.enrolment.enrol("a", KEY.public_key, WALL, by_token=True)
            return found

        two.enrolment.invitation = meanwhile  # type: ignore[assignment, method-assign]
        assert gate.enrol("a", message, encode(message), b"run1", WALL).status == "committed"


def test_a_board_with_another_key_has_numbers_of_its_own_whoever_enrolled_it(place: str) -> None:
    """The leader hears births; another process may have taken the new board's token."""
    topic, token = topics.status(FLEET, "a"), draw_token()
    with SharedStore(place, BUNDLE, FLEET, leads=True) as one, SharedStore(place, BUNDLE, FLEET, leads=False) as two:
        one.enrolment.enrol("a", OTHER.public_key, WALL)
        leader, member = Gate(FLEET, one.enrolment), Gate(FLEET, two.enrolment)
        leader.check_news("a", topic, Status(True, bytes(8), 1, issued=900))
        one.enrolment.invite("a", invitation_key(token), WALL + 60)
        message = enrolment_of(FLEET, "a", KEY.public_key, token)
        assert member.enrol("a", message, encode(message), b"run1", WALL).status == "committed"
        leader.reload()
        leader.check_news("a", topic, Status(True, bytes(8), 1, issued=5))  # its clock is behind


def test_two_that_sign_answer_alike_and_follow_each_other(broker: TestBroker, place: str, tmp_path: Path) -> None:
    """Enrolled by token, held to the key, revoked: of both; all that is published is signed, and numbered on."""
    sha256, ring = bundle_file(tmp_path / "f.bundle"), Keyring([AGGREGATOR.public_key])
    (tmp_path / "key").write_bytes(b"g" * 32)
    secure = {**STANDING, "enrolled": True, "sign": str(tmp_path / "key")}
    crew = [Running(tmp_path / "f.bundle", broker.url, place, **secure) for _ in range(2)]  # type: ignore[arg-type]
    token = draw_token()
    with Listener(broker.url, DOWN, ROUND) as device:

        def opened(kind: type, holds: object = lambda m: True) -> object:
            found = device.until(
                lambda m: isinstance(m, Signed) and isinstance(decode(m.payload), kind) and holds(decode(m.payload))
            )  # type: ignore[operator]
            assert isinstance(found, Signed)
            return decode(found.payload)

        def ask(payload: bytes, times: int = 4) -> Counter[str]:
            """What is answered to the same message, some times; each answer is signed for its topic."""
            digest, said = hashlib.sha256(payload).digest()[:8], Counter[str]()
            for _ in range(times):  # the broker gives them to both in turn
                device.link.publish(UP, payload)
                receipt = opened(Receipt, lambda m: m.digest == digest)
                said[receipt.status] += 1  # type: ignore[attr-defined]
            return said

        try:
            told = opened(Announcement)
            assert isinstance(told, Announcement)

            def sums(generation: int) -> bytes:
                key = {"run": told.run, "round": generation, "method": "ncm", "bundle": sha256}
                return encode(
                    Contribution.of(unit_means(generation), **key, extractor=told.extractor, standing="present")
                )

            order, _ = give(place, "invite", "a", "me", detail=f"{invitation_key(token).hex()} {time.time() + 600}")
            assert await_done(place, order, 30).outcome == "done"
            enrolment = encode(enrolment_of(FLEET, "a", KEY.public_key, token))
            assert ask(enrolment) == {"committed": 4}
            assert ask(encode(enrolment_of(FLEET, "a", OTHER.public_key, token)), 1) == {"rejected": 1}
            assert ask(KEY.sign(UP, sums(1))) == {"committed": 1, "duplicate": 3}
            assert ask(sums(2), 1) == {"rejected": 1}  # nobody has signed it
            assert ask(KEY.sign(UP, sums(2))) == {"committed": 1, "duplicate": 3}
            leads = lambda each: any(type(event).__name__ == "HeadMade" for event in each.told)  # noqa: E731
            wait(lambda: any(map(leads, crew)))
            first, second = crew if leads(crew[0]) else crew[::-1]
            first.stop()
            newer = opened(Announcement, lambda m: m.epoch > told.epoch)
            assert newer.issued > told.issued  # type: ignore[attr-defined]
            assert ask(KEY.sign(UP, sums(3)), 2) == {"committed": 1, "duplicate": 1}
            crew[0] = Running(tmp_path / "f.bundle", broker.url, place, **secure)  # type: ignore[arg-type]
            crew[1] = second
            order, _ = give(place, "revoke", "a", "me")
            assert await_done(place, order, 30).outcome == "done"
            assert ask(KEY.sign(UP, sums(4)), 1) == {"rejected": 1}
        finally:
            for each in crew:
                each.stop()
        for topic, message in device.heard:
            assert isinstance(message, Signed)
            ring.payload(message, topic)


def test_whom_another_process_has_enrolled_is_no_intruder_to_the_leader(
    broker: TestBroker, place: str, tmp_path: Path
) -> None:
    """The leader alone hears births, and the first one may come before its next look at the store."""
    sha256 = bundle_file(tmp_path / "f.bundle")
    (tmp_path / "key").write_bytes(b"g" * 32)
    secure = {**STANDING, "enrolled": True, "sign": str(tmp_path / "key")}
    leader = Running(tmp_path / "f.bundle", broker.url, place, **secure)  # type: ignore[arg-type]
    names = [f"d{i}" for i in range(20)]
    try:
        with Listener(broker.url, ROUND) as listener:
            assert listener.until(lambda m: isinstance(m, Signed))
            leadership = leader.service._leadership
            assert leadership is not None
            with SharedStore(place, sha256, FLEET, leads=False, settings=leadership.settings) as other:
                for number, name in enumerate(names):
                    topic = topics.status(FLEET, name)
                    other.enrolment.enrol(name, KEY.public_key, WALL)
                    listener.link.publish(topic, KEY.sign(topic, encode(Status(True, bytes(8), number + 1, issued=1))))
            wait(lambda: read_state(place).online == len(names))
    finally:
        leader.stop()
    assert not [event for event in leader.told if isinstance(event, IntruderTold)]


# ── roll-outs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_who_waits_for_pieces_goes_on_waiting_when_something_changes(place: str) -> None:
    """Each word of a device on a roll-out changes the store, and a device that was dropped asks again after 10 s."""
    settings = Settings(method="ncm", standing=True)
    with SharedStore(place, BUNDLE, FLEET, leads=True) as leader, SharedStore(place, BUNDLE, FLEET, leads=False) as two:
        give_rollout(place, bytes(100), Plan(BUNDLE, 1, 100), (1.0,), "me")

        def core_of(store: SharedStore) -> StandingCoordinator:
            keep = partial(SharedStanding, store=store)
            return standing_sums(store, manifest(), BUNDLE, settings, now=0.0, keep=keep)

        core = core_of(leader)
        core.advance(0.0, 1000.0)
        about = {"listener": lambda event: None, "signer": None, "stopping": threading.Event()}
        about |= {"manager": ServiceManager({})}
        worker = Worker(two, lambda: core_of(two), Address.parse("mqtt://127.0.0.1:1"), FLEET, **about)  # type: ignore[arg-type]
        worker._handout.turn(1_000)
        assert worker._handout.take("a", encode(Request(leader.run, BUNDLE[:8], 0, 100)))
        core.parts.rollouts.hear("b", {"bundle": "1 00", "rollout": "1 fetching"})
        core.advance(10.0, 1010.0)
        assert leader.changes() != two.based_on
        worker._read()
        assert worker._handout.wait_s is not None


def test_a_bundle_reaches_devices_whoever_is_asked(broker: TestBroker, place: str, tmp_path: Path) -> None:
    old = old_bundle(tmp_path / "old.bundle", pad=8_000)
    new = new_bundle(tmp_path / "new.bundle", old)
    blob, found = new.read_bytes(), read_bundle(new)
    options = {**STANDING, "limit_bytes": 4_096, "others": (old,)}
    crew = [Running(new, broker.url, place, **options) for _ in range(2)]  # type: ignore[arg-type]
    devices = [Fetcher(broker.url, FLEET, name) for name in ("a", "b", "c")]
    try:
        for device in devices:
            device.say("1 00")
        plan = Plan(found.sha256, found.manifest.version, len(blob), soak_s=0.0)
        wait(lambda: all(any(isinstance(event, LinkUp) for event in each.told) for each in crew))
        order = give_rollout(place, blob, plan, (1.0,), "me")
        assert await_done(place, order, 30).outcome == "done"
        for number, device in enumerate(devices):
            device.until_offered()
            devices[number - 1].say("1 00", f"{plan.version} fetching")  # a change, while this one fetches
            device.fetch(len(blob))
            assert device.got == blob
            device.say(plan.tag, f"{plan.version} healthy")
        wait(lambda: any(isinstance(event, RolloutCompleted) for each in crew for event in each.told))
    finally:
        for device in devices:
            device.link.close()
        for each in crew:
            each.stop()


def test_a_worker_of_another_bundle_takes_nothing(place: str) -> None:
    """It would refuse what devices send that have gone over to the newer one."""
    newer = b"n" * 32
    with SharedStore(place, BUNDLE, FLEET, leads=True):
        pass
    with SharedStore(place, BUNDLE, FLEET, leads=False) as member:
        member.check_version()
        with SharedStore(place, newer, FLEET, extends=[BUNDLE], leads=True):
            assert member.changes() != member.based_on
            with pytest.raises(UsageError, match=r"expected the bundle of sha256 6e6e6e.*, which the leader has"):
                member.check_version()
