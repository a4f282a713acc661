"""Measures every way to use a frozen backbone on a user's own photos, and recommends the cheapest good one.

1. The photos are read and divided as a device divides its own (`edge_client/data`). Features are computed once.
2. Copies and near copies (`near_copies.py`) are moved to one side of the split (`apart`). A test on copies of training
   photos would promise too much, and would prefer methods that memorise single photos.
3. The training photos are dealt to simulated devices. Every way of `protofleet.contract.bundle.uplink_bytes.rungs` runs
   one round on them (`frozen_fleet.py`), and is measured on the held-out photos. No device learns from those.
4. The recommended way is the cheapest one whose accuracy is behind the best by at most one standard error of the
   difference. The difference is taken photo by photo, since all ways answer about the same photos. This is the rule of
   one standard error: Breiman et al., "Classification and Regression Trees", 1984, section 3.4.3.

Limit: the held-out photos choose the way, so its accuracy on them is a little too high. A claim about a finished fleet
needs photos that took no part in the choice (`client --test`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.advice.frozen_fleet import FrozenFleet, Outcome, deal, features_of, shipped_head
from protofleet.advice.near_copies import near_copies
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.uplink_bytes import Rung, payload_bytes, rungs
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.methods import DEFAULT, method
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_held_out

__all__ = ["Advice", "Measured", "OnDone", "Plan", "advise", "apart", "recommended"]

SCHEMA = "protofleet.advise/1"
FEW_HELD_OUT = 50
FEW_OF_A_CLASS = 4  # fewer photos than that: docs/methods.md, "Heads from sums"

OnDone = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """How photos are divided.

    Attributes:
        devices: number of devices that the photos are dealt to.
        classes_each: number of classes on each device; None for all.
        hold_out: share of every class that is held out, where the photos declare no split.
        most: the largest number of photos to read.
        min_samples: a device withholds classes with fewer photos.
    """

    devices: int = 5
    classes_each: int | None = None
    hold_out: float = 0.2
    most: int = 5_000
    min_samples: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for option, value, low, high in (
            ("--devices", self.devices, 1, 1_000),
            ("--photos", self.most, 2, 10_000_000),
            ("--min-samples", self.min_samples, 1, 1_000_000),
            ("--seed", self.seed, 0, 2**32 - 1),
        ):
            if not low <= value <= high:
                raise UsageError(option, expected=f"{low:,} to {high:,}", got=value)
        if not 0 < self.hold_out < 1:
            raise UsageError("--hold-out", expected="above 0, below 1", got=self.hold_out)


@dataclass(frozen=True, eq=False)
class Measured:
    """The result of one way on the held-out photos. Accuracies and errors are fractions.

    Attributes:
        name: the name of the way.
        rung: how to run it; None for the head that the bundle came with.
        right: (n,) 1 for each held-out photo with a right answer, 0 for the others.
        alone: (n,) the same for one device alone; None where that does not apply.
        uplink_bytes: bytes that a device sends, once.
        told, doubt: the aggregator's lines about the result.
    """

    name: str
    rung: Rung | None
    right: NDArray[np.float64]
    alone: NDArray[np.float64] | None = None
    uplink_bytes: int = 0
    told: str = ""
    doubt: str = ""

    @property
    def accuracy(self) -> float:
        return float(self.right.mean())

    @property
    def error(self) -> float:
        """The standard error of the accuracy over n held-out photos: √(p (1 − p) / n)."""
        return float(np.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right)))

    def behind(self, other: NDArray[np.float64]) -> tuple[float, float]:
        """How far this way is behind another's right answers (n,), and the standard error of that difference."""
        difference = other - self.right
        spread = float(difference.std(ddof=1)) if len(difference) > 1 else 1.0
        return float(difference.mean()), spread / float(np.sqrt(len(difference)))


