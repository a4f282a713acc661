"""What a device believes, what it signs with, and how it is enrolled."""

from __future__ import annotations

import hashlib
import os
import random
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from commands import ROOT

from protofleet.contract.errors import LinkError, StoreError, UsageError, WireError
from protofleet.contract.identity.signatures import Keyring, Signer, inside, invitation_key, token_proves
from protofleet.contract.identity.tokens import draw_token, read_token, token_text
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.link import Received
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import ENROL
from protofleet.contract.wire.messages import Announcement, Contribution, Message, Receipt, Rival, Signed, Status
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.signing_identity import FILE, Identity, identity_of
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import FINAL, Journal, Pending
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.rounds.patience import Patience
from protofleet.edge_client.settings import ClientSettings
from tests.attacks.targets.inbox import KEYS, Scene

FLEET, DEVICE = "fleet", "pi-1"
AGGREGATOR, OWN, HOSTILE = Signer(bytes(range(32))), Signer(b"o" * 32), Signer(bytes(32))
ROUND, DOWN, UP = topics.round_(FLEET), topics.down(FLEET, DEVICE), topics.up(FLEET, DEVICE)
STATUS = topics.status(FLEET, DEVICE)
RECEIPT = encode(Receipt(b"run1", 3, "ncm", "committed"))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal(tmp_path / "state", fleet=FLEET, device=DEVICE, bundle=bytes(32)) as made:
        yield made


class Trusted:
    """A `Trust`, and who speaks to it."""

    def __init__(self, journal: Journal, *keys: bytes, own: Signer | None = None) -> None:
        self.trust = Trust(keys, Identity(own), journal.issued, fleet=FLEET, device_id=DEVICE)

    def hears(self, topic: str, payload: bytes) -> Message | None:
        return self.trust.opened(Received(topic, payload, False, 1, 1))


def announcement(issued: int) -> bytes:
    return encode(Announcement(b"run1", 3, "open", "ncm", bytes(32), issued=issued))


def test_only_what_a_trusted_key_signed_for_this_topic_is_believed(journal: Journal, said: list[str]) -> None:
    device = Trusted(journal, HOSTILE.public_key[::-1], AGGREGATOR.public_key)
    assert device.hears(DOWN, AGGREGATOR.sign(DOWN, RECEIPT)) == decode(RECEIPT)
    for payload in (
        RECEIPT,
        HOSTILE.sign(DOWN, RECEIPT),
        AGGREGATOR.sign(topics.down("other", DEVICE), RECEIPT),
        AGGREGATOR.sign(topics.down(FLEET, "pi-2"), RECEIPT),
        b"garbage",
    ):
        assert device.hears(DOWN, payload) is None
    assert device.trust.refused == 5
    assert sum("aggregate --sign KEY" in line for line in said) == 1  # what to do, once
    assert sum("has to name the aggregator's key" in line for line in said) == 1


def test_a_flood_writes_no_log(journal: Journal, said: list[str]) -> None:
    device = Trusted(journal, AGGREGATOR.public_key)
    for _ in range(500):
        assert device.hears(ROUND, announcement(1)) is None
        assert device.hears(DOWN, Signer(os.urandom(32)).sign(DOWN, RECEIPT)) is None
    assert len(said) == 2
    assert device.trust.to_report(0.0) == 1000
    assert device.hears(ROUND, announcement(1)) is None
    assert device.trust.to_report(1.0) is None  # told a moment ago
    assert device.trust.to_report(700.0) == 1001


def test_an_old_announcement_is_known_also_after_a_restart(tmp_path: Path) -> None:
    def at_start(payloads: list[bytes]) -> list[bool]:
        with Journal(tmp_path / "state", fleet=FLEET, device=DEVICE, bundle=bytes(32)) as journal:
            device = Trusted(journal, AGGREGATOR.public_key, HOSTILE.public_key)
            return [device.hears(ROUND, payload) is not None for payload in payloads]

    signed = {issued: AGGREGATOR.sign(ROUND, announcement(issued)) for issued in (0, 5, 9)}
    assert at_start([signed[0], signed[5], signed[9], signed[9], signed[5]]) == [False, True, True, True, False]
    assert at_start([signed[5], signed[9]]) == [False, True]
    assert at_start([HOSTILE.sign(ROUND, announcement(1))]) == [True]  # another trusted key has numbers of its own


