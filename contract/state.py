"""The global state: what the aggregator publishes and every device starts its next round from.

It holds prototypes (from rounds of FedProto, FedHP or FedPR), soft predictions beside them (FedHKD), and a head (from
an FFC round): whichever there are. It travels as `GlobalPart` messages, each with some class rows, so that every part
fits the message limit and is useful to a decoder by itself; a `GlobalCollector` on the device puts the parts of one
version together, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from contract.errors import WireError
from contract.messages import ClassRows, GlobalPart, RowKind

__all__ = ["GlobalCollector", "GlobalState"]

_PART_OVERHEAD_BYTES = 96  # more than the CBOR around a part's rows ever takes


@dataclass(frozen=True, eq=False)
class GlobalState:
    """One version of what comes back to the devices.

    Attributes:
        version: grows by one with each publication; 0 is the state before the first round, which is empty.
        round: the round it came out of.
        prototypes: (K, D) rows of the classes that have a global prototype, or None.
        head: (C, D) rows of the linear head on unit features, or (C, D') where those are projected, or None.
        soft: (K, C) rows of the global soft predictions, or None.
    """

    run: bytes
    version: int
    round: int
    prototypes: ClassRows | None = None
    head: ClassRows | None = None
    soft: ClassRows | None = None

    def parts(self, limit_bytes: int) -> list[GlobalPart]:
        """The state as messages of at most `limit_bytes` each when encoded as f32.

        Raises:
            WireError: when a single row is larger than the limit.
        """
        slices: list[tuple[RowKind, ClassRows]] = []
        for kind in get_args(RowKind):
            rows = getattr(self, kind)
            if rows is not None:
                slices += [(kind, part) for part in _cut(rows, limit_bytes)]
        return [
            GlobalPart(self.run, self.version, self.round, index, len(slices), kind, body)
            for index, (kind, body) in enumerate(slices)
        ]

    def dense_prototypes(self, classes: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Prototypes (C, D) and their mask (C,) as the training step takes them: zero where there is none."""
        return _dense(self.prototypes, classes, width)

    def dense_soft(self, classes: int) -> NDArray[np.float32]:
        """Soft predictions (C, C) as the training step takes them: zero where there are none."""
        return _dense(self.soft, classes, classes)[0]


@dataclass
class GlobalCollector:
    """Collects the parts of the newest version; forgets older ones and those of another run."""

    _run: bytes = b""
    _version: int = 0
    _parts: dict[int, GlobalPart] = field(default_factory=dict)

    def add(self, part: GlobalPart) -> GlobalState | None:
        """The state when `part` completes its version, else None.

        Raises:
            WireError: when parts of one version contradict each other.
        """
        if (part.run, part.version) != (self._run, self._version):
            if part.run == self._run and part.version < self._version:
                return None
            self._run, self._version, self._parts = part.run, part.version, {}
        elif any((p.parts, p.round) != (part.parts, part.round) for p in self._parts.values()):
            raise WireError(
                "global state", expected="parts of one count and round", got=f"{part.parts} and {part.round}"
            )
        self._parts[part.part] = part
        if len(self._parts) < part.parts:
            return None
        whole = [self._parts[index] for index in range(part.parts)]
        rows = {kind: _join([p.body for p in whole if p.kind == kind]) for kind in get_args(RowKind)}
        return GlobalState(part.run, part.version, part.round, **rows)


def _dense(rows: ClassRows | None, classes: int, width: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if rows is None:
        return np.zeros((classes, width), np.float32), np.zeros(classes, np.float32)
    dense, present = rows.dense(classes, width)
    return dense.astype(np.float32), present.astype(np.float32)


def _cut(rows: ClassRows, limit_bytes: int) -> list[ClassRows]:
    row_bytes = rows.rows.shape[1] * 4 + 2
    per_part = (limit_bytes - _PART_OVERHEAD_BYTES) // row_bytes
    if per_part < 1:
        raise WireError(
            "global state", expected=f"a message limit of {row_bytes + _PART_OVERHEAD_BYTES} bytes", got=limit_bytes
        )
    starts = range(0, max(len(rows.classes), 1), per_part)
    return [ClassRows(rows.classes[i : i + per_part], rows.rows[i : i + per_part]) for i in starts]


def _join(bodies: list[ClassRows]) -> ClassRows | None:
    if not bodies:
        return None
    if len({body.rows.shape[1] for body in bodies}) > 1:
        raise WireError("global state", expected="rows of one width", got="several")
    return ClassRows(np.concatenate([b.classes for b in bodies]), np.concatenate([b.rows for b in bodies]))
