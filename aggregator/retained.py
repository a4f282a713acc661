"""What the broker retains of the global state, as far as this connection has shown. No I/O.

A new connection is told what is retained, the global state among it. So only what the broker lacks is published again:
a connection that is lost again and again must not send the whole state to every device each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

__all__ = ["Retained"]


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
