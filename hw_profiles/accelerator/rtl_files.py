"""Writes an array as Verilog, with a test bench and a product whose result numpy computed.

The Verilog in `rtl/` has parameters; `parameters.vh`, which is written here, says them for one array. The product has
partly filled folds in both directions. A program that simulates other products writes their files with `product_files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import write_text
from protofleet.contract.names import named
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.accelerator.systolic import gemm_cycles, sram_traffic

__all__ = ["SIMULATE", "SOURCES", "RtlArray", "product_files", "random_product", "rtl_array", "write_rtl"]

SOURCES = ("accelerator.v", "array_os.v", "array_stationary.v", "bank.v", "skew.v", "testbench.v")
SIMULATE = "verilator --binary -O3 -Wno-fatal -Wno-lint --top-module testbench " + " ".join(sorted(SOURCES))
_KEPT: Mapping[str, int] = MappingProxyType({"os": 0, "ws": 1, "is": 2})  # the test bench's name of a dataflow
_SUM_BITS = 32
_Integers = NDArray[np.int64]


@dataclass(frozen=True)
class RtlArray:
    """An array of integer cells in Verilog.

    Attributes:
        width: bits of an operand; a sum has 32.
        address: bits of an address in a bank of a buffer.
    """

    rows: int
    cols: int
    dataflow: str
    width: int = 8
    address: int = 16

    def parameters(self, m: int, n: int, k: int) -> str:
        """`parameters.vh`: this array, and the product that the test bench computes unless it is told another."""
        kept = named(_KEPT, self.dataflow, "dataflow in Verilog")
        values = {"ROWS": self.rows, "COLS": self.cols, "WIDTH": self.width, "SUM": _SUM_BITS, "ADDRESS": self.address}
        lines = {**values, "KEPT": kept, "M": m, "N": n, "K": k}
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
    return RtlArray(array.rows, array.cols, array.dataflow)


def random_product(m: int, n: int, k: int, width: int = 8, seed: int = 0) -> tuple[_Integers, _Integers]:
    """Operands (m, k) and (k, n) of all integers that `width` bits have."""
    random, top = np.random.default_rng(seed), 1 << (width - 1)
    return random.integers(-top, top, (m, k)), random.integers(-top, top, (k, n))


def product_files(first: _Integers, second: _Integers, width: int = 8) -> dict[str, str]:
    """The files of a product that the test bench reads: operands (m, k) and (k, n), and numpy's result (m, n)."""
    return {
        "first.hex": _hex(first, width),
        "second.hex": _hex(second, width),
        "expected.hex": _hex(first @ second, _SUM_BITS),
    }


def _hex(values: _Integers, bits: int) -> str:
    return "".join(f"{int(v) & ((1 << bits) - 1):0{bits // 4}x}\n" for v in values.ravel())


def write_rtl(folder: Path, array: RtlArray, *, option: str = "--rtl") -> None:
    """Write the array's Verilog, its test bench, a product to try, and a README into `folder`.

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
    texts |= {"parameters.vh": array.parameters(m, n, k), "README.md": _readme(array, m, n, k)}
    for name, text in texts.items():
        write_text(folder / name, text, option=option)


def _readme(array: RtlArray, m: int, n: int, k: int) -> str:
    shape = {"rows": array.rows, "cols": array.cols, "dataflow": array.dataflow}
    cycles = gemm_cycles(m, n, k, **shape) + 1  # type: ignore[arg-type]
    first, second, written = sram_traffic(m, n, k, **shape)  # type: ignore[arg-type]
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

Resources, with Yosys:

    yosys -p "read_verilog accelerator.v array_os.v array_stationary.v bank.v skew.v; \\
      chparam -set ROWS {array.rows} -set COLS {array.cols} {_top(array)}; \\
      synth_xilinx -family xc7 -top {_top(array)}; stat"

Not in it: DDR, a DMA, and a second half of the buffers to fill while the first is read.
"""


def _top(array: RtlArray) -> str:
    return "array_os" if array.dataflow == "os" else "array_stationary"