def test_without_trust_nothing_is_looked_at(journal: Journal) -> None:
    device = Trusted(journal)
    for payload in (RECEIPT, HOSTILE.sign(ROUND, RECEIPT)):
        assert device.hears(DOWN, payload) == decode(RECEIPT)
    with pytest.raises(WireError):
        device.hears(DOWN, b"garbage")


@pytest.mark.parametrize("trusts", [True, False])
def test_nobody_else_speaks_for_a_device_that_signs(journal: Journal, trusts: bool) -> None:
    device = Trusted(journal, *([AGGREGATOR.public_key] if trusts else []), own=OWN)
    birth, death = (encode(Status(online, b"instance", 1)) for online in (True, False))
    assert device.hears(STATUS, OWN.sign(STATUS, birth)) == decode(birth)
    assert device.hears(STATUS, birth) is None
    assert device.hears(STATUS, HOSTILE.sign(STATUS, birth)) is None
    posing = encode(Signed(OWN.key_id, birth, HOSTILE.signature(STATUS, birth)))
    assert device.hears(STATUS, posing) is None
    assert (device.hears(STATUS, death) is None) is trusts  # an aggregator that does not sign asks in this way
    if trusts:
        assert device.hears(STATUS, AGGREGATOR.sign(STATUS, death)) == decode(death)


def test_a_recorded_birth_ends_no_process() -> None:
    presence = Presence(DEVICE, b"instance", 200, is_own=lambda instance: instance == b"earlier!", is_signed=True)
    presence.connected(0.0)
    presence.born()
    presence.heard(Status(True, b"instance", 200), 1.0)
    for instance, boot in ((b"longago!", 100), (b"earlier!", 190)):
        presence.heard(Status(True, instance, boot), 2.0)
    assert presence.birth_due(60.0)  # what is retained of us may be that one now
    presence.heard(Status(True, b"another!", 200), 3.0)
    assert presence.rival(3.0) is not None  # it is answered, and ends nobody who was first
    with pytest.raises(LinkError, match="another process"):
        presence.heard(Status(True, b"earlier!", 190, rival=Rival(b"instance", 100, 200)), 3.0)


def test_each_birth_has_a_higher_number_whatever_the_clock(tmp_path: Path) -> None:
    said = []
    for wall in (1.8e9, 0.0, 1.8e9, 1.9e9):
        with Journal(tmp_path / "state", fleet=FLEET, device=DEVICE, bundle=bytes(32)) as journal:
            said.append(Identity(OWN).numbered(Status(True, b"instance", 1), journal.issued, wall).issued)
            assert Identity().numbered(Status(True, b"instance", 1), journal.issued, wall).issued == 0
    assert said == [1_800_000_000_000, 1_800_000_000_001, 1_800_000_000_002, 1_900_000_000_000]


def test_an_older_birth_of_this_process_is_said_anew_unless_the_newest_comes_after_it() -> None:
    """What was said first, of an accuracy or a roll-out, would else stand for what was said last."""
    presence = Presence(DEVICE, b"instance", 1, is_own=lambda instance: False, is_signed=True)
    presence.connected(0.0)
    old, newest = (Status(True, b"instance", 1, issued=number) for number in (7, 8))
    for birth in (old, newest):
        presence.born(birth.issued)
    for birth in (old, newest):  # as the broker gives them back
        presence.heard(birth, 1.0)
    assert not presence.birth_due(60.0)
    presence.heard(old, 61.0)
    assert presence.birth_due(120.0)


def test_a_birth_that_somebody_clears_from_the_broker_is_said_again(journal: Journal) -> None:
    """An aggregator that starts later would not know that the device is here."""
    scene = Scene(journal)
    assert not scene.hear(STATUS, b"")  # of which the client says that it was overwritten
    assert scene.hear(ROUND, b"")


def test_many_who_ask_are_answered_now_and_then() -> None:
    """Whether a device is there was asked once, and is sent again without end: each answer is a write on the disk."""
    presence = Presence(DEVICE, b"instance", 1, is_own=lambda instance: False, is_signed=True)
    presence.connected(0.0)
    births, now_s = 0, 0.0
    while now_s < 100.0:
        if presence.birth_due(now_s):
            presence.born(births + 1)
            births += 1
            presence.heard(Status(True, b"instance", 1, issued=births), now_s)
        presence.heard(Status(False, b"instance", 0), now_s)
        now_s += 0.05
    assert 10 <= births <= 13
    presence.heard(Status(False, b"instance", 0), 200.0)
    assert presence.birth_due(200.0)  # and at once who asks for once


