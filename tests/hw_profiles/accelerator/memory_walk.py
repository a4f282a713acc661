"""A product behind a DMA, walked through step by step and transfer by transfer: what `memory_system.timed` must say.

start(v) = max(done(v-1), what v waits for + 1)      done(v) = start(v) + ceil(w / r)
begin(t) = max(end(t-1), done of what step t needs + 1)      end(t) = begin(t) + its cycles
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from protofleet.hw_profiles.accelerator.memory_system import Behind, Plan, Timed, plan

__all__ = ["walked", "walked_stream"]

_SUM_BYTES = 4


@dataclass(frozen=True)
class _Load:
    """An operand's part on its way in: bytes, and how many steps must have ended before."""

    left: bool
    size: int
    after: int


@dataclass(frozen=True)
class _Step:
    """A step: cycles, what it needs, what leaves after it.

    Attributes:
        fed: cycles until its last operand is fed; `cycles` until it ends.
        partials: bytes of partial sums that come back for it.
        stores: bytes that leave after it, `whole` unless they are partial sums.
        free_after: how many stores must be done before it begins.
    """

    fed: int
    cycles: int
    loads: tuple[_Load, ...]
    partials: int
    stores: int
    whole: bool
    free_after: int


def walked(m: int, n: int, k: int, behind: Behind) -> Timed:
    """Cycles and bytes of (M, K) times (K, N)."""
    chosen = plan(m, n, k, behind)
    if behind.dataflow == "is":
        m, n = n, m
    steps = list(_steps_os(m, n, k, behind, chosen) if behind.dataflow == "os" else _steps_ws(m, n, k, behind, chosen))
    channel = _Channel(steps, behind)
    end = fed = 0
    for number, step in enumerate(steps):
        begin = max(end, channel.ready(number, step) + 1)
        end, fed = begin + step.cycles, begin + step.fed
        channel.ends.append(end)
        channel.complete.append(_complete(end, fed, behind))
    channel.finish()
    compute = sum(step.cycles for step in steps)
    loads = [load for step in steps for load in step.loads]
    left, top = sum(x.size for x in loads if x.left), sum(x.size for x in loads if not x.left)
    partials = sum(step.partials for step in steps) + sum(step.stores for step in steps if not step.whole)
    return Timed(
        compute,
        end - compute,
        channel.done - end,
        *((top, left) if behind.dataflow == "is" else (left, top)),
        written_bytes=sum(step.stores for step in steps if step.whole),
        spilled_bytes=partials,
    )


def _complete(end: int, fed: int, behind: Behind) -> int:
    """The cycle in which a step's results are all in their buffer."""
    if behind.dataflow == "os":
        return end + behind.rows + 1  # captured, then a row a cycle
    return fed + behind.rows + behind.cols - 1  # the last sum falls out of the last column


