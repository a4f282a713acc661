"""What the broker retains of the global state, as far as this connection has shown, and what of it is published again.

A new connection is told what is retained, the global state among it. So only what the broker lacks is published again:
a connection that is lost again and again must not send the whole state to every device each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from aggregator.voice import Voice
from contract import topics
from contract.link import Link, Received
from contract.state import GlobalState

__all__ = ["Retained", "RetainedState"]


class Retained:
    """The parts that a connection has shown to be on the broker, by their hash: a state may be megabytes."""

    def __init__(self) -> None:
        self._connection, self._known = 0, dict[int, bytes]()

    def heard(self, connection: int, part: int, payload: bytes) -> None:
        """The broker sent this part. What an older connection has shown counts no more: the broker may have died."""
        if connection != self._connection:
            self._connection, self._known = connection, {}
        self._known[part] = hashlib.sha256(payload).digest()

    def missing(self, connection: int, parts: Sequence[bytes]) -> list[int]:
        """Which of the parts of a state the broker is not known to have on this connection."""
        known = self._known if connection == self._connection else {}
        return [part for part, payload in enumerate(parts) if known.get(part) != hashlib.sha256(payload).digest()]


class RetainedState:
    """The global state on the broker, and somebody else's parts in its place.

    Args:
        link: to the broker.
        voice: signs the parts, if the aggregator signs, and is told of what was overwritten.
    """

    def __init__(self, fleet: str, link: Link, voice: Voice) -> None:
        self._fleet, self._link, self._voice = fleet, link, voice
        self._known = Retained()

    def publish(self, state: GlobalState, limit_bytes: int, connection: int) -> None:
        """Publish what the broker is not known to retain of a state.

        Args:
            connection: on which what it retains has come.
        """
        parts = self._voice.parts(state, limit_bytes)
        for part in self._known.missing(connection, parts):
            self._link.publish(topics.global_part(self._fleet, part), parts[part], retain=True)

    def hear(self, message: Received, state: GlobalState, limit_bytes: int, now: float) -> bool:
        """A message on a part's topic; False for what is none. One beyond those of the state that we publish, left by a
        larger state or another run, must not stay."""
        index = message.topic.rsplit("/", 1)[1]
        parts = self._voice.parts(state, limit_bytes)
        if message.payload and not (index.isascii() and index.isdigit() and str(int(index)) == index):
            return False
        if message.payload and int(index) >= len(parts):
            self._link.publish(message.topic, b"", retain=True)
        elif index.isdigit() and int(index) < len(parts):
            self._known.heard(message.connection, int(index), message.payload)
            if message.payload != parts[int(index)]:
                self._voice.overwritten(now)
        return True
