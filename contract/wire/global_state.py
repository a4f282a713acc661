"""The global state: what the aggregator publishes, and what every device starts its next round from.

It holds class rows of several kinds: prototypes (from rounds of FedProto, FedHP or FedPR), a head (from an FFC round),
and other kinds that a method declares.

1. It travels as `GlobalPart` messages. Each has some class rows of one kind, so it fits the message limit and can be
   decoded by itself.
2. A `GlobalCollector` on the device puts the parts of one version together, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.wire.messages import ClassRows, GlobalPart

__all__ = ["GlobalCollector", "GlobalState", "least_limit_bytes"]

_PART_OVERHEAD_BYTES = 128  # more than the CBOR around a part's rows ever takes
_PART_COST_BYTES = 1_024  # about what Python's objects around a part take


@dataclass(frozen=True, eq=False)
class GlobalState:
    """One version of what comes back to the devices.

    Attributes:
        version: grows by one with each publication; 0 is the state before the first round, which is empty.
        round: the round it came out of.
        rows: class rows by kind: `prototypes` (K, D) of the classes that have a global prototype; `head` (C, D) of a
            linear head on unit features, or (C, D') where those are projected; others as methods declare them.
    """

    run: bytes
    version: int
    round: int
    rows: Mapping[str, ClassRows] = field(default_factory=dict)

    @property
    def prototypes(self) -> ClassRows | None:
        """Rows of the classes that have a global prototype."""
        return self.rows.get("prototypes")

    @property
    def head(self) -> ClassRows | None:
        """Rows of the linear head."""
        return self.rows.get("head")

    def parts(self, limit_bytes: int) -> list[GlobalPart]:
        """The state as messages of at most `limit_bytes` each when encoded as f32, kinds in alphabetical order.

        Raises:
            WireError: when a single row is larger than the limit.
        """
        slices = [(kind, part) for kind in sorted(self.rows) for part in _cut(self.rows[kind], limit_bytes)]
        return [
            GlobalPart(self.run, self.version, self.round, index, len(slices), kind, body)
            for index, (kind, body) in enumerate(slices)
        ]

    def filled(self) -> GlobalState:
        """This state without the kinds that have no row, as after a round in which every class was withheld."""
        return replace(self, rows={kind: rows for kind, rows in self.rows.items() if len(rows.classes)})

    def below(self, classes: int) -> GlobalState:
        """This state for a bundle with `classes` classes: without the rows of the fleet's further classes."""
        if all(int(rows.classes[-1]) < classes for rows in self.rows.values() if len(rows.classes)):
            return self
        cut = {kind: int(np.searchsorted(rows.classes, classes)) for kind, rows in self.rows.items()}
        below = {kind: ClassRows(rows.classes[: cut[kind]], rows.rows[: cut[kind]]) for kind, rows in self.rows.items()}
        return replace(self, rows=below)

    def dense(self, kind: str, classes: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Rows (C, W) of a kind as a training step takes them, zero where there is none, and (C,) 1 where there is.

        Raises:
            WireError: when they are not of this fleet.
        """
        if kind not in self.rows:
            return np.zeros((classes, width), np.float32), np.zeros(classes, np.float32)
        dense, present = self.rows[kind].dense(classes, width)
        return dense.astype(np.float32), present.astype(np.float32)


@dataclass
class GlobalCollector:
    """Collects the parts of the newest version; forgets older ones and those of another run.

    Attributes:
        capacity_bytes: the most that the parts of a state may take: a state may say that it has 65,535 of them.
    """

    capacity_bytes: int = 1 << 28
    _run: bytes = b""
    _version: int = 0
    _parts: dict[int, GlobalPart] = field(default_factory=dict)
    _held_bytes: int = 0

    @property
    def version(self) -> int:
        """The version that is being collected, or was collected last; 0 before the first part."""
        return self._version

    def add(self, part: GlobalPart) -> GlobalState | None:
        """The state when `part` completes its version, else None.

        A part with another count of parts, or of another round, than those before it begins anew. The reason: an
        aggregator that was started with another limit cuts the same version in another way. Parts of the old cut, on
        their way or recorded, must not keep out the new ones.

        Raises:
            WireError: when parts of one version contradict each other, or are too many.
        """
        is_other = self._parts and (self._first.parts, self._first.round) != (part.parts, part.round)
        if is_other or (part.run, part.version) != (self._run, self._version):
            if part.run == self._run and part.version < self._version:
                return None
            self._run, self._version, self._parts, self._held_bytes = part.run, part.version, {}, 0
        self._hold(part)
        if len(self._parts) < part.parts:
            return None
        ordered = [self._parts[index] for index in range(part.parts)]
        kinds = dict.fromkeys(p.kind for p in ordered)
        rows = {kind: _join([p.body for p in ordered if p.kind == kind]) for kind in kinds}
        return GlobalState(part.run, part.version, part.round, rows)

    @property
    def _first(self) -> GlobalPart:
        return next(iter(self._parts.values()))

    def _hold(self, part: GlobalPart) -> None:
        before = self._parts.get(part.part)
        held_bytes = self._held_bytes + _cost(part) - (_cost(before) if before is not None else 0)
        if held_bytes > self.capacity_bytes:
            raise WireError("global state", expected=f"at most {self.capacity_bytes:,} bytes", got="more")
        self._parts[part.part], self._held_bytes = part, held_bytes


def least_limit_bytes(width: int) -> int:
    """The smallest message limit that leaves room for one class row of `width` numbers; at least 1,024."""
    return max(1024, 4 * width + 2 + _PART_OVERHEAD_BYTES)


def _cut(rows: ClassRows, limit_bytes: int) -> list[ClassRows]:
    width = rows.rows.shape[1]
    per_part = (limit_bytes - _PART_OVERHEAD_BYTES) // (4 * width + 2)
    if per_part < 1:
        raise WireError(
            "global state", expected=f"a message limit of {least_limit_bytes(width)} bytes", got=limit_bytes
        )
    starts = range(0, max(len(rows.classes), 1), per_part)
    return [ClassRows(rows.classes[i : i + per_part], rows.rows[i : i + per_part]) for i in starts]


def _cost(part: GlobalPart) -> int:
    """What a part takes in memory."""
    return _PART_COST_BYTES + part.body.classes.nbytes + part.body.rows.nbytes


def _join(bodies: list[ClassRows]) -> ClassRows:
    if len({body.rows.shape[1] for body in bodies}) > 1:
        raise WireError("global state", expected="rows of one width", got="several")
    return ClassRows(np.concatenate([b.classes for b in bodies]), np.concatenate([b.rows for b in bodies]))
