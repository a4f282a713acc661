"""The cost of a layer on an accelerator: a systolic array, a special unit beside it, and a DDR memory behind both.

- The array computes a layer's matrix products (`systolic.map_gemm`), one after the other, each behind the DMA: with
  its stalls, first operands and last results (`memory_system`).
- The special unit computes the other operations, `lanes` of them a cycle: of a layer with products beside them, of
  another layer as its tensors pass by (`layer_traffic`).

Layers do not overlap, and everything comes from DDR and goes there. What bounds a layer is the longest of what the
array, the special unit and the DMA do. `assumptions` lists every assumption, and every report prints them. All figures
are `simulated`. See docs/hardware.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.layer_traffic import Stream, Traffic, bytes_beside, stream_cycles
from protofleet.hw_profiles.accelerator.memory_system import Behind, Timed, buffers_of, timed_all
from protofleet.hw_profiles.accelerator.systolic import DEPTHWISE, Depthwise, Placed, map_gemm
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.precisions import ON_ARRAYS, PRECISIONS
from protofleet.hw_profiles.workload.model import Layer, Phase, Workload

__all__ = ["Array", "Cost", "LayerCost", "array_of", "assumptions", "buildable_precisions", "simulate"]

Precision = Literal["fp32", "bf16", "int8"]
_LEAST_RATE = 1_000_000  # the DMA's bytes a cycle are a fraction with no larger denominator
_MOST_KNOWN = 65_536
_known: dict[tuple[int, int, int, Behind], Timed] = {}  # products that were timed before: methods share most of them


@dataclass(frozen=True)
class Array:
    """An accelerator: the array's cells and clock, the special unit, the memories.

    The defaults are the profile fpga-vc707-32x64; SphereFed's appendix E gives the cells, the clock and the board.

    Attributes:
        lanes: numbers that the special unit takes each cycle. The paper does not say; one per column is assumed.
        dram_bytes_per_s: peak of the DDR; 12.8 GB/s is one 64-bit DDR3-1600 channel.
        sram_bytes: on-chip memory; 37,080 Kb of block RAM.
        dsps: multiplier blocks on the chip, 0 for unknown. Used only to report cells that cannot be built.
    """

    rows: int = 32
    cols: int = 64
    mhz: float = 100.0
    lanes: int = 64
    dram_bytes_per_s: float = 12.8e9
    sram_bytes: int = 37_080 * 1024 // 8
    dram_bytes: int = 1 << 30
    dsps: int = 2_800
    dataflow: str = "os"
    depthwise: Depthwise = "per-channel"
    precision: Precision = "fp32"

    def __post_init__(self) -> None:
        for name in ("rows", "cols", "lanes", "sram_bytes", "mhz", "dram_bytes_per_s", "dram_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"accelerator: {name}", expected="a positive number", got=getattr(self, name))
        known(DATAFLOWS, self.dataflow, "dataflow")
        known(ON_ARRAYS, self.precision, "precision")

    @property
    def float_bytes(self) -> int:
        """Bytes of one number at this precision."""
        return PRECISIONS[self.precision].number_bytes

    @property
    def buffer_bytes(self) -> int:
        """One operand's share of the on-chip memory: a third (two operands, one result), halved to double-buffer."""
        return self.sram_bytes // 6

    @property
    def bytes_per_cycle(self) -> float:
        """Bytes from DDR in one cycle of the array."""
        return self.dram_bytes_per_s / (self.mhz * 1e6)

    @property
    def rate(self) -> Fraction:
        """`bytes_per_cycle` as a fraction, which the DMA's transfers are counted by."""
        exact = Fraction(self.dram_bytes_per_s) / Fraction(self.mhz * 1e6)
        return max(exact.limit_denominator(_LEAST_RATE), Fraction(1, _LEAST_RATE))

    @cached_property
    def behind(self) -> Behind:
        """The array behind its DMA: numbers of one precision everywhere off-chip."""
        each = self.float_bytes
        buffers = buffers_of(self.buffer_bytes, self.rows, self.cols, each)
        return Behind(self.rows, self.cols, self.dataflow, buffers, self.rate, each, each)

    @property
    def peak_gflops(self) -> float:
        """Peak speed: two operations per cell and cycle."""
        return 2 * self.rows * self.cols * self.mhz / 1e3


