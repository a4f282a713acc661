"""When a store whose server went away is looked for again.

A server is restarted, moved, or cut off for a while; its aggregator stays, and begins again from the store when it is
back. A store that was never opened is an error at once, and so is whatever else it refuses; a worker, which is one of
several and started with the machine, also waits for a server that was never there. Where another process
has it, that may be what is left of our own connection, which the server takes for alive a little longer: only when that
does not end is it another's.
"""

from __future__ import annotations

from contract.errors import InUseError, StoreAwayError, StoreError, StoreLostError

__all__ = ["Away"]

FIRST_S, LONGEST_S = 0.5, 5.0
OURS_S = 120.0  # above what a server takes to find out that a connection is dead (`aggregator/database/postgres.py`)


class Away:
    """How often it was looked for, since it was there.

    Args:
        patience_s: how long a server may be away that was never there.
    """

    def __init__(self, patience_s: float = 0.0) -> None:
        self._patience_s, self._was_open, self._tries = patience_s, False, 0
        self._taken_since_s: float | None = None
        self._away_since_s: float | None = None

    def opened(self) -> None:
        """It is there."""
        self._was_open, self._tries, self._taken_since_s = True, 0, None

    def wait_s(self, error: StoreError, now: float) -> float | None:
        """How long to wait after an error before all begins again; None where that is of no use.

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
