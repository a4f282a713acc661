"""Writes an array as Verilog, with test benches and a product whose result numpy computed.

The Verilog in `rtl/` has parameters; `parameters.vh`, which is written here, says them for one array. The product has
partly filled folds in both directions. A program that simulates other products writes their files with `product_files`.

`testbench.v` runs the array between buffers that hold whole operands, `memory_testbench.v` the array behind a DMA. What
the second has to be told of a product, its plan and the DMA's rate, is in `memory_arguments`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import write_text
from protofleet.contract.names import named
from protofleet.hw_profiles.accelerator.memory_system import Behind, Buffers, buffers_of, plan, timed
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles, sram_traffic

__all__ = [
    "SIMULATE", "SIMULATE_MEMORY", "SOURCES", "RtlArray", "memory_arguments", "product_files", "random_product",
    "rtl_array", "synthesis", "write_rtl",
]  # fmt: skip

_CELLS = ("array_os.v", "array_stationary.v", "skew.v")
_ALONE = (*_CELLS, "accelerator.v", "bank.v", "testbench.v")
_BEHIND = (*_CELLS, "bank.v", "dma.v", "memory_system.v", "memory_testbench.v", "walker.v", "wide_bank.v")
SOURCES = tuple(sorted({*_ALONE, *_BEHIND}))
_VERILATOR = "verilator --binary -O3 -Wno-fatal -Wno-lint"
_READ_MEMORY = "read_verilog " + " ".join(sorted({*_BEHIND} - {"memory_testbench.v"}))  # for Yosys
SIMULATE = f"{_VERILATOR} --top-module testbench " + " ".join(sorted(_ALONE))
SIMULATE_MEMORY = f"{_VERILATOR} --top-module memory_testbench --Mdir memory " + " ".join(sorted(_BEHIND))
_KEPT: Mapping[str, int] = MappingProxyType({"os": 0, "ws": 1, "is": 2})  # the test bench's name of a dataflow
_SUM_BITS = 32
_WIDEST_BUS = 16  # bytes a cycle of the DMA that is written: one of more takes Verilator long
_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RtlArray:
    """An array of integer cells in Verilog.

    Attributes:
        width: bits of an operand; a sum has 32.
        address: bits of an address in a bank of a buffer.
        bytes_per_cycle: of the DMA.
        buffer_bytes: half of a buffer behind the DMA, as `simulate.Array.buffer_bytes`.
        result_bytes: of a result in DRAM: 4, or 1 after a shift and saturated.
    """

    rows: int
    cols: int
    dataflow: str
    width: int = 8
    address: int = 16
    bytes_per_cycle: Fraction = Fraction(4)
    buffer_bytes: int = 8_192
    result_bytes: int = 4

    @property
    def bus(self) -> int:
        """Bytes that the DMA's bus takes in one cycle: a power of two, since banks are cut into as many parts."""
        return 1 << (math.ceil(self.bytes_per_cycle) - 1).bit_length()

    @property
    def behind(self) -> Behind:
        """The array behind its DMA; half a buffer is no longer than half a bank."""
        most = 1 << (self.address - 1)
        halves = buffers_of(self.buffer_bytes, self.rows, self.cols)
        buffers = Buffers(min(halves.left, most), min(halves.top, most), min(halves.results, most))
        return Behind(self.rows, self.cols, self.dataflow, buffers, self.bytes_per_cycle, 1, self.result_bytes)

    def parameters(self, m: int, n: int, k: int) -> str:
        """`parameters.vh`: this array, and the product that the test benches compute unless they are told another."""
        kept = named(_KEPT, self.dataflow, "dataflow in Verilog")
        values = {"ROWS": self.rows, "COLS": self.cols, "WIDTH": self.width, "SUM": _SUM_BITS, "ADDRESS": self.address}
        told = {name.upper(): value for name, value in memory_arguments(m, n, k, self.behind).items()}
        lines = {**values, "BUS": self.bus, "KEPT": kept, **told, "RESULTS_HALF": self.behind.buffers.results}
        words = f"// {self.rows} x {self.cols} cells of {self.width} bits, dataflow {self.dataflow}\n"
        return words + "".join(f"`define {name} {value}\n" for name, value in lines.items())


def rtl_array(array: Array) -> RtlArray:
    """The array in Verilog.

    Raises:
        UsageError: numbers that are no integers.
    """
    if array.precision != "int8":
        raise UsageError(
            "the array in Verilog", expected="--precision int8", got=array.precision, hint="it: the cells are integer"
        )
    rate = min(max(array.rate.limit_denominator(64), Fraction(1, 64)), Fraction(_WIDEST_BUS))
    return RtlArray(
        array.rows,
        array.cols,
        array.dataflow,
        bytes_per_cycle=rate,
        buffer_bytes=array.buffer_bytes,
        result_bytes=array.float_bytes,
    )


def memory_arguments(m: int, n: int, k: int, behind: Behind) -> dict[str, int]:
    """What `memory_testbench.v` is told of a product: its sizes, its plan, the DMA's rate.

    Raises:
        UsageError: as `memory_system.plan`.
    """
    chosen = plan(m, n, k, behind)
    rate = behind.bytes_per_cycle
    return {
        "m": m,
        "n": n,
        "k": k,
        "kept_tiles": chosen.kept_tiles,
        "streamed_tiles": chosen.streamed_tiles,
        "block": chosen.block,
        "chunk": chosen.chunk,
        "chunks": chosen.chunks,
        "keeps_left": int(chosen.keeps_left),
        "reloads": int(chosen.reloads),
        "spills": int(chosen.spills),
        "left_half": behind.buffers.left,
        "top_half": behind.buffers.top,
        "rate": rate.numerator,
        "per": rate.denominator,
        "result_words": behind.result_bytes,
    }


