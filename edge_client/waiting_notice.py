"""What a device waits for, told to a person: once it has lasted a moment, and once for each change. No clock."""

from __future__ import annotations

__all__ = ["Waits"]

_LASTING_S = 1.0  # what is waited for between two messages of one round is not worth a line


class Waits:
    """Decides when a line about waiting is due."""

    def __init__(self) -> None:
        self._what, self._since_s = "", 0.0
        self._told = ""

    def line(self, what: str, now_s: float) -> str:
        """`what` when it is to be said now, else nothing.

        Args:
            what: what is waited for at `now_s`; empty for nothing.
        """
        if what != self._what:
            self._what, self._since_s = what, now_s
        if not what or what == self._told or now_s - self._since_s < _LASTING_S:
            return ""
        self._told = what
        return what
