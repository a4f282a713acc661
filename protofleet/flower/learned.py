"""What has come of the rounds so far, for whoever asks: the rows, and answers to features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.answers import Answer, nearest_answer
from contract.errors import DataError, MethodError
from contract.methods import Method, Value
from contract.state import GlobalState

__all__ = ["Learned"]


@dataclass(frozen=True, eq=False)
class Learned:
    """Prototypes, class means or a head, as clients have them.

    Attributes:
        method: whose rounds they came of.
        hyper: its hyper-parameters, settled.
        classes, width: C and D.
        state: the rows, by kind.
    """

    method: Method
    hyper: Mapping[str, Value]
    classes: int
    width: int
    state: GlobalState

    @property
    def kinds(self) -> tuple[str, ...]:
        """What there is: `prototypes`, `means`, `head`, …; none before the first round."""
        return tuple(self.state.rows)

    def rows(self, kind: str = "prototypes") -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows (C, W) float32 of a kind, zero where there is none, and which classes have one (C,)."""
        width = self.method.row_kinds(self.hyper, self.classes, self.width).get(kind, self.width)
        dense, present = self.state.dense(kind, self.classes, width)
        return dense, present > 0

    @property
    def answer(self) -> Answer:
        """How features are answered by what came back alone: FFC's head, the nearest class mean or prototype.

        Raises:
            MethodError: the method answers by each client's own head, or nothing has come back yet.
        """
        found = self.method
        shared = found.shared_answers(self.state, self.classes, self.width, self.hyper)
        if found.way in shared:
            return shared[found.way]
        prototypes, present = self.rows("prototypes")
        if found.way == "prototype" and present.any():
            return nearest_answer(prototypes, present)
        own = "each client's own head" if found.way == "head" else "what rounds bring"
        got = "what came back" if self.kinds else "nothing yet"
        raise MethodError(f"an answer of {found.name}", expected=own, got=got)

    def __call__(self, features: Any) -> NDArray[np.int64]:
        """Features (N, D), numpy or torch, to class numbers (N,).

        Raises:
            DataError: features of another shape.
            MethodError: as `answer`.
        """
        for step in ("detach", "cpu", "numpy"):
            features = getattr(features, step)() if hasattr(features, step) else features
        given = np.asarray(features, dtype=np.float32)
        if given.ndim != 2 or given.shape[1] != self.width:
            raise DataError("features", expected=f"(N, {self.width})", got=given.shape)
        return self.answer(given)
