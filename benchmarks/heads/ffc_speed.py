"""How fast FFC's sums and its head are, beside what this machine's BLAS and LAPACK allow, in processor time.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.heads.ffc_speed [--widths 1280,2048] [--classes 1000] [--samples 2048]

1. The limit: multiply-adds a second of a product of two D × D matrices in float64.
2. A device: `FFC.summarise` over blocks of 512 features in float32, as they come from the extractor, network aside:
   unit length, float64, class sums, the triangle of Σ z zᵀ, packed. And its rank-k update alone. The share of the limit
   counts N · D(D+1)/2 multiply-adds, those of the triangle.
3. The aggregator: the matrix of a packed triangle, a head of C classes with the ridge that is chosen from the sums (all
   eigenvalues) and with a given one, beside `numpy.linalg.eigh` and `numpy.linalg.solve` of the same matrix.

The fastest of `--repeats` each; run it with one thread, or with as many as the aggregator has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.ridge import solve
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.sums.triangle import add_products

BLOCK = 512  # samples: what an extractor gives at a time
FIXED_RIDGE = 0.3


@dataclass
class Blocks:
    """What `FFC.summarise` asks of a device: blocks of features that are there already."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int

    def __post_init__(self) -> None:
        self.width, self.hyper = self.z.shape[1], method("ffc").resolve({})

    def features(self, extractor: str) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        for start in range(0, len(self.z), BLOCK):
            yield self.z[start : start + BLOCK], self.y[start : start + BLOCK]


def fastest_s(run: Callable[[], Any], repeats: int) -> float:
    """The least processor time of all threads."""
    found = []
    for _ in range(repeats):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return min(found)


def measure(width: int, classes: int, samples: int, repeats: int) -> None:
    """One width's table."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((width, width))
    limit = width**3 / fastest_s(lambda: a @ a, repeats)  # multiply-adds a second
    z = np.maximum(rng.standard_normal((samples, 64)) @ rng.standard_normal((64, width)), 0).astype(np.float32)
    z += np.abs(rng.standard_normal(z.shape)).astype(np.float32)
    y = rng.integers(0, classes, samples)
    work, upper, wide = samples * width * (width + 1) / 2, np.zeros((width, width)), z.astype(np.float64)

    def rank_k() -> None:
        for start in range(0, samples, BLOCK):
            add_products(upper, wide[start : start + BLOCK])

    print(f"D = {width:,}, {samples:,} samples, C = {classes:,}; {2 * limit / 1e9:.1f} GFLOP/s of this BLAS")
    update_s = fastest_s(rank_k, repeats)
    summed_s = fastest_s(lambda: method("ffc").summarise(Blocks(z, y, classes)), repeats)  # type: ignore[arg-type]
    for name, took_s in (("rank-k update", update_s), ("all of a device's sums", summed_s)):
        print(f"  {name:34} {took_s * 1e3:8.1f} ms   {work / took_s / limit:6.1%} of the limit")
    sums = method("ffc").summarise(Blocks(z, y, classes))  # type: ignore[arg-type]
    assert isinstance(sums, FeatureGram)
    matrix = sums.matrix
    shifted = matrix + FIXED_RIDGE * np.trace(matrix) / width * np.eye(width)
    rows: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("matrix of a packed triangle", lambda: sums.matrix),
        ("numpy.linalg.eigh", lambda: np.linalg.eigh(matrix)),
        ("head, ridge chosen", lambda: solve(matrix, sums.cross, sums.counts, "auto")),
        ("numpy.linalg.solve", lambda: np.linalg.solve(shifted, sums.cross.T)),
        ("head, ridge given", lambda: solve(matrix, sums.cross, sums.counts, FIXED_RIDGE)),
    )
    for name, run in rows:
        print(f"  {name:34} {fastest_s(run, repeats) * 1e3:8.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--widths", default="1280,2048")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    for width in map(int, options.widths.split(",")):
        measure(width, options.classes, options.samples, options.repeats)


if __name__ == "__main__":
    main()
