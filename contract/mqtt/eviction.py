"""Detection of another process with our certificate, on a broker that allows one session for each certificate.

Where the broker takes the certificate's name as the client id, a second client with the same certificate ends the
connection of the first one. Both reconnect, and so each ends the other's connection. The broker need not give a reason
(Mosquitto 2.0.11 gives none).

Neither process ever hears the other's birth on their common status topic. After each reconnect, the topic holds the
last will that this very reconnect made the broker publish. So this is the sign of another process: on several
connections in a row, each soon after the last, the first status is the death of a stranger.

Both processes count alike, because they take turns. The process that had been connected for a while waits longer, so
the newcomer ends first. The owner of an `Eviction` tells a new death from one that the broker has kept
(`aggregator/server/sole_aggregator.py`, `edge_client/messages/presence.py`).
"""

from __future__ import annotations

__all__ = ["Eviction"]

SOON_S = 10.0  # at most between two connections of one quarrel; a process that held one for longer was there before


class Eviction:
    """Counts the evictions of one process.

    Args:
        newcomer: after so many evictions in a row a new process is sure that there is another one.
        settled: the same for a process that had been connected for longer than `SOON_S`.
    """

    def __init__(self, newcomer: int = 2, settled: int = 3) -> None:
        self._newcomer, self._settled = newcomer, settled
        self._times, self._was_there = 0, False
        self._connected_s: float | None = None
        self._listens = False

    @property
    def is_suspected(self) -> bool:
        """Whether there may be another process."""
        return self._times > 0

    @property
    def is_sure(self) -> bool:
        """Whether there certainly is another process."""
        return self._times >= (self._settled if self._was_there else self._newcomer)

    def connected(self, now_s: float) -> None:
        """A connection is up."""
        before = self._connected_s
        self._connected_s, self._listens = now_s, before is not None
        if before is not None and now_s - before > SOON_S:
            self._times, self._was_there = 0, True

    def heard(self, *, strangers_death: bool) -> bool:
        """A status came on our own topic; whether it shows that another process has ended our connection.

        Only the first status after a reconnect counts.
        """
        counts, self._listens = self._listens, False
        if counts:
            self._times = self._times + 1 if strangers_death else 0
        return counts and strangers_death
