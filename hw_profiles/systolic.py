"""Cycles of a matrix product on a systolic array, in closed form.

A product of (M, K) by (K, N) on an array of `rows` x `cols` multiply-accumulate cells is done in F *folds*, each of
which fills the array, streams operands through it and drains it in P cycles. What stays in the cells during a fold
names the dataflow (output, weight or input stationary):

    os   the outputs accumulate in place   F = ceil(M/rows) * ceil(N/cols)   P = K + rows + cols - 2
    ws   the second operand stays          F = ceil(K/rows) * ceil(N/cols)   P = M + 2*rows + cols - 2
    is   the first operand stays           F = ceil(K/rows) * ceil(M/cols)   P = N + 2*rows + cols - 2

`rows + cols - 2` is the skew of operands entering the array diagonally; the second `rows` of ws and is loads the
stationary operand, row by row, before the stream starts. Folds follow each other without overlap, and the first
cycle is number 0, so the last cycle, which is what the published simulator SCALE-Sim 3.0.0 reports, is F*P - 1.
A partly filled fold costs as much as a full one. DESIGN section 5.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from contract.errors import UsageError, near_names

__all__ = ["Dataflow", "gemm_cycles"]

Dataflow = Literal["os", "ws", "is"]

# (m, n, k, rows, cols) -> (folds, cycles of one fold)
_FOLDS: dict[str, Callable[[int, int, int, int, int], tuple[int, int]]] = {
    "os": lambda m, n, k, rows, cols: (-(-m // rows) * -(-n // cols), k + rows + cols - 2),
    "ws": lambda m, n, k, rows, cols: (-(-k // rows) * -(-n // cols), m + 2 * rows + cols - 2),
    "is": lambda m, n, k, rows, cols: (-(-k // rows) * -(-m // cols), n + 2 * rows + cols - 2),
}


def gemm_cycles(m: int, n: int, k: int, *, rows: int = 32, cols: int = 64, dataflow: Dataflow = "os") -> int:
    """Compute cycles of (M, K) times (K, N) on a rows x cols array, as SCALE-Sim 3.0.0 counts them.

    Memory stalls are not in it: operands are taken to arrive in time.

    Args:
        m: rows of the first operand; for a convolution B * OH * OW.
        n: columns of the second operand; for a convolution C_out.
        k: the shared dimension; for a convolution kh * kw * C_in.
        rows, cols: the array's cells; the default is that of the profile fpga-vc707-32x64.
        dataflow: `os`, `ws` or `is`.

    Returns:
        F*P - 1 cycles, a positive integer except for a single cell and a single product, where it is 0.

    Raises:
        UsageError: for a size that is not a positive integer, or an unknown dataflow.

    Source: DESIGN section 5; equal to SCALE-Sim 3.0.0.
    """
    for name, size in {"m": m, "n": n, "k": k, "rows": rows, "cols": cols}.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise UsageError(f"systolic array: {name}", expected="a positive integer", got=repr(size))
    if dataflow not in _FOLDS:
        raise UsageError(
            "systolic array: dataflow", expected="os, ws or is", got=repr(dataflow), hint=near_names(dataflow, _NAMES)
        )
    folds, fold_cycles = _FOLDS[dataflow](m, n, k, rows, cols)
    return folds * fold_cycles - 1


_NAMES: tuple[str, ...] = get_args(Dataflow)