@dataclass(frozen=True)
class LayerCost:
    """One layer on the accelerator.

    Attributes:
        cycles: of the layer, from its first transfer to its last.
        array_cycles: in which the array computes, as SCALE-Sim counts them.
        vector_cycles: of the special unit.
        dram_cycles: in which the DMA moves the layer's bytes, all of them in one.
    """

    layer: Layer
    placed: tuple[Placed, ...]
    cycles: int
    array_cycles: int
    vector_cycles: int
    dram_cycles: int
    traffic: Traffic

    @property
    def stall_cycles(self) -> int:
        """Cycles in which neither the array nor the special unit computes: waiting, filling, emptying."""
        return self.cycles - max(self.array_cycles, self.vector_cycles)

    @property
    def bound(self) -> str:
        """What is busy longest in the layer: array, dram, special unit; or free."""
        if self.cycles == 0:
            return "free"
        longest = max(self.array_cycles, self.dram_cycles, self.vector_cycles)
        if self.array_cycles == longest:
            return "array"
        return "dram" if self.dram_cycles == longest else "special unit"

    @property
    def sram_reads(self) -> int:
        """Elements that the array reads on-chip."""
        return sum(p.sram_reads for p in self.placed)

    @property
    def sram_writes(self) -> int:
        """Elements that the array writes on-chip."""
        return sum(p.sram_writes for p in self.placed)


@dataclass(frozen=True)
class Cost:
    """A workload on an accelerator: one `LayerCost` for each layer, and the sums."""

    array: Array
    workload: Workload
    layers: tuple[LayerCost, ...]

    @cached_property
    def cycles(self) -> int:
        """Cycles of all layers, one after the other."""
        return sum(layer.cycles for layer in self.layers)

    @cached_property
    def array_cycles(self) -> int:
        """Cycles of the array alone, as SCALE-Sim reports them."""
        return sum(layer.array_cycles for layer in self.layers)

    @property
    def latency_ms(self) -> float:
        """Milliseconds at the array's clock."""
        return self.cycles / self.array.mhz / 1e3

    @property
    def utilisation(self) -> float:
        """Multiply-accumulates of the workload over those possible while the array ran; 0 to 1."""
        cells = self.array.rows * self.array.cols * self.array_cycles
        return self.workload.macs / cells if cells else 0.0

    @cached_property
    def dram_bytes(self) -> int:
        """Bytes moved to and from DDR."""
        return sum(layer.traffic.total for layer in self.layers)

    def phase_cycles(self) -> dict[Phase, int]:
        """Cycles by phase of training."""
        cycles: dict[Phase, int] = {}
        for layer in self.layers:
            cycles[layer.layer.phase] = cycles.get(layer.layer.phase, 0) + layer.cycles
        return cycles


