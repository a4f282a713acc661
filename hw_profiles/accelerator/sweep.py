"""Many arrays on one chip: what each costs, and which no other beats.

1. `Axes` are the values to try; every combination is a point, unless its chip cannot hold, clock or feed the array
   (`chip.excess_of`) or its precision does not train what is asked.
2. A `Task` is what a method asks of the array at batch B: workloads that run one after the other.
3. A point's cycles and traffic are those of `simulate`, of all arrays of a task side by side: their products and their
   other layers are timed together, each distinct one once. A test holds both equal.
4. Energy is counted access by access (`access_energy`), memory is the task's peak, resources are the largest share of
   anything on the chip.
5. The front is of points that do the same: within one method, by a photo's time and energy, memory, and share.

SphereFed's published array stands beside the points, on no front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known
from protofleet.hw_profiles.accelerator.access_energy import energies
from protofleet.hw_profiles.accelerator.chip import Chip, Excess, Resources, excess_of, resources_of, share_of
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.layer_traffic import Stream, bytes_beside, stream_cycles
from protofleet.hw_profiles.accelerator.memory_system import timed_all
from protofleet.hw_profiles.accelerator.pareto import pareto_front
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.accelerator.systolic import Depthwise, map_gemm
from protofleet.hw_profiles.latency.precisions import ON_ARRAYS, PRECISIONS
from protofleet.hw_profiles.memory.liveness import peak_memory
from protofleet.hw_profiles.units import digits
from protofleet.hw_profiles.workload.model import Workload

__all__ = ["MOST_POINTS", "PUBLISHED", "Axes", "Point", "Refused", "Sweep", "Task", "sweep"]

MOST_POINTS = 50_000
PUBLISHED = Array()  # SphereFed's: 32 x 64 in floating point at 100 MHz on a VC707, appendix E
_Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Axes:
    """The values to try of each: bytes of on-chip memory, bytes a second of DDR."""

    rows: tuple[int, ...]
    cols: tuple[int, ...]
    dataflow: tuple[str, ...]
    precision: tuple[str, ...]
    sram_bytes: tuple[int, ...]
    dram_bytes_per_s: tuple[float, ...]
    mhz: tuple[float, ...]
    batch: tuple[int, ...]
    method: tuple[str, ...]

    def __post_init__(self) -> None:
        for name in self.dataflow:
            known(DATAFLOWS, name, "--dataflow")
        for name in self.precision:
            known(ON_ARRAYS, name, "--precision")
        if self.points > MOST_POINTS:
            raise UsageError(
                "cost sweep", expected=f"at most {MOST_POINTS:,} points", got=f"{self.points:,}", hint="fewer values"
            )

    @property
    def points(self) -> int:
        """How many combinations there are."""
        return prod(len(getattr(self, each.name)) for each in fields(self))

    def combinations(self, base: Array) -> Iterator[tuple[str, int, Array]]:
        """Method, batch and array of each; the rest of the array is `base`'s."""
        on_array = ("rows", "cols", "dataflow", "precision", "sram_bytes", "dram_bytes_per_s", "mhz")
        arrays = [
            replace(base, **dict(zip(on_array, values, strict=True)))
            for values in product(*(getattr(self, name) for name in on_array))
        ]
        for method, batch in product(self.method, self.batch):
            yield from ((method, batch, array) for array in arrays)


@dataclass(frozen=True, eq=False)
class Task:
    """What a method asks of the array at batch B.

    Attributes:
        parts: run one after the other, once for the batch.
        in_floats: what of it nobody does in integers, as a verb; empty where they do.
        kept_bytes: memory beside the peak of the largest part: sums that are added to.
    """

    method: str
    batch: int
    parts: tuple[Workload, ...]
    in_floats: str = ""
    kept_bytes: int = 0


@dataclass(frozen=True)
class Point:
    """One array with one task.

    Attributes:
        batch_ms: of the whole batch, `photo_ms` of one photo of it.
        photo_mj: lowest, middle and highest, by the range of DDR.
        memory_bytes: the task's peak, in DDR.
        dram_bytes: moved for the whole batch.
        takes: of the chip; `share` is the largest part of anything on it.
        front: whether no other point of the method beats it.
        published: SphereFed's array.
    """

    method: str
    batch: int
    array: Array
    batch_ms: float
    photo_mj: tuple[float, float, float]
    memory_bytes: int
    dram_bytes: int
    utilisation: float
    takes: Resources
    share: float
    front: bool = False
    published: bool = False

    @property
    def photo_ms(self) -> float:
        """Milliseconds of one photo of the batch."""
        return self.batch_ms / self.batch


@dataclass(frozen=True)
class Refused:
    """Combinations that cannot be, for one reason, with the first of them."""

    reason: str
    count: int
    first: str


@dataclass(frozen=True)
class Sweep:
    """All points in the order of the axes, SphereFed's array last, and what was left out."""

    chip: Chip
    axes: Axes
    points: tuple[Point, ...]
    refused: tuple[Refused, ...]


