"""A broker that delivers any messages to a device, on any topic: none ends it, none makes it forget a contribution.

The device's inbox is real, with its follower, outbox and journal; two contributions wait for their receipts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import random
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
from aggregator_samples import BUNDLE, CLASSES, RUN, WIDTH, contribution, manifest
from contract_samples import empty_graph, readable_messages
from log_lines import each_record

from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import LinkError, WireError
from protofleet.contract.mqtt.link import Address
from protofleet.contract.mqtt.link_actions import Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, ClassRows, GlobalPart, Receipt, Status
from protofleet.edge_client.identity.enrolment import Enrolling
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.identity.trust import Trust
from protofleet.edge_client.journal.journal import FINAL, Journal, Key
from protofleet.edge_client.messages.inbox import Hearing, Inbox
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.messages.outbox import Outbox
from protofleet.edge_client.messages.presence import Presence
from protofleet.edge_client.rounds.round_follower import Follower
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 2048
FLEET, DEVICE = "fleet", "pi-1"
TOPICS = (
    topics.round_(FLEET),
    topics.global_part(FLEET, 0),
    topics.global_part(FLEET, 1),
    topics.down(FLEET, DEVICE),
    topics.status(FLEET, DEVICE),
    topics.down(FLEET, "pi-2"),
)
KEYS: tuple[Key, ...] = ((RUN, 1, "fedproto"), (RUN, 2, "fedproto"))
OWN, INSTANCE = b"earlier!", b"instance"


def run(data: bytes) -> None:
    with scratch() as folder, _journal(folder) as journal, each_record(_short):
        scene = Scene(journal)
        choices = Choices(data)
        while choices:
            try:
                scene.next(choices)
            except LinkError as error:
                is_one_line(error)
        scene.check()


@functools.cache
def _blank() -> bytes:
    """A journal's file with two contributions that wait."""
    with scratch() as folder:
        with Journal(folder, fleet=FLEET, device=DEVICE, bundle=BUNDLE) as journal:
            journal.begin(OWN)
            journal.begin(INSTANCE)
            for key in KEYS:
                payload = encode(contribution(round=key[1]))
                journal.commit_round(key, weights={}, payload=payload, limit_bytes=1024, metrics={})
        return (folder / "journal.sqlite").read_bytes()


def _journal(folder: Path) -> Journal:
    (folder / "journal.sqlite").write_bytes(_blank())
    return Journal(folder, fleet=FLEET, device=DEVICE, bundle=BUNDLE)


