"""Screening before a round's contributions merge: which devices are left out, and which count for less.

Only what a comparison of devices can show is checked here.

- **Left out**: a device with a class mean more than `OUTLIER` times as long as the usual device's longest. The usual
  length is that of the middle device of this round, so fewer than half of the devices cannot shift it together by
  lying. The length that the bundle's noise may have added is subtracted first: of a class with one sample, that is most
  of the mean.
- **Left out**, or only named: a device whose class means contradict those of more devices than may lie
  (`aggregator/screening/contradictions.py`), or those of one device that the operator vouches for. A device is only
  named when most of the devices that can tell contradict it, but fewer than that number. Vouched devices are never left
  out, and they set the usual length.
- **Counted as less**: a device that says it has more samples than `max_share` of all. The default is a half and, of n
  devices, 3/n where that is less; vouched devices are exempt from 3/n. The device's counts, and with them the weight of
  its rows or sums, are scaled as a whole. So a false sample count cannot buy more than that share of a round; of one
  class it can, when the device claims no other class. With a share of a half or more, only one device can exceed it.

With one or two devices nobody can say who lies. One alone counts as it is. Of two that differ by more than `OUTLIER`,
the longer is left out, because long features end training and short ones do not; the counts stay as they are. The same
holds for a class that only one or two of many devices have: only `aggregator/ingest/validation.py` and the usual length
in the other classes bound it.

A gateway's sum (docs/gateway.md) is in no comparison: its contributions were compared on its site, and the operator
named the gateway. Its samples count in the total that `max_share` refers to.

The first comparison needs three numbers of each contribution, its `Traits`. So no contribution is read again for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.screening.contradictions import Contradicted, Some, contradicted
from protofleet.contract.methods import method as method_of
from protofleet.contract.names import named
from protofleet.contract.privacy.mechanism import Mechanism
from protofleet.contract.sums.merge_rules import Source
from protofleet.contract.sums.plausibility import usual_norm
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.messages import Contribution

__all__ = ["OUTLIER", "SUSPECTS", "Finding", "Screened", "Screening", "Suspects", "Traits", "Verdict", "screen"]

OUTLIER = 5.0
HALF = 0.5  # of a round's samples, the most that a device counts for in small fleets
SHARES = 3.0  # even shares that a device counts for at most, where that is less
_BY_DEVICES = "by-devices"
Suspects = Literal["leave-out", "name", "ignore"]
Verdict = Literal["left out", "counts as less", "suspected"]
SUSPECTS: Mapping[Suspects, Verdict | None] = MappingProxyType(  # of who is accused; None: nobody is
    {"leave-out": "left out", "name": "suspected", "ignore": None}
)


@dataclass(frozen=True)
class Traits:
    """What is compared of a contribution.

    Attributes:
        longest: the norm of its longest class mean; 0 for FFC's sums, whose features all have length 1.
        samples: how many samples the device says it has.
        certain: the part of `longest` that declared noise cannot explain; equal to `longest` without declared noise.
        devices: how many devices a gateway sent it for; 0 for a device's own contribution.
    """

    longest: float
    samples: int
    certain: float
    devices: int = 0

    @classmethod
    def of(cls, message: Contribution, noise: Mechanism | None = None) -> Traits:
        """The traits of a contribution as it came; `noise` is what the bundle declares."""
        samples = message.samples
        if message.devices:
            return cls(0.0, samples, 0.0, message.devices)
        kind = method_of(message.method).statistic
        if message.has_products or not kind.COUNTED:
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
    """A device that something speaks against, and what became of its contribution. A suspected one still counts."""

    device: str
    verdict: Verdict
    reason: str

    @property
    def left_out(self) -> bool:
        """Whether the contribution does not count at all."""
        return self.verdict == "left out"


@dataclass(frozen=True)
class Screened:
    """A round's contributions as they may merge.

    Attributes:
        source: the statistics in the given order, without those left out; may be read several times.
        findings: about devices, in that order.
    """

    source: Source
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Screening:
    """How devices are screened where a round is merged; see `screen`."""

    max_share: float | None = None
    suspects: Suspects = "leave-out"
    vouched: tuple[str, ...] = ()

    def written(self) -> bytes:
        """The form that the store keeps."""
        share = _BY_DEVICES if self.max_share is None else repr(self.max_share)
        return " ".join((share, self.suspects, *self.vouched)).encode()

    @classmethod
    def read(cls, written: bytes) -> Screening:
        """The screening that `written` gave.

        Stores of earlier releases name no vouched devices, or only the share; then suspects are ignored.

        Raises:
            ValueError, TypeError: the bytes are something else.
        """
        share, *rest = bytes(written).decode().split(" ")
        (suspects,) = [way for way in SUSPECTS if way == (rest[0] if rest else "ignore")]
        max_share = None if share == _BY_DEVICES else float(share)
        return cls(max_share, suspects, tuple(rest[1:]))


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
        max_share: the largest share of the round's samples that one device counts for, above 0, up to 1. None for a
            half and, for devices that are not vouched for, three even shares where that is less.
        suspects: what happens to devices whose class means contradict the others'.
        vouched: the names of devices that do not lie.
        labels: the names of the classes, for the reasons; without them the reasons have numbers.
        some: see `contradicted`.
        beside: the traits of the gateways in the same round.
    """
    findings = _outliers(traits, vouched)
    out = {finding.device for finding in findings}
    verdict = named(SUSPECTS, suspects, "suspects")
    if verdict is not None:
        compared = [device for device in traits if device not in out]
        accused = contradicted(lambda: _without(source, traits, out), compared, vouched, some)
        findings += [_of_contradicted(contradiction, verdict, labels) for contradiction in accused]
        out |= {finding.device for finding in findings if finding.left_out}
    samples = {device: trait.samples for device, trait in traits.items() if device not in out}
    allowed = _allowances(samples, max_share, vouched, [gateway for gateway in beside if gateway.samples])
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
    sure = [trait.longest for device, trait in traits.items() if device in vouched and trait.longest > 0]
    usual = usual_norm(sure or [trait.longest for trait in traits.values()])
    limit = f"at most {OUTLIER:g} times the usual {usual:.3g}"
    return [
        Finding(device, "left out", f"a class mean of norm {trait.certain:.3g}, {limit}")
        for device, trait in traits.items()
        if trait.certain > OUTLIER * usual and device not in vouched
    ]


