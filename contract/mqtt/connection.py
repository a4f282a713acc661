"""One connection to a broker after another: a state machine without sockets, threads or clock.

    waiting ──time──▶ dialling ──accepted──▶ subscribing ──subscribed──▶ up ──close──▶ over
       ▲                  │                       │                      │
       └──────────────────┴──────── ended ────────┴──────────────────────┘
         longer each time, with jitter; starts over once a connection has held

1. The network reports by `accepted`, `subscribed`, `received`, `published` and `ended`.
2. The owner asks by `publish`, `acknowledge`, `taken` and `close`.
3. The caller (`link.py`) calls `advance` until it returns None, and executes each action.

Time is an argument, in seconds of any steady clock. The rules of this module:

- Nothing survives a connection: no session at the broker, and no message in memory. The outbox, the store and the
  broker's retained messages are durable. A new subscription gets the retained messages, on every broker.
- Publications that wait for their acknowledgement have two limits: the broker's and our own. The smaller one counts.
- Messages are acknowledged in the order in which they came, each once, and only those with a packet id. The
  acknowledgement goes out after what was published before it, as long as the broker lets us publish: some brokers
  confirm nothing before we do.
- No window of MQTT holds back messages at QoS 0. Beyond a bound they are dropped and counted.
- No more is held in memory than one connection may bring. A broker that sends beyond the window that it was given is
  left. No new connection is made before the owner has taken enough of the messages of earlier ones.
- A broker that answers pings but does nothing else is left: one that acknowledges no publication for long, or one that
  does not send back what was published on `echo_topic`, to which the link has subscribed.
- The machine gives up only where another attempt cannot help.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Literal

from protofleet.contract.errors import LinkError
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

__all__ = ["PACKET_OVERHEAD_BYTES", "Connection"]

WINDOW_COUNT, WINDOW_BYTES = 64, 1 << 20  # publications that wait for their acknowledgement, where the broker allows
LOOSE_COUNT, LOOSE_BYTES = 256, 1 << 20  # messages at QoS 0 that wait for the owner
ANSWER_S = 60.0  # for CONNACK, then SUBACK, unless messages come meanwhile
ECHO_S = 30.0
STALL_S, SLOWEST_BYTES_PER_S = 300.0, 1000.0  # without any acknowledgement, and what the slowest uplink carries
RENEW_S = 600.0  # for a quiet moment in which to make the connection anew
WINDOW_BORNE = 4  # times our own window
BACKLOG_S = 1.0  # until an owner that is behind is looked at again
STEADY_S = 10.0  # a connection that held for so long was a good one
RETRY_S, AWAY_RETRY_S, AWAY_ATTEMPTS = 30.0, 300.0, 30  # the longest wait, and that of a broker away for minutes
DENIALS = 3  # connections in a row that ended since the broker denied us something
QUICK_ENDS = 5  # connections in a row that were accepted and soon lost: worth a hint
PACKET_OVERHEAD_BYTES = 256  # more than fixed header, topic and properties of a publish ever take
SMALLEST_PACKET_BYTES = 1024  # an announcement, a birth and four topic filters fit

_FATAL_CONNECT = {132, 133, 134, 135, 138, 140, 154, 155}  # protocol, id, user, right, ban, method, retain, QoS
_NOT_AUTHORIZED, _TAKEN_OVER = 135, 142


class Connection:
    """The state machine.

    Args:
        rng: draws the jitter of the waits.

    Attributes:
        phase: the present state in the diagram.
        number: the number of the connection that is up or being made, from 1.
        limit_bytes: the largest payload that the broker takes, while the connection is up.
        dropped: the number of messages at QoS 0 that were dropped for want of room.
        delivered: how many publications of this connection, from the first, the broker has acknowledged.
    """

    def __init__(self, limits: Limits, rng: random.Random) -> None:
        self._limits, self._rng = limits, rng
        self.phase: Literal["waiting", "dialling", "subscribing", "up", "over"] = "waiting"
        self.number, self.dropped, self.delivered = 0, 0, 0
        self._actions: deque[Action] = deque()
        self._tickets, self._attempt, self._denials, self._away = 0, 0, 0, 0
        self._retry_at = float("-inf")
        self._answer_by = self._up_since = 0.0
        self._close_by: float | None = None
        self._untaken = 0  # messages that the owner was told of and has not taken, of whatever connection
        self._loose: list[int] = [0, 0]  # messages at QoS 0 that the owner has not taken yet, and their bytes
        self._forget()

    def _forget(self) -> None:
        """Reset all that belongs to one connection. Only events for the owner outlive it."""
        self._queue: deque[tuple[str, bytes, bool]] = deque()
        self._sent: dict[int, tuple[str, int]] = {}  # ticket → topic, bytes; not acknowledged by the broker
        self._sent_bytes, self._window, self._progress_at, self.limit_bytes = 0, 0, 0.0, 0
        self._acks: deque[int] = deque()  # packet ids to acknowledge
        self._held: dict[int, bool] = {}  # packet id → whether the owner has acknowledged it, in order of arrival
        self._held_bytes, self._lengths = 0, dict[int, int]()  # of these in all, and of each packet id
        self._early: list[Received] = []  # before the subscriptions are answered
        self._renew_by: float | None = None  # until when a quiet moment is waited for, to make the connection anew
        self._echo: tuple[bytes, float] | None = None  # what must come back on the echo topic, and until when
        self._actions = deque(action for action in self._actions if isinstance(action, Tell))

    # ── the owner's side ────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def idle(self) -> bool:
        """Whether the broker has acknowledged everything that was handed over on this connection."""
        return not (self._queue or self._sent)

    @property
    def outstanding(self) -> int:
        """The number of publications that the broker has not acknowledged, including those that were not sent yet."""
        return len(self._queue) + len(self._sent)

    def publish(self, topic: str, payload: bytes, retain: bool, now: float) -> bool:
        """Queue a QoS 1 message. False when no connection is up; then nothing is kept.

        Raises:
            LinkError: when the broker would not take a message of that size.
        """
        if self.phase != "up" or self._close_by is not None:
            return False
        if len(payload) > self.limit_bytes:
            raise LinkError(
                f"message to {topic}", expected=f"at most {self.limit_bytes} bytes", got=f"{len(payload)} bytes"
            )
        self._queue.append((topic, payload, retain))
        if topic == self._limits.echo_topic:
            self._echo = payload, now + ECHO_S
        return True

    def acknowledge(self, received: Received) -> None:
        """The owner has made the effect of a message durable. Its PUBACK goes out once all earlier ones have theirs."""
        if received.connection != self.number or received.mid not in self._held:
            return
        self._held[received.mid] = True
        while self._held and self._held[mid := next(iter(self._held))]:
            del self._held[mid]
            self._held_bytes -= self._lengths.pop(mid)
            self._acks.append(mid)

    def taken(self, received: Received) -> None:
        """The owner has taken a message, which makes room for others."""
        self._untaken -= 1
        if not received.mid:
            self._loose[0] -= 1
            self._loose[1] -= len(received.payload)

    def close(self, now: float, timeout_s: float) -> None:
        """End the connection once all that is queued has been acknowledged, or after `timeout_s`."""
        if self._close_by is None:
            self._close_by = now + timeout_s

    def renew(self, now: float) -> None:
        """Make the connection anew, because its certificates have changed.

        This happens when nothing is on its way, or after ten minutes without such a moment. The last will is not
        published.
        """
        if self.phase == "up" and self._renew_by is None:
            self._renew_by = now + RENEW_S

    # ── what the network says ───────────────────────────────────────────────────────────────────────────────────────

    def accepted(self, terms: Terms, now: float) -> None:
        """CONNACK, with these terms."""
        unfit = self._unfit(terms)
        if self.phase != "dialling":
            self.ended("a second CONNACK", now)
        elif unfit is not None:
            self._give_up(unfit)
        else:
            self.phase, self._answer_by = "subscribing", now + ANSWER_S
            self.limit_bytes = terms.packet_bytes - PACKET_OVERHEAD_BYTES
            self._window = min(WINDOW_COUNT, terms.receive_maximum)
            if self._limits.subscriptions:
                self._actions.append(Subscribe(self._limits.subscriptions))
            else:
                self.subscribed((), now)

    def refused(self, code: int, reason: str, now: float) -> None:
        """CONNACK with a reason why not."""
        if code in _FATAL_CONNECT:
            subject = f"broker {self._limits.broker} refused {self._limits.client_id}"
            self._give_up(LinkError(subject, got=reason))
        else:
            self.ended(f"refused: {reason}", now)

    def subscribed(self, refusals: Sequence[str | None], now: float) -> None:
        """SUBACK: for each topic why it was refused, or None."""
        if self.phase != "subscribing" or len(refusals) != len(self._limits.subscriptions):
            self.ended("a SUBACK that answers nothing", now)
            return
        for topic, reason in zip(self._limits.subscriptions, refusals, strict=True):
            if reason is not None:
                self._give_up(LinkError(f"broker {self._limits.broker} refused {topic}", got=reason, hint="its ACL"))
                return
        self.phase, self._up_since = "up", now
        self._actions.append(Tell(Connected(self.limit_bytes)))
        self._actions.extend(Tell(received) for received in self._early)
        self._early.clear()

    def received(self, topic: str, payload: bytes, *, qos: int, retained: bool, mid: int, now: float) -> None:
        """PUBLISH. A repetition of a message that the owner has not acknowledged yet makes no second event."""
        if self.phase not in ("subscribing", "up") or mid in self._held:
            return
        self._answer_by = now + ANSWER_S
        if qos > 1 or (qos == 1 and mid == 0):
            self.ended(f"a message at QoS {qos} with packet id {mid}, which nobody asked for", now)
            return
        if qos == 1 and self._is_beyond_window(len(payload)):
            self.ended(f"{len(self._held)} messages unacknowledged and a further one, which nobody asked for", now)
            return
        if qos == 1:
            self._held[mid], self._lengths[mid] = False, len(payload)
            self._held_bytes += len(payload)
        elif not self._has_room(len(payload)):
            return
        if self._echo is not None and topic == self._limits.echo_topic and payload == self._echo[0]:
            self._echo = None
        event = Received(topic, payload, retained, mid, self.number)
        self._untaken += 1
        if self.phase == "up":
            self._actions.append(Tell(event))
        else:
            self._early.append(event)

    def published(self, ticket: int, refusal: str | None, denied: bool, now: float) -> None:
        """PUBACK of the publication with this ticket.

        Args:
            refusal: why it was refused; None where it was not.
            denied: whether it was refused for want of a right.
        """
        if ticket not in self._sent:
            return
        topic, length = self._sent.pop(ticket)
        self._sent_bytes -= length
        self._progress_at = now
        self.delivered += refusal is None
        if refusal is not None:
            self.ended(f"publish refused on {topic}: {refusal}", now, code=_NOT_AUTHORIZED if denied else None)

    def ended(self, reason: str, now: float, *, code: int | None = None) -> None:
        """The connection has ended, or is to be ended.

        Args:
            code: of the broker's DISCONNECT, if it sent one.
        """
        if self.phase in ("waiting", "over"):
            return
        steady = self.phase == "up" and now - self._up_since > STEADY_S
        self._denials = (0 if steady else self._denials) + (code == _NOT_AUTHORIZED)
        fatal = self._fatal(code, reason)
        if fatal is not None:
            self._give_up(fatal)
            return
        self._attempt = 0 if steady else self._attempt + 1
        self._away = 0 if self.phase == "up" else self._away + 1
        if self.phase == "up" and self._attempt >= QUICK_ENDS:
            reason += f", soon after connecting, {self._attempt} times now: do id, user and certificate fit?"
        self._hang_up()
        if self._close_by is not None:
            self.phase = "over"
            return
        longest = RETRY_S if self._away < AWAY_ATTEMPTS else AWAY_RETRY_S
        wait_s = self._rng.uniform(0.5, 1.0) * min(longest, 0.25 * 2 ** min(self._attempt, 16))
        self.phase, self._retry_at = "waiting", now + wait_s
        self._actions.append(Tell(Disconnected(reason, wait_s)))

    # ── what follows ────────────────────────────────────────────────────────────────────────────────────────────────

    def advance(self, now: float) -> Action | None:
        """The next action to execute; None when there is none until something happens or `due_in_s` has passed."""
        if not self._actions:
            self._look(now)
        if self._actions:
            return self._actions.popleft()
        if self.phase == "up" and self._queue and self._may_send(len(self._queue[0][1])):
            return self._send(now)
        return Acknowledge(self._acks.popleft()) if self._acks else None

    def due_in_s(self, now: float) -> float | None:
        """Seconds until `advance` may have something to do without anything happening; None when never."""
        times = [] if self._close_by is None else [self._close_by]
        if self.phase == "waiting":
            times.append(now + BACKLOG_S if self._is_behind(now) else self._retry_at)
        elif self.phase in ("dialling", "subscribing"):
            times.append(self._answer_by)
        elif self.phase == "up":
            times += [self._stalled_at()] if self._sent else []
            times += [self._echo[1]] if self._echo is not None else []
            times += [self._renew_by] if self._renew_by is not None else []
        return max(0.0, min(times) - now) if times and self.phase != "over" else None

    def _look(self, now: float) -> None:
        """Act on what is due at this time."""
        if self.phase == "over":
            return
        if self._close_by is not None and (self.phase != "up" or self._is_done() or now >= self._close_by):
            self._hang_up(polite=self.phase == "up")
            self.phase = "over"
        elif self.phase == "waiting":
            if now >= self._retry_at and not self._is_behind(now):
                self.number, self.delivered = self.number + 1, 0
                self.phase, self._answer_by = "dialling", now + ANSWER_S
                self._actions.append(Dial(self.number))
        elif self.phase != "up":
            if now >= self._answer_by:
                self.ended("the broker does not answer", now)
        elif self._sent and now >= self._stalled_at():
            self.ended(f"the broker has acknowledged nothing for {now - self._progress_at:.0f} s", now)
        elif self._echo is not None and now >= self._echo[1]:
            self._miss_echo(self._echo[0], now)
        elif self._renew_by is not None and (now >= self._renew_by or (self._is_done() and not self._held)):
            self._hang_up(polite=True)
            self.phase, self._retry_at, self._attempt = "waiting", now, 0
            self._actions.append(Tell(Disconnected("its certificates are others now", 0.0)))

    def _is_behind(self, now: float) -> bool:
        """Whether a connection is due, but the owner has not taken a whole window of earlier messages yet."""
        return now >= self._retry_at and self._untaken >= self._limits.receive_maximum

    def _is_done(self) -> bool:
        """Whether nothing is left to send or to acknowledge."""
        return self.idle and not self._actions and not self._acks

    def _miss_echo(self, payload: bytes, now: float) -> None:
        """The echo is late. The broker gets more time where the owner has not emptied its window, or where the message
        has not been delivered to the broker yet."""
        if self._held or self._sent or self._queue:
            self._echo = payload, now + ECHO_S
        else:
            self.ended(f"nothing came back on {self._limits.echo_topic} within {ECHO_S:.0f} s", now)

    def _is_beyond_window(self, length: int) -> bool:
        """Whether one more message exceeds the window that the broker was given, by the tolerated factor.

        Some brokers use a limit of their own (iotcore a hundred messages); none of them exceeds the tolerated one.
        """
        limits = self._limits
        bytes_ = None if limits.packet_bytes is None else limits.receive_maximum * limits.packet_bytes
        many = len(self._held) >= WINDOW_BORNE * limits.receive_maximum
        return many or (bytes_ is not None and self._held_bytes + length > bytes_)

    def _has_room(self, length: int) -> bool:
        """Whether one more message at QoS 0 may wait for the owner. It is counted as waiting, or as dropped."""
        if self._loose[0] >= LOOSE_COUNT or self._loose[1] + length > LOOSE_BYTES:
            self.dropped += 1
            return False
        self._loose[0] += 1
        self._loose[1] += length
        return True

    def _may_send(self, length: int) -> bool:
        if not self._sent:
            return True  # one may always be on its way, however large
        return len(self._sent) < self._window and self._sent_bytes + length <= WINDOW_BYTES

    def _send(self, now: float) -> Send:
        topic, payload, retain = self._queue.popleft()
        if not self._sent:
            self._progress_at = now
        self._tickets += 1
        self._sent[self._tickets] = topic, len(payload)
        self._sent_bytes += len(payload)
        return Send(self._tickets, topic, payload, retain)

    def _stalled_at(self) -> float:
        return self._progress_at + STALL_S + self._sent_bytes / SLOWEST_BYTES_PER_S

    def _unfit(self, terms: Terms) -> LinkError | None:
        """The error of a broker whose terms are not enough for Protofleet; None where they are enough."""
        broker = f"broker {self._limits.broker}"
        if terms.maximum_qos < 1:
            return LinkError(broker, expected="QoS 1", got="QoS 0 only")
        if not terms.retains:
            return LinkError(broker, expected="retained messages", got="none")
        if not terms.shares and any(topic.startswith("$share/") for topic in self._limits.subscriptions):
            hint = "Mosquitto or another that has them, or one aggregator without --worker"
            return LinkError(broker, expected="shared subscriptions", got="none", hint=hint)
        if terms.packet_bytes < SMALLEST_PACKET_BYTES:
            expected = f"packets of {SMALLEST_PACKET_BYTES} bytes"
            return LinkError(broker, expected=expected, got=f"at most {terms.packet_bytes}")
        return None

    def _fatal(self, code: int | None, reason: str) -> LinkError | None:
        """The error of a connection that is not to be made again after such an end; None where it is."""
        limits = self._limits
        if code == _TAKEN_OVER and limits.echo_topic is None:  # else its owner hears on that topic who it was
            subject = f"another client took over the id {limits.client_id}"
            return LinkError(subject, hint="an id of its own for each")
        if self._denials >= DENIALS:
            subject = f"broker {limits.broker} denies {limits.client_id} what it needs, {DENIALS} times now"
            return LinkError(subject, got=reason, hint="a certificate or user that fits the id, or the broker's ACL")
        return None

    def _give_up(self, error: LinkError) -> None:
        if self.phase != "over":
            self._hang_up()
            self.phase = "over"
            self._actions.append(Tell(Failed(error)))

    def _hang_up(self, *, polite: bool = False) -> None:
        """End the connection, and forget all that belongs to it."""
        self._untaken -= len(self._early)
        unseen = [received for received in self._early if not received.mid]
        self._loose[0] -= len(unseen)
        self._loose[1] -= sum(len(received.payload) for received in unseen)
        if self.phase != "waiting":
            self._forget()
            self._actions.append(Hangup(polite))
