"""How well classes that nobody has taught are told from those that are known, on the shipped Fashion-MNIST subset.

    python -m benchmarks.heads.unknown [--seeds 3] [--json FILE]

Classes are left out in five pairs; for each pair and seed:

1. `small_cnn` is trained on 100 images of each known class, and never sees the pair: those are the frozen features, and
   its head. A second kind of features is the same network untrained;
2. class means, spreads and ridge heads come from 90 % of the other training images of the known classes;
3. a threshold is chosen on the last 10 % of these, so that 95 % of them are known. No test image chooses anything;
4. test images: AUROC of novelty, all known classes against the pair; and at the threshold, which share of the known is
   still known and which share of the pair is called unknown. `at 2` is the threshold that needs no images.

What is compared: what the product does (distance in units of the spread 1 − ‖μ‖² for unit features, of the device's own
spread for others), the same without its units, softmax over scores, the largest score itself, and Mahalanobis distance
by the covariance within classes, which FFC's sums give but no device is sent. Means over pairs and seeds, and their
standard deviation.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from protofleet.contract.files.json_output import write_json
from protofleet.contract.heads.answers import linear_answer
from protofleet.contract.heads.ridge import solve
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.unknown import USUAL_THRESHOLD, CentreNovelty, ScoreNovelty
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.data.datasets import DataSet, channel_statistics, load_dataset, take
from protofleet.lab.data.make_subset import draw_balanced
from protofleet.lab.demo.from_scratch import BATCH, recipe
from protofleet.lab.training.local_training import EagerModel, train_eager

PAIRS = ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
PUBLIC_PER_CLASS, KEEP = 100, 0.95
Rows = NDArray[np.floating]
Measure = Callable[[Rows], NDArray[np.float64]]
EPOCHS = 10  # the figures in docs were printed with so many


def known_part(data: LocalData, known: list[int]) -> LocalData:
    """The images of the known classes, these numbered 0, 1, …"""
    rows = np.flatnonzero(np.isin(data.y, known))
    return LocalData(data.x[rows], np.searchsorted(known, data.y[rows]))


def networks(data: DataSet, public: LocalData, classes: int, seed: int) -> dict[str, EagerModel]:
    """The network trained on public images, and untrained."""
    mean, std = channel_statistics(public.x)
    made = {}
    for kind in ("trained", "untrained"):
        net, width = build_backbone("small_cnn", data.input_shape, seed=seed)
        made[kind] = EagerModel(net, classes=classes, features=width, mean=mean, std=std, seed=seed)
    plan = recipe("ffc")
    epochs, lr = EPOCHS, float(plan.pretraining["lr"])
    told = {"epochs": epochs, "batch": BATCH, "lr": lr, "seed": seed, "on_epoch": lambda epoch, loss: None}
    train_eager(made["trained"], public, plan.objective, plan.pretraining, **told)
    return made


def measures(model: EagerModel, features: Rows, labels: NDArray[np.int64], classes: int) -> dict[str, Measure]:
    """Every measure of novelty, from the features (N, D) and labels of known classes."""
    z = np.asarray(unit_rows(features.astype(np.float64)))
    means = ClassMeans.of(z, labels, classes).means
    own = ClassMeans.of(features, labels, classes).means
    spread = np.array([((features[labels == j] - own[j]) ** 2).sum(axis=1).mean() for j in range(classes)])
    gram = FeatureGram.of(z, labels, classes)
    ridge = linear_answer(solve(gram.matrix, gram.cross, gram.counts, "auto").weights, unit=True)
    head = linear_answer(*(each.numpy() for each in model.head_copy()))
    within = (gram.matrix - (means * gram.counts[:, None]).T @ means) / len(z)
    inverse = np.linalg.inv(within + 1e-3 * np.trace(within) / len(within) * np.eye(len(within)))

    def mahalanobis(rows: Rows) -> NDArray[np.float64]:
        apart = np.asarray(unit_rows(rows.astype(np.float64)))[:, None] - means  # (N, C, D)
        return (apart @ inverse * apart).sum(axis=2).min(axis=1)

    return {
        "distance / spread, unit features": CentreNovelty(means, 1 - (means**2).sum(axis=1), unit=True).of,
        "distance alone, unit features": CentreNovelty(means, np.ones(classes), unit=True).of,
        "distance / spread, own features": CentreNovelty(own, spread, unit=False).of,
        "1 − max softmax of the trained head": ScoreNovelty(head).of,
        "− max logit of the trained head": lambda rows: -head.scores(rows).max(axis=1),
        "1 − max softmax of the ridge head": ScoreNovelty(ridge).of,
        "− max score of the ridge head": lambda rows: -ridge.scores(rows).max(axis=1),
        "Mahalanobis, covariance of FFC's sums": mahalanobis,
    }


def auroc(known: NDArray[np.float64], new: NDArray[np.float64]) -> float:
    """How often an image of a new class is more novel than one of a known class; ties count half."""
    both = np.concatenate([known, new])
    _, place, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return float((ranks[len(known) :].sum() - len(new) * (len(new) + 1) / 2) / (len(known) * len(new)))


def one(data: DataSet, pair: tuple[int, int], seed: int, found: dict[tuple[str, str], list[list[float]]]) -> None:
    """One pair left out, one seed: figures are added to `found`."""
    known, rng = [j for j in range(data.classes) if j not in pair], np.random.default_rng(seed)
    train, test = known_part(data.train, known), known_part(data.test, known)
    new = take(data.test, np.flatnonzero(np.isin(data.test.y, pair)))
    public = draw_balanced(train.y, PUBLIC_PER_CLASS, rng)
    rest = rng.permutation(np.setdiff1d(np.arange(len(train)), public))
    held, fit = take(train, rest[: len(rest) // 10]), take(train, rest[len(rest) // 10 :])
    for kind, model in networks(data, take(train, public), len(known), seed).items():
        for name, of in measures(model, model.features(fit.x), fit.y, len(known)).items():
            if kind == "untrained" and "trained head" in name:
                continue
            chosen, old, unseen = (of(model.features(part.x)) for part in (held, test, new))
            limit = float(np.quantile(chosen, KEEP))
            row = [auroc(old, unseen), float((old <= limit).mean()), float((unseen > limit).mean())]
            if "spread" in name:
                row += [float((old <= USUAL_THRESHOLD).mean()), float((unseen > USUAL_THRESHOLD).mean()), limit]
            found[kind, name].append(row)


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    data, found = load_dataset("fashion_mnist_subset"), defaultdict[tuple[str, str], list[list[float]]](list)
    for seed in range(args.seeds):
        for pair in PAIRS:
            one(data, pair, seed, found)
            print(f"seed {seed}, classes {pair} left out: done", flush=True)
    print(f"{'features':10} {'novelty':40} {'AUROC':>13} {'known kept':>11} {'new caught':>11}   at 2: kept, caught")
    for (kind, name), rows in found.items():
        mean, spread = np.mean(rows, axis=0), np.std(rows, axis=0)
        line = f"{kind:10} {name:40} {mean[0]:.3f} ± {spread[0]:.3f} {mean[1]:>10.1%} {mean[2]:>11.1%}"
        at_2 = f"   {mean[3]:.1%}, {mean[4]:.1%}; 95 % are below {mean[5]:.2f}" if len(mean) > 3 else ""
        print(line + at_2)
    write_json(args.json, [{"features": k, "novelty": n, "rows": rows} for (k, n), rows in found.items()])


if __name__ == "__main__":
    main()
