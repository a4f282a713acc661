"""The set of a blinded round, on its way to the helper and back. No sockets.

    begin     the round's devices become a set, durable before the helper is asked
    asks      the set as messages, as often as needed: the helper answers the same question in the same way
    hear      parts of the answer, in any order and number
    answer    once it is whole: the helper's sum, or the devices that cannot be in it

While a set stands its round is held. What is lost on the way is asked for again. Answers about another set are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.store.blinded_tables import AskedSet, BlindedTables
from protofleet.contract.wire.helper_messages import Opened, Opening, set_digest

__all__ = ["Answered", "BlindedSet"]

_AROUND_BYTES = 512  # of a message that is not seeds, with the signature around it
_AROUND_SEED_BYTES = 8


@dataclass(frozen=True, eq=False)
class Answered:
    """The helper's answer about a set.

    Attributes:
        total: (W,) its sum of the helper's shares; None when the helper does not open it.
        reason: why it does not.
        refused: why, by device.
    """

    asked: AskedSet
    total: NDArray[np.uint64] | None
    reason: str = ""
    refused: Mapping[str, str] | None = None


class BlindedSet:
    """At most one at a time, in a store."""

    def __init__(self, tables: BlindedTables, run: bytes) -> None:
        self._tables, self._run = tables, run
        self._asked = tables.asked()
        self._parts: dict[int, Opened] = {}

    @property
    def asked(self) -> AskedSet | None:
        """The set that the helper is asked for."""
        return self._asked

    def begin(self, round: int, method: str, devices: list[str], at: float) -> AskedSet:
        """Ask for the sum over these devices; durable on return.

        Args:
            at: seconds since the epoch.
        """
        seeds = self._tables.seeds(round, devices)
        asked = AskedSet(round, method, set_digest(seeds), tuple(seeds), at)
        self._tables.ask(asked)
        self._asked, self._parts = asked, {}
        return asked

    def asks(self, limit_bytes: int) -> list[Opening]:
        """The set as messages of at most `limit_bytes`, signature included; none without a set."""
        if self._asked is None:
            return []
        a, room = self._asked, limit_bytes - _AROUND_BYTES
        seeds, cuts, taken = self._tables.seeds(a.round, a.devices), [dict[str, bytes]()], 0
        for device, seed in seeds.items():
            size = len(device) + len(seed) + _AROUND_SEED_BYTES
            if cuts[-1] and (taken + size > room or len(cuts[-1]) >= 1_024):
                cuts.append({})
                taken = 0
            cuts[-1][device] = seed
            taken += size
        return [Opening(self._run, a.round, a.method, a.digest, n, len(cuts), cut) for n, cut in enumerate(cuts)]

    def hear(self, part: Opened) -> None:
        """Take a part of an answer; a part about another set is ignored."""
        a = self._asked
        if a is None or (part.run, part.round, part.method, part.digest) != (self._run, a.round, a.method, a.digest):
            return
        if not all(_of_one_cut(held, part) for held in self._parts.values()):
            self._parts.clear()  # cut anew, for another limit
        self._parts[part.part] = part

    def answer(self) -> Answered | None:
        """The whole answer, once; None while parts of it are missing."""
        first = next(iter(self._parts.values()), None)
        if self._asked is None or first is None or len(self._parts) < first.parts:
            return None
        parts, self._parts = [self._parts[n] for n in range(first.parts)], {}
        if first.status == "refused":
            return Answered(self._asked, None, first.reason, dict(first.refused))
        return Answered(self._asked, np.concatenate([p.words for p in parts]))

    def drop(self) -> None:
        """End the set that the helper has not opened; durable on return."""
        self._tables.dropped()
        self.over()

    def over(self) -> None:
        """End the set, which the store has already ended."""
        self._asked, self._parts = None, {}


def _of_one_cut(one: Opened, other: Opened) -> bool:
    """Whether two parts of an answer go together: all but the last have as many words."""
    inner = [part for part in (one, other) if part.part + 1 < part.parts]
    alike = len({len(part.words) for part in inner}) <= 1
    return alike and (one.parts, one.status) == (other.parts, other.status)
