"""Whose sums cannot go up with the others': one device must not silence its site.

A gateway's message holds numbers up to 2²² (`contract/fixed_point.py`) and a bounded count of each class, and the
aggregator above takes so many samples of each device. A site whose sums are within that goes up whole. Else, in order:

1. who says that it has more samples than one device may have above is left out;
2. who makes most of the numbers that are too large is left out, and then who does of those that still are, until none
   is.

What remains is a function of what the devices sent, whatever the order in which it came.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.standing import ExactSum
from contract.fixed_point import FRACTION_BITS, LARGEST_INTEGER
from contract.messages import MAX_COUNT

__all__ = ["Fitted", "fitted"]

_LARGEST = LARGEST_INTEGER * 2.0**-FRACTION_BITS
_AT_ONCE = 16  # devices whose sums are in memory together: each takes as much as the site's

Sums = Callable[[], Iterable[tuple[str, ExactSum]]]
"""Gives each device's sums; asked for each pass over them."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """What of a site goes up.

    Attributes:
        total: the sums of all but those that are left out.
        left_out: why, by device.
    """

    total: ExactSum
    left_out: dict[str, str]


def fitted(total: ExactSum, devices: int, sums: Sums, *, max_samples: int) -> Fitted:
    """What of a site's sums fits into one message.

    Args:
        total, devices: of all, and how many that are.
        sums: of each; not asked where all fits.
        max_samples: the most that the aggregator above takes of one device.
    """
    left_out: dict[str, str] = {}
    if int(total.counts.sum()) > max_samples * devices:
        for device, its in sums():
            samples = int(its.counts.sum())
            if samples > max_samples:
                left_out[device] = f"{samples:,} samples, and at most {max_samples:,} of one device are taken above"
                total = total.subtract(its)
    while (large := _too_large(total)).any():  # ends: of nobody nothing is too large
        total = _without_the_worst(total, large, ((d, its) for d, its in sums() if d not in left_out), left_out)
    return Fitted(total, left_out)


def _without_the_worst(
    total: ExactSum, large: NDArray[np.bool_], here: Iterable[tuple[str, ExactSum]], left_out: dict[str, str]
) -> ExactSum:
    """The sums without those that make most of what is too large, one after another until none of it is, or until
    somebody else may make more of what still is: only the sums of a few are kept in memory."""

    def rank(each: tuple[str, ExactSum]) -> tuple[float, str]:
        return -_share(each[1], total, large), each[0]  # of what is too large by then

    worst = heapq.nsmallest(_AT_ONCE, here, rank)
    others = rank(worst[-1])[0] if len(worst) == _AT_ONCE else np.inf
    while worst and large.any():
        device, its = first = min(worst, key=rank)
        if rank(first)[0] > others:
            break
        worst.remove(first)
        left_out[device] = _words(int(its.counts.sum()))
        total = total.subtract(its)
        large = large & _too_large(total)
    return total


def _too_large(total: ExactSum) -> NDArray[np.bool_]:
    """Which numbers, and after them which counts, no message can hold."""
    return np.concatenate((total.numbers.beyond(), total.counts > MAX_COUNT))


def _share(its: ExactSum, total: ExactSum, large: NDArray[np.bool_]) -> float:
    """What a device has of the worst of these, in units of the largest that can be sent."""
    numbers, counts = large[: len(its.numbers)], large[len(its.numbers) :]
    sign = np.sign(total.numbers.high[numbers])
    of_numbers = (sign * its.numbers.to_float()[numbers] / _LARGEST).max(initial=-np.inf)
    return float(max(of_numbers, (its.counts[counts] / MAX_COUNT).max(initial=-np.inf)))


def _words(samples: int) -> str:
    return (
        f"with its {samples:,} samples the site's sums are beyond what one gateway can send, numbers up to "
        f"{_LARGEST:,.0f}; a second gateway for some devices"
    )
