"""When to look again for a store whose server went away.

A server may be restarted, moved, or cut off for a while. Its aggregator stays, and begins again from the store when the
server is back. A store that was never opened is an error at once, and so is any other refusal. A worker is one of
several processes and started with the machine, so it also waits for a server that was never there.

When another process has the store, that may be the rest of our own connection, which the server believes alive a little
longer. Only when that does not end, the store is another process's.
"""

from __future__ import annotations

from protofleet.contract.errors import InUseError, StoreAwayError, StoreError, StoreLostError

__all__ = ["StoreOutage"]

FIRST_S, LONGEST_S = 0.5, 5.0
OURS_S = 120.0  # above what a server takes to find out that a connection is dead (`aggregator/database/postgres.py`)


class StoreOutage:
    """How often the store was looked for since it was last there.

    Args:
        patience_s: how long a server may be away that was never there.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._patience_s, self._was_open, self._tries = patience_s, False, 0
        self._taken_since_s: float | None = None
        self._away_since_s: float | None = None

    def opened(self) -> None:
        """The store is there."""
        self._was_open, self._tries, self._taken_since_s = True, 0, None

    def wait_s(self, error: StoreError, now: float) -> float | None:
        """How long to wait after an error before everything begins again; None when waiting does not help.

        Args:
            now: seconds of a steady clock.
        """
        if not isinstance(error, StoreLostError | InUseError) or not (self._was_open or self._awaits(error, now)):
            return None
        if isinstance(error, InUseError):
            self._taken_since_s = now if self._taken_since_s is None else self._taken_since_s
            if now - self._taken_since_s > OURS_S:
                return None
        self._tries += 1
        return min(LONGEST_S, FIRST_S * 2.0 ** (self._tries - 1))

    def _awaits(self, error: StoreError, now: float) -> bool:
        """Whether one is waited for that was never there."""
        if not isinstance(error, StoreAwayError):  # it is there, and refuses us
            return False
        self._away_since_s = now if self._away_since_s is None else self._away_since_s
        return now - self._away_since_s < self._patience_s
