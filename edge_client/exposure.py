"""What a contribution shows of single photos, in a line for the owner: said before it leaves, and nothing is refused.

Of sums without noise, by the numbers of the device itself:

    a class of one sample     its row is that sample's feature, in whatever encoding; where sums stand, so is what comes
                              alone between two of them
    a triangle Σ z zᵀ of      its span is that of its samples: it shows for certain who is in it, where features vary in
    fewer samples than D      as many directions, and of few samples the features themselves

Of a share in a blinded round nothing is said here. How surely, and what hides how much, is measured in
docs/security.md. An owner who does not want it has `--policy`.
"""

from __future__ import annotations

from collections.abc import Mapping

from contract.messages import Announcement, Contribution
from contract.methods import Method, Value
from contract.terminal import counted

__all__ = ["exposed"]


def exposed(
    contribution: Contribution, announcement: Announcement, found: Method, hyper: Mapping[str, Value], width: int
) -> str:
    """The line; empty where there is nothing to say.

    Args:
        contribution: as made of this device's samples.
        announcement: what asks for it.
        found: its method.
        hyper: as the bundle settles it.
        width: D of the bundle's features.
    """
    kind = found.statistic
    if not len(contribution.counts) or found.mechanism(hyper) is not None or announcement.helper is not None:
        return ""
    told, samples = [], int(contribution.counts.sum())
    if kind.COUNTED and (lone := int((contribution.counts == 1).sum())):
        told.append(f"{counted(lone, 'row')} of one photo alone (min_samples in --policy keeps such classes here)")
    if announcement.phase == "standing" and announcement.min_samples == 1:
        told.append("whatever comes or goes alone between two sums (min_samples here, too)")
    columns = found.row_width(hyper, width)
    if kind.has_triangle() and samples < columns:
        told.append(f"{counted(samples, 'sample')}: of fewer than {columns:,} FFC's matrix can show who is in it")
    return "; ".join(told)