class _Channel:
    """The DMA: one transfer at a time, in the fixed order.

    Loads are in the order in which steps need them. One that may begin when step t has ended goes before the results of
    step t; partial sums of step t+2 follow these, into the same half.
    """

    def __init__(self, steps: list[_Step], behind: Behind) -> None:
        self.steps, self.rate = steps, behind.bytes_per_cycle
        self.done = 1  # the cycle in which the last transfer is whole; one passes before the first
        self.ends: list[int] = []
        self.complete: list[int] = []
        self.loads = [load for step in steps for load in step.loads]
        self.stores = [number for number, step in enumerate(steps) if step.stores]
        self.load_done: list[int] = []
        self.store_done: list[int] = []
        self.partial_done: dict[int, int] = {}
        self.needed = 0

    def ready(self, number: int, step: _Step) -> int:
        """When all that this step needs is there; 0 for nothing."""
        self.needed += len(step.loads)
        while (
            len(self.load_done) < self.needed
            or len(self.store_done) < step.free_after
            or (step.partials and number not in self.partial_done)
        ):
            self._next()
        return max(
            self.load_done[self.needed - 1],
            self.store_done[step.free_after - 1] if step.free_after else 0,
            self.partial_done.get(number, 0),
        )

    def finish(self) -> None:
        """All that is left."""
        while len(self.load_done) < len(self.loads) or len(self.store_done) < len(self.stores):
            self._next()

    def _next(self) -> None:
        load = self.loads[len(self.load_done)] if len(self.load_done) < len(self.loads) else None
        store = self.stores[len(self.store_done)] if len(self.store_done) < len(self.stores) else None
        if load is not None and (store is None or load.after <= store + 1):
            self._move(load.size, self.ends[load.after - 1] if load.after else 0)
            self.load_done.append(self.done)
            return
        assert store is not None
        self._move(self.steps[store].stores, self.complete[store])
        self.store_done.append(self.done)
        if store + 2 < len(self.steps) and self.steps[store + 2].partials:
            self._move(self.steps[store + 2].partials, 0)
            self.partial_done[store + 2] = self.done

    def _move(self, size: int, after: int) -> None:
        cycles = -(-size * self.rate.denominator // self.rate.numerator)
        self.done = max(self.done, after + 1) + cycles


def _live(tile: int, number: int, size: int) -> int:
    """How much of tile `number` lies within `size`."""
    return min(tile, size - tile * number)


def _steps_os(m: int, n: int, k: int, behind: Behind, chosen: Plan) -> Iterator[_Step]:
    rows, cols, each = behind.rows, behind.cols, behind.operand_bytes
    step = block_first = block_before = group_first = group_before = fold = 0
    for base in range(0, chosen.kept_tiles, chosen.block):
        block_before, block_first = block_first, step
        for streamed in range(chosen.streamed_tiles):
            group_before, group_first = group_first, step
            for kept in range(base, min(base + chosen.block, chosen.kept_tiles)):
                down, across = (kept, streamed) if chosen.keeps_left else (streamed, kept)
                live_rows, live_cols = _live(rows, down, m), _live(cols, across, n)
                sizes = (live_rows, live_cols) if chosen.keeps_left else (live_cols, live_rows)
                for part in range(chosen.chunks):
                    length, last = _live(chosen.chunk, part, k), part == chosen.chunks - 1
                    before = max(step - 1, 0)
                    loads = []
                    if streamed == 0 or chosen.reloads:
                        after = before if chosen.reloads else block_before
                        loads.append(_Load(chosen.keeps_left, sizes[0] * length * each, after))
                    if kept == base:
                        after = before if chosen.chunks > 1 else group_before
                        loads.append(_Load(not chosen.keeps_left, sizes[1] * length * each, after))
                    yield _Step(
                        length,
                        length + (rows + cols - 2) * last,
                        tuple(loads),
                        0,
                        live_rows * live_cols * behind.result_bytes * last,
                        True,
                        max(fold - 1, 0),
                    )
                    step += 1
                fold += 1


def _steps_ws(m: int, n: int, k: int, behind: Behind, chosen: Plan) -> Iterator[_Step]:
    rows, cols, each = behind.rows, behind.cols, behind.operand_bytes
    step = group_first = group_before = fold_first = fold_before = 0
    stored = stored_before = free_after = 0
    for base in range(0, chosen.kept_tiles, chosen.block):
        free_after, stored_before = stored_before, stored
        for inner in range(chosen.streamed_tiles):
            group_before, group_first = group_first, step
            final = inner == chosen.streamed_tiles - 1
            for outer in range(base, min(base + chosen.block, chosen.kept_tiles)):
                fold_before, fold_first = fold_first, step
                live_rows, live_cols = _live(rows, inner, k), _live(cols, outer, n)
                for part in range(chosen.chunks):
                    length, last = _live(chosen.chunk, part, m), part == chosen.chunks - 1
                    loads = [_Load(False, live_rows * live_cols * each, fold_before)] if part == 0 else []
                    if base == 0 if chosen.keeps_left else outer == base:
                        after = max(step - 1, 0) if chosen.chunks > 1 else group_before
                        loads.append(_Load(True, live_rows * length * each, 0 if chosen.keeps_left else after))
                    leaves = (length if chosen.spills else m) * live_cols
                    stores = chosen.spills or (final and last)
                    yield _Step(
                        rows * (part == 0) + length,
                        rows * (part == 0) + length + (rows + cols - 2) * last,
                        tuple(loads),
                        length * live_cols * _SUM_BYTES if chosen.spills and inner else 0,
                        leaves * (behind.result_bytes if final else _SUM_BYTES) * stores,
                        final,
                        max(step - 1, 0) if chosen.spills else free_after,
                    )
                    step += 1
                    stored += stores


def walked_stream(read: int, written: int, cycles: int, half: int, rate) -> int:
    """Cycles of a layer that passes by the special unit in equal parts of at most half a buffer."""
    parts = max(1, -(-max(read, written) // half))
    moves = [math.ceil(math.ceil(size / parts) / rate) for size in (read, written)]
    ends, outs, dma = [], [], 1 + moves[0]
    there = dma
    for part in range(parts):
        before = ends[-1] if ends else 0
        begin = max(before, there + 1, outs[part - 2] + 1 if part > 1 else 0)
        if part + 1 < parts and moves[0]:
            dma = there = max(dma, before + 1) + moves[0]
        if part and moves[1]:
            dma = max(dma, before + 1) + moves[1]
        outs += [dma] if part else []
        ends.append(begin + -(-cycles // parts))
    return max(dma, ends[-1] + 1) + moves[1]
