"""Which way of a frozen backbone to take: each one measured on a user's own photos, and the cheapest good one named.

1. Photos are read and divided as a device divides its own (`edge_client/data`), and made features once.
2. Copies, and near ones (`near_copies.py`), come to one side: `apart`. Who is tested on copies of what it learned
   from promises too much, and prefers what learns single photos by heart.
3. What learns is dealt to simulated devices; every way of `contract.uplink_bytes.rungs` goes through a round of theirs
   (`frozen_fleet.py`), and is measured on the held-out photos, which nothing has learned from.
4. Recommended is the cheapest way that is behind the best by no more than one standard error of that difference, which
   is taken photo by photo, since all ways answer about the same photos (the rule of one standard error: Breiman et al.,
   "Classification and Regression Trees", 1984, section 3.4.3).

So the held-out photos choose, and the accuracy of what they choose is a little flattered by it: a claim about a
finished fleet needs photos that had no say (`client --test`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle
from contract.errors import DataError, UsageError
from contract.methods import DEFAULT, method
from contract.uplink_bytes import Rung, payload_bytes, rungs
from edge_client.data import LocalData
from edge_client.data.load import load_held_out
from protofleet.frozen_fleet import FrozenFleet, Outcome, deal, features_of, shipped_head
from protofleet.near_copies import near_copies

__all__ = ["Advice", "Measured", "OnDone", "Plan", "advise", "apart", "recommended"]

SCHEMA = "protofleet.advise/1"
FEW_HELD_OUT = 50
FEW_OF_A_CLASS = 4  # fewer photos than that: docs/methods.md, "Heads from sums"

Log = Callable[[str], None]
OnDone = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Plan:
    """How photos are divided.

    Attributes:
        devices: among so many.
        classes_each: each holds so many classes; all of them when None.
        hold_out: share of every class that is held out, where the photos declare no split.
        most: so many photos are looked at, at most.
        min_samples: classes of which a device has fewer are withheld.
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
    """One way on the held-out photos. Accuracies and errors are fractions.

    Attributes:
        name: of the way.
        rung: how to run it; None for the head that the bundle came with.
        right: (n,) 1 for each held-out photo that is named right.
        alone: (n,) the same of one device alone; None where there is no such thing.
        uplink_bytes: what a device sends, once.
        told, doubt: what the aggregator would say of it.
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
        """The standard error that so few held-out photos leave: √(p (1 − p) / n)."""
        return float(np.sqrt(self.accuracy * (1 - self.accuracy) / len(self.right)))

    def behind(self, other: NDArray[np.float64]) -> tuple[float, float]:
        """How far behind another's right answers (n,) this one is, and the standard error of that difference."""
        difference = other - self.right
        spread = float(difference.std(ddof=1)) if len(difference) > 1 else 1.0
        return float(difference.mean()), spread / float(np.sqrt(len(difference)))


@dataclass(frozen=True, eq=False)
class Advice:
    """What was measured, fewest bytes first, and what follows.

    Attributes:
        photos, held_out: how many devices learn from, and how many they are asked about.
        copies: photos that are like another that was counted, exactly or nearly.
        doubts: why the figures may be bad, a line each.
        trained: bytes a round of a method that trains, by name: not measured.
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
        """The way with the most right answers; of several the cheapest."""
        return _best(self.ways)

    @property
    def chosen(self) -> Measured:
        """The recommended way."""
        return recommended(self.ways)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values, schema `protofleet.advise/1`."""
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
            "ways": [self._row(each) for each in self.ways],
            "recommended": chosen.name,
            "best": self.best.name,
            "behind_best": behind,
            "behind_best_error": error,
            "chosen_on": "the held-out photos",
            "doubts": list(self.doubts),
            "trained_not_measured": self.trained,
        }

    def _row(self, each: Measured) -> dict[str, Any]:
        return {
            "way": each.name,
            "method": None if each.rung is None else each.rung.method.name,
            "set": {} if each.rung is None else dict(each.rung.beside),
            "solved_with": {} if each.rung is None else dict(each.rung.solved_with),
            "uplink_bytes": each.uplink_bytes,
            "accuracy": each.accuracy,
            "standard_error": each.error,
            "alone": None if each.alone is None else float(each.alone.mean()),
            "told": each.told,
            "doubt": each.doubt,
        }


def advise(
    bundle: Bundle,
    data: str | Path | tuple[LocalData, LocalData],
    plan: Plan | None = None,
    *,
    threads: int = 1,
    cache: Path | None = None,
    log: Log = lambda line: None,
    on_done: OnDone = lambda what, done, whole: None,
) -> Advice:
    """Measure every way that needs no training.

    Args:
        data: labelled photos as a device takes them (docs/data.md), or what learns and what is held out.
        threads: of the feature extractor.
        cache: a directory that keeps decoded photos for another time; None to keep none.
        log: takes a line about photos that are left out.
        on_done: called with what is being done, how much of it is done, and how much it is.

    Raises:
        DataError: no photos, of one class only, of classes that the bundle has not.
        BundleError: the bundle's features cannot be used.
        UsageError: the plan does not fit the photos.
    """
    plan = plan or Plan()
    learn, held = _read(bundle, data, plan, cache, log) if isinstance(data, str | Path) else data
    learn = learn.labelled
    _check(bundle, learn, held)
    whole = len(learn) + len(held)
    made = [
        features_of(bundle, part, threads, lambda done, before=before: on_done("photos", before + done, whole))
        for part, before in ((learn, 0), (held, len(learn)))
    ]
    on_done("comparing photos", 0, whole)
    alike = near_copies([learn.x, held.x])
    learn, held = apart(made[0], made[1], alike, plan.seed)
    if not len(held):
        raise DataError(
            "photos to test with",
            expected="some that are not like those to learn from",
            got="copies alone, or nearly",
            hint="photos of other moments, or another --seed",
        )
    dealt = deal(learn.y, plan.devices, classes_each=plan.classes_each, seed=plan.seed)
    shares = [LocalData(learn.x[rows], learn.y[rows]) for rows in dealt]
    run = plan.seed.to_bytes(4, "big")
    fleet = FrozenFleet(bundle, shares, held, min_samples=plan.min_samples, run=run)
    ways = _measured(bundle, fleet, on_done)
    doubts, copies = _doubts(bundle, learn, held), whole - len(np.unique(alike))
    return Advice(plan, bundle, len(learn), len(held), ways, doubts, _trained(bundle), copies)


