"""Anybody publishes anything, at both ends that check signatures: nothing is believed but what a key of theirs signed.

A device with `--trust` and a key of its own (`edge_client/identity/trust.py`), and the aggregator's gate, where some
devices are enrolled, one is revoked, one invited (`aggregator/enrolment/gate.py`). Good messages are published on any
topic, with bytes changed; enrolments, too.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Mapping

from aggregator_samples import BUNDLE, RUN, contribution
from log_lines import each_record

from protofleet.aggregator.enrolment.gate import INTRUSIONS, Gate, Intrusion, inner_of, read_enrolment
from protofleet.aggregator.store.enrolment_tables import Intruder
from protofleet.contract.errors import WireError
from protofleet.contract.identity.signatures import Signer, enrolment_of, invitation_key, token_proves
from protofleet.contract.mqtt.link_actions import Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import Mark
from protofleet.contract.wire.messages import Announcement, Enrolment, Receipt, Status
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.identity.trust import Trust
from tests.attacks.choices import Choices
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 1024
FLEET, DEVICE = "fleet", "a"
AGGREGATOR, OWN, OTHER = (Signer(bytes([number]) * 32) for number in (1, 2, 3))
TOKEN, WALL = bytes(20), 1.8e9
TOPICS = (
    topics.round_(FLEET),
    topics.down(FLEET, DEVICE),
    topics.status(FLEET, DEVICE),
    topics.up(FLEET, DEVICE),
    topics.up(FLEET, "b"),
    topics.up("other", DEVICE),
)
_SIGNERS = (AGGREGATOR, OWN, OTHER)


class _Marks:
    """In place of the journal's, as `edge_client/journal/issued_marks.py`."""

    def __init__(self) -> None:
        self._newest: dict[bytes, int] = {}

    def newest(self, key_id: bytes) -> int:
        return self._newest.get(key_id, 0)

    def heard(self, key_ids: Iterable[bytes]) -> tuple[Mark, ...]:
        return ()

    def saw(self, key_id: bytes, issued: int, proof: bytes = b"") -> None:
        assert issued > self.newest(key_id), "a mark went back"
        self._newest[key_id] = issued


class _Tables:
    """In place of the store's, as `aggregator/store/enrolment_tables.py`: a enrolled, r revoked, i invited."""

    def __init__(self) -> None:
        self.found: dict[str, bytes | None] = {"a": OWN.public_key, "r": None}

    def keys(self) -> dict[str, bytes | None]:
        return dict(self.found)

    def intruders(self) -> list[Intruder]:
        return []

    def invitation(self, device: str) -> tuple[bytes, float] | None:
        return (invitation_key(TOKEN), WALL + 100.0) if device == "i" else None

    def enrol(self, device: str, key: bytes, wall: float, *, by_token: bool) -> None:
        self.found[device] = key

    def marks(self) -> dict[str, int]:
        return {}

    def forget(self, device: str, cause: str) -> None:
        pass

    def keep(self, intruders: Iterable[Intruder], marks: Mapping[str, int]) -> None:
        assert all(len(each.reason) <= 200 for each in intruders)


def run(data: bytes) -> None:
    with each_record(_short):
        _run(data)


def _run(data: bytes) -> None:
    choices = Choices(data)
    trust = Trust([AGGREGATOR.public_key], Identity(OWN), _Marks(), fleet=FLEET, device_id=DEVICE)  # type: ignore[arg-type]
    tables = _Tables()
    gate = Gate(FLEET, tables, only=choices.chance())  # type: ignore[arg-type]
    issued = 0
    while choices:
        topic, payload = choices.one_of(TOPICS), _payload(choices)
        if choices.chance():
            issued = _to_device(trust, topic, payload, issued)
        else:
            _to_aggregator(gate, tables, choices.one_of(("a", "b", "r", "i")), topic, payload)
        if choices.below(8) == 0:
            gate.take_news(WALL)
    assert (trust.to_report(1.0) or 0) <= trust.refused, "more than there were"  # old announcements are not counted


