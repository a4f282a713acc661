"""Before a round's contributions merge: who is left out, and who counts for less. What only comparing devices can show.

- **Left out**: a device with a class mean more than `OUTLIER` times as long as the usual device's longest. What is
  usual is the middle device of this round, so less than half of the devices, lying together, cannot shift it. What the
  bundle's noise may have added is taken off first: of a class with one sample that is most of the mean.
- **Counted as less**: a device that says it has more samples than all other devices together. It counts as that many,
  or as s / (1 − s) times that many for another largest share s than a half: its counts, and with them the weight of its
  rows or sums, are scaled as a whole. So nobody can buy more than the share of a round with a number that costs
  nothing; of one class it can, by claiming no other.

Of one or two devices nobody can say who lies. One alone counts as it is. Of two that differ by more than `OUTLIER` the
longer is left out, for long features end training and short ones do not; their counts stay as they are. The same holds
of a class that only one or two of many devices have: only `aggregator/validation.py` and what is usual in the other
classes bound it.

What is compared is three numbers of each contribution, its `Traits`, so that none must be read again to be screened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.mechanism import Mechanism
from contract.messages import Contribution
from contract.methods import method as method_of
from contract.plausible import usual_norm
from contract.rules import Source
from contract.statistics import Statistic

__all__ = ["OUTLIER", "Finding", "Screened", "Traits", "screen"]

OUTLIER = 5.0


@dataclass(frozen=True)
class Traits:
    """What of a contribution is compared with the others'.

    Attributes:
        longest: the norm of its longest class mean; 0 for FFC's sums, whose features all have length 1.
        samples: as it says.
        certain: what of the longest one declared noise cannot explain; `longest` where none is declared.
    """

    longest: float
    samples: int
    certain: float

    @classmethod
    def of(cls, message: Contribution, noise: Mechanism | None = None) -> Traits:
        """Those of a contribution as it came, `noise` being what the bundle declares."""
        samples = message.samples
        if message.triangle is not None or not method_of(message.method).statistic.COUNTED:
            return cls(0.0, samples, 0.0)
        norms: NDArray[np.floating] = message.norms  # (K,) of means, or of sums
        for field in method_of(message.method).statistic.row_fields()[:1]:
            norms = field.means(norms[:, None], message.counts)[:, 0]
        longest = certain = float(norms.max(initial=0.0))
        if noise is not None:
            on_mean = noise.on_mean(message.counts, message.body.rows.shape[1])  # (K,)
            certain = float((norms - on_mean).max(initial=0.0))
        return cls(longest, samples, certain)


@dataclass(frozen=True)
class Finding:
    """A device whose contribution does not count, or not in full.

    Attributes:
        left_out: whether it does not count at all.
    """

    device: str
    left_out: bool
    reason: str


@dataclass(frozen=True)
class Screened:
    """A round's contributions as they may merge.

    Attributes:
        source: in the order given, without those left out; may be read again and again.
        findings: about devices, in that order.
    """

    source: Source
    findings: tuple[Finding, ...]


def screen(source: Source, traits: Mapping[str, Traits], *, max_share: float = 0.5) -> Screened:
    """What of `source` may merge.

    Args:
        source: yields one statistic for each of the devices in `traits`, in that order.
        max_share: the largest share of the round's samples that one device counts for, 0.5 to 1.
    """
    findings = _outliers(traits)
    out = {finding.device for finding in findings}
    devices, left = list(traits), [device not in out for device in traits]
    samples = [0 if device in out else found.samples for device, found in traits.items()]
    heaviest, most = _allowance(samples, max_share)
    factor = 1.0
    if heaviest is not None:
        factor = most / samples[heaviest]
        reason = f"{samples[heaviest]:,} samples, more than the others allow, count as {most:,}"
        findings.append(Finding(devices[heaviest], False, reason))

    def kept() -> Iterator[Statistic]:
        for index, (statistic, stays) in enumerate(zip(source(), left, strict=True)):
            if stays:
                yield statistic.lightened(factor) if index == heaviest else statistic

    return Screened(kept, tuple(findings))


def _outliers(traits: Mapping[str, Traits]) -> list[Finding]:
    """Devices whose longest class mean is out of all proportion."""
    usual = usual_norm([found.longest for found in traits.values()])
    words = f"at most {OUTLIER:g} times the usual {usual:.3g}"
    return [
        Finding(device, True, f"a class mean of norm {found.certain:.3g}, {words}")
        for device, found in traits.items()
        if found.certain > OUTLIER * usual
    ]


def _allowance(samples: Sequence[int], max_share: float) -> tuple[int | None, int]:
    """Which of three or more devices has more samples than the share, and as how many they count; None when none has.

    From a half up, no more than one device can.
    """
    if sum(count > 0 for count in samples) < 3:
        return None, 0
    heaviest = int(np.argmax(samples))
    rest = sum(samples) - samples[heaviest]
    if samples[heaviest] <= max_share * sum(samples):
        return None, 0
    return heaviest, max(1, int(rest * max_share / (1.0 - max_share)))
