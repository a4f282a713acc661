"""Another process with our certificate, on a broker that has one session for each: known by the death that it leaves.

Where the broker makes the certificate's name the client id, whoever comes with the same certificate throws out the one
that is connected. Both come back, and throw out each other; the broker need not say why (Mosquitto 2.0.11 does not).
On the status topic that both read, neither ever hears the other's birth: what stands there on each return is the last
will that this very return made the broker publish. So a stranger's death that is the first thing heard, on several
connections in a row that soon followed each other, says that somebody else is there. They take turns, so that both
count alike; the one that had been there for a while is the more patient, and the newcomer ends. Its owner tells a new
death from one that a broker has kept (`aggregator/sole_aggregator.py`, `edge_client/presence.py`).
"""

from __future__ import annotations

__all__ = ["Eviction"]

SOON_S = 10.0  # between two connections of one quarrel; who had one for longer was there before


class Eviction:
    """Counts, for one process.

    Args:
        newcomer, settled: after how many evictions in a row it is sure.
    """

    def __init__(self, newcomer: int = 2, settled: int = 3) -> None:
        self._newcomer, self._settled = newcomer, settled
        self._times, self._was_there = 0, False
        self._connected_s: float | None = None
        self._listens = False

    @property
    def is_suspected(self) -> bool:
        """Whether there may be another."""
        return self._times > 0

    @property
    def is_sure(self) -> bool:
        """Whether there is another."""
        return self._times >= (self._settled if self._was_there else self._newcomer)

    def connected(self, now_s: float) -> None:
        """A connection is up."""
        before = self._connected_s
        self._connected_s, self._listens = now_s, before is not None
        if before is not None and now_s - before > SOON_S:
            self._times, self._was_there = 0, True

    def heard(self, *, strangers_death: bool) -> bool:
        """A status on our own topic: only the first one after a return counts; whether it is of one that threw us
        out."""
        counts, self._listens = self._listens, False
        if counts:
            self._times = self._times + 1 if strangers_death else 0
        return counts and strangers_death
