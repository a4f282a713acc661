"""A round's contributions merged into its result: by the aggregator that took them, and again from its store.

1. Every contribution's traits and class means are compared (`aggregator/outliers.py`): who is left out, or counts for
   less. Means under noise are not: what they say of the samples is not theirs.
2. What stays is merged by the method, one contribution at a time, in the order of the devices. Where some of them are
   gateways', all are added up as whole numbers first (`contract/fixed_point.py`): the sum is that of all devices behind
   and beside them, whatever the order.
3. What a person should know of it is said beside: findings, doubts, and what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.contradictions import has_means
from aggregator.outliers import Finding, Screened, Screening, Traits, screen
from aggregator.standing import ExactSum
from contract.messages import Contribution
from contract.methods import Method, Value
from contract.methods.base import Merged
from contract.rules import Rule
from contract.state import GlobalState
from contract.statistics import Statistic

__all__ = ["Made", "Messages", "Result", "Some", "exact_total", "merge_round", "screened_round", "traits_of"]

Messages = Callable[[], Iterator[tuple[str, Contribution]]]
"""Gives each device's contribution to a round, ordered by device; asked for each pass over them."""
Some = Callable[[Collection[str]], Iterator[tuple[str, Contribution]]]
"""Gives the contributions of these devices alone, in their order."""
_USUAL = Screening()
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


@dataclass(frozen=True, eq=False)
class Made:
    """A round's end, to be recorded.

    Attributes:
        classes: how many are known of it.
        state: the global state after it.
        screening: how devices were compared.
        findings, doubt, told: as of `Result`.
        joint: the joint head of some that were left out, as the store keeps it; empty for none.
    """

    classes: int
    state: GlobalState
    screening: Screening
    findings: tuple[Finding, ...]
    doubt: str
    told: str
    joint: str = field(default="", kw_only=True)


def traits_of(found: Method, messages: Messages, hyper: Mapping[str, Value]) -> dict[str, Traits]:
    """What of each contribution is compared with the others'; reads them all."""
    noise = found.mechanism(hyper)
    return {device: Traits.of(message, noise) for device, message in messages()}


def screened_round(
    found: Method,
    messages: Messages,
    traits: Mapping[str, Traits],
    hyper: Mapping[str, Value],
    *,
    classes: int,
    width: int,
    how: Screening = _USUAL,
    labels: Sequence[str] = (),
    some: Some | None = None,
) -> Screened:
    """What devices sent for themselves, as it may merge; arguments as of `merge_round`."""

    def statistics(sent: Iterator[tuple[str, Contribution]]) -> Iterator[Statistic]:
        return (message.statistic(found.statistic, classes, width) for _, message in sent if not message.devices)

    comparable = has_means(found.statistic) and found.mechanism(hyper) is None
    return screen(
        lambda: statistics(messages()),
        {device: each for device, each in traits.items() if not each.devices},
        max_share=how.max_share,
        suspects=how.suspects if comparable else "ignore",
        vouched=how.vouched,
        labels=labels,
        some=None if some is None else lambda devices: statistics(some(devices)),
        beside=[each for each in traits.values() if each.devices],
    )


def exact_total(found: Method, screened: Screened, classes: int, width: int) -> ExactSum:
    """The sum of what may merge, as whole numbers.

    Raises:
        StatisticError: a number is beyond `contract.fixed_point.LARGEST`.
    """
    total = ExactSum.zero(found.statistic, classes, width)
    for statistic in screened.source():
        total = total.add(ExactSum.of(statistic))
    return total


def merge_round(
    found: Method,
    messages: Messages,
    traits: Mapping[str, Traits],
    hyper: Mapping[str, Value],
    *,
    classes: int,
    width: int,
    rule: Rule = "mean",
    how: Screening = _USUAL,
    labels: Sequence[str] = (),
    some: Some | None = None,
) -> Result:
    """The result of a round of a method.

    Args:
        traits: of the devices in `messages`, in that order.
        hyper: the method's, settled.
        classes, width: C, and the width of the round's rows.
        rule: how class means merge; other sums always add up.
        how: what is held against devices.
        labels: see `screen`.
        some: as `messages`, of these devices alone, where that takes less.

    Raises:
        StatisticError: when there is no contribution.
    """
    screened = screened_round(
        found, messages, traits, hyper, classes=classes, width=width, how=how, labels=labels, some=some
    )
    source = screened.source
    if any(each.devices for each in traits.values()):
        total = exact_total(found, screened, classes, width)
        for _, message in messages():
            if message.devices:
                total = total.add(ExactSum.sent_in(message, found.statistic, classes, width))
        source = lambda: iter((total.statistic(found.statistic, width),))  # noqa: E731
    merged = found.merge(source, rule, hyper)
    doubt = found.doubt(merged, hyper) if merged.present.any() else _NOTHING
    return Result(merged, screened.findings, doubt, found.told(merged, hyper))
