"""Another process with our certificate, on a broker that has one session for each: known by the death that it leaves.

Where the broker makes the certificate's name the client id, whoever comes with the same certificate throws out the one
that is connected. Both come back, and throw out each other; the broker need not say why (Mosquitto 2.0.11 does not).
On the status topic that both read, neither ever hears the other's birth: what stands there on each return is the last
will that this very return made the broker publish. So a stranger's death that is the first thing heard, on several
connections in a row that soon followed each other, says that somebody else is there. They take turns, and the one that
was there first has counted one more: it is the one that knows first, and ends.
"""

from __future__ import annotations

__all__ = ["Eviction"]

SOON_S = 60.0  # between two connections of one quarrel


class Eviction:
    """Counts, for one process."""

    def __init__(self) -> None:
        self.times = 0
        self._connected_s: float | None = None
        self._listens = False

    def connected(self, now_s: float) -> None:
        """A connection is up."""
        before = self._connected_s
        self._connected_s, self._listens = now_s, before is not None
        if before is None or now_s - before > SOON_S:
            self.times = 0

    def heard(self, *, strangers_death: bool) -> None:
        """A status on our own topic: only the first one after a return counts."""
        if self._listens:
            self._listens = False
            self.times = self.times + 1 if strangers_death else 0