class Scene:
    """The inbox of a device, and what it is told of.

    Args:
        trusted: public keys that messages have to be signed with; none where signatures are not looked at.

    Attributes:
        ended: receipts that ended a contribution; `news` those that answer none.
    """

    def __init__(self, journal: Journal, trusted: Collection[bytes] = ()) -> None:
        self.journal, self.now, self.settled = journal, 0.0, dict[Key, str]()
        self.ended: list[Receipt] = []
        self.news: list[Receipt] = []
        bundle = Bundle(manifest(), BUNDLE, empty_graph(), empty_graph(), {"backbone.weight": np.ones((2, 2), "<f4")})
        self.outbox = Outbox(random.Random(0))
        for pending in journal.pending():
            self.outbox.add(pending)
        self.follower = Follower(DEVICE, bundle, is_done=journal.is_done, took_part=journal.took_part, stays=True)
        self.presence = Presence(DEVICE, INSTANCE, is_own=journal.is_own_instance)
        self.inbox = Inbox(
            Membership(Address.parse("mqtt://127.0.0.1:1"), FLEET, DEVICE, bundle, stays=True),
            journal,
            self.follower,
            self.outbox,
            self.presence,
            Trust(trusted, Identity(), journal.issued, fleet=FLEET, device_id=DEVICE),
            Enrolling(FLEET, DEVICE, None, None),
            Changes(logging.getLogger("protofleet.test")),
        )
        self.inbox.hearing = Hearing(settled=self.ended.append, news=self.news.append)

    def next(self, choices: Choices) -> None:
        what = choices.below(8)
        self.now += what / 4
        if what == 0:
            self.outbox.connected(640 + choices.number(2))
            self.presence.connected(self.now)
        elif what == 1:
            self.outbox.disconnected()
            self.presence.disconnected()
        elif what == 2:
            for payload in self.outbox.due(self.now, idle=choices.chance()):
                decode(payload)
            if self.presence.birth_due(self.now):
                self.presence.born()
        else:
            self._deliver(choices)
        self.follower.task()
        self.follower.waits_for()
        wait_s = self.outbox.wait_s(self.now)
        assert wait_s is None or wait_s >= 0

    def _deliver(self, choices: Choices) -> None:
        topic, payload = choices.one_of(TOPICS), _payload(choices)
        self._note(topic, payload)
        self.hear(topic, payload, retained=choices.chance())
        state = self.follower.newest_state
        if state is not None:
            state.below(CLASSES)

    def hear(self, topic: str, payload: bytes, *, retained: bool = False) -> bool:
        """A message came; whether it is believed."""
        return self.inbox.take(Received(topic, payload, retained, 1, 1))

    def _note(self, topic: str, payload: bytes) -> None:
        """Only a final receipt, on its own topic and of our own bytes, may settle anything."""
        try:
            message = decode(payload)
        except WireError:
            return
        if isinstance(message, Receipt) and message.status in FINAL and topic == topics.down(FLEET, DEVICE):
            key = (message.run, message.round, message.method)
            if self.outbox.is_answered(message):
                self.settled.setdefault(key, message.status)

    def check(self) -> None:
        waiting = {pending.key for pending in self.journal.pending()}
        for key in KEYS:
            assert (key in waiting) == (key not in self.settled), "a contribution was lost, or is held for ever"
            if key in self.settled:
                assert (self.journal.outcome(key) or ("",))[0] == self.settled[key]
        assert len(self.outbox) == len(waiting)


def _payload(choices: Choices) -> bytes:
    if choices.below(4) == 0:
        return choices.block()
    payload = bytearray(choices.one_of(_good()))
    for _ in range(choices.below(4)):
        payload[choices.below(len(payload))] = choices.number()
    return bytes(payload)


def _short(record: logging.LogRecord) -> None:
    assert len(record.getMessage()) < 1000


@functools.cache
def _good() -> tuple[bytes, ...]:
    """What an aggregator sends, and what anybody else may."""
    open_ = Announcement(RUN, 3, "open", "fedproto", BUNDLE, limit_bytes=1024)
    made: list[object] = [open_, *(dataclasses.replace(open_, phase=p) for p in ("closed", "finished", "standing"))]
    made += [dataclasses.replace(open_, run=b"run2"), dataclasses.replace(open_, global_version=1, limit_bytes=4096)]
    rows = ClassRows(np.arange(CLASSES, dtype=np.uint16), np.ones((CLASSES, WIDTH), "<f4"))
    made += [GlobalPart(RUN, 1, 1, part, 2, kind, rows) for part, kind in enumerate(("prototypes", "head"))]
    first, second = (digest_of(encode(contribution(round=key[1]))) for key in KEYS)
    made += [Receipt(*KEYS[0], status, digest=first) for status in FINAL]  # type: ignore[arg-type]
    made += [Receipt(*KEYS[1], "need-chunks", missing=b"\xff", digest=second), Receipt(*KEYS[1], "late", digest=first)]
    made += [Status(online, who, 1) for online in (True, False) for who in (OWN, INSTANCE, b"stranger")]
    return tuple(encode(message) for message in (*made, *readable_messages().values()))  # type: ignore[arg-type]


def seeds() -> Iterable[bytes]:
    for topic in range(len(TOPICS)):
        for number in range(len(_good())):
            yield bytes([0, 0, 0, 2, 1, 3, topic, 1, number, 0, 0, 2, 0])
    yield bytes([3, 1, 1, 6, 0, 0, 3, 2, 1, 7, 0, 0, 3, 0, 1, 5, 0, 0])