def test_a_client_that_ends_with_its_run_waits_for_no_aggregator_without_a_signature() -> None:
    patience = Patience(Address.parse("mqtt://x"), 60.0, until_finished=True, now_s=0.0)
    patience.check_trust(59.0, refused=3)
    patience.check_trust(61.0, refused=0)
    with pytest.raises(LinkError, match="aggregate --sign KEY"):
        patience.check_trust(61.0, refused=3)


# ── what it signs ───────────────────────────────────────────────────────────────────────────────────────────────────


def settings(folder: Path, **more: object) -> object:
    needed = {"bundle": "b", "broker": "mqtt://x", "id": DEVICE, "data": "d", "state": str(folder / "state")}
    return read_settings(ClientSettings, needed | more)


def test_a_device_makes_its_key_once_for_itself_alone(tmp_path: Path) -> None:
    assert identity_of(settings(tmp_path)).signer is None  # type: ignore[arg-type]
    token = token_text(draw_token())
    made = identity_of(settings(tmp_path, token=token)).signer  # type: ignore[arg-type]
    path = tmp_path / "state" / FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    again = identity_of(settings(tmp_path, token=token)).signer  # type: ignore[arg-type]
    assert made is not None
    assert again is not None
    assert made.public_key == again.public_key
    other = identity_of(settings(tmp_path / "other", token=token)).signer  # type: ignore[arg-type]
    assert other is not None
    assert made.public_key != other.public_key
    given = tmp_path / "given"
    given.write_bytes(b"o" * 32)
    named = identity_of(settings(tmp_path, identity=str(given))).signer  # type: ignore[arg-type]
    assert named is not None
    assert named.public_key == OWN.public_key


@pytest.mark.parametrize(
    ("left", "got"),
    [(b"", "0 bytes"), (b"short", "5 bytes"), (bytes(32), "32 bytes of zeros"), (b"o" * 33, "33 bytes")],
)
@pytest.mark.parametrize("invited", [False, True])
def test_a_key_that_is_lost_is_not_replaced_and_ends_nothing_for_good(
    tmp_path: Path, left: bytes, got: str, invited: bool
) -> None:
    """As a disk leaves it after a power cut: a service manager goes on trying, and a person is told what to do."""
    path = tmp_path / "state" / FILE
    path.parent.mkdir()
    path.write_bytes(left)
    token = {"token": token_text(draw_token())} if invited else {}
    with pytest.raises(StoreError) as caught:
        identity_of(settings(tmp_path, **token))  # type: ignore[arg-type]
    words = str(caught.value)
    assert (
        f"got {got}: the key is lost, try a copy of that file; without one, protofleet fleet invite {DEVICE}" in words
    )
    assert "openssl" not in words
    unit = (ROOT / "deploy" / "protofleet-client.service").read_text().splitlines()
    assert f"RestartPreventExitStatus={caught.value.exit_code}" not in unit
    assert "Restart=on-failure" in unit
    assert path.read_bytes() == left


@pytest.mark.parametrize("trust", ["", [], [""], ["a.pub", ""]])
def test_an_empty_trust_is_not_taken_for_none(tmp_path: Path, trust: object) -> None:
    """A device would believe everybody whose owner has written that it trusts."""
    with pytest.raises(UsageError, match="--trust, expected a public key file, or several, got none"):
        settings(tmp_path, trust=trust)


def test_tokens_are_read_as_people_copy_them() -> None:
    token = draw_token()
    assert token != draw_token()
    text = token_text(token)
    assert len(text.replace("-", "")) == 32
    for written in (text, text.upper(), text.replace("-", " "), f" {text} "):
        assert read_token(written) == token
    for wrong in ("", "abc", text + "a", text.replace(text[0], "1")):
        with pytest.raises(UsageError, match="fleet invite"):
            read_token(wrong)


def withdrawal(round: int = 1) -> bytes:
    return encode(Contribution.withdrawal(run=b"run1", round=round, method="ncm", bundle=bytes(32)))


def test_what_an_earlier_process_left_is_signed_the_same_each_time() -> None:
    plain, key = withdrawal(), (b"run1", 1, "ncm")
    signed = OWN.sign(UP, plain)
    for payload in (plain, signed, HOSTILE.sign(UP, plain)):
        assert Identity(OWN).signed_anew(UP, Pending(key, payload, 65_536)).payload == signed
    assert Identity().signed_anew(UP, Pending(key, plain, 65_536)).payload == plain


