"""How good the device's answers are, on test images that never trained anything.

A method has one or more ways of answering (`Method.answers`, `Method.shared_answers`). Each way is measured on all test
images, and on the test images of the classes that the device itself holds. The second measurement is done twice,
because a device alone chooses among its own classes, and a fleet's head chooses among all:

- as the way answers;
- with the choice limited to the device's own classes.

`measured` picks the few figures that are told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.heads.answers import Answer
from protofleet.contract.printable import counted
from protofleet.edge_client.device.calibration import Gathered
from protofleet.edge_client.device.left_out import is_joint_best

__all__ = [
    "JOINT",
    "OWN",
    "Evaluation",
    "Heads",
    "Scored",
    "Tested",
    "in_words",
    "measured",
    "score",
    "summary",
]

OWN = "own head"  # of a device that was left out, among ways of answering
JOINT = "joint head"  # of it and of others that agree with it
_CLEAR = 2.0  # standard errors between two shares that are told as different


@dataclass(frozen=True, eq=False)
class Scored:
    """What one way of answering did on the test images.

    Attributes:
        confusion: (C, C) int64: rows true, columns answered.
        among_own: how many images of the device's own classes it names right when it chooses among these only.
        classes: how many classes it can name.
    """

    confusion: NDArray[np.int64]
    among_own: int
    classes: int


@dataclass(frozen=True)
class Heads:
    """How many of `photos` test images each head names right.

    `fleet` is the fleet's head, `own` the device's own. `joint` is the joint head of it and of others that agree with
    it; it is 0 where there is none.
    """

    photos: int
    fleet: int
    own: int
    joint: int = 0

    @property
    def best(self) -> str:
        """Which one is answered by: `JOINT` where `is_joint_best`, `OWN` where it names more right than the fleet's;
        empty for the fleet's."""
        if is_joint_best(self.photos, self.fleet, self.own, self.joint):
            return JOINT
        return OWN if self.own > self.fleet else ""


