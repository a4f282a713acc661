"""Before a round's contributions merge: who is left out, and who counts for less. What only comparing devices can show.

- **Left out**: a device with a class mean more than `OUTLIER` times as long as the usual device's longest. What is
  usual is the middle device of this round, so less than half of the devices, lying together, cannot shift it. What the
  bundle's noise may have added is taken off first: of a class with one sample that is most of the mean.
- **Left out**, or only named: a device whose class means contradict those of more others than may lie
  (`aggregator/contradictions.py`), or those of one that the operator vouches for. Who is contradicted by most of those
  that can tell, but by fewer, is named. Devices that are vouched for are never left out, and say what length is usual.
- **Counted as less**: a device that says it has more samples than `max_share` of all: by itself a half, and of n
  devices 3/n where that is less, but for devices that are vouched for. Its counts, and with them the weight of its rows
  or sums, are scaled as a whole, so that nobody can buy more than that share of a round with a number that costs
  nothing; of one class it can, by claiming no other. From a half up that can be one device only.

Of one or two devices nobody can say who lies. One alone counts as it is. Of two that differ by more than `OUTLIER` the
longer is left out, for long features end training and short ones do not; their counts stay as they are. The same holds
of a class that only one or two of many devices have: only `aggregator/validation.py` and what is usual in the other
classes bound it.

A gateway's sum (docs/gateway.md) is in no comparison: what it is made of was compared on its site, and the operator
named it. Its samples are among all of which `max_share` is.

What is compared first is three numbers of each contribution, its `Traits`, so that none must be read again for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from aggregator.contradictions import Contradicted, Some, contradicted
from contract.mechanism import Mechanism
from contract.messages import Contribution
from contract.methods import method as method_of
from contract.plausible import usual_norm
from contract.rules import Source
from contract.statistics import Statistic

__all__ = ["OUTLIER", "SUSPECTS", "Finding", "Screened", "Screening", "Suspects", "Traits", "Verdict", "screen"]

OUTLIER = 5.0
HALF = 0.5  # of a round's samples, the most that a device counts for in small fleets
SHARES = 3.0  # even shares that a device counts for at most, where that is less
_BY_DEVICES = "by-devices"
Suspects = Literal["leave-out", "name", "ignore"]
SUSPECTS: tuple[Suspects, ...] = get_args(Suspects)
Verdict = Literal["left out", "counts as less", "suspected"]


@dataclass(frozen=True)
class Traits:
    """What of a contribution is compared with the others'.

    Attributes:
        longest: the norm of its longest class mean; 0 for FFC's sums, whose features all have length 1.
        samples: as it says.
        certain: what of the longest one declared noise cannot explain; `longest` where none is declared.
        devices: for how many devices a gateway sent it; 0 where a device did for itself.
    """

    longest: float
    samples: int
    certain: float
    devices: int = 0

    @classmethod
    def of(cls, message: Contribution, noise: Mechanism | None = None) -> Traits:
        """Those of a contribution as it came, `noise` being what the bundle declares."""
        samples = message.samples
        if message.devices:
            return cls(0.0, samples, 0.0, message.devices)
        kind = method_of(message.method).statistic
        if message.triangle is not None or not kind.COUNTED:
            return cls(0.0, samples, 0.0)
        norms: NDArray[np.floating] = message.norms  # (K,) of means, or of sums
        longest = message.longest
        for field in kind.row_fields()[:1]:
            if field.travels == "sums":
                norms = field.means(norms[:, None], message.counts)[:, 0]
                longest = float(norms.max(initial=0.0))
        certain = longest
        if noise is not None:
            on_mean = noise.on_mean(message.counts, message.body.rows.shape[1])  # (K,)
            certain = float((norms - on_mean).max(initial=0.0))
        return cls(longest, samples, certain)


@dataclass(frozen=True)
class Finding:
    """A device that something speaks against, and what became of its contribution: of a suspected one nothing."""

    device: str
    verdict: Verdict
    reason: str

    @property
    def left_out(self) -> bool:
        """Whether it does not count at all."""
        return self.verdict == "left out"


@dataclass(frozen=True)
class Screened:
    """A round's contributions as they may merge.

    Attributes:
        source: in the order given, without those left out; may be read again and again.
        findings: about devices, in that order.
    """

    source: Source
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Screening:
    """What is held against devices where a round is merged; see `screen`."""

    max_share: float | None = None
    suspects: Suspects = "leave-out"
    vouched: tuple[str, ...] = ()

    def written(self) -> bytes:
        """As the store keeps it."""
        share = _BY_DEVICES if self.max_share is None else repr(self.max_share)
        return " ".join((share, self.suspects, *self.vouched)).encode()

    @classmethod
    def read(cls, written: bytes) -> Screening:
        """What `written` gave; stores of earlier releases have nobody vouched for, or the share alone, and ignored
        suspects.

        Raises:
            ValueError, TypeError: something else.
        """
        share, *said = bytes(written).decode().split(" ")
        given = None if share == _BY_DEVICES else float(share)
        return cls(given, SUSPECTS[SUSPECTS.index(said[0] if said else "ignore")], tuple(said[1:]))


def screen(
    source: Source,
    traits: Mapping[str, Traits],
    *,
    max_share: float | None = None,
    suspects: Suspects = "ignore",
    vouched: Collection[str] = (),
    labels: Sequence[str] = (),
    some: Some | None = None,
    beside: Sequence[Traits] = (),
) -> Screened:
    """What of `source` may merge.

    Args:
        source: yields one statistic for each of the devices in `traits`, in that order.
        max_share: the largest share of the round's samples that one device counts for, above 0, up to 1; None for a
            half and, of devices that nobody vouches for, for three even shares where that is less.
        suspects: what becomes of devices whose class means contradict the others'.
        vouched: the names of devices that do not lie.
        labels: the names of the classes, for the reasons; their numbers where there are none.
        some: see `contradicted`.
        beside: of the gateways in the same round.
    """
    findings = _outliers(traits, vouched)
    out = {finding.device for finding in findings}
    if suspects != "ignore":
        here = [device for device in traits if device not in out]
        told = contradicted(lambda: _without(source, traits, out), here, vouched, some)
        findings += [_of_contradicted(each, suspects, labels) for each in told]
        out |= {finding.device for finding in findings if finding.left_out}
    samples = {device: found.samples for device, found in traits.items() if device not in out}
    allowed = _allowances(samples, max_share, vouched, [each for each in beside if each.samples])
    for device, most in allowed.items():
        reason = f"{samples[device]:,} samples, more than the others allow, count as {most:,}"
        findings.append(Finding(device, "counts as less", reason))

    def kept() -> Iterator[Statistic]:
        for device, statistic in zip(samples, _without(source, traits, out), strict=True):
            factor = allowed[device] / samples[device] if device in allowed else 1.0
            yield statistic if factor == 1.0 else statistic.lightened(factor)

    return Screened(kept, tuple(findings))


def _without(source: Source, devices: Iterable[str], out: Set[str]) -> Iterator[Statistic]:
    """The statistics of `devices` but for some."""
    for device, statistic in zip(devices, source(), strict=True):
        if device not in out:
            yield statistic


def _outliers(traits: Mapping[str, Traits], vouched: Collection[str]) -> list[Finding]:
    """Devices whose longest class mean is out of all proportion."""
    sure = [found.longest for device, found in traits.items() if device in vouched and found.longest > 0]
    usual = usual_norm(sure or [found.longest for found in traits.values()])
    words = f"at most {OUTLIER:g} times the usual {usual:.3g}"
    return [
        Finding(device, "left out", f"a class mean of norm {found.certain:.3g}, {words}")
        for device, found in traits.items()
        if found.certain > OUTLIER * usual and device not in vouched
    ]


def _of_contradicted(found: Contradicted, suspects: Suspects, labels: Sequence[str]) -> Finding:
    verdict: Verdict = "left out" if found.accused and suspects == "leave-out" else "suspected"
    return Finding(found.device, verdict, found.words(labels))


def _allowances(
    samples: Mapping[str, int], max_share: float | None, vouched: Collection[str], beside: Sequence[Traits]
) -> dict[str, int]:
    """As how many samples devices count that have more than they may: by the share that was given, or both of ours."""
    if max_share is not None:
        return _allowance(samples, max_share, beside)
    devices = sum(count > 0 for count in samples.values()) + sum(each.devices for each in beside)
    found = _allowance(samples, HALF, beside)
    if devices > SHARES / HALF:
        sure = [Traits(0.0, count, 0.0, 1) for device, count in samples.items() if device in vouched and count > 0]
        others = {device: count for device, count in samples.items() if device not in vouched}
        for device, most in _allowance(others, SHARES / devices, [*beside, *sure]).items():
            found[device] = min(most, found.get(device, most))
    return {device: found[device] for device in samples if device in found}


def _allowance(samples: Mapping[str, int], max_share: float, beside: Sequence[Traits]) -> dict[str, int]:
    """As how many samples devices count that have more than the share; of fewer than three devices with any, those of
    gateways counted, none.

    The heaviest m devices count as c each, and c is `max_share` of what all then count as; where that is less than a
    device's even share, all count as the lightest. Beside gateways, m may be all of the devices.
    """
    ranked = sorted((count for count in samples.values() if count > 0), reverse=True)
    if not ranked or len(ranked) + sum(each.devices for each in beside) < 3:
        return {}
    rest, most = sum(ranked) + sum(each.samples for each in beside), float(ranked[-1])
    for capped, count in enumerate(ranked):
        if count * (1.0 - max_share * capped) <= max_share * rest:
            most = max_share * rest / (1.0 - max_share * capped) if capped else float(count)
            break
        rest -= count
    else:
        if beside:  # all devices have more than the share of what gateways leave them: here max_share · m is below 1
            most = max_share * rest / (1.0 - max_share * len(ranked))
    return {device: max(1, int(most)) for device, count in samples.items() if count > most}
