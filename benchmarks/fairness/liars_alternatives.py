"""Three ways to find liars in FFC's sums, on the same fleets: the choice of docs/decisions/158.

    python -m benchmarks.fairness.liars_alternatives [--seeds 3] [--cache DIR]

- contradictions  what the product does (`aggregator/screening/contradictions.py`)
- left-out error  the squared error, on a device's own sums, of the head of all others' sums, which sums give exactly;
                  accused is who is so far above the middle device, in deviations (1.4826 · median absolute deviation),
                  as one honest device in `ALARMS` rounds would be if these errors were normally distributed
- buckets         pairs of devices, drawn at random, each with a head of its own; the answer's head is their median in
                  each coordinate, and nobody is named

Fleets as `benchmarks/fairness/liars.py` has them, by how classes are spread; ridge 0.01 of trace/D for every head.
Printed: liars accused of how many, honest devices accused, and accuracy on the test photos, beside the sum of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from benchmarks.fairness.liars import LIES, SPREADS, Fleet, Lie, Photos, show
from benchmarks.heads.frozen_features import trained
from protofleet.aggregator.screening.contradictions import ALARMS, contradicted
from protofleet.contract.sums.statistics import FeatureGram
from tests.support.pooled_head import solve_head

RIDGE = 0.01
Sent = Mapping[str, FeatureGram]


def total(sent: Sent) -> FeatureGram:
    """The sum of all."""
    first, *others = sent.values()
    for other in others:
        first = first.merge(other)
    return first


def left_out_error(sent: Sent) -> dict[str, float]:
    """By device, the mean squared error of the head of all others on its samples: ‖Y − ZWᵀ‖² / n, from sums alone."""
    found = {}
    for device, own in sent.items():
        head = solve_head(total({name: s for name, s in sent.items() if name != device}), RIDGE)
        error = own.counts.sum() - 2.0 * (head * own.cross).sum() + np.sum(head * (head @ own.matrix))
        found[device] = float(error / own.counts.sum())
    return found


def beyond(errors: Mapping[str, float]) -> set[str]:
    """Whose error is out of all proportion."""
    values = np.array(list(errors.values()))
    middle = float(np.median(values))
    deviation = 1.4826 * float(np.median(np.abs(values - middle)))
    limit = middle + NormalDist().inv_cdf(1.0 - 1.0 / (ALARMS * len(errors))) * deviation
    return {device for device, error in errors.items() if error > limit}


def of_buckets(sent: Sent, seed: int) -> NDArray[np.float64]:
    """(C, D) the median of the heads of pairs."""
    names = list(np.random.default_rng([seed, 3]).permutation(list(sent)))
    pairs = [names[at : at + 2] for at in range(0, len(names), 2)]
    return np.asarray(np.median([solve_head(total({n: sent[n] for n in pair}), RIDGE) for pair in pairs], axis=0))


def right(head: NDArray[np.float64], test: Photos) -> float:
    return float(((test[0] @ head.T).argmax(axis=1) == test[1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    frozen = [trained(seed, options.cache) for seed in range(options.seeds)]
    print("| spread | lie | contradictions: liars, others | right | left-out error: liars, others | right "
          "| buckets: right | sum of all: right |\n| --- | --- |" + " ---: |" * 6)  # fmt: skip
    for label, spread in SPREADS.items():
        for lie, liars in (("none", 0), ("label flip", 3), ("colluding", 3)):
            counts, rights = np.zeros((2, 2), int), [list[float]() for _ in range(4)]
            for seed, kind in enumerate(frozen):
                fleet = Fleet.of(kind, spread, seed)
                made = fleet.sent("ffc", LIES.get(lie, Lie()), liars)
                sent = {name: s for name, s in made.items() if isinstance(s, FeatureGram) and s.counts.any()}
                guilty = set(fleet.order[:liars])
                told = contradicted(lambda sent=sent: iter(sent.values()), list(sent))
                named = ({each.device for each in told if each.accused}, beyond(left_out_error(sent)))
                for at, accused in enumerate(named):
                    counts[at] += (len(accused & guilty), len(accused - guilty))
                    kept = {name: s for name, s in sent.items() if name not in accused}
                    rights[at].append(right(solve_head(total(kept), RIDGE), fleet.test))
                rights[2].append(right(of_buckets(sent, seed), fleet.test))
                rights[3].append(right(solve_head(total(sent), RIDGE), fleet.test))
            of = liars * options.seeds
            cells = [f"{a}/{of}, {b} | {show(r)}" for (a, b), r in zip(counts, rights, strict=False)]
            print(f"| {label} | {lie} | {' | '.join(cells)} | {show(rights[2])} | {show(rights[3])} |", flush=True)


if __name__ == "__main__":
    main()
