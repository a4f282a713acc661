"""A broker, an owner and a clock that do anything to the connection's machine: it never fails, and never overstays."""

from __future__ import annotations

import random
from collections.abc import Iterable

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt import connection as rules
from protofleet.contract.mqtt.connection import Connection
from protofleet.contract.mqtt.link_actions import (
    Acknowledge,
    Connected,
    Dial,
    Failed,
    Hangup,
    Limits,
    Received,
    Send,
    Tell,
    Terms,
)
from tests.attacks.choices import Choices

LONGEST_BYTES = 1024
TOPICS = ("a", "b")
WINDOW = 3
CODES = (None, 0, 128, 135, 139, 141, 142, 151)


class _Scene:
    """What the network and the owner know; each method is one thing that happens."""

    def __init__(self, choices: Choices) -> None:
        self.choices, self.now = choices, 0.0
        self.core = Connection(Limits("mqtt://b", "d", TOPICS, "a", WINDOW, 1_000_000), random.Random(0))
        self.flying: list[int] = []
        self.held: list[int] = []  # packet ids of this connection that were not acknowledged, in order of arrival
        self.told: list[Received] = []
        self.sent = self.loose = self.loose_bytes = 0
        self.over = False

    def obey(self) -> None:
        for _ in range(100_000):
            action = self.core.advance(self.now)
            if action is None:
                return
            if isinstance(action, Dial | Hangup):
                self.flying, self.held = [], []
            elif isinstance(action, Send):
                assert action.ticket not in self.flying
                self.flying.append(action.ticket)
                assert len(self.flying) <= rules.WINDOW_COUNT
            elif isinstance(action, Acknowledge):
                assert action.mid == self.held.pop(0), "acknowledged out of turn"
            elif isinstance(action, Tell):
                self._hear(action.event)
        raise AssertionError("it never comes to rest")

    def _hear(self, event: object) -> None:
        assert not self.over, "something was told after the end"
        self.over = isinstance(event, Failed)
        if isinstance(event, Received):
            self.told.append(event)
            assert len(self.told) <= (1 + rules.WINDOW_BORNE) * WINDOW + rules.LOOSE_COUNT, "more than was asked for"
            if event.mid:
                self.held.append(event.mid)
            else:
                self.loose, self.loose_bytes = self.loose + 1, self.loose_bytes + len(event.payload)
            assert self.loose <= rules.LOOSE_COUNT
            assert self.loose_bytes <= rules.LOOSE_BYTES
        elif isinstance(event, Connected):
            assert self.core.phase == "up"

    # ── what may happen ─────────────────────────────────────────────────────────────────────────────────────────────

    def time(self) -> None:
        self.now += self.choices.one_of((0.0, 0.1, 1.0, 29.0, 31.0, 61.0, 400.0))

    def accept(self) -> None:
        c = self.choices
        terms = Terms(1 + c.below(100), c.below(3), c.one_of((1 << 28, 1024, 1023, 65_536)), bool(c.below(8)))
        self.core.accepted(terms, self.now)

    def refuse(self) -> None:
        self.core.refused(self.choices.number(), "no", self.now)

    def subscribe(self) -> None:
        self.core.subscribed([None] * (2 if self.choices.below(8) else 1), self.now)

    def refuse_subscription(self) -> None:
        self.core.subscribed([None, "no"][: self.choices.below(4)], self.now)

    def come_up(self) -> None:
        self.now += 301.0
        self.obey()
        self.core.accepted(Terms(), self.now)
        self.obey()
        self.core.subscribed([None, None], self.now)

    def deliver(self) -> None:
        c = self.choices
        qos, mid, size = c.below(4), c.below(6), c.one_of((0, 1, 1000, 600_000))
        topic = c.one_of((*TOPICS, "elsewhere"))
        self.core.received(topic, bytes(size), qos=qos, retained=c.chance(), mid=mid if qos else 0, now=self.now)

    def answer(self) -> None:
        ticket = self.choices.number() if self.choices.below(4) == 0 or not self.flying else self.flying[0]
        refusal = None if self.choices.below(4) else "no"
        if ticket in self.flying:
            self.flying.remove(ticket)
        self.core.published(ticket, refusal, self.choices.chance(), self.now)

    def end(self) -> None:
        self.core.ended("gone", self.now, code=self.choices.one_of(CODES))

    def publish(self) -> None:
        size = self.choices.one_of((0, 1, 1000, 100_000))
        try:
            taken = self.core.publish(self.choices.one_of(TOPICS), bytes(size), False, self.now)
        except LinkError:
            return
        assert not taken or self.core.phase == "up"

    def take(self) -> None:
        if self.told:
            event = self.told[self.choices.below(len(self.told))]
            self.told.remove(event)
            self.core.taken(event)
            if not event.mid:
                self.loose, self.loose_bytes = self.loose - 1, self.loose_bytes - len(event.payload)
            if self.choices.chance():
                self.core.acknowledge(event)

    def close(self) -> None:
        if self.choices.below(8) == 0:
            self.core.close(self.now, float(self.choices.number()))


_EVENTS = (
    _Scene.time, _Scene.accept, _Scene.refuse, _Scene.subscribe, _Scene.refuse_subscription, _Scene.come_up,
    _Scene.deliver, _Scene.answer, _Scene.end, _Scene.publish, _Scene.take, _Scene.close,
)  # fmt: skip


def run(data: bytes) -> None:
    choices = Choices(data)
    scene = _Scene(choices)
    while choices:
        choices.one_of(_EVENTS)(scene)
        scene.obey()
        due_s = scene.core.due_in_s(scene.now)
        assert due_s is None or due_s >= 0
        waits = scene.core.phase in ("waiting", "dialling", "subscribing") or scene.flying
        assert due_s is not None or not waits, "it waits for nothing"
        assert scene.over <= (scene.core.phase == "over")


def seeds() -> Iterable[bytes]:
    yield bytes([5, 6, 1, 1, 1, 0, 10, 0, 1, 9, 1, 0, 7, 1, 0, 1])
    yield bytes([0, 0, 1, 10, 2, 0, 1, 3, 1, 6, 1, 2, 2, 0, 0, 8, 0, 0, 3, 5])
    yield bytes([5, 9, 3, 0] * 20)
    yield bytes([5, *[6, 0, 0, 3, 0, 0] * 4, 10, 0, 0, 11, 0, 9])
    yield bytes([5, 8, 3, 5, 8, 3, 5, 8, 3])
