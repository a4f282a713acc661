"""Who is enrolled is held to its key; a token enrols once; who poses as a device is named and ends nothing of it."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import BUNDLE, contribution, manifest
from postgres_server import ON_FILES, Places

from protofleet.aggregator.coordinators.kinds import rounds_of
from protofleet.aggregator.coordinators.round_coordinator import CONTRADICTS_S, RoundCoordinator
from protofleet.aggregator.database import read_only
from protofleet.aggregator.enrolment.gate import Gate, Intrusion
from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.rounds.round_machine import Closed
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.enrolment_tables import MAX_INTRUDERS, Intruder
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import StoreError, WireError
from protofleet.contract.identity.signatures import Signer, enrolment_of, inside, invitation_key
from protofleet.contract.identity.tokens import draw_token
from protofleet.contract.wire import topics
from protofleet.contract.wire.chunks import split
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES, REFUSED
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution, Receipt, Signed, Status

FLEET = "fleet"
KEY, OTHER = Signer(bytes(range(32))), Signer(bytes(32))
UP = topics.up(FLEET, "a")
WALL = 1.8e9


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, FLEET) as made:
        yield made


def plain(store: DurableStore, round: int = 1, **fields: object) -> bytes:
    return encode(contribution(run=store.run, round=round, **fields))  # type: ignore[arg-type]


def opened(store: DurableStore, device: str, payload: bytes, *, only: bool = False, topic: str = UP) -> object:
    return Gate(FLEET, store.enrolment, only=only).opened(device, topic, payload)


# ── whose message it is ─────────────────────────────────────────────────────────────────────────────────────────────


def test_who_is_enrolled_is_held_to_its_key(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    said = plain(store)
    assert isinstance(opened(store, "a", KEY.sign(UP, said)), Contribution)
    for cause, payload, topic in (
        ("unsigned", said, UP),
        ("other-key", OTHER.sign(UP, said), UP),
        ("forged", KEY.sign(topics.up("other", "a"), said), UP),
        ("forged", KEY.sign(topics.up(FLEET, "b"), said), UP),
        ("forged", KEY.sign(UP, said), topics.status(FLEET, "a")),
        ("unsigned", b"garbage", UP),
    ):
        with pytest.raises(Intrusion) as caught:
            opened(store, "a", payload, topic=topic)
        assert caught.value.cause == cause


def test_who_never_was_is_taken_as_it_comes_unless_only_the_enrolled_are(store: DurableStore) -> None:
    said = plain(store)
    for payload in (said, KEY.sign(UP, said)):
        assert isinstance(opened(store, "a", payload), Contribution)
        with pytest.raises(Intrusion, match="fleet invite a") as caught:
            opened(store, "a", payload, only=True)
        assert caught.value.cause == "not-enrolled"
    with pytest.raises(WireError, match="message"):
        opened(store, "a", b"garbage")


def test_a_revoked_key_speaks_for_nobody_and_another_takes_its_place(store: DurableStore) -> None:
    said = plain(store)
    store.enrolment.enrol("a", KEY.public_key, WALL)
    store.enrolment.revoke("a", WALL)
    for payload in (said, KEY.sign(UP, said)):
        with pytest.raises(Intrusion) as caught:
            opened(store, "a", payload)
        assert caught.value.cause == "revoked"
    store.enrolment.enrol("a", OTHER.public_key, WALL)
    assert isinstance(opened(store, "a", OTHER.sign(UP, said)), Contribution)
    with pytest.raises(Intrusion):
        opened(store, "a", KEY.sign(UP, said))
    gate = Gate(FLEET, store.enrolment)  # an aggregator that runs
    order = Order(1, "revoke", "a", "me", WALL)
    assert gate.obey(order, WALL) == "done"
    with pytest.raises(Intrusion, match="was revoked"):
        gate.opened("a", UP, OTHER.sign(UP, said))


# ── enrolment with a token ──────────────────────────────────────────────────────────────────────────────────────────


def enrol(gate: Gate, signer: Signer, token: bytes, device: str = "a", wall: float = WALL) -> Receipt:
    message = enrolment_of(FLEET, device, signer.public_key, token)
    return gate.enrol(device, message, encode(message), b"run1", wall)


def test_a_token_enrols_its_device_once_and_for_one_key(store: DurableStore) -> None:
    token = draw_token()
    store.enrolment.invite("a", invitation_key(token), WALL + 60)
    gate = Gate(FLEET, store.enrolment)
    assert "not the token" in enrol(gate, OTHER, draw_token()).reason
    assert "no invitation of b" in enrol(gate, OTHER, token, "b").reason
    assert enrol(gate, KEY, token).status == "committed"
    assert gate.key("a") == KEY.public_key
    assert enrol(gate, KEY, token).status == "committed"  # its answer was lost
    assert "no invitation" in enrol(gate, OTHER, token).reason  # who has read the token later
    with read_only(store.standing.path, KIND) as db:
        (order,) = orders(db)
    assert (order.what, order.device, order.who) == ("enrol", "a", "the device, by its token")
    again = Gate(FLEET, store.enrolment)
    assert again.key("a") == KEY.public_key
    assert list(again.enrolled) == ["a"]


@ON_FILES
def test_who_reads_the_proof_cannot_use_it(store: DurableStore) -> None:
    token = draw_token()
    store.enrolment.invite("a", invitation_key(token), WALL + 60)
    gate = Gate(FLEET, store.enrolment)
    read = enrolment_of(FLEET, "a", KEY.public_key, token)
    stolen = read.__class__(OTHER.public_key, read.proof)
    assert gate.enrol("a", stolen, encode(stolen), b"run1", WALL).status == "rejected"
    weak = enrolment_of(FLEET, "a", bytes(32), token)
    assert gate.enrol("a", weak, encode(weak), b"run1", WALL).reason == "a key for which anybody can sign"
    assert token not in Path(store.standing.path).read_bytes()  # nor is it in the store


def test_a_token_expires_and_a_new_one_takes_its_place(store: DurableStore) -> None:
    token, newer = draw_token(), draw_token()
    store.enrolment.invite("a", invitation_key(token), WALL)
    gate = Gate(FLEET, store.enrolment)
    assert "has expired" in enrol(gate, KEY, token, wall=WALL + 1).reason
    store.enrolment.invite("a", invitation_key(newer), WALL + 60)
    assert "not the token" in enrol(gate, KEY, token).reason
    assert enrol(gate, KEY, newer).status == "committed"


# ── in the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────


def coordinator(store: DurableStore, **settings: object) -> RoundCoordinator:
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, calibrate=False, **settings), now=0.0)  # type: ignore[arg-type]
    core.status("a", KEY.sign(topics.status(FLEET, "a"), encode(Status(True, bytes(8), 1, issued=1))), 0.0)
    core.advance(10.0, WALL)
    assert core.rounds.phase == "open"
    return core


def test_a_stolen_name_is_named_and_takes_nothing_from_the_device(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    core = coordinator(store, enrolled=True)
    said, mine = plain(store), KEY.sign(UP, plain(store))
    (forged,) = core.take([("a", said)], 11.0)
    assert (forged.outcome, forged.cause) == ("rejected", "intruder")
    assert forged.receipt is not None
    assert forged.receipt.digest  # it speaks of those bytes, and of no other
    assert core.rounds.contributions == set()
    (honest,) = core.take([("a", mine)], 12.0)
    assert honest.outcome == "committed"
    assert honest.receipt is not None
    stored = next(iter(store.contributions(1, "fedproto")))
    assert stored == mine  # kept with its signature
    (stranger,) = core.take([("b", plain(store))], 12.0)
    assert stranger.cause == "intruder"
    news = {(each.device, each.cause): each.messages for each in core.parts.gate.take_news(WALL)}
    assert news == {("a", "unsigned"): 1, ("b", "not-enrolled"): 1}
    assert {each.device for each in store.enrolment.intruders()} == {"a", "b"}


def test_chunks_are_the_devices_own_too(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    core = coordinator(store)
    whole = KEY.sign(UP, plain(store))
    keys = {"run": store.run, "round": 1, "method": "fedproto"}
    bare = [encode(chunk) for chunk in split(whole, 700, **keys)]
    spoilt = [encode(chunk) for chunk in split(whole[:-1] + b"x", 700, **keys)]
    (mine,) = (KEY.sign(UP, chunk) for chunk in bare)
    (forged,), (honest,) = (core.take([("a", payload)], 11.0) for payload in (spoilt[0], mine))
    assert (forged.cause, honest.outcome) == ("intruder", "committed")


def test_an_honest_mistake_of_a_device_that_signs_is_answered_by_its_key(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    core = coordinator(store)
    (decided,) = core.take([("a", KEY.sign(UP, plain(store, bundle=bytes(32))))], 11.0)
    assert (decided.outcome, decided.cause) == ("rejected", "content")
    broken = bytearray(plain(store))
    broken[-4:] = b"\x00\x00\xc0\x7f"  # NaN
    (decided,) = core.take([("a", KEY.sign(UP, bytes(broken)))], 12.0)
    assert (decided.outcome, decided.cause, decided.round) == ("rejected", "unreadable", 1)


def test_a_forged_status_moves_nobody(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    core = coordinator(store)
    assert core.rounds.is_online("a")
    death = encode(Status(False, bytes(8), 1))
    core.status("a", death, 11.0)
    assert core.rounds.is_online("a")
    core.status("a", death, 11.0, is_ours=True)  # our own question whether it is there, which it may answer
    core.advance(11.0 + CONTRADICTS_S, WALL)
    assert not core.rounds.is_online("a")


def test_a_recorded_death_does_not_end_a_round_without_its_device(store: DurableStore) -> None:
    """It is of the process that still runs: its last will of a connection that it had lost. The device contradicts."""
    status = topics.status(FLEET, "a")
    store.enrolment.enrol("a", KEY.public_key, WALL)
    core = coordinator(store)
    assert core.take([("b", plain(store))], 11.0)[0].outcome == "committed"
    death = KEY.sign(status, encode(Status(False, bytes(8), 1)))
    for now in (20.0, 40.0, 60.0):
        core.status("a", death, now)
        core.status("a", death, now + 5.0)
        assert not isinstance(core.advance(now + 10.0, WALL), Closed)
        birth = encode(Status(True, bytes(8), 1, issued=int(now)))
        core.status("a", KEY.sign(status, birth), now + 10.0)
        assert not isinstance(core.advance(now + 19.0, WALL), Closed)
    core.status("a", death, 80.0)
    assert isinstance(core.advance(80.0 + CONTRADICTS_S, WALL), Closed)  # it was true


def test_a_recorded_birth_says_nothing_again_also_after_a_restart(store: DurableStore) -> None:
    """It is signed, for this topic: a device that failed a roll-out, or measured itself, weeks ago."""
    topic = topics.status(FLEET, "a")
    store.enrolment.enrol("a", KEY.public_key, WALL)
    first, newest = (KEY.sign(topic, encode(Status(True, bytes(8), 1, issued=number))) for number in (5, 9))
    for wall in (WALL, WALL + 100):
        core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, calibrate=False), now=0.0)
        for birth in (first, newest) if wall == WALL else (newest,):  # which the broker retains
            core.status("a", birth, 11.0)
        assert core.rounds.death("a", bytes(8))
        assert not core.status("a", first, 12.0)
        assert not core.rounds.is_online("a")
        (told,) = core.parts.gate.take_news(wall)
        assert (told.device, told.cause) == ("a", "replayed")
        assert "birth 5 after 9" in told.reason
    store.enrolment.enrol("a", OTHER.public_key, WALL)  # another key has numbers of its own
    core = rounds_of(store, manifest(), BUNDLE, Settings(rounds=1, calibrate=False), now=0.0)
    core.status("a", OTHER.sign(topic, encode(Status(True, b"another!", 1, issued=1))), 14.0)
    assert not core.parts.gate.take_news(WALL + 200)


def test_a_device_that_gets_forged_messages_says_so(store: DurableStore) -> None:
    core = coordinator(store)
    core.status("a", encode(Status(True, bytes(8), 1, metrics={REFUSED: 7.0})), 11.0)
    (told,) = core.parts.gate.take_news(WALL)
    assert (told.device, told.cause, told.messages) == ("a", "refuses", 7)


def test_orders_enrol_invite_and_revoke(store: DurableStore, places: Places) -> None:
    core = coordinator(store)
    token, path = draw_token(), places("s")
    give(path, "invite", "b", "me", detail=f"{invitation_key(token).hex()} {int(time.time()) + 60}")
    give(path, "enrol", "a", "me", detail=KEY.public_key.hex())
    give(path, "enrol", "c", "me", detail="no key")
    give(path, "revoke", "d", "me")
    outcomes = [core.advance(now, WALL).outcome for now in (20.0, 21.0, 22.0, 23.0)]  # type: ignore[union-attr]
    assert outcomes == [
        "done",
        f"done: key {KEY.key_id.hex()}",
        "refused: that is no key",
        "done: no key of it was known",
    ]
    answer = core.parts.enrol("b", encode(enrolment_of(FLEET, "b", OTHER.public_key, token)), time.time())
    assert answer is not None
    assert answer.status == "committed"
    assert store.enrolment.keys() == {"a": KEY.public_key, "b": OTHER.public_key, "d": None}


def test_who_is_revoked_is_turned_away_at_once_and_its_token_and_old_key_are_of_no_use(store: DurableStore) -> None:
    gate, token = Gate(FLEET, store.enrolment), draw_token()
    said = KEY.sign(UP, plain(store))
    again = enrolment_of(FLEET, "a", KEY.public_key, token)
    store.enrolment.invite("a", invitation_key(token), WALL + 60)
    answer = gate.enrol("a", again, encode(again), store.run, WALL)
    assert (answer.status, answer.digest) == ("committed", hashlib.sha256(encode(again)).digest()[:8])
    assert isinstance(gate.opened("a", UP, said), Contribution)
    gate.note("a", "forged", "no", WALL)
    gate.take_news(WALL)
    store.enrolment.invite("a", invitation_key(token), WALL + 60)
    assert gate.obey(Order(1, "revoke", "a", "me", WALL), WALL) == "done"
    for payload in (said, OTHER.sign(UP, plain(store)), plain(store)):
        with pytest.raises(Intrusion) as caught:
            gate.opened("a", UP, payload)
        assert caught.value.cause == "revoked"
    assert gate.enrol("a", again, encode(again), store.run, WALL).status == "rejected"
    assert [each.cause for each in store.enrolment.intruders()] == ["forged"]
    gate.obey(Order(2, "enrol", "a", "me", WALL, detail=KEY.public_key.hex()), WALL)
    assert store.enrolment.intruders() == []  # of a device that is known again


@pytest.mark.parametrize("until", ["nan", "inf", "1e300", "tomorrow"])
def test_an_invitation_ends(store: DurableStore, until: str) -> None:
    order = Order(1, "invite", "a", "me", WALL, detail=f"{invitation_key(draw_token()).hex()} {until}")
    assert Gate(FLEET, store.enrolment).obey(order, WALL) == "refused: that is no key"
    assert store.enrolment.invitation("a") is None


def test_a_disk_that_refuses_enrols_nobody(store: DurableStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(*args: object, **named: object) -> None:
        raise StoreError("the disk is full")

    gate, token = Gate(FLEET, store.enrolment, only=True), draw_token()
    store.enrolment.invite("a", invitation_key(token), WALL + 60)
    asked = enrolment_of(FLEET, "a", KEY.public_key, token)
    with monkeypatch.context() as patch:
        patch.setattr(store.enrolment, "enrol", off)
        with pytest.raises(StoreError):
            gate.enrol("a", asked, encode(asked), store.run, WALL)
    assert gate.key("a") is None
    assert not gate.enrolled


def test_the_newest_of_those_turned_away_are_kept_over_a_restart(
    store: DurableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofleet.aggregator.enrolment.gate.MAX_INTRUDERS", 3)
    gate = Gate(FLEET, store.enrolment)
    for number in range(3):
        gate.note(f"x{number}", "unsigned", f"reason {number}", WALL + number)
    gate.note("x0", "unsigned", "another reason", WALL + 5)
    gate.take_news(WALL)
    gate = Gate(FLEET, store.enrolment)
    gate.note("x9", "unsigned", "no", WALL + 9)
    gate.take_news(WALL + 9)
    assert [device for device, _ in gate._noted] == ["x2", "x0", "x9"]
    first = next(each for each in store.enrolment.intruders() if each.device == "x0")
    assert (first.reason, first.messages) == ("another reason", 2)


def test_a_store_keeps_the_newest_of_many_turned_away(store: DurableStore) -> None:
    count = MAX_INTRUDERS + 2
    store.enrolment.keep((Intruder(f"x{n}", "unsigned", "no", 1, WALL, WALL + n) for n in range(count)), {})
    assert [each.device for each in store.enrolment.intruders()] == [f"x{n}" for n in range(count - 1, 1, -1)]


def test_what_an_aggregator_that_signs_hears_of_itself_is_its_own() -> None:
    voice, topic, said = (
        SignedPublisher(FLEET, KEY, lambda wall: 1),
        topics.round_(FLEET),
        encode(Status(True, b"instance", 1)),
    )
    assert voice.heard(topic, voice.sealed(topic, said)) == Status(True, b"instance", 1)
    posing = encode(Signed(KEY.key_id, said, OTHER.signature(topic, said)))
    for payload in (said, OTHER.sign(topic, said), posing, KEY.sign("elsewhere", said)):
        assert not voice.is_ours(topic, payload)
        with pytest.raises(Intrusion):
            voice.heard(topic, payload)


def test_a_signed_global_state_fits_in_the_brokers_messages() -> None:
    assert [SignedPublisher(FLEET, each, lambda wall: 1).room_bytes for each in (KEY, None)] == [ENVELOPE_BYTES, 0]
    rows = ClassRows(np.arange(40, dtype=np.uint16), np.ones((40, 30), np.float32))
    state = GlobalState(b"run1", 1, 1, {"means": rows})
    for limit in range(1_000, 1_400, 16):
        parts = SignedPublisher(FLEET, KEY, lambda wall: 1).parts(state, limit)
        assert len(parts) > 4
        assert max(map(len, parts)) <= limit


def test_what_was_overwritten_is_said_again_but_not_all_the_time() -> None:
    voice = SignedPublisher(FLEET, KEY, lambda wall: 1)
    voice.overwritten(100.0)
    assert not voice.mends(100.4)
    assert voice.mends(100.5)
    voice.overwritten(100.6)
    assert voice.wait_s(100.6) == pytest.approx(4.9)
    assert not voice.mends(105.4)
    assert voice.mends(105.5)


def test_invented_names_fill_nothing(store: DurableStore) -> None:
    store.enrolment.enrol("a", KEY.public_key, WALL)
    gate = Gate(FLEET, store.enrolment, only=True)
    gate.note("a", "forged", "no", WALL)
    for number in range(MAX_INTRUDERS + 100):
        gate.note(f"x{number}", "not-enrolled", "no", WALL + number)
        if number % 200 == 0:
            gate.take_news(WALL + 10 * number)
    gate.take_news(WALL + 1e6)
    assert len(store.enrolment.intruders()) == MAX_INTRUDERS
    assert "a" in {each.device for each in store.enrolment.intruders()}  # who poses as a known device is not hidden
    gate.note("x600", "not-enrolled", "no", WALL + 700)  # of one that is still known, and was told of just now
    assert gate.take_news(WALL + 700) == []


def test_what_a_store_keeps_is_read_without_its_signature(store: DurableStore) -> None:
    assert isinstance(inside(KEY.sign(UP, plain(store))), Contribution)


def test_announcements_are_numbered_above_all_before(store: DurableStore) -> None:
    core = coordinator(store)
    first = core.parts.numbers.issue(WALL)
    assert core.parts.numbers.issue(WALL) == first + 1
    assert core.parts.numbers.issue(WALL - 1e6) == first + 2  # a clock that was set back
    assert core.parts.numbers.issue(WALL + 1) == int((WALL + 1) * 1000)