def test_chunks_are_signed_and_so_is_the_whole() -> None:
    outbox = Outbox(random.Random(0), seal=lambda payload: OWN.sign(UP, payload))
    whole = OWN.sign(UP, encode(Receipt(b"run1", 1, "ncm", "rejected", missing=bytes(3000))))  # of some length
    outbox.add(Pending((b"run1", 1, "ncm"), whole, 1024))
    outbox.connected(1 << 20)
    sent = outbox.due(0.0, idle=True)
    ring, data = Keyring([OWN.public_key]), b""
    for payload in sent:
        assert len(payload) <= 1024
        message = decode(payload)
        assert isinstance(message, Signed)
        data += decode(ring.payload(message, UP)).data  # type: ignore[union-attr]
    assert data == whole


@pytest.mark.parametrize("status", [*FINAL, "need-chunks"])
def test_a_receipt_of_other_bytes_ends_nothing(status: str) -> None:
    """An intruder's bytes are answered on the device's topic, with their digest; and the receipt of a board that was
    there before, under the same key, may have been recorded."""
    outbox = Outbox(random.Random(0))
    outbox.add(Pending((b"run1", 1, "ncm"), b"mine", 1024))
    digest = hashlib.sha256(b"mine").digest()[:8]
    answer = lambda round, digest: Receipt(b"run1", round, "ncm", status, digest=digest)  # noqa: E731
    assert outbox.is_answered(answer(1, digest))
    assert not outbox.is_answered(answer(1, b""))
    assert not outbox.is_answered(answer(1, b"recorded"))
    assert not outbox.is_answered(answer(2, b"recorded"))  # of what has its receipt already


def test_a_recorded_receipt_sent_again_robs_a_device_of_nothing(journal: Journal) -> None:
    """It is signed, for this topic, run, round and method: a board that was replaced under its name forgot what nobody
    had. Nor does one of long ago say that the bundle on probation is good."""
    own = encode(Contribution.withdrawal(run=KEYS[0][0], round=1, method=KEYS[0][2], bundle=bytes(32)))
    journal.commit_round(KEYS[0], weights={}, payload=own, limit_bytes=1024, metrics={})
    scene = Scene(journal, trusted=(AGGREGATOR.public_key,))
    recorded = [Receipt(*KEYS[0], status, digest=b"recorded") for status in FINAL]  # type: ignore[arg-type]
    for receipt in (*recorded, replace(recorded[0], digest=b""), *(Receipt(*KEYS[1], "committed", digest=bytes(8)),)):
        scene.hear(DOWN, AGGREGATOR.sign(DOWN, encode(receipt)))
    assert [pending.key for pending in journal.pending()] == [KEYS[0]]
    assert scene.ended == scene.news == []
    true = replace(recorded[0], digest=hashlib.sha256(own).digest()[:8])
    scene.hear(DOWN, AGGREGATOR.sign(DOWN, encode(true)))
    assert not journal.pending()
    assert scene.ended == [true]


# ── enrolment ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_device_asks_until_it_is_answered(said: list[str]) -> None:
    token = draw_token()
    enrolling = Enrolling(FLEET, DEVICE, OWN, token)
    assert enrolling.is_open
    assert enrolling.due(0.0) is None  # no connection
    enrolling.connected()
    payload = enrolling.due(0.0)
    assert payload is not None
    assert enrolling.due(4.0) is None
    assert enrolling.due(5.0) == payload
    assert enrolling.wait_s(5.0) == 10.0  # each time twice as long
    assert token_proves(inside(payload), FLEET, DEVICE, invitation_key(token))  # type: ignore[arg-type]
    digest = hashlib.sha256(payload).digest()[:8]
    enrolling.heard(Receipt(b"run1", 1, ENROL, "committed", digest=b"another!"))
    enrolling.heard(Receipt(b"run1", 1, "ncm", "committed", digest=digest))
    assert enrolling.is_open
    enrolling.heard(Receipt(b"run1", 1, ENROL, "rejected", "it has expired", digest=digest))
    assert not enrolling.is_open  # it goes on as it is
    assert "it has expired" in said[-1]
    enrolling.connected()  # and asks once more
    assert enrolling.is_open
    enrolling.heard(Receipt(b"run1", 1, ENROL, "committed", digest=digest))
    enrolling.connected()
    assert not enrolling.is_open
    assert not Enrolling(FLEET, DEVICE, OWN, None).is_open
