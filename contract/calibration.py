"""From scores to probabilities: a temperature, and how much a device's own class shares count.

    p_c ∝ exp(s_c / (T σ) + a · log π_c)

s (C,) are the scores of a way of answering, σ is that way's own scale (`Answer.scale`), and T is the temperature.
π (C,) are the class shares of the device: what it usually sees. a, the strength, says how much they count: 0 for
nothing, 1 for a prior by Bayes' rule.

1. A device puts the surprise of its held-out photos, −log p of the right class, into a table (`surprise_table`): the
   mean for each of `TEMPERATURES` and `STRENGTHS`. Held-out photos have trained nothing.
2. Tables of several devices are averaged by their photos (`pooled`). No device counts for more than
   `MOST_OF_MEDIAN` times the median.
3. `chosen` takes the entry with the least surprise. A strength above 0 must save `LEAST_GAIN` nats over all photos
   together, since a few photos prefer one by chance.
4. At that entry, devices count their held-out photos in bins (`Bins`): by the probability of the right class, and by
   the probability of the answer. The first says how large a set of classes has to be (`least_in_set`); the second,
   whether the probabilities are true (`Bins.error`).

Temperature scaling is Guo et al., ICML 2017. Sets of classes are split conformal prediction with the probability of the
right class as score (Sadinle, Lei and Wasserman, JASA 2019). docs/decisions/253 has what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BINS",
    "LEAST_PHOTOS",
    "STRENGTHS",
    "TABLE_BYTES",
    "TEMPERATURES",
    "Bins",
    "Calibration",
    "SurpriseTable",
    "chosen",
    "log_shares",
    "most_of",
    "pooled",
    "surprise_table",
]

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]
TEMPERATURES: tuple[float, ...] = tuple(float(2.0 ** (-step / 2)) for step in range(-8, 15))  # 16 down to 2⁻⁷
STRENGTHS: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
LEAST_PHOTOS = 20  # held-out photos, of one device or of all together, from which anything is chosen
MOST_SURPRISE = 20.0  # nats: one photo with an impossible label decides nothing
MOST_OF_MEDIAN = 3.0
LEAST_GAIN = 2.0  # nats: what Akaike's criterion asks of one more number
PRIOR_PHOTOS = 1.0  # spread over all classes, so that no class has the share 0
BINS = 10  # by the probability of the answer
_TRUE_BINS = 20  # by the probability of the right class: log-odds from −10 to 10
_STEP = 1.0 / 1024  # nats, in a table's bytes
TABLE_BYTES = 2 * len(TEMPERATURES) * len(STRENGTHS)


@dataclass(frozen=True)
class Calibration:
    """How scores become probabilities.

    Attributes:
        temperature: T, above 0, in units of the way's own scale.
        strength: a, 0 to 1.
    """

    temperature: float = 1.0
    strength: float = 0.0

    def log_probabilities(self, scores: Float64, log_shares: Float64 | None = None) -> Float64:
        """(N, C) of scores (N, C) in units of their scale; −inf for a class that is never answered.

        Args:
            log_shares: (C,) or (N, C), log π; None where they do not count.
        """
        with np.errstate(over="ignore"):  # the best is 0, however small T is, and others may be −inf
            raised = (scores - scores.max(axis=1, keepdims=True)) / self.temperature
        if log_shares is not None and self.strength:
            raised = raised + self.strength * log_shares
        raised = raised - raised.max(axis=1, keepdims=True)
        return np.asarray(raised - np.log(np.exp(raised).sum(axis=1, keepdims=True)), dtype=np.float64)


def log_shares(counts: NDArray[np.floating] | Int64) -> Float64:
    """log π (C,) of counts of what a device sees, (C,), which need not be whole.

    One photo more is spread over all classes.
    """
    seen = np.asarray(counts, dtype=np.float64) + PRIOR_PHOTOS / len(counts)
    return np.asarray(np.log(seen / seen.sum()), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class SurpriseTable:
    """The mean surprise of held-out photos: rows temperatures, columns strengths.

    Attributes:
        surprise: (temperatures, strengths) float64, in nats, 0 to `MOST_SURPRISE`.
        photos: how many.
    """

    surprise: Float64
    photos: int

    def to_bytes(self) -> bytes:
        """`TABLE_BYTES` bytes: whole multiples of 1/1,024 nat, uint16, little-endian, row by row."""
        return np.rint(self.surprise / _STEP).astype("<u2").tobytes()

    @classmethod
    def of_bytes(cls, written: bytes, photos: int) -> SurpriseTable | None:
        """What `to_bytes` gave; None for bytes that cannot be a table."""
        if len(written) != TABLE_BYTES or photos < 1:
            return None
        surprise = np.frombuffer(written, "<u2").reshape(len(TEMPERATURES), len(STRENGTHS)) * _STEP
        return None if surprise.max() > MOST_SURPRISE else cls(surprise, photos)


def surprise_table(scores: Float64, labels: Int64, shares: Float64) -> SurpriseTable:
    """The table of held-out photos.

    Args:
        scores: (N, C) in units of their scale.
        labels: (N,) the right classes. A class that is never answered surprises as much as is possible.
        shares: (C,) log π of the device.
    """
    surprise, rows = np.empty((len(TEMPERATURES), len(STRENGTHS))), np.arange(len(labels))
    for row, temperature in enumerate(TEMPERATURES):
        for column, strength in enumerate(STRENGTHS):
            found = Calibration(temperature, strength).log_probabilities(scores, shares)[rows, labels]
            surprise[row, column] = np.minimum(-found, MOST_SURPRISE).mean()
    return SurpriseTable(surprise, len(labels))


def pooled(tables: Sequence[SurpriseTable]) -> SurpriseTable | None:
    """All tables as one; None for none. No device counts for more than `MOST_OF_MEDIAN` times the median."""
    if not tables:
        return None
    photos = [table.photos for table in tables]
    weights = np.minimum(np.array(photos, dtype=np.float64), most_of(photos))
    total = sum(weight * table.surprise for weight, table in zip(weights, tables, strict=True))
    return SurpriseTable(np.asarray(total / weights.sum()), int(weights.sum()))


def chosen(table: SurpriseTable | None, before: Calibration | None = None, clear: float = 0.0) -> Calibration | None:
    """The calibration with the least surprise; None where there are fewer than `LEAST_PHOTOS`.

    Args:
        before: the one that holds; it stays unless the other one saves more than `clear` nats a photo.
    """
    if table is None or table.photos < LEAST_PHOTOS:
        return None
    surprise = table.surprise
    row, column = divmod(int(surprise.argmin()), len(STRENGTHS))
    plain = int(surprise[:, 0].argmin())
    if (surprise[plain, 0] - surprise[row, column]) * table.photos < LEAST_GAIN:
        row, column = plain, 0
    best = Calibration(TEMPERATURES[row], STRENGTHS[column])
    if before is not None and before.temperature in TEMPERATURES and before.strength in STRENGTHS:
        held = surprise[TEMPERATURES.index(before.temperature), STRENGTHS.index(before.strength)]
        if held - surprise[row, column] <= clear:
            return before
    return best


@dataclass(frozen=True)
class Bins:
    """Held-out photos, counted at one calibration.

    Attributes:
        true: (20,) photos by the log-odds of the right class, from below −9 to 9 and more, each of width 1.
        answered: (10,) photos by the probability of the answer: below 0.1, …, 0.9 and more.
        right: (10,) those of `answered` whose answer is right.
        expected: (10,) the sum of the probabilities of `answered`, in thousandths: what `right` would be if they were
            true.
    """

    true: tuple[int, ...]
    answered: tuple[int, ...]
    right: tuple[int, ...]
    expected: tuple[int, ...]

    BYTES: ClassVar[int] = 4 * (_TRUE_BINS + 3 * BINS)

    @classmethod
    def of(cls, log_probabilities: Float64, labels: Int64) -> Bins:
        """Of log probabilities (N, C) and the right classes (N,)."""
        with np.errstate(divide="ignore"):
            found = np.exp(log_probabilities[np.arange(len(labels)), labels])
            odds = np.clip(np.log(found) - np.log1p(-np.minimum(found, 1.0)), -10.0, 10.0)
        best = np.exp(log_probabilities.max(axis=1))
        places = np.minimum((best * BINS).astype(np.int64), BINS - 1)
        is_right = log_probabilities.argmax(axis=1) == labels
        true = np.bincount(np.clip(np.floor(odds) + 10, 0, _TRUE_BINS - 1).astype(np.int64), minlength=_TRUE_BINS)
        answered = np.bincount(places, minlength=BINS)
        right = np.bincount(places, weights=is_right, minlength=BINS)
        expected = np.rint(1_000.0 * np.bincount(places, weights=best, minlength=BINS))
        return cls(*(tuple(map(int, counts)) for counts in (true, answered, right, expected)))

    def __add__(self, other: Bins) -> Bins:
        return Bins(*(tuple(map(sum, zip(*pair, strict=True))) for pair in zip(self._all, other._all, strict=True)))

    @property
    def _all(self) -> tuple[tuple[int, ...], ...]:
        return self.true, self.answered, self.right, self.expected

    @property
    def photos(self) -> int:
        return sum(self.true)

    def at_most(self, photos: int) -> Bins:
        """The same shares of so many photos, 1 or more, where there are more."""
        if self.photos <= photos:
            return self
        answered = _shared_out(self.answered, photos)
        of_each = [(now / before if before else 0.0) for now, before in zip(answered, self.answered, strict=True)]
        right = tuple(round(count * share) for count, share in zip(self.right, of_each, strict=True))
        expected = tuple(round(count * share) for count, share in zip(self.expected, of_each, strict=True))
        return Bins(_shared_out(self.true, photos), answered, right, expected)

    def to_bytes(self) -> bytes:
        """`BYTES` bytes: uint32, little-endian: `true`, `answered`, `right`, `expected`."""
        return np.concatenate([np.array(counts, "<u4") for counts in self._all]).tobytes()

    @classmethod
    def of_bytes(cls, written: bytes) -> Bins | None:
        """What `to_bytes` gave; None for counts that cannot be of the same photos."""
        if len(written) != cls.BYTES:
            return None
        counts = np.frombuffer(written, "<u4").astype(np.int64)
        true, answered, right, expected = np.split(counts, [_TRUE_BINS, _TRUE_BINS + BINS, _TRUE_BINS + 2 * BINS])
        if true.sum() != answered.sum() or (right > answered).any() or (expected > 1_000 * answered).any():
            return None
        return cls(*(tuple(map(int, part)) for part in (true, answered, right, expected)))

    @property
    def error(self) -> float:
        """The expected calibration error: how far probability and share of right answers differ, a mean over photos."""
        if not self.photos:
            return 0.0
        gaps = (abs(expected / 1_000 - right) for expected, right in zip(self.expected, self.right, strict=True))
        return sum(gaps) / self.photos

    def least_in_set(self, coverage: float) -> float:
        """The least probability of a class that belongs to a set.

        Sets of all classes with this probability and more hold the right class in at least a share `coverage` of
        photos, where photos come as the held-out ones did. 0 where there are too few of these to say so: then the set
        is all classes.
        """
        allowed = int(np.floor((1.0 - coverage) * (self.photos + 1) + 1e-9))  # photos whose right class may be left out
        below, least = 0, 0.0
        for place, count in enumerate(self.true):
            below += count
            if below >= allowed:
                break
            least = float(1.0 / (1.0 + np.exp(-(place - 9.0))))  # the upper edge of this bin
        return least


def _shared_out(counts: Sequence[int], total: int) -> tuple[int, ...]:
    """Whole numbers that add up to `total`, as near to the shares of counts as may be; no count is exceeded."""
    exact = [count * total / sum(counts) for count in counts]
    whole = [int(share) for share in exact]
    by_rest = sorted(range(len(counts)), key=lambda place: whole[place] - exact[place])
    for place in by_rest[: total - sum(whole)]:
        whole[place] += 1
    return tuple(whole)


def most_of(photos: Sequence[int]) -> int:
    """For how many photos one of these devices counts at most: `MOST_OF_MEDIAN` times the median."""
    return int(MOST_OF_MEDIAN * float(np.median(photos)))