def _of_contradicted(contradiction: Contradicted, verdict: Verdict, labels: Sequence[str]) -> Finding:
    return Finding(contradiction.device, verdict if contradiction.accused else "suspected", contradiction.words(labels))


def _allowances(
    samples: Mapping[str, int], max_share: float | None, vouched: Collection[str], beside: Sequence[Traits]
) -> dict[str, int]:
    """As how many samples devices count that have more than they may: by the share that was given, or both of ours."""
    if max_share is not None:
        return _allowance(samples, max_share, beside)
    devices = sum(count > 0 for count in samples.values()) + sum(gateway.devices for gateway in beside)
    allowances = _allowance(samples, HALF, beside)
    if devices > SHARES / HALF:
        sure = [Traits(0.0, count, 0.0, 1) for device, count in samples.items() if device in vouched and count > 0]
        samples_of_others = {device: count for device, count in samples.items() if device not in vouched}
        for device, most in _allowance(samples_of_others, SHARES / devices, [*beside, *sure]).items():
            allowances[device] = min(most, allowances.get(device, most))
    return {device: allowances[device] for device in samples if device in allowances}


def _allowance(samples: Mapping[str, int], max_share: float, beside: Sequence[Traits]) -> dict[str, int]:
    """As how many samples devices count that have more than the share; of fewer than three devices with any, those of
    gateways counted, none.

    The heaviest m devices count as c each, and c is `max_share` of what all then count as; where that is less than a
    device's even share, all count as the lightest. Beside gateways, m may be all of the devices.
    """
    ranked = sorted((count for count in samples.values() if count > 0), reverse=True)
    if not ranked or len(ranked) + sum(gateway.devices for gateway in beside) < 3:
        return {}
    remaining, most = sum(ranked) + sum(gateway.samples for gateway in beside), float(ranked[-1])
    for capped, count in enumerate(ranked):
        if count * (1.0 - max_share * capped) <= max_share * remaining:
            most = max_share * remaining / (1.0 - max_share * capped) if capped else float(count)
            break
        remaining -= count
    else:
        if beside:  # all devices have more than the share of what gateways leave them: here max_share · m is below 1
            most = max_share * remaining / (1.0 - max_share * len(ranked))
    return {device: max(1, int(most)) for device, count in samples.items() if count > most}
