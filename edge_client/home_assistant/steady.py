"""Which answer is shown: one that so many photos after each other agree on, so that no chance photo rings.

A pure machine: photos go in, and what stands comes out.
"""

from __future__ import annotations

from protofleet.edge_client.answers.camera_answers import Answered

__all__ = ["Steady"]


class Steady:
    """Args:
    equal: so many photos after each other have to have the same answer; 1 shows each one.
    """

    def __init__(self, equal: int) -> None:
        self._equal, self._count = equal, 0
        self._last: tuple[str, bool] | None = None
        self.shown: Answered | None = None

    def take(self, answered: Answered) -> Answered | None:
        """The answer that stands now, after one more photo; None before there is any."""
        key = answered.answer, answered.is_unknown
        self._count = self._count + 1 if key == self._last else 1
        self._last = key
        if self._count >= self._equal:
            self.shown = answered
        return self.shown
