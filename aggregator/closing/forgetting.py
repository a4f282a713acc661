"""The global state of a fleet with rounds, made again without one of its devices or classes.

The contributions of the last closed round of each method are kept. So each kind of rows that the device may be in is
made again from them. Some rows were only taken over from earlier rounds, because no device of that round held their
classes. These rows are removed, since their origin is no longer known.

This is exact for what a round's sums alone make: FFC's head, class means, FedCOF's discriminant. Where devices train,
their weights were trained with what the device had sent: that is not undone (docs/decisions/118).

Without a class (docs/decisions/139), where rows are of one class each, rows of other classes that a round took over
stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from protofleet.aggregator.merging.forgotten_classes import left_of
from protofleet.aggregator.merging.merge_round import Messages, merge_round, traits_of
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.outliers import Screening
from protofleet.aggregator.store.records import RoundRecord
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution

__all__ = ["Remaking", "none_of", "state_without", "state_without_class"]

Stored = Callable[[int, str], Iterator[Contribution]]
"""Gives the contributions of a round of a method, ordered by device."""


@dataclass(frozen=True)
class Remaking:
    """How a fleet's rounds merge.

    Attributes:
        hyper, width: of a method's rounds.
        rule: see `merge_round`.
        screening: of a method's rounds.
    """

    hyper: Callable[[Method], Mapping[str, Value]]
    classes: int
    width: Callable[[Method], int]
    rule: Rule
    screening: Callable[[Method], Screening]

    def rows(self, before: GlobalState, method: Method, messages: Messages) -> dict[str, ClassRows]:
        """The rows of the global state that a round of a method makes of `before`; without a message, those of it."""
        if next(messages(), None) is None:
            return dict(before.rows)
        settled = self.hyper(method)
        merged = merge_round(
            method,
            messages,
            traits_of(method, messages, settled),
            settled,
            classes=self.classes,
            width=self.width(method),
            rule=self.rule,
            how=self.screening(method),
        ).merged
        return dict(next_global(before, method, merged, round=before.round, hyper=settled).rows)


def state_without(
    device: str, state: GlobalState, rounds: list[RoundRecord], stored: Stored, remaking: Remaking
) -> GlobalState:
    """The next global state, one version above `state`; `state` itself where the device is in none of it.

    Args:
        rounds: all that were opened, in order.
    """
    rows = dict(state.rows)
    closed = [record for record in rounds if record.closed and not record.taken_back]
    last = _last(rounds)
    touched = [m for m in last if any(device in r.uplink_bytes for r in closed if r.method == m)]
    for name in touched:
        method = method_of(name)
        kinds = [kind for kind in method.global_rows if kind in rows]
        before = replace(state, rows={kind: class_rows for kind, class_rows in rows.items() if kind not in kinds})
        empty = {kind: none_of(rows[kind]) for kind in kinds}  # what nobody is left to make is told to be gone
        rows = empty | remaking.rows(before, method, _without_device(stored, last[name], device))
    return replace(state, version=state.version + 1, rows=rows) if touched and state.version else state


def state_without_class(
    number: int,
    holders: Collection[tuple[int, str, str]],
    state: GlobalState,
    rounds: list[RoundRecord],
    stored: Stored,
    remaking: Remaking,
) -> GlobalState:
    """The next global state, one version above `state`; `state` itself where the class is in none of it.

    Args:
        number: of the class.
        holders: round, method and device of the contributions that have it.
        rounds: all that were opened, in order.
    """
    rows, touched = dict(state.rows), False
    for name, record in _last(rounds).items():
        method = method_of(name)
        kinds = [kind for kind in method.global_rows if kind in rows]
        contributed = any((record.number, name, device) in holders for device in record.uplink_bytes)
        if not contributed and not any(number in rows[kind].classes for kind in kinds):
            continue
        touched = True
        empty = {kind: none_of(rows[kind]) for kind in kinds}
        reduced = {} if method.statistic.has_triangle() else {kind: _without_row(rows[kind], number) for kind in kinds}
        before = replace(
            state, rows={kind: class_rows for kind, class_rows in rows.items() if kind not in kinds} | reduced
        )
        rows = empty | remaking.rows(before, method, _without_class(stored, record, number))
    return replace(state, version=state.version + 1, rows=rows) if touched and state.version else state


def _last(rounds: list[RoundRecord]) -> dict[str, RoundRecord]:
    """The last closed round of each method, of those that were not taken back."""
    return {record.method: record for record in rounds if record.closed and not record.taken_back}


def none_of(rows: ClassRows) -> ClassRows:
    """No rows of the same width: what devices are told is gone."""
    return ClassRows(np.zeros(0, np.uint16), np.zeros((0, rows.rows.shape[1])))


def _without_row(rows: ClassRows, number: int) -> ClassRows:
    stays = rows.classes != number
    return ClassRows(rows.classes[stays], rows.rows[stays])


def _without_device(stored: Stored, record: RoundRecord, device: str) -> Messages:
    """The contributions of a round but for one device's, again and again."""

    def messages() -> Iterator[tuple[str, Contribution]]:
        for name, message in zip(record.uplink_bytes, stored(record.number, record.method), strict=True):
            if name != device:
                yield name, message

    return messages


def _without_class(stored: Stored, record: RoundRecord, number: int) -> Messages:
    """What stays of the contributions of a round without a class, again and again."""

    def messages() -> Iterator[tuple[str, Contribution]]:
        for name, message in zip(record.uplink_bytes, stored(record.number, record.method), strict=True):
            reduced = left_of(message, (number,))
            if reduced is not None:
                yield name, reduced

    return messages
