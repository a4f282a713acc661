"""The ridge head of pooled sums, which what a fleet makes is compared with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.ridge import Ridge, solve
from protofleet.contract.sums.statistics import FeatureGram

__all__ = ["solve_head", "usual_head"]


def solve_head(gram: FeatureGram, ridge: Ridge) -> NDArray[np.float64]:
    """The head W (C, D), float64, that fits the pooled data behind `gram`; see `solve`."""
    return solve(gram.matrix, gram.cross, gram.counts, ridge).weights


def usual_head(gram: FeatureGram, ridge: Ridge) -> NDArray[np.float64]:
    """The head (C, D) that FFC makes of these sums where nobody asks for a form, written out."""
    head, named = solve_head(gram, ridge), gram.counts[gram.counts > 0]
    if named.max() < 2 * named.min():
        return head
    return head / np.sqrt(np.where(gram.counts > 0, gram.counts / named.mean(), 1.0))[:, None]