@dataclass(frozen=True)
class Tested:
    """How good one way of answering is; shares are fractions.

    Attributes:
        samples: how many test images there are.
        own_samples: how many of them are of the device's own classes.
        all_classes: the share of all test images that is named right.
        own_classes: the same share of the test images of the own classes; None when there are none.
        among_own: the same as `own_classes`, when it chooses among the own classes only.
        classes: how many classes it can name.
        own: how many classes the device has itself.
    """

    samples: int
    own_samples: int
    all_classes: float
    own_classes: float | None
    among_own: float | None
    classes: int
    own: int


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Accuracy as fractions, for each way of answering.

    Attributes:
        all_classes: by way of answering, over all test images.
        own_classes: the same over the test images of the device's own classes; empty when there are none.
        confusion: by way of answering, (C, C) int64 over all test images: rows true, columns answered.
        samples: how many test images.
        tested: by way of answering, all figures, also those of a choice among the own classes.
    """

    all_classes: Mapping[str, float]
    own_classes: Mapping[str, float]
    confusion: Mapping[str, NDArray[np.int64]]
    samples: int
    tested: Mapping[str, Tested]


def score(
    blocks: Iterable[tuple[slice, NDArray[np.float32]]],
    answers: Mapping[str, Answer],
    y: NDArray[np.int64],
    own: NDArray[np.bool_],
    gathered: Gathered | None = None,
) -> dict[str, Scored]:
    """What each way of answering does, in one pass over the test images.

    Args:
        blocks: which rows, and their features.
        y: (N,) their classes.
        own: (C,) which classes the device holds.
        gathered: takes the scores of one of these ways, too.
    """
    confusion = {name: np.zeros((len(own), len(own)), np.int64) for name in answers}
    among_own, known = dict.fromkeys(answers, 0), {name: np.zeros(len(own), np.bool_) for name in answers}
    for rows, features in blocks:
        truth = y[rows]
        if gathered is not None and gathered.way in answers:
            gathered.add(rows, features)
        for name, answer in answers.items():
            scores = answer.scores(features)  # (n, C)
            np.add.at(confusion[name], (truth, answer(features)), 1)
            known[name] |= np.isfinite(scores).any(axis=0)
            mine = np.where(own & np.isfinite(scores), scores, -np.inf)[own[truth]]
            right = (mine.argmax(axis=1) == truth[own[truth]]) & np.isfinite(mine).any(axis=1)
            among_own[name] += int(right.sum())
    return {name: Scored(confusion[name], among_own[name], int(known[name].sum())) for name in answers}


def summary(scored: Mapping[str, Scored], own: NDArray[np.bool_]) -> Evaluation:
    """Accuracies from what each way did; `own` (C,) as above."""
    tested = {name: _tested(result, own) for name, result in scored.items() if result.confusion.any()}
    return Evaluation(
        all_classes={name: figures.all_classes for name, figures in tested.items()},
        own_classes={name: figures.own_classes for name, figures in tested.items() if figures.own_classes is not None},
        confusion={name: result.confusion for name, result in scored.items()},
        samples=max((figures.samples for figures in tested.values()), default=0),
        tested=tested,
    )


def measured(tested: Tested | None, *, shipped: Tested | None, alone: Tested | None) -> Accuracy | None:
    """The few figures that a person is told, and that the fleet may know.

    They are of one way of answering, beside those of other ways.

    Args:
        tested: the round's own way; None where there is none yet: before the first global state of a method that
            answers by it alone.
        shipped, alone: see `protofleet.contract.accuracy`; `alone` is None where the device's own head is the round's
            own way.
    """
    if tested is None:
        return None
    return Accuracy(
        tested.samples,
        tested.all_classes,
        tested.own_classes,
        shipped=None if shipped is None else shipped.all_classes,
        alone=None if alone is None else alone.all_classes,
        own_samples=tested.own_samples,
        among_own=tested.among_own,
        alone_among_own=None if alone is None else alone.among_own,
        classes=tested.classes,
        own=tested.own,
    )


def in_words(accuracy: Accuracy, photos: str, personal: float | None = None) -> str:
    """One line for a person: what the device can name, and how often it is right, beside what it was without the fleet.

    Only shares of one task stand side by side: the same photos, to be named with the same classes.

    Args:
        photos: which they are.
        personal: what a head of the device's own gets right of the photos of its own classes.
    """
    own, classes, some = accuracy.own, accuracy.classes, accuracy.own_samples
    if own is None or classes is None or some is None:
        return f"{accuracy.all_classes:.1%} right on {accuracy.samples:,} {photos}"
    parts = []
    if accuracy.alone is not None:
        parts.append(f"it can name {counted(classes, 'class', 'classes')} now (alone {own})")
    if some < accuracy.samples:
        beside = {"alone": accuracy.alone, "bundle as shipped": accuracy.shipped}
        line = f"on {accuracy.samples:,} {photos}: {accuracy.all_classes:.1%} right"
        parts.append(line + _beside(accuracy.all_classes, beside, accuracy.samples))
    if accuracy.among_own is not None and accuracy.own_classes is not None:
        preposition = "on the" if some < accuracy.samples else "on"
        which = f"{some:,}" if some < accuracy.samples else f"{some:,} {photos}"
        these = "this one" if own == 1 else f"these {own}"
        beside = {
            "alone": accuracy.alone_among_own,
            "bundle as shipped": accuracy.shipped_among_own,
            "personal head": personal,
        }
        line = f"{preposition} {which} of its own {counted(own, 'class', 'classes')}: {accuracy.among_own:.1%} right"
        line += f" choosing among {these}" if classes > own else ""
        line += _beside(accuracy.among_own, beside, some)
        if classes > own:
            chance = f"chance: {1 / classes:.1%}, not {1 / own:.1%}"
            line += f", {accuracy.own_classes:.1%} choosing among all {classes}, which is harder ({chance})"
        parts.append(line)
    return "; ".join(parts)


def _beside(share: float, others: Mapping[str, float | None], photos: int) -> str:
    """Other shares of the same task, and whether so few photos tell a device alone from the fleet."""
    alone = others.get("alone")  # the bundle as shipped, too, where the round is NCM's
    same = alone is not None and others.get("bundle as shipped") == alone
    known = {name: other for name, other in others.items() if not (same and name == "bundle as shipped")}
    parts = [f"{name} {other:.1%}" for name, other in known.items() if other is not None]
    if alone is not None and alone != share and not _is_clear(share, alone, photos):
        parts[0] += f", no clear difference on {counted(photos, 'photo')}"
    return f" ({', '.join(parts)})" if parts else ""


def _is_clear(one: float, other: float, photos: int) -> bool:
    """Whether two shares of so many photos differ by more than chance makes them differ."""
    error = ((one * (1 - one) + other * (1 - other)) / photos) ** 0.5
    return abs(one - other) > max(_CLEAR * error, 1.5 / photos)


def _tested(scored: Scored, own: NDArray[np.bool_]) -> Tested:
    counts = scored.confusion
    some = int(counts[own].sum())
    return Tested(
        int(counts.sum()),
        some,
        _accuracy(counts),
        _accuracy(counts, own) if some else None,
        scored.among_own / some if some else None,
        scored.classes,
        int(own.sum()),
    )


def _accuracy(counts: NDArray[np.int64], rows: NDArray[np.bool_] | slice = slice(None)) -> float:
    return float(np.diag(counts)[rows].sum() / counts[rows].sum())
