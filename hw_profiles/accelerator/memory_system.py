"""One product behind a DMA of a stated bandwidth: cycles, stalls and bytes, as the Verilog of `rtl/` counts them.

A product of (M, K) by (K, N) is computed in *steps*: a fold, or a part of it where what streams by is longer than half
a buffer. Each buffer has two halves: the array reads one while the DMA fills the other, and results leave one while
the array writes the other. The DMA moves one thing at a time, in an order that is fixed beforehand; a transfer of w
bytes at r bytes a cycle takes ceil(w / r) cycles. `plan` says what stays on the chip, `timed` when each step begins:

    start(v) = max(done(v-1), what v waits for + 1)      done(v) = start(v) + ceil(w / r)
    begin(t) = max(end(t-1), done of what step t needs + 1)      end(t) = begin(t) + its cycles

`memory_timing` solves these for many products side by side. docs/accelerator-memory.md has the equations; `python -m
benchmarks.hardware.rtl_memory` compares them with the Verilog, simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from types import MappingProxyType

import numpy as np

from protofleet.contract.errors import UsageError
from protofleet.contract.names import named
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.memory_timing import Family, Lanes, OsChunks, OsTiles, Stationary, run

__all__ = ["Behind", "Buffers", "Plan", "Timed", "buffers_of", "least_half_bytes", "plan", "timed", "timed_all"]

_SUM_BYTES = 4
_ONE = Fraction(1)
_FAMILIES: tuple[type[Family], ...] = (OsTiles, OsChunks, Stationary)


@dataclass(frozen=True)
class Buffers:
    """Numbers that one half of each buffer holds in a bank: of operands by row and by column, of sums by column."""

    left: int
    top: int
    results: int


@dataclass(frozen=True)
class Behind:
    """An array behind a DMA.

    Attributes:
        buffers: of one half.
        bytes_per_cycle: of the DMA, both ways together.
        operand_bytes, result_bytes: of one number off-chip; a partial sum has 4.
    """

    rows: int
    cols: int
    dataflow: str
    buffers: Buffers
    bytes_per_cycle: Fraction
    operand_bytes: int = 1
    result_bytes: int = 4


def buffers_of(buffer_bytes: int, rows: int, cols: int, operand_bytes: int = 1) -> Buffers:
    """Halves of `buffer_bytes` each (`simulate.Array.buffer_bytes`), cut into a bank for each row and column."""
    return Buffers(
        buffer_bytes // (rows * operand_bytes),
        buffer_bytes // (cols * operand_bytes),
        buffer_bytes // (cols * _SUM_BYTES),
    )


def least_half_bytes(behind: Behind) -> int:
    """Bytes that half a buffer has to have for a single fold."""
    rows, cols, each = behind.rows, behind.cols, behind.operand_bytes
    if behind.dataflow == "os":
        return max(rows * each, cols * each, rows * cols * _SUM_BYTES)
    return max(rows * each, rows * cols * each, cols * _SUM_BYTES)


@dataclass(frozen=True)
class Plan:
    """The order of a product's folds, and what stays on the chip meanwhile.

    Folds are three loops: blocks of `block` kept tiles; in each block all streamed tiles; for each all kept tiles of
    the block. In ws (and `is`, which is ws of the transposed product) a kept tile is a column block of results.

    Attributes:
        chunk: numbers of what streams by in one step.
        keeps_left: os: tiles of the left operand are kept, else of the top one; ws: all of the left operand stays.
        reloads: os: neither operand has a tile that fits.
        spills: ws: results leave after each step, since a column block of them does not fit.
    """

    kept_tiles: int
    streamed_tiles: int
    block: int
    chunk: int
    chunks: int
    keeps_left: bool = False
    reloads: bool = False
    spills: bool = False


@dataclass(frozen=True)
class Timed:
    """What a product takes. `cycles` are all, from the first transfer to the last: computing, stalls, and the tail in
    which the last results leave.

    Attributes:
        read_bytes: of both operands; `written_bytes` of results; `spilled_bytes` of partial sums, out and back.
    """

    compute_cycles: int
    stall_cycles: int
    tail_cycles: int
    first_bytes: int
    second_bytes: int
    written_bytes: int
    spilled_bytes: int

    @property
    def cycles(self) -> int:
        """Cycles from the first transfer to the last."""
        return self.compute_cycles + self.stall_cycles + self.tail_cycles

    @property
    def dram_bytes(self) -> int:
        """All bytes that the DMA moves."""
        return self.first_bytes + self.second_bytes + self.written_bytes + self.spilled_bytes


def plan(m: int, n: int, k: int, behind: Behind) -> Plan:
    """What stays on the chip, so that the fewest bytes are read.

    Raises:
        UsageError: an unknown dataflow, or a buffer that does not hold what a single fold has to have.
    """
    order = named(_PLANS, behind.dataflow, "dataflow behind a DMA")
    has, rows = behind.buffers, behind.rows
    least = Buffers(1, 1, rows) if behind.dataflow == "os" else Buffers(1, rows, 1)
    for name in ("left", "top", "results"):
        if getattr(has, name) < getattr(least, name):
            raise UsageError(
                f"half a buffer ({name})",
                expected=f"{getattr(least, name)} numbers a bank",
                got=getattr(has, name),
                hint="more on-chip memory",
            )
    return order(m, n, k, behind)


def _plan_os(m: int, n: int, k: int, behind: Behind) -> Plan:
    has = behind.buffers
    left_tiles, top_tiles = -(-m // behind.rows), -(-n // behind.cols)
    if has.left < k and has.top < k:
        chunk = min(has.left, has.top)
        return Plan(top_tiles, left_tiles, 1, chunk, -(-k // chunk), reloads=True)
    choices = []
    for keeps_left, kept, streamed, tiles, others, kept_size, streamed_size in (
        (False, has.top, has.left, top_tiles, left_tiles, k * n, m * k),
        (True, has.left, has.top, left_tiles, top_tiles, m * k, k * n),
    ):
        if kept >= k:
            block = min(kept // k, tiles) if streamed >= k else 1
            chunk = min(k, streamed)
            read = kept_size + streamed_size * -(-tiles // block)
            choices.append((read, Plan(tiles, others, block, chunk, -(-k // chunk), keeps_left)))
    return min(choices, key=lambda each: each[0])[1]


def _plan_ws(m: int, n: int, k: int, behind: Behind) -> Plan:
    has = behind.buffers
    inner, outer = -(-k // behind.rows), -(-n // behind.cols)
    spills, stays = m > has.results, inner * m <= has.left
    chunk = min(m, has.results) if spills else m
    chunk = chunk if stays else min(chunk, has.left)
    block = min(outer, has.results // m) if chunk == m and not stays else 1
    return Plan(outer, inner, block, chunk, -(-m // chunk), keeps_left=stays, spills=spills)


_PLANS: Mapping[str, Callable[[int, int, int, Behind], Plan]] = MappingProxyType(
    {"os": _plan_os, "ws": _plan_ws, "is": lambda m, n, k, behind: _plan_ws(n, m, k, behind)}
)


def timed(m: int, n: int, k: int, behind: Behind) -> Timed:
    """Cycles and bytes of (M, K) times (K, N).

    Raises:
        UsageError: as `plan`.
    """
    return timed_all([(m, n, k, behind)])[0]


def timed_all(products: Sequence[tuple[int, int, int, Behind]]) -> list[Timed]:
    """Cycles and bytes of many products, each (m, k) by (k, n) behind a DMA of its own: hundreds in little more time
    than one.

    Raises:
        UsageError: as `plan`.
    """
    shapes: dict[Behind, int] = {}
    known: dict[int, tuple[int, int, int]] = {}  # by a Behind's identity: many products have the same one
    placed: dict[tuple[int, int, int, int], _Placed] = {}
    order, rates = [], []
    for m, n, k, behind in products:
        if id(behind) not in known:
            shape = shapes.setdefault(replace(behind, bytes_per_cycle=_ONE), len(shapes))
            known[id(behind)] = (shape, behind.bytes_per_cycle.numerator, behind.bytes_per_cycle.denominator)
        shape, *rate = known[id(behind)]
        key = (m, n, k, shape)
        if key not in placed:
            placed[key] = _Placed.of(m, n, k, behind, len(placed))
        order.append(placed[key])
        rates.append(rate)
    if not order:
        return []
    table, speed = np.array([each.lane for each in placed.values()], dtype=np.int64).T, np.array(rates).T
    place = np.array([each.number for each in order])
    kinds = np.array([_FAMILIES.index(each.family) for each in placed.values()])[place]
    ends, dones = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    for kind, family in enumerate(_FAMILIES):
        which = np.flatnonzero(kinds == kind)
        if len(which):
            own = table[:, place[which]]
            lanes = Lanes(*own[:12], *(own[12:14] > 0), *own[14:], *speed[:, which])
            ends[which], dones[which] = run(family, lanes)
    return [
        Timed(each.cycles, end - each.cycles, done - end, *each.moved)
        for each, end, done in zip(order, ends.tolist(), dones.tolist(), strict=True)
    ]


@dataclass(frozen=True)
class _Placed:
    """A product on an array, whatever the DMA's rate: its loops, its cycles computing, its bytes in `Timed`'s order."""

    number: int
    family: type[Family]
    lane: tuple[int, ...]
    cycles: int
    moved: tuple[int, int, int, int]

    @classmethod
    def of(cls, m: int, n: int, k: int, behind: Behind, number: int) -> _Placed:
        chosen = plan(m, n, k, behind)
        folds, cycles = DATAFLOWS[behind.dataflow].folds(m, n, k, behind.rows, behind.cols)
        os = OsTiles if chosen.chunks == 1 else OsChunks
        family = os if behind.dataflow == "os" else Stationary
        lane, moved = _lane(m, n, k, behind, chosen), _moved(m, n, k, behind, chosen)
        return cls(number, family, lane, folds * cycles, moved)


def _lane(m: int, n: int, k: int, behind: Behind, chosen: Plan) -> tuple[int, ...]:
    """The product's numbers in `Lanes`, in the order of its fields, without the rate."""
    rows, cols = behind.rows, behind.cols
    if behind.dataflow == "os":
        sides, length, stays = ((cols, n), (rows, m)), k, chosen.reloads
        sides = sides[::-1] if chosen.keeps_left else sides
    else:
        m, n = (m, n) if behind.dataflow == "ws" else (n, m)
        sides, length, stays = ((cols, n), (rows, k)), m, chosen.keeps_left
    return (
        *sides[0], *sides[1], length, chosen.chunk, chosen.chunks, chosen.block,
        -(-chosen.kept_tiles // chosen.block), chosen.streamed_tiles, rows, rows + cols - 2, stays, chosen.spills,
        behind.operand_bytes, behind.result_bytes,
    )  # fmt: skip


def _moved(m: int, n: int, k: int, behind: Behind, chosen: Plan) -> tuple[int, int, int, int]:
    """Bytes of the first operand, of the second, of results, of partial sums."""
    blocks, inner = -(-chosen.kept_tiles // chosen.block), chosen.streamed_tiles
    spilled = 0
    if behind.dataflow == "os":
        left, top = (1, blocks) if chosen.keeps_left else (blocks, 1)
        left, top = (chosen.kept_tiles, inner) if chosen.reloads else (left, top)
    else:
        left, top = (1 if chosen.keeps_left else blocks), 1
        left, top = (left, top) if behind.dataflow == "ws" else (top, left)
        spilled = 2 * (inner - 1) * m * n * _SUM_BYTES * chosen.spills
    each = behind.operand_bytes
    return m * k * left * each, k * n * top * each, m * n * behind.result_bytes, spilled