@dataclass(frozen=True, eq=False)
class Advice:
    """The measured ways, fewest bytes first, and what follows from them.

    Attributes:
        photos, held_out: number of photos that devices learn from, and number of test photos.
        copies: number of photos that are copies or near copies of a counted one.
        doubts: reasons why the figures may be wrong, a line each.
        trained: bytes in a round of a method that trains, by name. It is not measured.
    """

    plan: Plan
    bundle: Bundle
    photos: int
    held_out: int
    ways: tuple[Measured, ...]
    doubts: tuple[str, ...]
    trained: dict[str, int]
    copies: int = 0

    @property
    def best(self) -> Measured:
        """The way with the most right answers, the cheapest of several."""
        return _best(self.ways)

    @property
    def chosen(self) -> Measured:
        """The recommended way."""
        return recommended(self.ways)

    def as_json(self) -> dict[str, Any]:
        """The advice as plain values, schema `protofleet.advise/1`."""
        chosen = self.chosen
        behind, error = chosen.behind(self.best.right)
        return {
            "schema": SCHEMA,
            "bundle": self.bundle.sha256.hex(),
            "devices": self.plan.devices,
            "classes_per_device": self.plan.classes_each,
            "min_samples": self.plan.min_samples,
            "seed": self.plan.seed,
            "photos": self.photos,
            "held_out": self.held_out,
            "copies": self.copies,
            "ways": [self._row(way) for way in self.ways],
            "recommended": chosen.name,
            "best": self.best.name,
            "behind_best": behind,
            "behind_best_error": error,
            "chosen_on": "the held-out photos",
            "doubts": list(self.doubts),
            "trained_not_measured": self.trained,
        }

    def _row(self, way: Measured) -> dict[str, Any]:
        return {
            "way": way.name,
            "method": None if way.rung is None else way.rung.method.name,
            "set": {} if way.rung is None else dict(way.rung.beside),
            "solved_with": {} if way.rung is None else dict(way.rung.solved_with),
            "uplink_bytes": way.uplink_bytes,
            "accuracy": way.accuracy,
            "standard_error": way.error,
            "alone": None if way.alone is None else float(way.alone.mean()),
            "told": way.told,
            "doubt": way.doubt,
        }


def advise(
    bundle: Bundle,
    data: str | Path | tuple[LocalData, LocalData],
    plan: Plan | None = None,
    *,
    threads: int = 1,
    cache: Path | None = None,
    wanted: Callable[[Rung], bool] = lambda rung: True,
    on_done: OnDone = lambda what, done, whole: None,
) -> Advice:
    """Measure every way that needs no training, and recommend one.

    Args:
        data: labelled photos as a device takes them (docs/data.md), or the two parts: to learn from, and held out.
        threads: threads of the feature extractor.
        cache: a directory that keeps decoded photos for the next time; None to keep none.
        wanted: which ways are measured.
        on_done: called with the current step, how much of it is done, and its size.

    Raises:
        DataError: no photos, photos of one class only, or classes that the bundle does not have.
        BundleError: the bundle's features cannot be used.
        UsageError: the plan does not fit the photos.
    """
    plan = plan or Plan()
    learn, held_out = _read(bundle, data, plan, cache) if isinstance(data, str | Path) else data
    learn = learn.labelled
    _check(bundle, learn, held_out)
    whole = len(learn) + len(held_out)
    features = [
        features_of(bundle, part, threads, lambda done, before=before: on_done("photos", before + done, whole))
        for part, before in ((learn, 0), (held_out, len(learn)))
    ]
    on_done("comparing photos", 0, whole)
    alike = near_copies([learn.x, held_out.x])
    learn, held_out = apart(features[0], features[1], alike, plan.seed)
    if not len(held_out):
        raise DataError(
            "photos to test with",
            expected="some that are not like those to learn from",
            got="copies alone, or nearly",
            hint="photos of other moments, or another --seed",
        )
    dealt = deal(learn.y, plan.devices, classes_each=plan.classes_each, seed=plan.seed)
    shares = [LocalData(learn.x[rows], learn.y[rows]) for rows in dealt]
    run = plan.seed.to_bytes(4, "big")
    fleet = FrozenFleet(bundle, shares, held_out, min_samples=plan.min_samples, run=run)
    ways = _measured(bundle, fleet, wanted, on_done)
    doubts, copies = _doubts(bundle, learn, held_out), whole - len(np.unique(alike))
    return Advice(plan, bundle, len(learn), len(held_out), ways, doubts, _trained(bundle), copies)


def apart(learn: LocalData, held_out: LocalData, alike: NDArray[np.int64], seed: int) -> tuple[LocalData, LocalData]:
    """Move all photos of a group to one side of the split. Of a held-out group only one photo is kept.

    A randomly drawn photo of the group decides the side. So a group is held out as often as a single photo is. A group
    stays on the training side where its class would have no training photos left. So it is possible that nothing is
    held out.

    Args:
        alike: (N,) the group of each photo, first of `learn`, then of `held_out`.
        seed: seed of the draw.

    Returns:
        the training photos and the held-out photos.
    """
    x, y, first = np.concatenate([learn.x, held_out.x]), np.concatenate([learn.y, held_out.y]), len(learn)
    order = np.random.default_rng(seed).permutation(len(y))
    is_held = np.arange(len(y)) >= first
    kept = is_held.copy()
    left = np.bincount(y[~is_held], minlength=int(y.max()) + 1)
    for number in np.unique(alike[_repeated(alike)]):
        members = np.flatnonzero(alike == number)
        drawn = members[order[members].argmin()]
        moved = np.bincount(y[members[members < first]], minlength=len(left))
        out = is_held[drawn] and not ((moved > 0) & (left == moved)).any()
        left = left - moved if out else left
        is_held[members], kept[members] = out, False
        kept[drawn] = out
    return LocalData(x[~is_held], y[~is_held]), LocalData(x[kept], y[kept])


