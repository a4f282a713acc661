"""Which answer is shown: one that so many photos after each other agree on, so that no chance photo rings.

Whether a photo is unknown changes oftener than its answer does. So photos of the same answer need not agree on that; it
changes for itself, once as many of them after each other do. What is shown is about the newest photo of that answer.

A pure machine: photos go in, and what stands comes out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from protofleet.edge_client.answers.camera_answers import Answered

__all__ = ["Steady"]


class Steady:
    """Args:
    equal: so many photos after each other have to have the same answer; 1 shows each one.
    """

    def __init__(self, equal: int) -> None:
        self._same: deque[Answered] = deque(maxlen=equal)  # the newest photos, all of one answer
        self._equal = equal
        self.shown: Answered | None = None

    def take(self, answered: Answered) -> Answered | None:
        """The answer that stands now, after one more photo; None before there is any."""
        if self._same and self._same[-1].answer != answered.answer:
            self._same.clear()
        self._same.append(answered)
        is_enough = len(self._same) == self._equal
        unknown = sum(each.is_unknown for each in self._same)
        if self.shown is not None and self.shown.answer == answered.answer:
            is_agreed = is_enough and unknown in (0, self._equal)
            self.shown = answered if is_agreed else replace(answered, is_unknown=self.shown.is_unknown)
        elif is_enough:
            self.shown = replace(answered, is_unknown=2 * unknown > self._equal)
        return self.shown
