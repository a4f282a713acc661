"""When does a float32 result equal torch's?

Float32 has no single right answer: every processor adds in another order, and training can amplify the rounding
(BatchNorm over few values, Adam's division of a gradient by its own size). So torch runs twice: in float64, which
stands for exact arithmetic, and in float32, which shows what float32 can do with this network and these numbers. The
rule is

    our distance from exact  ≤  16 · (torch's own float32 distance from exact + 4 float32 epsilons)

for each tensor, relative to its change in the step. Decision 060 derives the two numbers.

Rounding can change the sign at a ReLU or the choice of a maximum, and then one batch may differ by more. So a batch
that disagrees is followed by another one. A graph is wrong if the same tensor disagrees on each of six batches, as it
does with a wrong formula. `uneven` changes the start values so that they cannot hide a wrong formula.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import ExportError

__all__ = ["Agreement", "distances", "uneven", "worst_agreement"]

_FACTOR = 16.0  # how much further from exact than torch's float32 a tensor may be
_LEAST = 4 * float(np.finfo(np.float32).eps)  # what torch counts as being off by, however lucky it was
_SMALL = 1e-3  # a change below this share of the whole step's is compared with that share
_ATTEMPTS = 6
_AT_A_TIME = 1 << 15
Tensors = Mapping[str, NDArray]


@dataclass(frozen=True)
class Agreement:
    """How far a tensor is from exact arithmetic.

    Attributes:
        error: relative to the tensor's change, or to the tensor itself where it is no state.
        torch_error: torch's own in float32, on the same tensor.
        tensor: which output.
    """

    error: float
    torch_error: float
    tensor: str

    @property
    def allowed(self) -> float:
        """The error that rounding explains."""
        return _FACTOR * (self.torch_error + _LEAST)

    @property
    def holds(self) -> bool:
        """Whether rounding explains the error; never where one of the two is not finite."""
        return self.error <= self.allowed < np.inf


def distances(ours: Tensors, exact: Tensors, torchs: Tensors, before: Tensors) -> list[Agreement]:
    """The distance of each tensor from exact arithmetic: ours, and that of torch in float32.

    Args:
        ours: the results of the graph.
        exact: the results of torch in float64.
        torchs: the results of torch in float32.
        before: the state before the step. A tensor that is not in it is compared as a whole, not by its change.
    """
    changes = {name: _apart(value, before.get(name)) for name, value in exact.items()}
    overall = float(np.sqrt(sum(change**2 for name, change in changes.items() if name in before)))
    agreements = []
    for name, value in exact.items():
        least = _SMALL * overall if name in before else 0.0
        scale = max(changes[name], least, 1e-30)
        errors = [_apart(t[name], value) / scale for t in (ours, torchs)]
        agreements.append(Agreement(errors[0], errors[1], name))
    return agreements


def _apart(a: NDArray, b: NDArray | None) -> float:
    """‖a − b‖ in float64, a few numbers at a time: of a dense layer with 10⁸ weights each copy is a gigabyte.

    The squares are summed by `einsum`, since BLAS would take all cores for them, and its threads wait for each other.
    """
    left, squares = np.ravel(a), 0.0
    right = None if b is None else np.ravel(b)
    for start in range(0, left.size, _AT_A_TIME):
        part = left[start : start + _AT_A_TIME].astype(np.float64)
        if right is not None:
            part -= right[start : start + _AT_A_TIME]
        squares += float(np.einsum("i,i->", part, part))
    return float(np.sqrt(squares))


def worst_agreement(attempt: Callable[[], list[Agreement]], name: str) -> Agreement:
    """Compare batch after batch, until no tensor has disagreed on all of them. The result is the last batch's worst.

    Args:
        attempt: compares one more batch.
        name: the name of the graph in the error.

    Raises:
        ExportError: when one tensor disagrees on each of six batches.
    """
    suspects: set[str] | None = None
    for _ in range(_ATTEMPTS):
        agreements = attempt()
        wrong = {agreement.tensor for agreement in agreements if not agreement.holds}
        suspects = wrong if suspects is None else suspects & wrong
        if not suspects:
            return max(agreements, key=lambda agreement: agreement.error if agreement.holds else 0.0)
    worst = max(
        (agreement for agreement in agreements if agreement.tensor in suspects),
        key=lambda agreement: agreement.error / agreement.allowed if np.isfinite(agreement.error) else np.inf,
    )
    raise ExportError(
        f"{name} disagrees with torch at {worst.tensor}; the bundle was not written",
        expected=f"a relative difference of at most {worst.allowed:.1e} (torch's own is {worst.torch_error:.1e})",
        got=f"{worst.error:.1e}",
        hint="reporting this backbone",
    )


def uneven(state: Tensors, names: Iterable[str], seed: int) -> dict[str, NDArray]:
    """The state with uneven numbers, so that a graph that forgets a tensor cannot pass.

    A new network's scales are all ones, its shifts and running means all zeros. A graph that forgets them would give
    the same result. So each tensor whose elements are all equal is scaled down unevenly, or moved away from zero.
    """
    rng, new = np.random.default_rng(seed), dict(state)
    for name in names:
        value = state[name]
        if value.size > 1 and np.ptp(value) == 0.0:
            moved = value * rng.uniform(0.5, 1.0, value.shape) if value.any() else rng.normal(0.0, 0.1, value.shape)
            new[name] = moved.astype(value.dtype)
    return new