def _to_device(trust: Trust, topic: str, payload: bytes, issued: int) -> int:
    """How new the newest announcement is after it."""
    before = trust.refused
    try:
        message = trust.opened(Received(topic, payload, False, 1, 1))
    except WireError as error:
        is_one_line(error)
        return issued
    assert (message is None) == (trust.refused == before + 1)
    if message is None:
        return issued
    whose = (AGGREGATOR, OWN) if topic == topics.status(FLEET, DEVICE) else (AGGREGATOR,)
    assert (topic, payload) in {(topic, signer.sign(topic, inner_of(payload))) for signer in whose}, "not signed"
    if isinstance(message, Announcement) and topic == topics.round_(FLEET):
        assert message.issued >= max(issued, 1), "one of before was believed"
        return message.issued
    return issued


def _to_aggregator(gate: Gate, tables: _Tables, device: str, topic: str, payload: bytes) -> None:
    enrolment = read_enrolment(payload)
    if enrolment is not None:
        before = tables.found.get(device)
        receipt = gate.enrol(device, enrolment, payload, RUN, WALL)
        assert decode(encode(receipt)) == receipt
        if tables.found.get(device) != before:
            assert token_proves(enrolment, FLEET, device, invitation_key(TOKEN)), "enrolled without the token"
        return
    try:
        message = gate.opened(device, topic, payload)
    except WireError as error:
        is_one_line(error)
        if isinstance(error, Intrusion):
            _is_noted(gate, device, error, payload)
        return
    assert inner_of(payload) in (encode(message, each) for each in ("f64", "f32", "f16")), "another message"
    if device == "a":
        assert payload == OWN.sign(topic, inner_of(payload)), "not of the key that the device is held to"
    assert device != "r", "revoked"


def _is_noted(gate: Gate, device: str, intrusion: Intrusion, payload: bytes) -> None:
    assert intrusion.cause in INTRUSIONS
    assert intrusion.inner == inner_of(payload)
    gate.note(device, intrusion.cause, str(intrusion), WALL)  # type: ignore[arg-type]


def _short(record: logging.LogRecord) -> None:
    assert len(record.getMessage()) < 1000
    assert record.getMessage().isprintable()


def _payload(choices: Choices) -> bytes:
    what = choices.below(8)
    if what == 0:
        return choices.block()
    payload = bytearray(choices.one_of(_good()))
    for _ in range(choices.below(3)):
        payload[choices.below(len(payload))] = choices.number()
    if what == 1:  # two in one another
        return _nested(bytes(payload))
    return bytes(payload)


def _nested(payload: bytes) -> bytes:
    head = encode(Receipt(RUN, 1, "ncm", "committed"))
    return AGGREGATOR.sign(TOPICS[0], head).replace(head, payload)


@functools.cache
def _good() -> tuple[bytes, ...]:
    """What each signer says on each topic, and enrolments."""
    told = [dataclasses.replace(_announcement(), issued=issued) for issued in (0, 5, 7)]
    plain = [*told, Receipt(RUN, 1, "ncm", "committed"), Status(True, b"instance", 1), Status(False, b"instance", 1)]
    plain.append(contribution(round=1))
    said = [encode(message) for message in plain]
    signed = [signer.sign(topic, each) for signer in _SIGNERS for topic in TOPICS for each in said]
    enrolments = [enrolment_of(FLEET, device, OTHER.public_key, TOKEN) for device in "ai"]
    enrolments.append(Enrolment(OTHER.public_key, bytes(64)))
    return (*said, *map(encode, enrolments), *signed)


def _announcement() -> Announcement:
    return Announcement(RUN, 1, "open", "ncm", BUNDLE, limit_bytes=1024)


def seeds() -> Iterable[bytes]:
    for number in range(len(_good())):
        for topic in range(len(TOPICS)) if number < 12 else (number % len(TOPICS),):
            yield bytes([1, topic, 2, number, 0, 1, 0, topic, 2, number, 0, 0, number % 4, 0])
    for number in (8, 9):  # an enrolment, twice
        yield bytes([0, 3, 2, number, 0, 0, 3, 1, 3, 2, number, 0, 0, 3, 0])
    yield bytes([0, 3, 0, 2, 0, 1, 2, 0, 0, 1, 3, 0, 1, 0, 7, 1])
    yield bytes([0, 0, 1, 20, 0, 1, 1])
    for cut in range(0, 120, 12):
        yield bytes([0, 0, 2, 12, 1, cut, 7, 1, 1])
