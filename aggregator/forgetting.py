"""What a fleet of rounds knows without one of its devices: what comes back, made again of what the others sent.

The contributions of the last closed round of each method are kept, so each kind of rows that the device may be in is
made anew of theirs. Rows that such a round only took over from rounds before (of classes that nobody held in it) go,
since nobody knows any more whose they are. That is exact for what a round's sums alone make: FFC's head, class means,
FedCOF's discriminant. Where devices train, their weights were taught by what the device had sent: that is not undone
(docs/decisions/118).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import numpy as np

from aggregator.merging import Messages, merge_round, traits_of
from aggregator.state import next_global
from aggregator.store import RoundRecord
from contract.messages import ClassRows, Contribution
from contract.methods import Method, Value
from contract.methods import method as method_of
from contract.rules import Rule
from contract.state import GlobalState

__all__ = ["state_without"]


def state_without(
    device: str,
    state: GlobalState,
    rounds: list[RoundRecord],
    stored: Callable[[int, str], Iterator[Contribution]],
    *,
    hyper: Callable[[Method], Mapping[str, Value]],
    classes: int,
    width: Callable[[Method], int],
    rule: Rule,
    max_share: float,
) -> GlobalState:
    """The next global state, one version above `state`; `state` itself where the device is in none of it.

    Args:
        rounds: all that were opened, in order.
        stored: the contributions of a round of a method, ordered by device.
        hyper, width: of a method's rounds.
        rule, max_share: how they merge.
    """
    rows = dict(state.rows)
    closed = [record for record in rounds if record.closed]
    last = {record.method: record for record in closed}
    touched = [m for m in last if any(device in r.uplink_bytes for r in closed if r.method == m)]
    for name in touched:
        found, record = method_of(name), last[name]
        kinds = [kind for kind in found.global_rows if kind in rows]
        widths = {kind: rows[kind].rows.shape[1] for kind in kinds}
        before = replace(state, rows={kind: each for kind, each in rows.items() if kind not in kinds})
        others = [each for each in record.uplink_bytes if each != device]
        rows = dict(before.rows)
        if others:
            messages = _others(stored, record, device)
            settled, traits = hyper(found), traits_of(found, messages, hyper(found))
            merged = merge_round(
                found, messages, traits, settled, classes=classes, width=width(found), rule=rule, max_share=max_share
            ).merged
            rows = dict(next_global(before, found, merged, round=state.round, hyper=settled).rows)
        for kind in kinds:  # what nobody is left to make is told to be gone
            empty = ClassRows(np.zeros(0, np.uint16), np.zeros((0, widths[kind])))
            rows.setdefault(kind, empty)
    return replace(state, version=state.version + 1, rows=rows) if touched and state.version else state


def _others(stored: Callable[[int, str], Iterator[Contribution]], record: RoundRecord, device: str) -> Messages:
    """The contributions of a round but for one device's, again and again."""

    def messages() -> Iterator[tuple[str, Contribution]]:
        for name, message in zip(record.uplink_bytes, stored(record.number, record.method), strict=True):
            if name != device:
                yield name, message

    return messages
