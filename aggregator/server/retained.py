"""Which parts of the global state the broker retains, as seen on this connection, and which are published again.

A new connection receives what is retained, the global state among it. So only what the broker lacks is published again:
a connection that is lost again and again must not send the whole state to every device each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.contract.mqtt.link import Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["Retained", "RetainedState"]


class Retained:
    """The parts that a connection has shown to be on the broker, by their hash, since a state may be megabytes."""

    def __init__(self) -> None:
        self._connection, self._digests = 0, dict[int, bytes]()

    def heard(self, connection: int, part: int, payload: bytes) -> None:
        """The broker sent this part. What an older connection has shown counts no more: the broker may have died."""
        if connection != self._connection:
            self._connection, self._digests = connection, {}
        self._digests[part] = hashlib.sha256(payload).digest()

    def missing(self, connection: int, parts: Sequence[bytes]) -> list[int]:
        """The parts of a state that the broker is not known to have on this connection."""
        digests = self._digests if connection == self._connection else {}
        return [part for part, payload in enumerate(parts) if digests.get(part) != hashlib.sha256(payload).digest()]


class RetainedState:
    """The global state on the broker, and parts of others in its place.

    Args:
        link: to the broker.
        publisher: signs the parts, if the aggregator signs, and hears which parts were overwritten.
    """

    def __init__(self, fleet: str, link: Link, publisher: SignedPublisher) -> None:
        self._fleet, self._link, self._publisher = fleet, link, publisher
        self._digests = Retained()

    def publish(self, state: GlobalState, limit_bytes: int, connection: int) -> None:
        """Publish what the broker is not known to retain of a state.

        Args:
            connection: on which what it retains has come.
        """
        parts = self._publisher.parts(state, limit_bytes)
        for part in self._digests.missing(connection, parts):
            self._link.publish(topics.global_part(self._fleet, part), parts[part], retain=True)

    def hear(self, message: Received, state: GlobalState, limit_bytes: int, now: float) -> bool:
        """Take a message on a part's topic; False when the topic is none.

        A part beyond those of the state that we publish, left by a larger state or another run, is removed.
        """
        index = message.topic.rsplit("/", 1)[1]
        parts = self._publisher.parts(state, limit_bytes)
        if message.payload and not (index.isascii() and index.isdigit() and str(int(index)) == index):
            return False
        if message.payload and int(index) >= len(parts):
            self._link.publish(message.topic, b"", retain=True)
        elif index.isdigit() and int(index) < len(parts):
            self._digests.heard(message.connection, int(index), message.payload)
            if message.payload != parts[int(index)]:
                self._publisher.overwritten(now)
        return True