def simulate(workload: Workload, array: Array) -> Cost:
    """Run a workload through the accelerator model, layer by layer."""
    behind, rate = array.behind, array.rate
    placed = [
        tuple(
            map_gemm(g, rows=array.rows, cols=array.cols, dataflow=array.dataflow, depthwise=array.depthwise)
            for g in layer.gemms
        )
        for layer in workload.layers
    ]
    known = _times({(p.m, p.n, p.k) for each in placed for p in each}, behind)
    beside = bytes_beside(workload, array.float_bytes)
    units = [-(-layer.vector_ops // array.lanes) for layer in workload.layers]
    alone = [i for i, layer in enumerate(workload.layers) if not layer.gemms]
    streams = [Stream(*beside[i], units[i], array.buffer_bytes, rate) for i in alone]
    passing = dict(zip(alone, stream_cycles(streams).tolist(), strict=True))
    costs = []
    for i, layer in enumerate(workload.layers):
        timed = [(p.count, known[p.m, p.n, p.k]) for p in placed[i]]
        read, written = beside[i]
        moved = Traffic(
            read + sum(count * (t.first_bytes + t.second_bytes) for count, t in timed),
            written + sum(count * t.written_bytes for count, t in timed),
            sum(count * t.spilled_bytes for count, t in timed),
        )
        computing = max(sum(count * t.cycles for count, t in timed), units[i])
        costs.append(
            LayerCost(
                layer,
                placed[i],
                cycles=computing + math.ceil((read + written) / rate) if layer.gemms else passing[i],
                array_cycles=sum(p.cycles for p in placed[i]),
                vector_cycles=units[i],
                dram_cycles=math.ceil(moved.total / rate),
                traffic=moved,
            )
        )
    return Cost(array, workload, tuple(costs))


def _times(products: Iterable[tuple[int, int, int]], behind: Behind) -> dict[tuple[int, int, int], Timed]:
    """Each product behind this DMA."""
    products = list(products)
    missing = [(*product, behind) for product in products if (*product, behind) not in _known]
    if len(_known) + len(missing) > _MOST_KNOWN:
        _known.clear()
        missing = [(*product, behind) for product in products]
    _known.update(zip(missing, timed_all(missing), strict=True))
    return {product: _known[*product, behind] for product in products}


def assumptions(array: Array) -> tuple[str, ...]:
    """The assumptions behind the figures of this accelerator, in words."""
    lines = (
        f"{array.rows}x{array.cols} cells, one multiply-accumulate per cell and cycle, {array.mhz:g} MHz "
        f"({array.peak_gflops:g} GFLOP/s), dataflow {array.dataflow}",
        f"depthwise mapping {array.depthwise}: {DEPTHWISE[array.depthwise].words}",
        f"special unit of {array.lanes} lanes for everything that is not a matrix product (one lane per column is our "
        "assumption; the paper does not give its width); a transcendental function takes 4 operations",
        f"DDR at {array.dram_bytes_per_s / 1e9:g} GB/s, one transfer at a time; on-chip memory {array.sram_bytes:,} "
        "bytes, a third for each operand and the result, in two halves; what of a product stays on the chip, its "
        "stalls and its bytes are those of the array in Verilog behind its DMA",
        "a convolution's operand is read window by window; nothing stays on the chip from one layer to the next, and "
        "neither layers nor the products of one layer overlap: each waits for its first operands and its last results",
        "other layers pass by the special unit in parts of half a buffer, read, computed and written side by side",
        f"numbers are {array.precision} ({array.float_bytes} bytes) everywhere off-chip; partial sums are 4 bytes",
        *_buildable(array),
    )
    return tuple(lines)


def buildable_precisions(array: Array) -> tuple[str, ...]:
    """The precisions whose cells fit the chip's multiplier blocks, in the table's order; all where `dsps` is 0."""
    cells = array.rows * array.cols
    needed = {name: number.dsps_per_mac * cells for name, number in PRECISIONS.items() if number.dsps_per_mac}
    return tuple(name for name, blocks in needed.items() if not array.dsps or blocks <= array.dsps)


def _buildable(array: Array) -> tuple[str, ...]:
    each = PRECISIONS[array.precision].dsps_per_mac
    needed = each * array.rows * array.cols
    if array.precision in buildable_precisions(array):
        return ()
    return (
        f"{array.rows * array.cols:,} {array.precision} cells of one multiply-accumulate a cycle would need about "
        f"{needed:,} "
        f"DSP blocks ({each} each) where the chip has {array.dsps:,}: the published machine "
        "cannot be built so at this precision, the figures follow the paper's description",
    )


def array_of(device: Device, **choices: str) -> Array:
    """The accelerator that a device file describes.

    Raises:
        UsageError: the device has no systolic array, or a choice is unknown.
    """
    systolic = device.systolic
    if systolic is None:
        raise UsageError(
            f"device {device.name}",
            expected="one with a systolic array",
            got=" and ".join(device.processors),
            hint=f"protofleet profile F.bundle --devices {device.name}",
        )
    return Array(
        rows=systolic.rows,
        cols=systolic.cols,
        mhz=systolic.clock_mhz,
        lanes=systolic.special_lanes,
        dram_bytes_per_s=systolic.memory_gb_s * 1e9,
        sram_bytes=systolic.sram_bits // 8,
        dsps=systolic.dsp_slices or 0,
        **choices,  # type: ignore[arg-type]
    )
