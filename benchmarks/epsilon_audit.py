"""How large an ε an attack can show of the noised methods, beside the one that is stated.

    pip install dp-accounting
    python benchmarks/epsilon_audit.py [--trials 20000] [--multiplier 2 1 0.5]

The attacker knows every photo of a device but one, and asks of each of many releases whether that one is in it: by the
likelihood ratio over every number that leaves, which is the best test there is. Its sample is the worst there is, too:
of a class that nobody else has. From the shares of right and wrong accusations follows ε ≥ ln((true − δ) / false);
printed for each δ is the largest over thresholds, of 99 % Clopper-Pearson bounds that allow for their number
(Bonferroni). Thresholds are set on other releases than those that are counted. Beside it is the ε that is stated for
that δ, and what the same attack shows of a mechanism that adds half the noise and one that leaves the counts as they
are: these have to be found out.

Releases are those of the deployed methods, with their own noise from secrets of their own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from dp_accounting import get_epsilon_gaussian
from numpy.typing import NDArray
from scipy.stats import beta

import contract.noised_sums
from contract.methods import method
from contract.noised_sums import SumNoise
from contract.secret_noise import SecretNoise, key_of
from contract.statistics import Statistic

CLASSES, WIDTH, OTHERS = 4, 8, 12
DELTAS = (1e-5, 1e-3, 1e-2)
QUANTILES = (0.8, 0.9, 0.95, 0.98, 0.99, 0.995)
Data = tuple[NDArray[np.float32], NDArray[np.int64]]


class Attacked:
    """One device's samples, as a method sees them, with a secret of its own for each release."""

    min_samples, params = 1, dict[str, Any]()

    def __init__(self, hyper: dict[str, Any], data: Data, secret: bytes) -> None:
        self.hyper, self._data, self._secret = hyper, data, secret
        self.classes, self.width, self.asked = CLASSES, WIDTH, np.ones(CLASSES, bool)
        self.counts = np.bincount(data[1], minlength=CLASSES)

    def features(self, extractor: str) -> Iterator[Data]:
        """All at once."""
        yield self._data

    def secret_noise(self, *of: bytes | NDArray[np.generic]) -> SecretNoise:
        """As on a device."""
        return SecretNoise(key_of(self._secret, *of))


def main() -> None:
    """Print a table."""
    options = _options()
    print(
        "| method | m | stated ε at δ = " + ", ".join(f"{d:g}" for d in DELTAS) + " | mechanism | shown ε at these δ |"
    )
    print("| --- | --- | --- | --- | --- |", flush=True)
    whole = contract.noised_sums._noised
    broken = {
        "as it is": mock.patch.object(contract.noised_sums, "_noised", whole),
        "half the noise": mock.patch.object(contract.noised_sums, "_noised", lambda v, d, n: whole(v, 0.5 * d, n)),
        "counts bare": mock.patch.object(SumNoise, "noised_counts", lambda self, n, _: n.astype(np.float64)[:, None]),
    }
    for name in ("ffc-dp", "ncm-dp"):
        for multiplier in options.multiplier:
            stated = [get_epsilon_gaussian(multiplier, delta) for delta in DELTAS]
            for what, patch in broken.items():
                with patch:
                    shown = _shown(name, multiplier, options.trials, only_counts=what == "counts bare")
                cells = [", ".join(f"{value:.2f}" for value in row) for row in (stated, shown)]
                print(f"| {name} | {multiplier:g} | {cells[0]} | {what} | {cells[1]} |", flush=True)


def _shown(name: str, multiplier: float, trials: int, *, only_counts: bool) -> list[float]:
    """For each δ, what the attack shows; 0 where it shows nothing."""
    hyper = method(name).settle({"noise_multiplier": multiplier})
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(OTHERS, WIDTH)).astype(np.float32), rng.integers(0, CLASSES - 1, OTHERS)
    more = np.concatenate([z, np.eye(WIDTH, dtype=np.float32)[:1]]), np.append(y, CLASSES - 1)
    quiet = mock.Mock(whole_normal=lambda shape, deviation: np.zeros(shape, np.int64))
    with mock.patch.object(Attacked, "secret_noise", return_value=quiet):
        base, with_it = (_numbers(name, hyper, data, b"") for data in ((z, y), more))
    moved = with_it - base
    if only_counts:
        moved[:-CLASSES] = 0.0

    def scores(data: Data, side: str, count: int) -> NDArray[np.float64]:
        return np.array([(_numbers(name, hyper, data, f"{side} {i}".encode()) - base) @ moved for i in range(count)])

    thresholds = np.quantile(scores((z, y), "threshold", max(trials // 4, 200)), QUANTILES)
    false, true = scores((z, y), "without", trials), scores(more, "with", trials)
    level = 0.01 / (2 * len(QUANTILES))
    best = []
    for delta in DELTAS:
        found = [0.0]
        for threshold in thresholds:
            hits, wrong = int((true > threshold).sum()), int((false > threshold).sum())
            least = float(beta.ppf(level, hits, trials - hits + 1)) if hits else 0.0
            most = float(beta.ppf(1 - level, wrong + 1, trials - wrong)) if wrong < trials else 1.0
            found.append(math.log((least - delta) / most) if least > delta else 0.0)
        best.append(max(found))
    return best


def _numbers(name: str, hyper: dict[str, Any], data: Data, secret: bytes) -> NDArray[np.float64]:
    """Every number that leaves, in units of the deviation of its own noise; the counts last."""
    statistic: Statistic = method(name).summarise(Attacked(hyper, data, secret))
    noise = method(name).mechanism(hyper)
    assert isinstance(noise, SumNoise)
    rows, sizes = (statistic.rows(field).ravel() for field in statistic.row_fields())
    parts = [rows / noise.row_deviation, sizes / noise.count_deviation]
    if statistic.triangle is not None:
        scale = np.full((WIDTH, WIDTH), math.sqrt(2.0))
        np.fill_diagonal(scale, 1.0)
        parts.insert(0, statistic.triangle * scale[np.triu_indices(WIDTH)] / noise.gram_deviation)
    return np.concatenate(parts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20_000)
    parser.add_argument("--multiplier", type=float, nargs="+", default=[2.0, 1.0, 0.5])
    return parser.parse_args()


if __name__ == "__main__":
    main()
