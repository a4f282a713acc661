"""Finds the devices whose sums cannot go up with the others', so that one device cannot silence its site.

A gateway's message has limits. It holds numbers up to 2²² (`contract/sums/fixed_point.py`) and a bounded count of each
class, and the aggregator above takes at most `max_samples` samples of each device. A site within these limits goes up
whole. Otherwise, in this order:

1. Every device that has more samples than one device may have above is left out.
2. While some numbers are too large, the device with the largest part in them is left out, one after another.

Guarantee: the result depends on what the devices sent, and not on the order in which it came.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.contract.sums.fixed_point import FRACTION_BITS, LARGEST_INTEGER
from protofleet.contract.wire.messages import MAX_COUNT

__all__ = ["Fitted", "fitted"]

_LARGEST = LARGEST_INTEGER * 2.0**-FRACTION_BITS
_AT_ONCE = 16  # devices whose sums are in memory together: each takes as much as the site's

Sums = Callable[[], Iterable[tuple[str, ExactSum]]]
"""Gives each device's sums; called once for each pass over them."""


@dataclass(frozen=True, eq=False)
class Fitted:
    """The part of a site that goes up.

    Attributes:
        total: the sums of all devices that are not left out.
        left_out: the reason for each device that is left out.
    """

    total: ExactSum
    left_out: dict[str, str]


def fitted(total: ExactSum, devices: int, sums: Sums, *, max_samples: int) -> Fitted:
    """The part of a site's sums that fits into one message.

    Args:
        total, devices: the sums of all devices, and the number of devices.
        sums: the sums of each device. Not called where all of them fit.
        max_samples: the most that the aggregator above takes of one device.
    """
    left_out: dict[str, str] = {}
    if int(total.counts.sum()) > max_samples * devices:
        for device, its in sums():
            samples = int(its.counts.sum())
            if samples > max_samples:
                left_out[device] = f"{samples:,} samples, and at most {max_samples:,} of one device are taken above"
                total = total.subtract(its)
    while (large := _too_large(total)).any():  # it ends: a sum of no devices is never too large
        total = _without_the_worst(total, large, ((d, its) for d, its in sums() if d not in left_out), left_out)
    return Fitted(total, left_out)


def _without_the_worst(
    total: ExactSum, large: NDArray[np.bool_], candidates: Iterable[tuple[str, ExactSum]], left_out: dict[str, str]
) -> ExactSum:
    """The sums without the devices that have the largest part in the numbers that are too large.

    Devices are taken out one after another. It ends when no number is too large, or when a device that is not in memory
    may have a larger part: only the sums of `_AT_ONCE` devices are in memory.
    """

    def rank(candidate: tuple[str, ExactSum]) -> tuple[float, str]:
        return -_share(candidate[1], total, large), candidate[0]  # its part in the numbers that are too large now

    worst = heapq.nsmallest(_AT_ONCE, candidates, rank)
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
    """A mask of the numbers, then of the counts, that no message can hold."""
    return np.concatenate((total.numbers.beyond(), total.counts > MAX_COUNT))


def _share(its: ExactSum, total: ExactSum, large: NDArray[np.bool_]) -> float:
    """A device's part in the worst of these numbers, in units of the largest number that can be sent."""
    numbers, counts = large[: len(its.numbers)], large[len(its.numbers) :]
    sign = np.sign(total.numbers.high[numbers])
    of_numbers = (sign * its.numbers.to_float()[numbers] / _LARGEST).max(initial=-np.inf)
    return float(max(of_numbers, (its.counts[counts] / MAX_COUNT).max(initial=-np.inf)))


def _words(samples: int) -> str:
    return (
        f"with its {samples:,} samples the site's sums are beyond what one gateway can send, numbers up to "
        f"{_LARGEST:,.0f}; a second gateway for some devices"
    )
