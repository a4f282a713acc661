"""The connection's state machine, without a network: what must hold whatever is said, in whatever order, whenever."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt import connection as rules
from protofleet.contract.mqtt.connection import Connection
from protofleet.contract.mqtt.link_actions import (
    Acknowledge,
    Action,
    Connected,
    Dial,
    Disconnected,
    Failed,
    Hangup,
    Limits,
    Received,
    Send,
    Subscribe,
    Tell,
    Terms,
)


def machine(*, echo_topic: str | None = None, seed: int = 0) -> Connection:
    return Connection(Limits("mqtt://b", "d", ("a", "b"), echo_topic), random.Random(seed))


def actions(core: Connection, now: float) -> list[Action]:
    """Everything that is to be done now."""
    return list(iter(lambda: core.advance(now), None))


def told(done: list[Action], kind: type) -> list:
    return [a.event for a in done if isinstance(a, Tell) and isinstance(a.event, kind)]


def up(core: Connection, now: float = 0.0, terms: Terms | None = None) -> Connection:
    """Bring a waiting machine up."""
    assert [type(a) for a in actions(core, now)] == [Dial]
    core.accepted(terms or Terms(), now)
    assert actions(core, now) == [Subscribe(("a", "b"))]
    core.subscribed([None, None], now)
    assert len(told(actions(core, now), Connected)) == 1
    return core


def hear(
    core: Connection, mid: int, now: float = 0.0, *, qos: int = 1, payload: bytes = b"x", topic: str = "a"
) -> None:
    core.received(topic, payload, qos=qos, retained=False, mid=mid, now=now)


# ── flow control follows the broker ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("theirs", "window"), [(1, 1), (10, 10), (64, 64), (65_535, 64)])
def test_no_more_is_sent_than_the_broker_and_we_allow(theirs, window):
    core = up(machine(), terms=Terms(receive_maximum=theirs))
    for _ in range(100):
        core.publish("t", b"x", False, 0.0)
    sent = actions(core, 0.0)
    assert len(sent) == window
    core.published(sent[0].ticket, None, False, 0.0)
    assert len(actions(core, 0.0)) == 1


def test_bytes_on_their_way_are_bounded_but_one_message_always_goes():
    core = up(machine())
    for _ in range(3):
        core.publish("t", bytes(rules.WINDOW_BYTES + 1), False, 0.0)
    first = actions(core, 0.0)
    assert len(first) == 1
    core.published(first[0].ticket, None, False, 0.0)
    assert len(actions(core, 0.0)) == 1


@pytest.mark.parametrize(
    ("terms", "said"),
    [
        (Terms(maximum_qos=0), "expected QoS 1, got QoS 0 only"),
        (Terms(retains=False), "expected retained messages, got none"),
        (Terms(packet_bytes=100), "expected packets of 1024 bytes, got at most 100"),
    ],
)
def test_a_broker_that_cannot_carry_us_is_given_up_in_one_line(terms, said):
    core = machine()
    actions(core, 0.0)
    core.accepted(terms, 0.0)
    done = actions(core, 0.0)
    assert done[0] == Hangup(polite=False)
    assert said in str(told(done, Failed)[0].error)
    assert core.phase == "over"


def test_without_subscriptions_it_is_up_once_the_broker_accepts_and_counts_what_was_delivered_on_each_connection():
    core = Connection(Limits("mqtt://b", "d", ()), random.Random(0))
    for now in (0.0, 60.0):
        actions(core, now)
        core.accepted(Terms(), now)
        assert [type(a) for a in actions(core, now)] == [Tell]
        assert (core.phase, core.delivered) == ("up", 0)
        for _ in range(3):
            core.publish("t", b"x", False, now)
        sent = actions(core, now)
        for each in sent[:2]:
            core.published(each.ticket, None, False, now)
        assert core.delivered == 2
        core.published(sent[2].ticket, "quota exceeded", False, now)
        assert core.delivered == 2  # what is refused has not arrived, and ends the connection
        core.ended("gone", now)


def test_a_payload_above_the_limit_is_refused_and_what_is_behind_it_goes():
    core = up(machine(), terms=Terms(packet_bytes=2000))
    with pytest.raises(LinkError, match="expected at most 1744 bytes, got 1745 bytes"):
        core.publish("t", bytes(1745), False, 0.0)
    assert core.publish("t", bytes(1744), False, 0.0)
    assert len(actions(core, 0.0)) == 1


# ── acknowledgements ────────────────────────────────────────────────────────────────────────────────────────────────


def test_idle_speaks_of_what_we_published_and_closing_waits_for_acknowledgements_too():
    core = up(machine())
    hear(core, 7)
    (seven,) = told(actions(core, 0.0), Received)
    core.acknowledge(seven)
    assert core.idle  # whoever waits until the broker has a message does not wait for our acknowledgement of another
    core.publish("t", b"x", False, 0.0)
    assert not core.idle
    core.close(0.0, 3.0)
    send, acknowledge = core.advance(0.0), core.advance(0.0)
    assert isinstance(send, Send)
    assert acknowledge == Acknowledge(7)
    assert core.advance(0.0) is None
    core.published(send.ticket, None, False, 0.0)
    assert core.idle
    assert actions(core, 0.0) == [Hangup(polite=True)]


def test_closing_sends_the_acknowledgements_that_are_due():
    core = up(machine())
    hear(core, 7)
    (seven,) = told(actions(core, 0.0), Received)
    core.acknowledge(seven)
    core.close(0.0, 3.0)
    assert actions(core, 0.0) == [Acknowledge(7), Hangup(polite=True)]


def test_acknowledgements_go_out_in_the_order_of_the_messages():
    core = up(machine())
    for mid in (7, 3, 5):
        hear(core, mid)
    seven, three, five = told(actions(core, 0.0), Received)
    core.acknowledge(five)
    core.acknowledge(three)
    assert actions(core, 0.0) == []
    core.acknowledge(seven)
    core.acknowledge(seven)
    assert actions(core, 0.0) == [Acknowledge(7), Acknowledge(3), Acknowledge(5)]


def test_an_acknowledgement_is_of_the_connection_that_its_message_came_on():
    core = up(machine())
    hear(core, 1)
    (old,) = told(actions(core, 0.0), Received)
    core.ended("gone", 0.0)
    actions(core, 0.0)
    up(core, 60.0)
    hear(core, 1, 60.0)
    (new,) = told(actions(core, 60.0), Received)
    core.acknowledge(old)
    assert actions(core, 60.0) == []
    core.acknowledge(new)
    assert actions(core, 60.0) == [Acknowledge(1)]


def test_a_message_at_qos_0_is_never_acknowledged():
    """Packet id 0 in a PUBACK is a protocol error: Mosquitto ends the connection for it, again and again."""
    core = up(machine())
    hear(core, 0, qos=0)
    (received,) = told(actions(core, 0.0), Received)
    core.acknowledge(received)
    assert actions(core, 0.0) == []


@pytest.mark.parametrize("length", [0, 10, 100_000, rules.LOOSE_BYTES + 1])
def test_messages_at_qos_0_are_bounded_and_counted(length):
    core = up(machine())
    for _ in range(1000):
        hear(core, 0, qos=0, payload=bytes(length))
    kept = told(actions(core, 0.0), Received)
    assert len(kept) <= rules.LOOSE_COUNT
    assert sum(len(event.payload) for event in kept) <= rules.LOOSE_BYTES
    assert core.dropped == 1000 - len(kept)
    for event in kept:
        core.taken(event)
    hear(core, 0, qos=0, payload=b"room again")
    assert len(told(actions(core, 0.0), Received)) == 1


# ── renewed certificates ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_is_made_anew_when_nothing_is_on_its_way_and_politely():
    core = up(machine())
    core.publish("t", b"x", False, 0.0)
    (sent,) = actions(core, 0.0)
    hear(core, 1)
    (held,) = told(actions(core, 0.0), Received)
    core.renew(1.0)
    assert actions(core, 1.0) == []
    core.published(sent.ticket, None, False, 2.0)
    assert actions(core, 2.0) == []  # the owner has not acknowledged what it was told
    core.acknowledge(held)
    left = actions(core, 3.0)
    assert left[:2] == [Acknowledge(1), Hangup(polite=True)]  # no last will
    assert told(left, Disconnected) == [Disconnected("its certificates are others now", 0.0)]
    assert left[-1] == Dial(2)
    core.renew(3.0)  # it is being made: with the new ones
    core.accepted(Terms(), 4.0)
    actions(core, 4.0)
    core.subscribed([None, None], 4.0)
    assert [type(a) for a in actions(core, 9999.0)] == [Tell]


def test_one_that_is_never_quiet_is_made_anew_after_ten_minutes():
    core = up(machine())
    hear(core, 1)
    actions(core, 0.0)
    core.renew(5.0)
    core.renew(100.0)
    assert core.due_in_s(5.0) == rules.RENEW_S
    assert actions(core, rules.RENEW_S + 4.9) == []
    assert Hangup(polite=True) in actions(core, rules.RENEW_S + 5.0)


# ── a broker that does nothing ──────────────────────────────────────────────────────────────────────────────────────


def test_what_does_not_come_back_on_the_echo_topic_ends_the_connection():
    core = up(machine(echo_topic="a"))
    core.publish("a", b"here", True, 0.0)
    (sent,) = actions(core, 0.0)
    core.published(sent.ticket, None, False, 1.0)
    hear(core, 0, qos=0, payload=b"something else")
    actions(core, 1.0)
    assert core.due_in_s(1.0) == rules.ECHO_S - 1.0
    assert actions(core, rules.ECHO_S - 0.1) == []
    (lost,) = told(actions(core, rules.ECHO_S), Disconnected)
    assert lost.reason == "nothing came back on a within 30 s"


def test_an_echo_settles_it_and_a_slow_owner_is_not_taken_for_a_silent_broker():
    core = up(machine(echo_topic="a"))
    core.publish("a", b"here", True, 0.0)
    (sent,) = actions(core, 0.0)
    core.published(sent.ticket, None, False, 0.0)
    hear(core, 9, topic="b")
    (held,) = told(actions(core, 0.0), Received)
    assert told(actions(core, 500.0), Disconnected) == []  # the owner holds a message: the window may be full
    core.acknowledge(held)
    hear(core, 10, topic="a", payload=b"here")
    assert told(actions(core, 5000.0), Disconnected) == []


def test_a_broker_that_acknowledges_nothing_is_left_and_a_slow_one_is_not():
    core = up(machine())
    for _ in range(3):
        core.publish("t", bytes(50_000), False, 0.0)
    sent = actions(core, 0.0)
    assert actions(core, 400.0) == []  # 150 kB may take 150 s longer
    core.published(sent[0].ticket, None, False, 400.0)
    assert actions(core, 700.0) == []
    (lost,) = told(actions(core, 801.0), Disconnected)
    assert "acknowledged nothing for 401 s" in lost.reason


@pytest.mark.parametrize("accepted", [False, True])
def test_a_broker_that_does_not_answer_is_left(accepted):
    core = machine()
    actions(core, 0.0)
    if accepted:
        core.accepted(Terms(), 0.0)
    actions(core, rules.ANSWER_S - 1)
    (lost,) = told(actions(core, rules.ANSWER_S), Disconnected)
    assert lost.reason == "the broker does not answer"


# ── giving up, and not ──────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_denied_three_times_in_a_row_is_given_up():
    core, now = machine(), 0.0
    for attempt in (1, 2, 3):
        up(core, now)
        core.publish("theirs", b"x", False, now)
        (sent,) = actions(core, now)
        core.published(sent.ticket, "Not authorized", True, now)
        done = actions(core, now)
        assert len(told(done, Failed)) == (attempt == 3)
        now += 60.0
    (failed,) = told(done, Failed)
    assert "denies d what it needs, 3 times now, got publish refused on theirs: Not authorized" in str(failed.error)
    assert "certificate or user that fits the id" in str(failed.error)


def test_a_connection_that_held_between_makes_denials_start_over():
    core, now = machine(), 0.0
    for _ in range(6):
        up(core, now)
        core.ended("denied", now + rules.STEADY_S + 1, code=135)
        assert told(actions(core, now + rules.STEADY_S + 1), Failed) == []
        now += 100.0


def test_cuts_are_never_given_up_and_at_some_time_a_hint_is_given():
    core, now, reasons = machine(), 0.0, []
    for _ in range(50):
        up(core, now)
        core.ended("gone", now)
        reasons += [event.reason for event in told(actions(core, now), Disconnected)]
        now += 60.0
    assert reasons[0] == "gone"
    assert reasons[10] == "gone, soon after connecting, 11 times now: do id, user and certificate fit?"
    assert core.phase == "waiting"


def test_waits_grow_and_start_over_after_a_connection_that_held():
    core, now, waits = machine(), 0.0, []
    for held_s in (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, rules.STEADY_S + 1):
        up(core, now)
        core.ended("gone", now + held_s)
        waits += [event.retry_s for event in told(actions(core, now + held_s), Disconnected)]
        now += 100.0
    assert all(0.125 * 2**n <= wait_s <= 0.25 * 2**n for n, wait_s in enumerate(waits[:6], start=1))
    assert 15.0 <= waits[7] <= 30.0
    assert waits[8] <= 0.25


def test_a_broker_that_is_away_for_weeks_is_looked_for_every_five_minutes_at_most():
    core, now, waits = machine(), 0.0, []
    while now < 86_400.0:
        assert [type(a) for a in actions(core, now)] == [Dial]
        core.ended("refused", now)
        waits += [event.retry_s for event in told(actions(core, now), Disconnected)]
        now += waits[-1]
    assert max(waits[:29]) <= 30.0
    assert all(75.0 < wait_s <= 300.0 for wait_s in waits[40:])
    assert len(waits) < 600  # 2,900 at 30 s
    up(core, now)
    core.ended("gone", now + rules.STEADY_S + 1)
    assert told(actions(core, now + rules.STEADY_S + 1), Disconnected)[0].retry_s <= 0.25


def test_closing_sends_what_is_queued_says_goodbye_and_ends():
    core = up(machine())
    core.publish("t", b"last", False, 0.0)
    core.close(0.0, 3.0)
    assert core.publish("t", b"too late", False, 0.0) is False
    (sent,) = actions(core, 0.0)
    assert core.phase == "up"
    core.published(sent.ticket, None, False, 1.0)
    assert actions(core, 1.0) == [Hangup(polite=True)]
    assert core.phase == "over"
    assert core.due_in_s(1.0) is None


@pytest.mark.parametrize("where", ["waiting", "dialling", "subscribing", "up", "stuck"])
def test_closing_ends_from_anywhere(where):
    core = machine()
    if where != "waiting":
        actions(core, 0.0)
    if where in ("subscribing", "up", "stuck"):
        core.accepted(Terms(), 0.0)
    if where in ("up", "stuck"):
        core.subscribed([None, None], 0.0)
        actions(core, 0.0)
    if where == "stuck":
        core.publish("t", b"never acknowledged", False, 0.0)
        actions(core, 0.0)
    core.close(0.0, 3.0)
    actions(core, 0.0)
    actions(core, 3.0)
    assert core.phase == "over"


# ── whatever happens ────────────────────────────────────────────────────────────────────────────────────────────────


# ── what no other test would miss ───────────────────────────────────────────────────────────────────────────────────


def test_messages_keep_a_slow_subscription_from_being_given_up():
    core = machine()
    actions(core, 0.0)
    core.accepted(Terms(), 0.0)
    actions(core, 0.0)
    hear(core, 1, now=rules.ANSWER_S - 1.0)  # much is retained: it comes before the SUBACK
    actions(core, rules.ANSWER_S + 1.0)
    assert core.phase == "subscribing"
    actions(core, 2 * rules.ANSWER_S)
    assert core.phase == "waiting"


def test_what_the_owner_takes_at_qos_0_makes_room_by_count_and_by_bytes():
    core = up(machine())
    for _ in range(3):
        hear(core, 0, qos=0, payload=bytes(rules.LOOSE_BYTES))
        (message,) = told(actions(core, 0.0), Received)
        core.taken(message)
    assert core.dropped == 0


@pytest.mark.parametrize(("count", "length"), [(rules.LOOSE_COUNT, 1), (1, rules.LOOSE_BYTES)])
def test_what_came_at_qos_0_before_the_subscription_and_was_lost_with_it_takes_no_room(count, length):
    core = machine()
    actions(core, 0.0)
    core.accepted(Terms(), 0.0)
    actions(core, 0.0)
    for _ in range(count):
        hear(core, 0, qos=0, payload=bytes(length))
    core.ended("a cut", 0.0)
    actions(core, 0.0)
    up(core, 100.0)
    hear(core, 0, 100.0, qos=0, payload=bytes(length))
    assert len(told(actions(core, 100.0), Received)) == 1


def test_nothing_that_was_to_be_sent_on_a_lost_connection_is_done_on_the_next():
    core = machine()
    actions(core, 0.0)
    core.accepted(Terms(), 0.0)
    core.ended("a cut before we had subscribed", 0.0)
    assert [type(action) for action in actions(core, 0.0)] == [Hangup, Tell]


def test_a_message_that_is_told_twice_while_the_owner_has_it_is_one():
    core = up(machine())
    hear(core, 7)
    hear(core, 7)
    assert len(told(actions(core, 0.0), Received)) == 1


def test_a_cut_while_closing_ends_it():
    core = up(machine())
    core.publish("t", b"x", False, 0.0)
    actions(core, 0.0)
    core.close(0.0, 3.0)
    core.ended("a cut", 1.0)
    assert core.phase == "over"
    assert actions(core, 1.0) == [Hangup(polite=False)]
    assert core.due_in_s(1.0) is None


class Anything(RuleBasedStateMachine):
    """A broker and an owner that do anything, and a shell that obeys; what must hold after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.now = machine(echo_topic="a"), 0.0
        self.window = 0
        self.dialled = 0
        self.connected = self.ended = False  # what the owner believes, and whether it was told of the end
        self.flying: dict[int, bytes] = {}  # tickets that the broker has not answered
        self.delivered: list[Received] = []  # at QoS 1 on this connection, in order, not acknowledged to the broker
        self.waiting: list[Received] = []  # told, not yet taken by the owner
        self.taken: list[Received] = []  # taken, not yet acknowledged by the owner
        self.handed = 0  # publications accepted on this connection
        self.flown = 0

    def obey(self) -> None:
        for action in self._actions():
            if isinstance(action, Dial):
                assert action.connection == self.dialled + 1
                assert not self.connected
                self.dialled, self.flying, self.delivered, self.handed, self.flown = action.connection, {}, [], 0, 0
            elif isinstance(action, Send):
                assert action.ticket not in self.flying
                self.flying[action.ticket] = action.payload
                self.flown += 1
                assert action.payload == b"%d" % self.flown  # in order, none twice, none left out
                assert len(self.flying) <= self.window
            elif isinstance(action, Acknowledge):
                assert action.mid == self.delivered.pop(0).mid  # the order of arrival
            elif isinstance(action, Hangup):
                self.flying, self.delivered = {}, []
            elif isinstance(action, Tell):
                self._hear(action.event)

    def _actions(self) -> Iterator[Action]:
        for _ in range(10_000):
            action = self.core.advance(self.now)
            if action is None:
                return
            yield action
        raise AssertionError("it never comes to rest")

    def _hear(self, event: object) -> None:
        assert not self.ended
        if isinstance(event, Connected):
            assert not self.connected
            self.connected = True
        elif isinstance(event, Received):
            assert self.connected
            self.waiting.append(event)
            if event.mid:
                self.delivered.append(event)
        else:
            self.connected = False
            self.ended = isinstance(event, Failed)

    @rule()
    def renew(self) -> None:
        self.core.renew(self.now)
        self.obey()

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 29.0, 31.0, 400.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.obey()

    @rule(receive_maximum=st.integers(1, 100), qos=st.sampled_from([2, 2, 2, 1, 0]))
    def accept(self, receive_maximum: int, qos: int) -> None:
        if self.core.phase == "dialling":
            self.window = min(receive_maximum, rules.WINDOW_COUNT)
        self.core.accepted(Terms(receive_maximum=receive_maximum, maximum_qos=qos), self.now)
        self.obey()

    @rule(answers=st.sampled_from([[None, None]] * 4 + [[None], [None, "no"]]))
    def answer_subscription(self, answers: list[str | None]) -> None:
        self.core.subscribed(answers, self.now)
        self.obey()

    @precondition(lambda self: self.core.phase == "waiting")
    @rule()
    def come_up(self) -> None:
        self.now += 31.0
        self.obey()
        self.accept(10, 2)
        self.answer_subscription([None, None])

    @rule(qos=st.sampled_from([0, 1, 1, 1, 2]), mid=st.integers(0, 6), length=st.sampled_from([0, 1, 300_000]))
    def deliver(self, qos: int, mid: int, length: int) -> None:
        self.core.received("a", bytes(length), qos=qos, retained=False, mid=mid if qos else 0, now=self.now)
        self.obey()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), refusal=st.sampled_from([None] * 5 + ["no"]), denied=st.booleans())
    def answer_publication(self, data: st.DataObject, refusal: str | None, denied: bool) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.flying)))
        del self.flying[ticket]
        self.core.published(ticket, refusal, denied, self.now)
        self.core.published(ticket, refusal, denied, self.now)  # a repetition changes nothing
        self.obey()

    @rule(code=st.sampled_from([None] * 6 + [135, 139, 142]))
    def end(self, code: int | None) -> None:
        self.core.ended("gone", self.now, code=code)
        self.obey()

    @rule(count=st.integers(1, 100))
    def publish(self, count: int) -> None:
        for _ in range(count):
            payload = b"%d" % (self.handed + 1)
            if self.core.publish("a", payload, False, self.now):
                assert self.core.phase == "up"
                self.handed += 1
        self.obey()

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        event = self.waiting.pop(0)
        self.core.taken(event)
        self.taken.append(event)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.taken))
        self.taken.remove(event)
        self.core.acknowledge(event)
        self.obey()

    @invariant()
    def what_is_not_acknowledgeable_is_bounded(self) -> None:
        loose = [event for event in self.waiting if not event.mid]
        assert len(loose) <= rules.LOOSE_COUNT
        assert sum(len(event.payload) for event in loose) <= rules.LOOSE_BYTES

    @invariant()
    def the_owner_knows_how_it_stands(self) -> None:
        assert self.connected == (self.core.phase == "up")
        assert self.ended == (self.core.phase == "over")

    @invariant()
    def it_never_waits_for_nothing(self) -> None:
        """Time alone brings every connection that is not up, and every one that owes us something, to an end."""
        if self.core.phase in ("waiting", "dialling", "subscribing") or self.flying:
            assert self.core.due_in_s(self.now) is not None

    def teardown(self) -> None:
        """Liveness: from wherever it stands, a good broker brings it up, and everything is sent and acknowledged."""
        if self.core.phase == "over":
            return
        self.core.ended("a last cut", self.now)
        self.obey()
        self.come_up()
        assert self.connected
        self.publish(50)
        while self.flying:
            ticket = min(self.flying)
            del self.flying[ticket]
            self.core.published(ticket, None, False, self.now)
            self.obey()
        assert self.flown == self.handed == 50
        assert self.core.idle
        self.core.close(self.now, 3.0)
        assert actions(self.core, self.now) == [Hangup(polite=True)]


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
