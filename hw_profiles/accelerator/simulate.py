"""The cost of a layer on an accelerator: a systolic array, a special unit beside it, and a DDR memory behind both.

For each layer three things happen at the same time:

- The array computes the matrix products (`systolic.map_gemm`).
- The special unit computes the other operations, `lanes` of them a cycle.
- The operands come from DDR, unless the layer before left them on the chip (`dram`).

The layer takes as long as the longest of the three, which is its bound. Layers do not overlap. `assumptions` lists
every assumption, and every report prints them. All figures are `simulated`. See docs/hardware.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.dram import Traffic, layer_traffic
from protofleet.hw_profiles.accelerator.systolic import DEPTHWISE, Depthwise, Placed, map_gemm
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.precisions import ON_ARRAYS, PRECISIONS
from protofleet.hw_profiles.workload.model import Layer, Phase, Workload

__all__ = ["Array", "Cost", "LayerCost", "array_of", "assumptions", "check_buildable", "simulate"]

Precision = Literal["fp32", "bf16", "int8"]


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
    def peak_gflops(self) -> float:
        """Peak speed: two operations per cell and cycle."""
        return 2 * self.rows * self.cols * self.mhz / 1e3


@dataclass(frozen=True)
class LayerCost:
    """One layer on the accelerator. Cycles of the array, of the special unit, of the DDR; `cycles` is the longest."""

    layer: Layer
    placed: tuple[Placed, ...]
    array_cycles: int
    vector_cycles: int
    dram_cycles: int
    traffic: Traffic

    @property
    def cycles(self) -> int:
        """Cycles of the layer, with the three overlapping."""
        return max(self.array_cycles, self.vector_cycles, self.dram_cycles)

    @property
    def bound(self) -> str:
        """The bound of the layer: array, special unit, dram, or free."""
        if self.cycles == 0:
            return "free"
        if self.array_cycles == self.cycles:
            return "array"
        return "dram" if self.dram_cycles == self.cycles else "special unit"

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
    traffic = layer_traffic(workload, array.float_bytes, array.buffer_bytes, array.dataflow, array.rows, array.cols)
    costs = []
    for layer, moved in zip(workload.layers, traffic, strict=True):
        placed = tuple(
            map_gemm(g, rows=array.rows, cols=array.cols, dataflow=array.dataflow, depthwise=array.depthwise)
            for g in layer.gemms
        )
        costs.append(
            LayerCost(
                layer,
                placed,
                array_cycles=sum(p.cycles for p in placed),
                vector_cycles=-(-layer.vector_ops // array.lanes),
                dram_cycles=int(-(-moved.total // array.bytes_per_cycle)),
                traffic=moved,
            )
        )
    return Cost(array, workload, tuple(costs))


def assumptions(array: Array) -> tuple[str, ...]:
    """The assumptions behind the figures of this accelerator, in words."""
    lines = (
        f"{array.rows}x{array.cols} cells, one multiply-accumulate per cell and cycle, {array.mhz:g} MHz "
        f"({array.peak_gflops:g} GFLOP/s), dataflow {array.dataflow}",
        f"depthwise mapping {array.depthwise}: {DEPTHWISE[array.depthwise].words}",
        f"special unit of {array.lanes} lanes for everything that is not a matrix product (one lane per column is our "
        "assumption; the paper does not give its width); a transcendental function takes 4 operations",
        f"DDR at {array.dram_bytes_per_s / 1e9:g} GB/s peak; on-chip memory {array.sram_bytes:,} bytes, a third for "
        f"each "
        "operand and the result, double-buffered; an operand too large for its share is read again per block of the "
        "other",
        "a result that fits its share and is used by the very next layer is not fetched again, and not written out "
        "when "
        "nothing later needs it; everything else goes through DDR",
        "array, special unit and DDR overlap within a layer (the longest counts); layers do not overlap",
        f"numbers are {array.precision} ({array.float_bytes} bytes) everywhere off-chip; partial sums are 4 bytes",
        *_buildable(array),
    )
    return tuple(lines)


def _buildable(array: Array) -> tuple[str, ...]:
    each = PRECISIONS[array.precision].dsps_per_mac
    needed = each * array.rows * array.cols
    if not array.dsps or needed <= array.dsps:
        return ()
    return (
        f"{array.rows * array.cols:,} {array.precision} cells of one multiply-accumulate a cycle would need about "
        f"{needed:,} "
        f"DSP blocks ({each} each) where the chip has {array.dsps:,}: the published machine "
        "cannot be built so at this precision, the figures follow the paper's description",
    )


def check_buildable(array: Array, device: str) -> None:
    """Refuse an array that its chip cannot hold at any precision: a cell multiplies in one DSP block at least.

    Raises:
        UsageError: more cells than DSP blocks.
    """
    cells = array.rows * array.cols
    if array.dsps and cells > array.dsps:
        raise UsageError(
            f"{array.rows} x {array.cols} cells on {device}",
            expected=f"at most {array.dsps:,}, one for each DSP block",
            got=f"{cells:,}",
            hint="take fewer --rows or --cols, or a --devices-file of a larger chip",
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
