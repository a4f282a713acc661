"""Have I named enough? From the labels alone, and from what was answered before each of them was learned.

- A photo that the camera took was answered before anybody named it. So the share of right answers among named photos
  of a class is a test with photos that had not trained yet (prequential: Dawid, JRSS A 1984), with the 95 % interval of
  Wilson (JASA 1927). A near copy of a photo that was learned a minute before is easier than a new one.
- Which class ten more labels would help most is a rule of thumb: errors of a class fall as 1/√n, and a class counts as
  often as it was seen. So it is the class with the largest q_c e_c (1 − √(n_c / (n_c + 10))), with n_c labels, e_c the
  share of wrong answers, of which one more right and one more wrong are assumed, and q_c its share of the labels, of
  which ten more are spread evenly.
- A warning: answers about a class have become worse while others were named, if the intervals of its earlier and its
  later half do not touch. The class that was most often answered instead is named, too.
- A second warning: classes with fewer labels than the mean of all named ones have become worse, taken together. Each of
  them has as many answers in the earlier half as in the later one, so the halves differ in no class's share. It is
  given if the 95 % interval of the difference (Newcombe, Statistics in Medicine 1998, method 10) is below 0, and most
  of the later wrong answers are classes with more labels than that. Classes with a warning of their own are left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protofleet.contract.names import listed

__all__ = ["ClassLabels", "LabelReport", "difference", "report_of", "wilson"]

_Z = 1.959963984540054  # 95 %
_MORE = 10
_LEAST = 4  # answers in each half of a class that is compared, or of several together
_LISTED = 3  # classes that a sentence names


@dataclass(frozen=True)
class ClassLabels:
    """One class.

    Attributes:
        labels: photos that were named so.
        asked: of these, photos that were answered about before.
        right: of these, right answers.
        low, high: the 95 % interval of the share of right answers; 0 and 1 where nobody asked.
    """

    label: str
    labels: int
    asked: int
    right: int
    low: float
    high: float


@dataclass(frozen=True)
class LabelReport:
    """All classes, in the bundle's order.

    Attributes:
        most_helpful: the class that ten more labels would help most; empty without a class.
        warnings: of classes that have become worse, a sentence each; at last of those that were named less often,
            together.
    """

    classes: tuple[ClassLabels, ...]
    most_helpful: str
    warnings: tuple[str, ...]


def report_of(labels: Sequence[str], learned: Sequence[tuple[str, str]]) -> LabelReport:
    """What the labels say.

    Args:
        labels: of the bundle's classes.
        learned: label and earlier answer of each learned photo, in the order of learning; the answer is empty where
            nobody asked.
    """
    counts = Counter(label for label, _ in learned)
    by_class = {label: [answer for named, answer in learned if named == label and answer] for label in labels}
    classes = []
    for label in labels:
        asked, right = len(by_class[label]), by_class[label].count(label)
        classes.append(ClassLabels(label, counts[label], asked, right, *wilson(right, asked)))
    best = max(classes, key=lambda one: _gain(one, len(learned), len(labels)), default=None)
    warned = {label: line for label in labels if (line := _worse(label, by_class[label]))}
    rest = _others_worse({label: by_class[label] for label in labels if label not in warned}, counts)
    return LabelReport(
        tuple(classes), "" if best is None else best.label, (*warned.values(), *([rest] if rest else []))
    )


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not asked:
        return 0.0, 1.0
    share, z = right / asked, _Z * _Z / asked
    middle = (share + z / 2) / (1 + z)
    half = _Z * math.sqrt(share * (1 - share) / asked + z / (4 * asked)) / (1 + z)
    return max(middle - half, 0.0), min(middle + half, 1.0)


def difference(right: int, asked: int, before: int, asked_before: int) -> tuple[float, float]:
    """The 95 % interval of one share less another, of independent answers, −1 to 1."""
    if not asked or not asked_before:
        return -1.0, 1.0
    (low, high), (low_before, high_before) = wilson(right, asked), wilson(before, asked_before)
    share, share_before = right / asked, before / asked_before
    below = math.hypot(share - low, high_before - share_before)
    above = math.hypot(high - share, share_before - low_before)
    return share - share_before - below, share - share_before + above


def _gain(one: ClassLabels, labels: int, classes: int) -> float:
    seen = (one.labels + _MORE / classes) / (labels + _MORE)
    wrong = (one.asked - one.right + 1) / (one.asked + 2)
    return seen * wrong * (1 - math.sqrt(one.labels / (one.labels + _MORE)))


def _worse(label: str, answers: list[str]) -> str:
    """A sentence where later answers about a class are worse than earlier ones; else empty."""
    half = len(answers) // 2
    if half < _LEAST:
        return ""
    earlier, later = answers[:half], answers[half:]
    before, after = (part.count(label) for part in (earlier, later))
    if wilson(after, len(later))[1] >= wilson(before, half)[0]:
        return ""
    wrong = Counter(answer for answer in later if answer != label)
    instead = wrong.most_common(1)[0][0]
    return (
        f"{label} is answered worse than before: {after} of the last {len(later)} right, {before} of the {half} before;"
        f" mostly {instead} is answered instead, so name more photos of {label}"
    )


def _others_worse(by_class: Mapping[str, list[str]], counts: Counter[str]) -> str:
    """A sentence where later answers about the classes that were named less often are worse than earlier ones."""
    even = counts.total() / max(len(counts), 1)  # of the classes that anybody named
    rare = {label: answers for label, answers in by_class.items() if counts[label] < even and len(answers) > 1}
    half = sum(len(answers) // 2 for answers in rare.values())
    if half < _LEAST:
        return ""
    before = sum(answers[: len(answers) // 2].count(label) for label, answers in rare.items())
    later = [(label, answer) for label, answers in rare.items() for answer in answers[-(len(answers) // 2) :]]
    wrong = Counter(answer for label, answer in later if answer != label)
    after = half - wrong.total()
    low, high = difference(after, half, before, half)
    often = sum(count for answer, count in wrong.items() if counts[answer] > even)
    if high >= 0 or 2 * often <= wrong.total():
        return ""
    instead = max((answer for answer in wrong if counts[answer] > even), key=lambda answer: wrong[answer])
    worst = sorted(rare, key=lambda label: -sum(label == one != answer for one, answer in later))[:_LISTED]
    return (
        f"classes that you named less often are answered worse than before: {after} of their last {half} right, "
        f"{before} of the {half} before ({-100 * high:.0f} to {-100 * low:.0f} points less, 95 % interval); mostly "
        f"{instead} is answered instead, so name more photos of {listed(worst)}; where that does not help, "
        "the fleet's operator can take --form even or discriminant"
    )
