"""What a contribution shows of single photos: a line for the owner, logged before it is sent. Nothing is refused here.

The line is about sums without noise. It follows from the device's own counts:

    a class of one sample     its row is that sample's feature, in every encoding; where sums stand, the same holds for
                              a sample that alone comes or goes between two sums
    a triangle Σ z zᵀ of      its span is the span of its samples; where features vary in as many directions, it shows
    fewer samples than D      for certain whose photos are in it; of few samples it shows the features themselves

Nothing is said of a share in a blinded round. docs/security.md has measurements: how certain this is, and how much each
protection hides. An owner who does not want it has `--policy`.
"""

from __future__ import annotations

from collections.abc import Mapping

from protofleet.contract.methods import Method, Value
from protofleet.contract.printable import counted
from protofleet.contract.wire.messages import Announcement, Contribution

__all__ = ["exposed"]


def exposed(
    contribution: Contribution, announcement: Announcement, method: Method, hyper: Mapping[str, Value], width: int
) -> str:
    """The line; empty where there is nothing to say.

    Args:
        contribution: as made of this device's samples.
        announcement: what asks for it.
        method: its method.
        hyper: as the bundle settles it.
        width: D of the bundle's features.
    """
    kind = method.statistic
    if not len(contribution.counts) or method.mechanism(hyper) is not None or announcement.helper is not None:
        return ""
    findings, samples = [], int(contribution.counts.sum())
    if kind.COUNTED and (lone := int((contribution.counts == 1).sum())):
        findings.append(f"{counted(lone, 'row')} of one photo alone (min_samples in --policy keeps such classes here)")
    if announcement.phase == "standing" and announcement.min_samples == 1:
        findings.append("whatever comes or goes alone between two sums (min_samples here, too)")
    columns = method.row_width(hyper, width)
    if kind.has_triangle() and samples < columns:
        findings.append(f"{counted(samples, 'sample')}: of fewer than {columns:,} FFC's matrix can show who is in it")
    return "; ".join(findings)