def random_product(m: int, n: int, k: int, width: int = 8, seed: int = 0) -> tuple[_Integers, _Integers]:
    """Operands (m, k) and (k, n) of all integers that `width` bits have."""
    random, top = np.random.default_rng(seed), 1 << (width - 1)
    return random.integers(-top, top, (m, k)), random.integers(-top, top, (k, n))


def product_files(
    first: _Integers, second: _Integers, width: int = 8, transposed: tuple[bool, bool] = (False, False)
) -> dict[str, str]:
    """The files of a product that the test benches read: operands (m, k) and (k, n), and numpy's result (m, n).

    Args:
        transposed: which operands lie transposed in DRAM, (k, m) and (n, k).
    """
    return {
        "first.hex": _hex(first.T if transposed[0] else first, width),
        "second.hex": _hex(second.T if transposed[1] else second, width),
        "expected.hex": _hex(first @ second, _SUM_BITS),
    }


def _hex(values: _Integers, bits: int) -> str:
    return "".join(f"{int(v) & ((1 << bits) - 1):0{bits // 4}x}\n" for v in values.ravel())


def write_rtl(folder: Path, array: RtlArray, *, option: str = "--rtl", takes: str = "", family: str = "xc7") -> None:
    """Write the array's Verilog, its test bench, a product to try, and a README into `folder`.

    Args:
        takes: what the array takes of a chip, in words, for the README.
        family: of the chip, as Yosys names it.

    Raises:
        UsageError: the folder or a file cannot be written.
    """
    m, n, k = array.rows + 1, array.cols + 1, array.rows + 3
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(option, expected="a folder that can be written", got=f"{folder}: {error.strerror}") from None
    texts = {name: (files(__package__) / "rtl" / name).read_text() for name in SOURCES}
    texts |= product_files(*random_product(m, n, k, array.width), array.width)
    texts |= {"parameters.vh": array.parameters(m, n, k), "README.md": _readme(array, m, n, k, takes, family)}
    for name, text in texts.items():
        write_text(folder / name, text, option=option)


def _readme(array: RtlArray, m: int, n: int, k: int, takes: str, family: str) -> str:
    shape = {"rows": array.rows, "cols": array.cols, "dataflow": array.dataflow}
    cycles = gemm_cycles(m, n, k, **shape) + 1  # type: ignore[arg-type]
    first, second, written = sram_traffic(m, n, k, **shape)  # type: ignore[arg-type]
    memory, rate = timed(m, n, k, array.behind), float(array.bytes_per_cycle)
    return f"""# {array.rows} x {array.cols} cells, dataflow {array.dataflow}, {array.width} bits

`protofleet cost --rtl` wrote this. `accelerator.v` is the array between its on-chip buffers, `testbench.v` computes a
product of ({m}, {k}) by ({k}, {n}) and compares it with numpy's result. With Verilator 5:

    {SIMULATE}
    ./obj_dir/Vtestbench

It prints counts and `wrong 0`, and ends in an error where a result differs. The closed form of `protofleet cost` says:
{cycles} compute cycles, {first} reads of the first operand, {second} of the second, {written} writes of results.

Another product: `./obj_dir/Vtestbench +m=M +n=N +k=K +dir=FOLDER`, with first.hex (M x K), second.hex (K x N) and
expected.hex (M x N) in FOLDER, one number a line, row by row, as two's complement.
A bank holds {1 << array.address:,} numbers (ADDRESS in `parameters.vh`).
A sum is exact up to K = {1 << (_SUM_BITS - 2 * array.width):,}.

`memory_system.v` is the same array behind a DMA of {rate:g} bytes a cycle, with buffers of two halves of
{array.buffer_bytes:,} bytes, draining and result writes:

    {SIMULATE_MEMORY}
    ./memory/Vmemory_testbench

The model says of this product: {memory.compute_cycles} cycles computing, {memory.stall_cycles} stalled,
{memory.cycles} in all; {memory.first_bytes} bytes read of the first operand, {memory.second_bytes} of the second,
{memory.written_bytes} written. What a product needs is in `parameters.vh`, and each of these is a plusarg too.
Where Protofleet is installed, `rtl_files.memory_arguments` names them for a product. An operand that lies transposed
in DRAM is `+ta=1`, `+tb=1`.

{f"{takes}{chr(10)}{chr(10)}" if takes else ""}`memory_system.v` counted by Yosys, with its DMA and buffers:

    yosys -p "{synthesis(array, family)}; stat"

Not in it: what a DDR memory needs beside its bandwidth (latency, refresh, rows that open and close).
"""


def synthesis(array: RtlArray, family: str) -> str:
    """Yosys' script of the array behind its DMA, with its buffers, for a chip of this family, in a written folder."""
    halves = array.behind.buffers
    sizes = {
        "ROWS": array.rows, "COLS": array.cols, "WIDTH": array.width, "STATIONARY": int(array.dataflow != "os"),
        "ADDRESS": array.address, "BUS": array.bus, "LEFT_HALF": halves.left, "TOP_HALF": halves.top,
        "RESULTS_HALF": halves.results,
    }  # fmt: skip
    chosen = " ".join(f"-set {name} {value}" for name, value in sizes.items())
    synth = f"synth_xilinx -family {family} -flatten -noiopad -noclkbuf -top memory_system"
    return f"{_READ_MEMORY}; chparam {chosen} memory_system; {synth}"
