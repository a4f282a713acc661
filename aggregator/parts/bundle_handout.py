"""Hands out the bundle that is rolled out, at its own pace, and hears devices' reports in the fleet they go over to.

Only a device's newest request is kept. It is answered with consecutive pieces, one for each device in turn, as long as
the broker has few publications of ours to acknowledge. So a fleet that downloads, or a device that asks for ever,
delays a receipt by no more than these few pieces, and takes no memory. A device gets nothing when it is refused, not in
the stage, or asks for something else.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.monitoring import events
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.contract.errors import WireError
from protofleet.contract.mqtt.link import Address, Failed, Link, Received, client_id
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES
from protofleet.contract.wire.messages import Message
from protofleet.contract.wire.rollout_messages import MAX_PIECES, Offer, Piece, Request

__all__ = ["Handout", "read_request"]

MAX_ASKING = 4_096  # devices at once; who finds no place asks again
_IN_FLIGHT = 8  # publications that the broker has not acknowledged
_LONGEST_REQUEST = 96 + ENVELOPE_BYTES
_LARGEST_PIECE = 65_536  # as a message
_AROUND_PIECE = 64  # bytes of a message that are not data
_AGAIN_S = 0.01  # while pieces wait for the broker
_LISTENS = 256  # messages of the other fleet that are heard in one turn


def read_request(payload: bytes, opened: Callable[[bytes], Message] = decode) -> Request | None:
    """The request in a device's message; None for any other message.

    Args:
        opened: decodes the message, if it is the device's.
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
    """Answers requests for the bundle.

    Args:
        parts: know the offered bundle.
        link: to devices of `fleet`.
        address: of the broker, for a second link while devices go over to another fleet, with a certificate of its
            own (`NAME.rollout.pem`) if there is one.
        listener: receives the devices' reports on the roll-out.
        publisher: signs what is published, if the aggregator does.
        follows: whether this process hears the devices' reports in the fleet that they go over to: one process does.
    """

    def __init__(
        self,
        parts: Parts,
        link: Link,
        address: Address,
        fleet: str,
        listener: events.Listener,
        publisher: SignedPublisher,
        *,
        follows: bool = True,
    ) -> None:
        self._publisher, self._follows = publisher, follows
        self._parts, self._link, self._address, self._fleet, self._listener = parts, link, address, fleet, listener
        self._requests: OrderedDict[str, _Asked] = OrderedDict()
        self._offer: Offer | None = None  # that they asked for
        self._elsewhere: Link | None = None
        self._followed = ""  # the fleet of that link, or one that could not be followed

    def serve(self, parts: Parts) -> None:
        """Serve other parts from now on, read anew. Waiting devices go on waiting."""
        self._parts = parts

    @property
    def wait_s(self) -> float | None:
        """Seconds until there may be a piece to send; None when no device waits."""
        return _AGAIN_S if self._requests else None

    def take(self, device: str, payload: bytes) -> bool:
        """Whether a message is a request. A request that can be answered is kept."""
        gate = self._parts.gate
        request = read_request(payload, lambda sent: gate.opened(device, None, sent))
        if request is None:
            return False
        is_refused = device in self._parts.exclusions.refused
        self._parts.store.devices.decided(device, len(payload), time.time(), is_refused=is_refused)
        offer = self._parts.rollouts.offer
        if offer is None or request.run != self._parts.run or not self._parts.gives(device, request):
            self._requests.pop(device, None)
        elif device in self._requests or len(self._requests) < MAX_ASKING:
            end = min(offer.size_bytes, request.offset + request.wanted_bytes)
            self._requests[device] = _Asked(request.offset, end)
        return True

    def turn(self, limit_bytes: int) -> None:
        """Send the pieces that the broker has room for, and pass on the devices' reports.

        Args:
            limit_bytes: the largest message that both the broker and this aggregator take.
        """
        self._follow(self._parts.rollouts.elsewhere if self._follows else "")
        for device, report in self._parts.rollouts.take_news():
            self._listener(events.RolloutTold(device, report.version, report.word, report.reason))
        if self._parts.rollouts.offer != self._offer:
            self._offer = self._parts.rollouts.offer
            if self._offer is None:
                self._requests.clear()
        most = min(limit_bytes, _LARGEST_PIECE) - _AROUND_PIECE - self._publisher.room_bytes
        while self._requests and self._link.outstanding < _IN_FLIGHT:
            device, request = self._requests.popitem(last=False)
            if not self._send(device, request, most):
                self._requests.clear()  # no connection, or the bundle has just gone: they ask again
            elif request.offset < request.end and request.pieces:
                self._requests[device] = request  # after the others

    def close(self) -> None:
        """Close the second link."""
        if self._elsewhere is not None:
            self._elsewhere.close()
        self._elsewhere = None

    def _send(self, device: str, request: _Asked, most: int) -> bool:
        if self._offer is None:
            return False
        data = self._parts.rollouts.read(request.offset, min(most, request.end - request.offset))
        if not data:
            return False
        piece = Piece(self._parts.run, self._offer.digest, request.offset, data)
        request.offset, request.pieces = request.offset + len(data), request.pieces - 1
        topic = topics.down(self._fleet, device)
        return bool(self._link.publish(topic, self._publisher.sealed(topic, encode(piece))))

    # ── the fleet that devices go over to ───────────────────────────────────────────────────────────────────────────

    def _follow(self, fleet: str) -> None:
        """Hear what devices say there, on a link of its own, for as long as it is named."""
        if fleet != self._followed:
            self.close()
            self._followed = fleet
            if fleet:
                address, client = self._address.of_process("rollout"), client_id(self._fleet, topics.AGGREGATOR)
                self._elsewhere = Link(address, client, subscriptions=[topics.status(fleet)]).open()
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
            self._parts.statuses.hear_elsewhere(device, event.topic, event.payload)