def apart(learn: LocalData, held: LocalData, alike: NDArray[np.int64], seed: int) -> tuple[LocalData, LocalData]:
    """What learns and what is held out, with all photos of a group on one side, and of those held out one of each.

    A photo of the group that is drawn says which side: so each group is held out as often as a single photo is. Where a
    class would have none left to learn from, the group stays to learn from; so it may be that nothing is held out.

    Args:
        alike: (N,) group of each photo of `learn` and then of `held`.
        seed: of the draw.
    """
    x, y, first = np.concatenate([learn.x, held.x]), np.concatenate([learn.y, held.y]), len(learn)
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
    """(N,) which photos are like another."""
    _, back, counts = np.unique(alike, return_inverse=True, return_counts=True)
    return np.asarray(counts[back] > 1)


def recommended(ways: tuple[Measured, ...]) -> Measured:
    """The first of `ways` that is behind the best by no more than a standard error; they come fewest bytes first."""
    best = _best(ways)
    gaps = ((each, *each.behind(best.right)) for each in ways)
    return next(each for each, behind, error in gaps if behind <= error)


def _best(ways: tuple[Measured, ...]) -> Measured:
    return max(ways, key=lambda each: each.accuracy)


def _read(bundle: Bundle, path: str | Path, plan: Plan, cache: Path | None, log: Log) -> tuple[LocalData, LocalData]:
    """What devices learn from, and what is held out: mapped files, so that photos need not fit memory."""
    options = {"share": plan.hold_out, "seed": plan.seed, "most": plan.most, "log": log}
    if cache is not None:
        return load_held_out(path, bundle.manifest, cache=cache, **options)
    with tempfile.TemporaryDirectory(prefix="protofleet-") as folder:  # a file that is mapped outlives its name
        return load_held_out(path, bundle.manifest, cache=Path(folder), **options)


def _check(bundle: Bundle, learn: LocalData, held: LocalData) -> None:
    classes = np.unique(learn.y)
    if len(classes) < 2:
        only = ", ".join(bundle.manifest.labels[label] for label in classes)
        raise DataError("photos", expected="of two classes or more", got=f"one only: {only}")
    if not len(held):
        raise DataError("photos to test with", expected="some", got="none held out", hint="more photos of each class")


def _measured(bundle: Bundle, fleet: FrozenFleet, on_done: OnDone) -> tuple[Measured, ...]:
    ways, todo = [], [rung for rung in rungs(bundle.manifest) if rung.uplink_bytes is not None]
    head = shipped_head(bundle)
    if head is not None:
        ways.append(Measured("bundle's own head", None, fleet.right(head)))
    for done, rung in enumerate(todo):
        on_done(f"measuring {rung.name}", done, len(todo))
        found = fleet.outcomes(rung)
        ways += [_way(rung, outcome, len(found) > 1) for outcome in found]
    return tuple(sorted(ways, key=lambda each: each.uplink_bytes))


def _way(rung: Rung, outcome: Outcome, several: bool) -> Measured:
    name = f"{rung.name} ({outcome.way})" if several else rung.name
    return Measured(name, rung, outcome.right, outcome.alone, outcome.uplink_bytes, outcome.told, outcome.doubt)


def _doubts(bundle: Bundle, learn: LocalData, held: LocalData) -> tuple[str, ...]:
    labels, found = bundle.manifest.labels, []
    if len(held) < FEW_HELD_OUT:
        found.append(f"only {len(held)} held-out photos: differences of a few points say nothing")
    counts, tested = (part.counts(len(labels)) for part in (learn, held))
    few = [labels[j] for j in np.flatnonzero((counts > 0) & (counts < FEW_OF_A_CLASS))]
    untested = [labels[j] for j in np.flatnonzero((counts > 0) & (tested == 0))]
    absent = [labels[j] for j in np.flatnonzero(counts == 0)]
    for names, why in (
        (few, f"fewer than {FEW_OF_A_CLASS} photos to learn from: nothing is chosen well there"),
        (untested, "no held-out photo: nothing is known of their accuracy"),
        (absent, "no photo at all: a fleet that has some of them will do worse than this"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            found.append(f"{', '.join(names[:3])}{more}: {why}")
    return tuple(found)


def _trained(bundle: Bundle) -> dict[str, int]:
    own = method(bundle.manifest.method)
    found = own if own.trains else method(DEFAULT)
    return {found.name: payload_bytes(bundle.manifest, found)}
