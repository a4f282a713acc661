"""A round's contributions merged into its result: by the aggregator that took them, and again from its store.

1. Every contribution's traits and class means are compared (`aggregator/outliers.py`): who is left out, or counts for
   less. Means under noise are not: what they say of the samples is not theirs.
2. What stays is merged by the method, one contribution at a time, in the order of the devices.
3. What a person should know of it is said beside: findings, doubts, and what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from aggregator.contradictions import has_means
from aggregator.outliers import Finding, Suspects, Traits, screen
from contract.messages import Contribution
from contract.methods import Method, Value
from contract.methods.base import Merged
from contract.rules import Rule
from contract.statistics import Statistic

__all__ = ["Messages", "Result", "merge_round", "traits_of"]

Messages = Callable[[], Iterator[tuple[str, Contribution]]]
"""Gives each device's contribution to a round, ordered by device; asked for each pass over them."""
_NOTHING = "no class is known: devices withhold each class of which they have fewer examples than --min-samples"


@dataclass(frozen=True, eq=False)
class Result:
    """What a round came to.

    Attributes:
        merged: the method's.
        findings: about devices whose contribution does not count, or not in full.
        doubt: why what is made of it may be bad; empty where nothing speaks against it.
        told: what was chosen in the making, in words.
    """

    merged: Merged
    findings: tuple[Finding, ...]
    doubt: str
    told: str


def traits_of(found: Method, messages: Messages, hyper: Mapping[str, Value]) -> dict[str, Traits]:
    """What of each contribution is compared with the others'; reads them all."""
    noise = found.mechanism(hyper)
    return {device: Traits.of(message, noise) for device, message in messages()}


def merge_round(
    found: Method,
    messages: Messages,
    traits: Mapping[str, Traits],
    hyper: Mapping[str, Value],
    *,
    classes: int,
    width: int,
    rule: Rule = "mean",
    max_share: float = 0.5,
    suspects: Suspects = "leave-out",
    vouched: Collection[str] = (),
    labels: Sequence[str] = (),
    some: Callable[[Collection[str]], Iterator[tuple[str, Contribution]]] | None = None,
) -> Result:
    """The result of a round of a method.

    Args:
        traits: of the devices in `messages`, in that order.
        hyper: the method's, settled.
        classes, width: C, and the width of the round's rows.
        rule: how class means merge; other sums always add up.
        max_share, suspects, vouched, labels: see `screen`.
        some: as `messages`, of these devices alone, where that takes less.

    Raises:
        StatisticError: when there is no contribution.
    """

    def statistics(sent: Iterator[tuple[str, Contribution]]) -> Iterator[Statistic]:
        return (message.statistic(found.statistic, classes, width) for _, message in sent)

    comparable = has_means(found.statistic) and found.mechanism(hyper) is None
    judged: Suspects = suspects if comparable else "ignore"
    screened = screen(
        lambda: statistics(messages()),
        traits,
        max_share=max_share,
        suspects=judged,
        vouched=vouched,
        labels=labels,
        some=None if some is None else lambda devices: statistics(some(devices)),
    )
    merged = found.merge(screened.source, rule, hyper)
    doubt = found.doubt(merged, hyper) if merged.present.any() else _NOTHING
    return Result(merged, screened.findings, doubt, found.told(merged, hyper))
