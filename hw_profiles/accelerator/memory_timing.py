"""When each step of a product begins behind its DMA, of many products side by side.

1. A product's steps are three loops: blocks, in each block groups, in each group steps (`memory_system.plan`). A family
   of loops says, for the step at (block, group, step) of each product, what the DMA does before and beside it, in
   cycles: `Beats`.
2. All that later times depend on are four: `end` of the last step, `done` of the DMA's last transfer, `stored`, which
   results that have to leave first are out, and `loaded`, when the next operands are there. A step moves them on by
   maxima and sums.
3. So steps that are alike come to a rhythm: over one step or two all four grow by the same, and what does not grow is
   not asked for. Then the steps up to the last three of the loop are added at once. Groups and blocks likewise.

Nothing is approximated: tests hold the result beside a walk through every step, and beside the Verilog's counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Lanes", "OsChunks", "OsTiles", "Stationary", "Streams", "run"]

_Ints = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_SUM_BYTES = 4
_NEVER = -(1 << 60)
_END, _DONE, _STORED, _LOADED = range(4)


@dataclass(frozen=True)
class Lanes:
    """What many products are, a number of each, (N,).

    Attributes:
        tile, size: cells along the tiles of the inner loop, and what they cut: of os the kept operand's, else columns.
        tile_2, size_2: along the tiles of the groups: of os the streamed operand's, else rows.
        length: what streams by in a fold: K in os, M in ws; `chunk` of it in one step.
        block: tiles of the inner loop in a block; `groups` tiles of the second.
        skew: rows + cols - 2.
        resident: ws: all of the left operand stays. In os: neither operand does.
    """

    tile: _Ints
    size: _Ints
    tile_2: _Ints
    size_2: _Ints
    length: _Ints
    chunk: _Ints
    chunks: _Ints
    block: _Ints
    blocks: _Ints
    groups: _Ints
    rows: _Ints
    skew: _Ints
    resident: _Flags
    spills: _Flags
    operand_bytes: _Ints
    result_bytes: _Ints
    rate: _Ints
    per: _Ints

    def chosen(self, which: Any) -> Lanes:
        """Some of them."""
        return replace(self, **{each.name: getattr(self, each.name)[which] for each in fields(self)})


@dataclass(frozen=True)
class Beats:
    """What happens at one step of each product, in cycles; 0 where nothing does.

    Attributes:
        load: operands that the DMA brings from the end of the step before on; `then` what follows at once.
        store: results, and partial sums that come back, from `wait` cycles after the end of the step before on.
        marks: whether these results are what a later step waits for.
        cycles: of the step.
        needs_load, needs_store: whether the step waits for the operands, for the results.
        more: this step's own operand, in a row behind those of the group; 0 for none.
    """

    load: _Ints
    then: _Ints
    store: _Ints
    wait: _Ints
    marks: _Flags
    cycles: _Ints
    needs_load: _Flags
    needs_store: _Flags
    more: _Ints


class Family(ABC):
    """Loops of one kind."""

    def __init__(self, lanes: Lanes) -> None:
        self.of = lanes

    @abstractmethod
    def start(self) -> tuple[_Ints, _Ints]:
        """When the first step's operands are there, and when the DMA is done with what follows them at once."""

    @abstractmethod
    def beats(self, b: _Ints, g: _Ints, s: _Ints) -> Beats:
        """What happens at these steps."""

    @abstractmethod
    def leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        """Cycles of the results that leave after these steps, 0 for none, and how long after their end that begins."""

    def steps(self, b: _Ints) -> _Ints:
        """Steps in a group of this block."""
        of = self.of
        tiles = -(-of.size // of.tile)
        return np.where(of.chunks > 1, of.chunks, np.minimum(of.block, tiles - b * of.block))

    def transfer(self, size: _Ints) -> _Ints:
        """Cycles of so many bytes."""
        return -(-size * self.of.per // self.of.rate)

    def wide(self, b: _Ints, s: _Ints) -> _Ints:
        """Cells of the inner loop's tile that are in use."""
        of = self.of
        number = b * of.block + np.where(of.chunks > 1, 0, s)
        return np.minimum(of.tile, of.size - of.tile * number)

    def high(self, g: _Ints) -> _Ints:
        """Cells of the group's tile that are in use."""
        return np.minimum(self.of.tile_2, self.of.size_2 - self.of.tile_2 * g)

    def long(self, s: _Ints) -> _Ints:
        """Numbers that stream by in this step."""
        of = self.of
        return np.where(of.chunks > 1, np.minimum(of.chunk, of.length - of.chunk * s), of.length)

    def after(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints, _Ints]:
        """The next step; beyond the last one a block that is not there."""
        s = s + 1
        over = s >= self.steps(b)
        s, g = np.where(over, 0, s), g + over
        over = g >= self.of.groups
        return b + over, np.where(over, 0, g), s

    def before(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints, _Ints]:
        """The step before; before the first one a block of -1."""
        first = s == 0
        g = g - first
        b_before = b - (g < 0)
        last = self.steps(b_before) - 1
        return b_before, np.where(g < 0, self.of.groups - 1, g), np.where(first, last, s - 1)

    def before_leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        """`leaves` of the step before; nothing before the first."""
        before = self.before(b, g, s)
        cycles, wait = self.leaves(*before)
        return np.where(before[0] < 0, 0, cycles), wait

    def last(self) -> tuple[_Ints, _Ints]:
        """`leaves` of the very last step."""
        b = self.of.blocks - 1
        return self.leaves(b, self.of.groups - 1, self.steps(b) - 1)


class OsTiles(Family):
    """os, where a fold is one step: a group's steps are the kept tiles of a block, beside one streamed tile."""

    def kept(self, b: _Ints, s: _Ints) -> _Ints:
        return self.transfer(self.wide(b, s) * self.of.length * self.of.operand_bytes)

    def streamed(self, g: _Ints) -> _Ints:
        return self.transfer(self.high(g) * self.of.length * self.of.operand_bytes)

    def other_kept(self, b: _Ints) -> _Ints:
        """All kept tiles of a block but the first."""
        steps = self.steps(b)
        whole = self.transfer(self.of.tile * self.of.length * self.of.operand_bytes)
        return np.where(steps > 1, (steps - 2) * whole + self.kept(b, steps - 1), 0)

    def start(self) -> tuple[_Ints, _Ints]:
        zero = np.zeros_like(self.of.tile)
        loaded = 1 + self.kept(zero, zero) + self.streamed(zero)
        return loaded, loaded + self.other_kept(zero)

    def leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        return self.transfer(self.wide(b, s) * self.high(g) * self.of.result_bytes), self.of.rows + 1

    def beats(self, b: _Ints, g: _Ints, s: _Ints) -> Beats:
        of = self.of
        first, ends, more = s == 0, g == of.groups - 1, b + 1 < of.blocks
        load = self.streamed(np.where(ends, 0, g + 1))
        first_kept = self.kept(b + 1, np.zeros_like(b))
        load = load + np.where(more & (of.groups == 1), first_kept, 0)
        then = np.where(more & (of.groups > 1) & (g == of.groups - 2), first_kept, 0)
        then = then + np.where(more & ends, self.other_kept(b + 1), 0)
        comes = first & (more | ~ends)
        store, wait = self.before_leaves(b, g, s)
        own = np.where((g == 0) & ~first, self.kept(b, s), 0)
        always = np.ones_like(first)
        cycles = of.length + of.skew
        return Beats(
            np.where(comes, load, 0), np.where(comes, then, 0), store, wait, store > 0, cycles, first, always, own
        )


class OsChunks(Family):
    """os, where an operand comes in chunks: a group is a fold, a step a chunk of it."""

    def kept(self, b: _Ints, s: _Ints) -> _Ints:
        return self.transfer(self.wide(b, s) * self.long(s) * self.of.operand_bytes)

    def streamed(self, g: _Ints, s: _Ints) -> _Ints:
        return self.transfer(self.high(g) * self.long(s) * self.of.operand_bytes)

    def start(self) -> tuple[_Ints, _Ints]:
        zero = np.zeros_like(self.of.tile)
        loaded = 1 + self.kept(zero, zero) + self.streamed(zero, zero)
        return loaded, loaded + np.where(self.of.resident, 0, self.kept(zero, zero + 1))

    def leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        cycles = self.transfer(self.wide(b, s) * self.high(g) * self.of.result_bytes)
        return np.where(s == self.of.chunks - 1, cycles, 0), self.of.rows + 1

    def beats(self, b: _Ints, g: _Ints, s: _Ints) -> Beats:
        of = self.of
        (b1, g1, s1), (b2, g2, s2) = (one := self.after(b, g, s)), self.after(*one)
        load = self.streamed(g1, s1) + np.where(of.resident, self.kept(b1, s1), 0)
        then = np.where((b2 < of.blocks) & ~of.resident & (g2 == 0), self.kept(b2, s2), 0)
        store, wait = self.before_leaves(b, g, s)
        cycles = self.long(s) + np.where(s == of.chunks - 1, of.skew, 0)
        always = np.ones(len(b), dtype=np.bool_)
        return Beats(
            np.where(b1 < of.blocks, load, 0), then, store, wait, store > 0, cycles, always, s == 0, np.zeros_like(b)
        )


class Stationary(Family):
    """ws, and `is`, which is ws of the transposed product: groups are tiles of the contraction."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__(lanes)
        self.parts = lanes.chunks > 1
        self.whole = self.parts & lanes.resident  # a fold's chunks of the left operand come together, and stay

    def top(self, b: _Ints, g: _Ints, s: _Ints) -> _Ints:
        return self.transfer(self.high(g) * self.wide(b, s) * self.of.operand_bytes)

    def left(self, g: _Ints, s: _Ints) -> _Ints:
        return self.transfer(self.high(g) * self.long(s) * self.of.operand_bytes)

    def other_left(self, g: _Ints) -> _Ints:
        """All chunks of a fold's left operand but the first."""
        last, first = self.of.chunks - 1, np.zeros_like(g)
        return np.where(last > 0, (last - 1) * self.left(g, first) + self.left(g, last), 0)

    def start(self) -> tuple[_Ints, _Ints]:
        zero = np.zeros_like(self.of.tile)
        loaded = 1 + self.top(zero, zero, zero) + self.left(zero, zero)
        return loaded, loaded + np.where(self.whole, self.other_left(zero), 0)

    def leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        of = self.of
        final, last = g == of.groups - 1, ~self.parts | (s == of.chunks - 1)
        numbers = np.where(of.spills, self.long(s), of.length) * self.wide(b, s)
        cycles = self.transfer(numbers * np.where(final, of.result_bytes, _SUM_BYTES))
        return np.where(of.spills | (final & last), cycles, 0), np.where(last, 1, of.skew + 1)

    def beats(self, b: _Ints, g: _Ints, s: _Ints) -> Beats:
        of, parts, whole = self.of, self.parts, self.whole
        first = s == 0
        (b1, g1, s1), (b2, g2, s2) = (one := self.after(b, g, s)), self.after(*one)
        # a step ahead: the left operand's part, and the weights where they are not there yet
        brings_left = np.where(of.resident, b1 == 0, parts | (s1 == 0))
        load = np.where(brings_left, self.left(g1, s1), 0) + np.where(parts, 0, self.top(b1, g1, s1))
        load = np.where(b1 < of.blocks, load, 0)
        then = np.where(parts & (b2 < of.blocks) & (s2 == 0), self.top(b2, g2, s2), 0)
        # a fold ahead: its weights, and in the first block all its chunks
        over = g + 1 >= of.groups
        b3, g3 = b + over, np.where(over, 0, g + 1)
        fold = self.top(b3, g3, np.zeros_like(b)) + np.where(b3 == 0, self.left(g3, np.zeros_like(b)), 0)
        comes = first & (b3 < of.blocks)
        load = np.where(whole, np.where(comes, fold, 0), load)
        then = np.where(whole, np.where(comes & (b3 == 0), self.other_left(g3), 0), then)
        store, wait = self.before_leaves(b, g, s)
        back = of.spills & (b1 < of.blocks) & (g1 > 0) & (store > 0)
        store = store + np.where(back, self.transfer(self.long(s1) * self.wide(b1, s1) * _SUM_BYTES), 0)
        cycles = np.where(first | ~parts, of.rows, 0) + self.long(s)
        cycles = cycles + np.where(~parts | (s == of.chunks - 1), of.skew, 0)
        waits = of.spills | (first & (g == 0))
        own = np.where(whole & (b == 0) & ~first, self.left(g, s), 0)
        return Beats(load, then, store, wait, (store > 0) & waits, cycles, ~whole | first, waits, own)


class Streams(Family):
    """Numbers that pass by a unit beside the array: in `chunks` equal parts, each of `size` bytes in, `size_2` out,
    and `length` cycles."""

    def steps(self, b: _Ints) -> _Ints:
        return self.of.chunks

    def start(self) -> tuple[_Ints, _Ints]:
        loaded = 1 + self.transfer(self.of.size)
        return loaded, loaded

    def leaves(self, b: _Ints, g: _Ints, s: _Ints) -> tuple[_Ints, _Ints]:
        return self.transfer(self.of.size_2), np.zeros_like(b)

    def beats(self, b: _Ints, g: _Ints, s: _Ints) -> Beats:
        of = self.of
        always = np.ones(len(b), dtype=np.bool_)
        store, wait = self.before_leaves(b, g, s)
        load, nothing = np.where(s + 1 < of.chunks, self.transfer(of.size), 0), np.zeros_like(b)
        return Beats(load, nothing, store, wait, store > 0, of.length, always, always, nothing)


def run(kind: type[Family], lanes: Lanes) -> tuple[_Ints, _Ints]:
    """The cycle in which the last step ends, and that in which the last result is out, (N,) each."""
    count = len(lanes.tile)
    ends, dones = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    walk = _Walk(kind, lanes)
    while len(walk.where):
        walk.step()
        over = walk.b >= walk.family.of.blocks
        if over.any():
            family = kind(walk.family.of.chosen(over))
            cycles, wait = family.last()
            end, done = walk.state[_END, over], walk.state[_DONE, over]
            ends[walk.where[over]] = end
            dones[walk.where[over]] = np.maximum(done, end + wait + 1) + cycles
            walk.keep(~over)
    return ends, dones


class _Walk:
    """Products that are not done yet: where each is in its loops, its four times, and those of the two turns before."""

    def __init__(self, kind: type[Family], lanes: Lanes) -> None:
        self.kind, self.family = kind, kind(lanes)
        count = len(lanes.tile)
        self.where = np.arange(count)
        self.b, self.g, self.s = (np.zeros(count, dtype=np.int64) for _ in range(3))
        self.state = np.full((4, count), _NEVER)
        self.state[_END] = 0
        self.state[_LOADED], self.state[_DONE] = self.family.start()
        self.behind = np.zeros(count, dtype=np.int64)  # when a step's own operand is there
        self.slack = np.zeros((2, count), dtype=np.bool_)  # whether it was there in time, in the last steps
        self.turns = np.full(
            (3, 2, 4, count), _NEVER
        )  # of steps, groups, blocks: after the last turn and the one before

    def keep(self, which: _Flags) -> None:
        """Only these products from now on."""
        self.family = self.kind(self.family.of.chosen(which))
        self.where, self.b, self.g, self.s = (each[which] for each in (self.where, self.b, self.g, self.s))
        self.state, self.behind, self.slack = self.state[:, which], self.behind[which], self.slack[:, which]
        self.turns = self.turns[..., which]

    def step(self) -> None:
        """One step of each product, and all that can be added at once after it."""
        of, beats = self.family.of, self.family.beats(self.b, self.g, self.s)
        end, done, stored, loaded = self.state
        begin = np.where(beats.needs_load, np.maximum(end, loaded + 1), end)
        begin = np.where(beats.needs_store, np.maximum(begin, stored + 1), begin)
        self.behind = np.where(self.s == 0, loaded, self.behind) + beats.more
        own = beats.more > 0
        self.slack[1], self.slack[0] = self.slack[0], ~own | (self.behind + 1 <= begin)
        begin = np.where(own, np.maximum(begin, self.behind + 1), begin)
        loads = beats.load > 0
        loaded = np.where(loads, np.maximum(done, end + 1) + beats.load, loaded)
        done = np.where(loads, loaded + beats.then, done)
        stores = beats.store > 0
        done = np.where(stores, np.maximum(done, end + beats.wait + 1) + beats.store, done)
        stored = np.where(stores & beats.marks, done, stored)
        self.state = np.stack((begin + beats.cycles, done, stored, loaded))
        steps = self.family.steps(self.b)
        self.s = self._skip(0, self.s + 1, steps, np.ones(len(self.b), dtype=np.bool_), beats.more)
        over = self.s >= steps
        self.s = np.where(over, 0, self.s)
        self.g = self._skip(1, self.g + over, of.groups, over)
        over = self.g >= of.groups
        self.g = np.where(over, 0, self.g)
        self.b = self._skip(2, self.b + over, of.blocks, over)

    def _skip(self, level: int, at: _Ints, count: _Ints, turned: _Flags, more: _Ints | None = None) -> _Ints:
        """Where the loop of this level goes on. Its first two turns and its last three are never left out."""
        turned = turned & (at >= 3) & (at < count)
        if not turned.any():
            return at
        which = np.flatnonzero(turned)
        now, at_these, left = self.state[:, which], at[which], count[which] - 3 - at[which]
        moved = np.zeros_like(now)
        jumped = np.zeros_like(at_these)
        for period in (1, 2):
            grown = now - self.turns[level, period - 1][:, which]
            same = (at_these >= 3 + period) & (left >= period) & (jumped == 0)
            same &= ((grown == 0) | (grown == grown[_END])).all(axis=0)
            if more is not None:
                each = more[which] * period
                in_time = self.slack[:period, which].all(axis=0)
                same &= (each == 0) | (grown[_END] == each) | ((grown[_END] > each) & in_time)
            turns = np.where(same, left // period, 0)
            moved += grown * turns
            jumped += turns * period
        self.turns[level, 1][:, which] = self.turns[level, 0][:, which]
        self.turns[level, 0][:, which] = now
        self.state[:, which] = now + moved
        if more is not None:
            self.behind[which] += more[which] * jumped
        at = at.copy()
        at[which] += jumped
        return at