def _repeated(alike: NDArray[np.int64]) -> NDArray[np.bool_]:
    """(N,) whether a photo shares its group with another."""
    _, back, counts = np.unique(alike, return_inverse=True, return_counts=True)
    return np.asarray(counts[back] > 1)


def recommended(ways: tuple[Measured, ...]) -> Measured:
    """The first way that is behind the best by at most a standard error. `ways` are ordered by bytes, fewest first."""
    best = _best(ways)
    gaps = ((way, *way.behind(best.right)) for way in ways)
    return next(way for way, behind, error in gaps if behind <= error)


def _best(ways: tuple[Measured, ...]) -> Measured:
    return max(ways, key=lambda way: way.accuracy)


def _read(bundle: Bundle, path: str | Path, plan: Plan, cache: Path | None) -> tuple[LocalData, LocalData]:
    """The training photos and the held-out photos, as mapped files: the photos need not fit in memory."""
    options = {"share": plan.hold_out, "seed": plan.seed, "most": plan.most}
    if cache is not None:
        return load_held_out(path, bundle.manifest, cache=cache, **options)
    with tempfile.TemporaryDirectory(prefix="protofleet-") as folder:  # a file that is mapped outlives its name
        return load_held_out(path, bundle.manifest, cache=Path(folder), **options)


def _check(bundle: Bundle, learn: LocalData, held_out: LocalData) -> None:
    classes = np.unique(learn.y)
    if len(classes) < 2:
        only = ", ".join(bundle.manifest.labels[label] for label in classes)
        raise DataError("photos", expected="of two classes or more", got=f"one only: {only}")
    if not len(held_out):
        raise DataError("photos to test with", expected="some", got="none held out", hint="more photos of each class")


def _measured(
    bundle: Bundle, fleet: FrozenFleet, wanted: Callable[[Rung], bool], on_done: OnDone
) -> tuple[Measured, ...]:
    ways, todo = [], [rung for rung in rungs(bundle.manifest) if rung.uplink_bytes is not None and wanted(rung)]
    head = shipped_head(bundle)
    if head is not None:
        ways.append(Measured("bundle's own head", None, fleet.right(head)))
    for done, rung in enumerate(todo):
        on_done(f"measuring {rung.name}", done, len(todo))
        outcomes = fleet.outcomes(rung)
        ways += [_way(rung, outcome, len(outcomes) > 1) for outcome in outcomes]
    return tuple(sorted(ways, key=lambda way: way.uplink_bytes))


def _way(rung: Rung, outcome: Outcome, several: bool) -> Measured:
    name = f"{rung.name} ({outcome.way})" if several else rung.name
    return Measured(name, rung, outcome.right, outcome.alone, outcome.uplink_bytes, outcome.told, outcome.doubt)


def _doubts(bundle: Bundle, learn: LocalData, held_out: LocalData) -> tuple[str, ...]:
    labels, doubts = bundle.manifest.labels, []
    if len(held_out) < FEW_HELD_OUT:
        doubts.append(f"only {len(held_out)} held-out photos: differences of a few points say nothing")
    counts, tested = (part.counts(len(labels)) for part in (learn, held_out))
    few = [labels[j] for j in np.flatnonzero((counts > 0) & (counts < FEW_OF_A_CLASS))]
    untested = [labels[j] for j in np.flatnonzero((counts > 0) & (tested == 0))]
    absent = [labels[j] for j in np.flatnonzero(counts == 0)]
    for names, why in (
        (few, f"fewer than {FEW_OF_A_CLASS} photos to learn from: expect wrong answers"),
        (untested, "no photo to spare for a test: how right it is was not tried"),
        (absent, "no photo at all: a fleet that has some of them will do worse than this"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            doubts.append(f"{', '.join(names[:3])}{more}: {why}")
    return tuple(doubts)


def _trained(bundle: Bundle) -> dict[str, int]:
    own = method(bundle.manifest.method)
    trained = own if own.trains else method(DEFAULT)
    return {trained.name: payload_bytes(bundle.manifest, trained)}
