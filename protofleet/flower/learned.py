"""The result of the rounds so far: rows of prototypes, means or a head, and answers to features."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError, MethodError
from protofleet.contract.heads.answers import Answer, nearest_answer
from protofleet.contract.methods import Method, Value
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["Learned"]


@dataclass(frozen=True, eq=False)
class Learned:
    """Prototypes, class means or a head, as clients have them.

    Attributes:
        method: the method of the rounds.
        hyper: the method's resolved hyper-parameters.
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
        """The kinds of rows in the state: `prototypes`, `means`, `head`, …; none before the first round."""
        return tuple(self.state.rows)

    def rows(self, kind: str = "prototypes") -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Rows (C, W) float32 of one kind, and a mask (C,) of the classes that have a row. Other rows are zero."""
        width = self.method.row_kinds(self.hyper, self.classes, self.width).get(kind, self.width)
        dense, present = self.state.dense(kind, self.classes, width)
        return dense, present > 0

    @property
    def answer(self) -> Answer:
        """The answer by the global state alone: FFC's head, or the nearest class mean or prototype.

        Raises:
            MethodError: the method answers by each client's own head, or no round has ended yet.
        """
        method = self.method
        shared = method.shared_answers(self.state, self.classes, self.width, self.hyper)
        if method.way in shared:
            return shared[method.way]
        prototypes, present = self.rows("prototypes")
        if method.way == "prototype" and present.any():
            return nearest_answer(prototypes, present)
        own = "each client's own head" if method.way == "head" else "what rounds bring"
        got = "what came back" if self.kinds else "nothing yet"
        raise MethodError(f"an answer of {method.name}", expected=own, got=got)

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