def sweep(
    axes: Axes, chip: Chip, task_of: Callable[[str, int], Task], *, base: Array, depthwise: Depthwise = "per-channel"
) -> Sweep:
    """Cost every combination that the chip can hold.

    Args:
        task_of: by method and batch.
        base: what the axes do not say: the special unit's lanes.

    Raises:
        UsageError: nothing is left, with the reason of most combinations.
    """
    base = replace(base, depthwise=depthwise)
    tasks: dict[tuple[str, int], _Costs] = {}
    points: list[Point] = []
    refused: dict[str, list[str]] = {}

    @cache
    def excess(array: Array) -> Excess | None:
        return excess_of(array, chip)

    wanted: dict[_Costs, list[Array]] = {}
    for method, batch, array in axes.combinations(base):
        if (method, batch) not in tasks:
            tasks[method, batch] = _Costs(task_of(method, batch))
        costs, found = tasks[method, batch], excess(array)
        if costs.task.in_floats and not PRECISIONS[array.precision].trains:
            refused.setdefault(f"nobody {costs.task.in_floats} in {array.precision}", []).append(method)
        elif found is not None:
            what = f"{array.rows} x {array.cols} {array.precision} at {array.mhz:g} MHz"
            says = f"{what}: {digits(found.wanted, 9)} where {digits(found.most, 9)} {found.words}"
            refused.setdefault(found.name, []).append(says)
        else:
            wanted.setdefault(costs, []).append(array)
    for costs in tasks.values():
        arrays = wanted.get(costs, [])
        costs.time([*arrays, replace(PUBLISHED, depthwise=depthwise)])
        points += [costs.point(array, chip) for array in arrays]
    left_out = tuple(Refused(reason, len(said), said[0]) for reason, said in refused.items())
    if not points:
        most = max(left_out, key=lambda each: each.count)
        raise UsageError(
            "cost sweep", expected=f"an array that {chip.device} can hold", got=f"{most.reason}: {most.first}"
        )
    published = [_published(costs, chip, depthwise) for costs in tasks.values()]
    return Sweep(chip, axes, (*_with_front(points), *published), left_out)


def _published(costs: _Costs, chip: Chip, depthwise: Depthwise) -> Point:
    return replace(costs.point(replace(PUBLISHED, depthwise=depthwise), chip), published=True)


def _with_front(points: Sequence[Point]) -> list[Point]:
    marked = list(points)
    for method in dict.fromkeys(point.method for point in points):
        places = [i for i, point in enumerate(points) if point.method == method]
        front = pareto_front([objectives(points[i]) for i in places])
        for place, on_front in zip(places, front, strict=True):
            marked[place] = replace(points[place], front=bool(on_front))
    return marked


def objectives(point: Point) -> tuple[float, float, float, float]:
    """What is to be small: a photo's milliseconds and millijoules, memory, share of the chip."""
    return point.photo_ms, point.photo_mj[1], float(point.memory_bytes), point.share


_Passing = tuple[int, int, Fraction, int]


def _passing(array: Array) -> _Passing:
    """What cycles of a layer without products depend on."""
    return array.float_bytes, array.buffer_bytes, array.rate, array.lanes


@dataclass(frozen=True)
class _OnArray:
    """A task's distinct products on one array, (P,) each, and their sums.

    Attributes:
        sizes: (m, k) by (k, n) of each.
        counts: how often each follows itself.
        cycles: computing, by layer.
    """

    sizes: tuple[tuple[int, int, int], ...]
    counts: _Floats
    cycles: _Floats
    macs: int
    operand_reads: int
    result_accesses: int


@dataclass(frozen=True)
class _Moved:
    """Cycles and bytes in DDR of a task's layers on one array, (L,) each."""

    cycles: _Floats
    dram_bytes: _Floats


