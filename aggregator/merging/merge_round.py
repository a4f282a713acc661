"""Merges a round's contributions into its result: in the aggregator that took them, and again from its store.

1. The traits and class means of all contributions are compared (`aggregator/screening/outliers.py`): which devices are
   left out, or count for less. Means under noise are not compared: they do not show the device's samples.
2. The method merges the rest, one contribution at a time, in the order of the devices. Where some of them are
   gateways', all are added up as whole numbers first (`contract/sums/fixed_point.py`): the sum is that of all devices
   behind and beside the gateways, in any order.
3. The result also has what a person should know of it: findings, doubts, and choices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.screening.contradictions import has_means
from protofleet.aggregator.screening.outliers import Finding, Screened, Screening, Traits, screen
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods.base import Merged
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution

__all__ = ["Messages", "Result", "RoundEnd", "Some", "exact_total", "merge_round", "screened_round", "traits_of"]

Messages = Callable[[], Iterator[tuple[str, Contribution]]]
"""Gives each device's contribution to a round, ordered by device; asked for each pass over them."""
Some = Callable[[Collection[str]], Iterator[tuple[str, Contribution]]]
"""Gives the contributions of these devices alone, in their order."""
_USUAL = Screening()
_NOTHING = "no class is known: devices withhold each class of which they have fewer examples than --min-samples"


@dataclass(frozen=True, eq=False)
class Result:
    """The result of a round.

    Attributes:
        merged: the method's.
        findings: about devices whose contribution does not count, or counts in part.
        doubt: why the result may be bad; empty when nothing speaks against it.
        told: which choices were made, in words.
    """

    merged: Merged
    findings: tuple[Finding, ...]
    doubt: str
    told: str


@dataclass(frozen=True, eq=False)
class RoundEnd:
    """A round's end, as it is recorded.

    Attributes:
        classes: how many classes it knows.
        state: the global state after it; None where it stays as it is.
        screening: how devices were compared.
        findings, doubt, told: as of `Result`.
        joint: the joint head of some left-out devices, in the store's form; empty for none.
    """

    classes: int
    state: GlobalState | None
    screening: Screening
    findings: tuple[Finding, ...]
    doubt: str
    told: str
    joint: str = field(default="", kw_only=True)


def traits_of(method: Method, messages: Messages, hyper: Mapping[str, Value]) -> dict[str, Traits]:
    """The traits of each contribution, for the comparison of devices; reads all contributions."""
    noise = method.mechanism(hyper)
    return {device: Traits.of(message, noise) for device, message in messages()}


def screened_round(
    method: Method,
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
    """The devices' own contributions, as they may merge; arguments as of `merge_round`."""

    def statistics(sent: Iterator[tuple[str, Contribution]]) -> Iterator[Statistic]:
        return (message.statistic(method.statistic, classes, width) for _, message in sent if not message.devices)

    comparable = has_means(method.statistic) and method.mechanism(hyper) is None
    return screen(
        lambda: statistics(messages()),
        {device: trait for device, trait in traits.items() if not trait.devices},
        max_share=how.max_share,
        suspects=how.suspects if comparable else "ignore",
        vouched=how.vouched,
        labels=labels,
        some=None if some is None else lambda devices: statistics(some(devices)),
        beside=[trait for trait in traits.values() if trait.devices],
    )


def exact_total(method: Method, screened: Screened, classes: int, width: int) -> ExactSum:
    """The sum of the screened statistics, as whole numbers.

    Raises:
        StatisticError: a number is beyond `protofleet.contract.sums.fixed_point.LARGEST`.
    """
    total = ExactSum.zero(method.statistic, classes, width)
    for statistic in screened.source():
        total = total.add(ExactSum.of(statistic))
    return total


def merge_round(
    method: Method,
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
        hyper: the method's, resolved.
        classes, width: C, and the width of the round's rows.
        rule: how class means merge; other sums always add up.
        how: how devices are screened.
        labels: see `screen`.
        some: like `messages`, for the given devices alone, where that reads less.

    Raises:
        StatisticError: there is no contribution.
    """
    screened = screened_round(
        method, messages, traits, hyper, classes=classes, width=width, how=how, labels=labels, some=some
    )
    source = screened.source
    if any(trait.devices for trait in traits.values()):
        total = exact_total(method, screened, classes, width)
        for _, message in messages():
            if message.devices:
                total = total.add(ExactSum.sent_in(message, method.statistic, classes, width))
        source = lambda: iter((total.statistic(method.statistic, width),))  # noqa: E731
    merged = method.merge(source, rule, hyper)
    doubt = method.doubt(merged, hyper) if merged.present.any() else _NOTHING
    return Result(merged, screened.findings, doubt, method.told(merged, hyper))
