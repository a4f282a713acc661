"""What a device waits for, told to a person: once it has lasted a moment, and once for each change. No clock.

A broker that stays away is told of once, and then once a day, however often the device tries. A second and a third
reason are told once each, because a connection may be lost for one reason and not come back for another.
"""

from __future__ import annotations

__all__ = ["Absence", "Waits"]

_DAY_S = 86_400.0
_REASONS = 3  # for one absence
_LASTING_S = 1.0  # what is waited for between two messages of one round is not worth a line


class Waits:
    """Decides when a line about waiting is due."""

    def __init__(self) -> None:
        self._what, self._since_s = "", 0.0
        self._last_said = ""

    def line(self, what: str, now_s: float) -> str:
        """`what` when it is to be said now, else nothing.

        Args:
            what: what is waited for at `now_s`; empty for nothing.
        """
        if what != self._what:
            self._what, self._since_s = what, now_s
        if not what or what == self._last_said or now_s - self._since_s < _LASTING_S:
            return ""
        self._last_said = what
        return what

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until `line` has something to say if nothing changes; None for never."""
        if not self._what or self._what == self._last_said:
            return None
        return max(0.0, self._since_s + _LASTING_S - now_s)


class Absence:
    """Decides when a line about a broker that is away is due."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._last_said_s = 0.0
        self._reasons: set[str] = set()

    def line(self, what: str, reason: str, now_s: float) -> str:
        """What to say of an attempt that failed at `now_s`, if anything.

        Args:
            what: how the first line of an absence begins.
            reason: why there is no connection.
        """
        if self._since_s is None:
            self._since_s = self._last_said_s = now_s
            self._reasons = {reason}
            return f"{what} ({reason}), trying again"
        if reason not in self._reasons and len(self._reasons) < _REASONS:
            self._reasons.add(reason)
            return f"still no broker ({reason}), trying again"
        if now_s - self._last_said_s < _DAY_S:
            return ""
        self._last_said_s = now_s
        days = round((now_s - self._since_s) / _DAY_S)
        return f"no broker for {days} {'day' if days == 1 else 'days'} ({reason}), trying again"

    def over(self) -> None:
        """The broker is here."""
        self._since_s = None