@dataclass(eq=False)
class _Costs:
    """A task's figures, each kept by what it depends on."""

    task: Task

    def __post_init__(self) -> None:
        layers = [layer for part in self.task.parts for layer in part.layers]
        self.vector_ops = np.array([layer.vector_ops for layer in layers], dtype=np.int64)
        self.additions = int(self.vector_ops.sum())
        self.wanted_macs = sum(layer.macs for layer in layers)
        self.gemms = tuple(dict.fromkeys(gemm for layer in layers for gemm in layer.gemms))
        number = {gemm: i for i, gemm in enumerate(self.gemms)}
        self.layer_of = np.array([i for i, layer in enumerate(layers) for _ in layer.gemms], dtype=np.int64)
        self.gemm_of = np.array([number[gemm] for layer in layers for gemm in layer.gemms], dtype=np.int64)
        self.multiplies = np.array([bool(layer.gemms) for layer in layers], dtype=np.bool_)
        self.moved: dict[Array, _Moved] = {}
        self._on_array = cache(self._place)
        self._beside = cache(self._tensors)
        self._memory = cache(self._peak)

    def time(self, arrays: Sequence[Array]) -> None:
        """Cycles and bytes of the layers on all these arrays; those of one rate, clock or not, are timed once."""
        keys = {array: (array.behind, array.lanes, array.depthwise) for array in arrays}
        first = {key: array for array, key in reversed(keys.items())}
        groups = [self._products(array).sizes for array in first.values()]
        timed = timed_all(
            [(*size, behind) for (behind, *_), sizes in zip(first, groups, strict=True) for size in sizes]
        )
        cycles = np.array([each.cycles for each in timed], dtype=np.float64)
        moved = np.array([each.dram_bytes for each in timed], dtype=np.float64)
        alone = self._pass_by(list(first.values()))
        found, start = {}, 0
        for (key, array), sizes in zip(first.items(), groups, strict=True):
            these, counts = slice(start, start + len(sizes)), self._products(array).counts
            found[key] = self._layers(array, counts * cycles[these], counts * moved[these], alone[_passing(array)])
            start += len(sizes)
        self.moved |= {array: found[key] for array, key in keys.items()}

    def point(self, array: Array, chip: Chip) -> Point:
        """The array's point."""
        placed, moved = self._products(array), self.moved[array]
        cells = array.rows * array.cols * float(placed.cycles.sum())
        takes = resources_of(array, chip)
        dram_bytes = float(moved.dram_bytes.sum())
        return Point(
            self.task.method,
            self.task.batch,
            array,
            batch_ms=float(moved.cycles.sum()) / array.mhz / 1e3,
            photo_mj=self._energy(placed, dram_bytes, array),
            memory_bytes=self._memory(array.float_bytes),
            dram_bytes=int(dram_bytes),
            utilisation=self.wanted_macs / cells if cells else 0.0,
            takes=takes,
            share=share_of(takes, chip.has),
        )

    def _energy(self, placed: _OnArray, moved: float, array: Array) -> tuple[float, float, float]:
        each = energies(array.precision, array.float_bytes, array.sram_bytes, array.rows, array.cols)
        on_chip = placed.macs * each.mac_pj + self.additions * each.add_pj
        on_chip += placed.operand_reads * each.operand_pj + placed.result_accesses * each.result_pj
        low, middle, high = ((on_chip + moved * pj) * 1e-9 / self.task.batch for pj in each.dram_pj)
        return low, middle, high

    def _products(self, array: Array) -> _OnArray:
        return self._on_array(array.rows, array.cols, array.dataflow, array.depthwise)

    def _place(self, rows: int, cols: int, dataflow: str, depthwise: Depthwise) -> _OnArray:
        each = [map_gemm(g, rows=rows, cols=cols, dataflow=dataflow, depthwise=depthwise) for g in self.gemms]
        times = np.bincount(self.gemm_of, minlength=len(each)).tolist()
        cycles = np.array([p.cycles for p in each], dtype=np.float64)
        return _OnArray(
            tuple((p.m, p.n, p.k) for p in each),
            np.array([p.count for p in each], dtype=np.float64),
            self._by_layer(cycles),
            sum(n * p.m * p.n * p.k * p.count for n, p in zip(times, each, strict=True)),
            sum(n * p.sram_reads for n, p in zip(times, each, strict=True)),
            sum(n * (2 * p.sram_writes - p.m * p.n * p.count) for n, p in zip(times, each, strict=True)),
        )

    def _by_layer(self, of_products: _Floats) -> _Floats:
        return np.bincount(self.layer_of, of_products[self.gemm_of], minlength=len(self.vector_ops))

    def _tensors(self, float_bytes: int) -> NDArray[np.int64]:
        beside = [bytes_ for part in self.task.parts for bytes_ in bytes_beside(part, float_bytes)]
        return np.array(beside, dtype=np.int64).reshape(-1, 2)

    def _pass_by(self, arrays: Sequence[Array]) -> dict[_Passing, NDArray[np.int64]]:
        """Cycles of the layers without products, on each of these arrays."""
        apart, streams = {_passing(array): array for array in arrays}, []
        for array in apart.values():
            units = -(-self.vector_ops[~self.multiplies] // array.lanes)
            each = zip(self._beside(array.float_bytes)[~self.multiplies].tolist(), units.tolist(), strict=True)
            streams += [Stream(*moves, unit, array.buffer_bytes, array.rate) for moves, unit in each]
        return dict(zip(apart, np.split(stream_cycles(streams), len(apart)), strict=True))

    def _layers(self, array: Array, cycles: _Floats, moved: _Floats, alone: NDArray[np.int64]) -> _Moved:
        """As `simulate` adds a layer up: its products, or the special unit if that takes longer, and what is beside."""
        beside, rate = self._beside(array.float_bytes).sum(axis=1), array.rate
        computing = np.maximum(self._by_layer(cycles), -(-self.vector_ops // array.lanes))
        layers = computing + -(-beside * rate.denominator // rate.numerator)
        layers[~self.multiplies] = alone
        return _Moved(layers, self._by_layer(moved) + beside)

    def _peak(self, float_bytes: int) -> int:
        peaks = [peak_memory(part, float_bytes=float_bytes).peak_bytes for part in self.task.parts]
        return max(peaks) + self.task.kept_bytes
