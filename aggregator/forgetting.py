"""What a fleet of rounds knows without one of its devices or classes: what comes back, made again of what remains.

The contributions of the last closed round of each method are kept, so each kind of rows that the device may be in is
made anew of theirs. Rows that such a round only took over from rounds before (of classes that nobody held in it) go,
since nobody knows any more whose they are. That is exact for what a round's sums alone make: FFC's head, class means,
FedCOF's discriminant. Where devices train, their weights were taught by what the device had sent: that is not undone
(docs/decisions/118).

Without a class (docs/decisions/139), where rows are of one class each, what a round took over of the others stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from aggregator.forgotten_classes import left_of
from aggregator.merging import Messages, merge_round, traits_of
from aggregator.outliers import Screening
from aggregator.state import next_global
from aggregator.store import RoundRecord
from contract.messages import ClassRows, Contribution
from contract.methods import Method, Value
from contract.methods import method as method_of
from contract.rules import Rule
from contract.state import GlobalState

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

    def rows(self, before: GlobalState, found: Method, messages: Messages) -> dict[str, ClassRows]:
        """The rows of the global state that a round of a method makes of `before`; without a message, those of it."""
        if next(messages(), None) is None:
            return dict(before.rows)
        settled = self.hyper(found)
        merged = merge_round(
            found,
            messages,
            traits_of(found, messages, settled),
            settled,
            classes=self.classes,
            width=self.width(found),
            rule=self.rule,
            how=self.screening(found),
        ).merged
        return dict(next_global(before, found, merged, round=before.round, hyper=settled).rows)


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
        found = method_of(name)
        kinds = [kind for kind in found.global_rows if kind in rows]
        before = replace(state, rows={kind: each for kind, each in rows.items() if kind not in kinds})
        empty = {kind: none_of(rows[kind]) for kind in kinds}  # what nobody is left to make is told to be gone
        rows = empty | remaking.rows(before, found, _others(stored, last[name], device))
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
        found = method_of(name)
        kinds = [kind for kind in found.global_rows if kind in rows]
        held = any((record.number, name, device) in holders for device in record.uplink_bytes)
        if not held and not any(number in rows[kind].classes for kind in kinds):
            continue
        touched = True
        empty = {kind: none_of(rows[kind]) for kind in kinds}
        kept = {} if found.statistic.has_triangle() else {kind: _without_row(rows[kind], number) for kind in kinds}
        before = replace(state, rows={kind: each for kind, each in rows.items() if kind not in kinds} | kept)
        rows = empty | remaking.rows(before, found, _rest(stored, record, number))
    return replace(state, version=state.version + 1, rows=rows) if touched and state.version else state


def _last(rounds: list[RoundRecord]) -> dict[str, RoundRecord]:
    """The last closed round of each method, of those that were not taken back."""
    return {record.method: record for record in rounds if record.closed and not record.taken_back}


def none_of(rows: ClassRows) -> ClassRows:
    """No rows of the same width: what devices are told is gone."""
    return ClassRows(np.zeros(0, np.uint16), np.zeros((0, rows.rows.shape[1])))


def _without_row(rows: ClassRows, number: int) -> ClassRows:
    kept = rows.classes != number
    return ClassRows(rows.classes[kept], rows.rows[kept])


def _others(stored: Stored, record: RoundRecord, device: str) -> Messages:
    """The contributions of a round but for one device's, again and again."""

    def messages() -> Iterator[tuple[str, Contribution]]:
        for name, message in zip(record.uplink_bytes, stored(record.number, record.method), strict=True):
            if name != device:
                yield name, message

    return messages


def _rest(stored: Stored, record: RoundRecord, number: int) -> Messages:
    """What stays of the contributions of a round without a class, again and again."""

    def messages() -> Iterator[tuple[str, Contribution]]:
        for name, message in zip(record.uplink_bytes, stored(record.number, record.method), strict=True):
            left = left_of(message, (number,))
            if left is not None:
                yield name, left

    return messages
