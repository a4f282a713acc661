"""Hands out the bundle that is rolled out, at a pace of its own, and hears of it in the fleet that devices go over to.

A device's request is kept, its newest only, and answered with consecutive pieces, one for each device in turn, as long
as the broker has few publications of ours to acknowledge. So a fleet that downloads, or a device that asks for ever,
delays a receipt by no more than these few pieces, and takes no memory. Who is refused, not in the stage, or asks for
something else gets nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from aggregator import events
from aggregator.core import Core
from aggregator.voice import Voice
from contract import topics
from contract.envelopes import ENVELOPE_BYTES
from contract.errors import WireError
from contract.link import Address, Failed, Link, Received, client_id
from contract.messages import Message
from contract.offers import MAX_PIECES, Offer, Piece, Request
from contract.wire import decode, encode

__all__ = ["Handout", "read_request"]

MAX_ASKING = 4_096  # devices at once; who finds no place asks again
_IN_FLIGHT = 8  # publications that the broker has not acknowledged
_LONGEST_REQUEST = 96 + ENVELOPE_BYTES
_LARGEST_PIECE = 65_536  # as a message
_AROUND_PIECE = 64  # bytes of a message that are not data
_AGAIN_S = 0.01  # while pieces wait for the broker
_LISTENS = 256  # messages of the other fleet that are heard in one turn


def read_request(payload: bytes, opened: Callable[[bytes], Message] = decode) -> Request | None:
    """The request in what a device sent; None where it is something else.

    Args:
        opened: decodes it, if it is the device's.
    """
    if len(payload) > _LONGEST_REQUEST:
        return None
    try:
        message = opened(payload)
    except WireError:
        return None
    return message if isinstance(message, Request) else None


@dataclass
class _Asked:
    """What a device waits for: bytes up to `end`, in `pieces` messages at most."""

    offset: int
    end: int
    pieces: int = MAX_PIECES


class Handout:
    """Answers requests.

    Args:
        core: what is served.
        link: to devices of `fleet`.
        address: of the broker, for a second link while devices go over to another fleet, with a certificate of its own
            (`NAME.rollout.pem`) where there is one.
        listener: is told what devices say of the roll-out.
        voice: signs what is published, if the aggregator does.
        follows: whether it hears what devices say in the fleet that they go over to: one process does.
    """

    def __init__(
        self,
        core: Core,
        link: Link,
        address: Address,
        fleet: str,
        listener: events.Listener,
        voice: Voice,
        *,
        follows: bool = True,
    ) -> None:
        self._voice, self._follows = voice, follows
        self._core, self._link, self._address, self._fleet, self._listener = core, link, address, fleet, listener
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._offer: Offer | None = None  # that they asked for
        self._elsewhere: Link | None = None
        self._followed = ""  # the fleet of that link, or one that could not be followed

    def serve(self, core: Core) -> None:
        """What is served from now on is another; who waits for pieces goes on waiting."""
        self._core = core

    @property
    def wait_s(self) -> float | None:
        """Seconds until there may be a piece to send; None when nobody waits for one."""
        return _AGAIN_S if self._asked else None

    def take(self, device: str, payload: bytes) -> bool:
        """Whether a message is a request; then it is kept, if it can be answered."""
        gate = self._core.gate
        request = read_request(payload, lambda sent: gate.opened(device, None, sent))
        if request is None:
            return False
        offer = self._core.rollouts.offer
        if offer is None or request.run != self._core.run or not self._core.gives(device, request):
            self._asked.pop(device, None)
        elif device in self._asked or len(self._asked) < MAX_ASKING:
            end = min(offer.size_bytes, request.offset + request.wanted_bytes)
            self._asked[device] = _Asked(request.offset, end)
        return True

    def turn(self, limit_bytes: int) -> None:
        """Send what the broker has room for, and tell what devices said.

        Args:
            limit_bytes: the largest message that the broker and we take.
        """
        self._follow(self._core.rollouts.elsewhere if self._follows else "")
        for device, told in self._core.rollouts.take_news():
            self._listener(events.RolloutTold(device, told.version, told.word, told.reason))
        if self._core.rollouts.offer != self._offer:
            self._offer = self._core.rollouts.offer
            if self._offer is None:
                self._asked.clear()
        most = min(limit_bytes, _LARGEST_PIECE) - _AROUND_PIECE - self._voice.room_bytes
        while self._asked and self._link.outstanding < _IN_FLIGHT:
            device, asked = self._asked.popitem(last=False)
            if not self._send(device, asked, most):
                self._asked.clear()  # no connection, or the bundle has just gone: they ask again
            elif asked.offset < asked.end and asked.pieces:
                self._asked[device] = asked  # after the others

    def close(self) -> None:
        """Give the second link back."""
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._elsewhere = None

    def _send(self, device: str, asked: _Asked, most: int) -> bool:
        if self._offer is None:
            return False
        data = self._core.rollouts.read(asked.offset, min(most, asked.end - asked.offset))
        if not data:
            return False
        piece = Piece(self._core.run, self._offer.digest, asked.offset, data)
        asked.offset, asked.pieces = asked.offset + len(data), asked.pieces - 1
        topic = topics.down(self._fleet, device)
        return bool(self._link.publish(topic, self._voice.sealed(topic, encode(piece))))

    # ── the fleet that devices go over to ───────────────────────────────────────────────────────────────────────────

    def _follow(self, fleet: str) -> None:
        """Hear what devices say there, on a link of its own, for as long as it is named."""
        if fleet != self._followed:
            self.close()
            self._followed = fleet
            if fleet:
                own, client = self._address.of_process("rollout"), client_id(self._fleet, topics.AGGREGATOR)
                self._elsewhere = Link(own, client, subscriptions=[topics.status(fleet)]).open()
        for _ in range(_LISTENS if self._elsewhere is not None else 0):
            assert self._elsewhere is not None
            event = self._elsewhere.receive(0)
            if event is None:
                return
            if isinstance(event, Received):
                self._hear(event)
                self._elsewhere.acknowledge(event)
            elif isinstance(event, Failed):  # a broker that does not let us: it is told once, and widened by hand
                self._listener(events.RolloutDeaf(fleet, str(event.error)))
                self.close()
                return

    def _hear(self, event: Received) -> None:
        try:
            device = topics.device_of(event.topic)
        except WireError:
            return
        if event.payload and device != topics.AGGREGATOR:  # an empty one clears what was retained
            self._core.hear_elsewhere(device, event.topic, event.payload)
