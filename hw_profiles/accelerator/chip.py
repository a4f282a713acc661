"""What an array takes of an FPGA, and whether the chip can hold it.

Cells, control and counters are counted by Yosys' synthesis of the Verilog in `rtl/`; `rtl_resources.json`, which
`python -m benchmarks.hardware.rtl_resources --table` writes, has whole accelerators of several sizes. Between and
beyond them stands `a + b·rows + c·cols + d·rows·cols`, none of them negative, fitted by relative error, rounded up.
What an array behind a DMA takes beside that (DMA, walkers, the ports of its buffers) is counted at the smallest array
and with a bus of one byte. A larger array or a faster bus takes more; look-up tables are right within some 8 %.
Buffers are counted in halves of block RAM, as in the Verilog: a bank for each row and each column of operands, and two
for each column of results; four in ws and is, where the array reads sums beside the DMA.

The Verilog is in integers of 8 bits. Of an array in floating point only the DSP blocks of its multipliers are counted,
as an assumption (`precisions.dsps_per_mac`); its look-up tables and flip-flops are unknown, None, and limit nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.accelerator.memory_system import least_half_bytes
from protofleet.hw_profiles.accelerator.simulate import Array
from protofleet.hw_profiles.devices.schema import Device, SystolicArray, check_figure
from protofleet.hw_profiles.latency.precisions import PRECISIONS
from protofleet.hw_profiles.units import digits

__all__ = [
    "Chip", "Excess", "Resources", "bank_halves", "behind_dma", "check_buildable", "check_option", "chip_of",
    "excess_of", "fit_counts", "in_words", "resources_of", "share_of", "synthesised",
]  # fmt: skip

_SUM_BYTES = 4
_HALF_BLOCKS = ((1, 16_384), (2, 8_192), (4, 4_096), (9, 2_048), (18, 1_024), (36, 512))  # bits wide, numbers deep
_COUNTED = "int8"  # what the cells of the Verilog compute in
_OPTIONS = {  # the figure of a device's file, and its unit
    "--rows": ("rows", ""),
    "--cols": ("cols", ""),
    "--mhz": ("clock_mhz", "MHz"),
    "--bandwidth": ("memory_gb_s", "GB/s"),
}
_WORDS = {
    "dsp_slices": "DSP blocks",
    "luts": "look-up tables",
    "flip_flops": "flip-flops",
    "block_ram_halves": "halves of block RAM",
}


@dataclass(frozen=True)
class Resources:
    """What something takes of a chip, or what a chip has; None where that is unknown.

    Attributes:
        luts: look-up tables, those that are shift registers among them.
        block_ram_halves: RAMB18 of 18 Kb, two in each block.
    """

    dsp_slices: int | None
    luts: int | None
    flip_flops: int | None
    block_ram_halves: int | None


@dataclass(frozen=True)
class Chip:
    """An FPGA on a board: what it has, what its clock and its memory reach, and the array that its file describes.

    Attributes:
        family: as Yosys names it; empty where nothing is counted.
        most_mhz: of its block RAM; infinite where unknown.
    """

    device: str
    family: str
    own: SystolicArray
    has: Resources
    most_mhz: float

    @property
    def sram_bytes(self) -> int:
        """All of its block RAM, parity bits included."""
        return self.own.sram_bits // 8

    @property
    def dram_bytes_per_s(self) -> float:
        """The peak of its memory."""
        return self.own.memory_gb_s * 1e9


def chip_of(device: Device) -> Chip:
    """The chip of a device whose file describes an array (`simulate.array_of` refuses others)."""
    own = device.systolic
    assert own is not None
    halves = None if own.block_rams is None else 2 * own.block_rams
    has = Resources(own.dsp_slices, own.luts, own.flip_flops, halves)
    return Chip(device.name, device.family, own, has, math.inf if own.most_mhz is None else own.most_mhz)


def resources_of(array: Array, chip: Chip) -> Resources:
    """What an array takes of a chip of this family.

    Raises:
        UsageError: a family that Yosys was not asked about.
    """
    each = PRECISIONS[array.precision].dsps_per_mac
    dsps = each * array.rows * array.cols if each is not None else None
    halves = _buffer_halves(array, chip)
    if not chip.family:
        return Resources(dsps, None, None, halves)
    if array.precision != _COUNTED:  # the DMA and the walkers are integer, whatever the cells are
        beside = behind_dma(chip.family, array.dataflow)["dsp_slices"]
        return Resources(None if dsps is None else dsps + beside, None, None, halves)
    counted = synthesised(chip.family, array.dataflow, array.rows, array.cols)
    return Resources(counted["dsp_slices"], counted["luts"], counted["flip_flops"], halves)


def in_words(takes: Resources, chip: Chip) -> str:
    """`Of fpga-kv260 it takes about 64 of 1,248 DSP blocks, …`: what is known of both."""
    pairs = ((getattr(takes, name), getattr(chip.has, name), words) for name, words in _WORDS.items())
    known = [f"{wanted:,} of {most:,} {words}" for wanted, most, words in pairs if wanted is not None and most]
    return f"Of {chip.device} it takes about {', '.join(known)}."


def share_of(takes: Resources, has: Resources) -> float:
    """The largest share of anything on the chip that an array takes, of what is known of both; above 1 it cannot be."""
    pairs = ((getattr(takes, name), getattr(has, name)) for name in _WORDS)
    return max((wanted / most for wanted, most in pairs if wanted is not None and most), default=0.0)


@dataclass(frozen=True)
class Excess:
    """What an array asks more of than its chip has, in words: `expected at most {most} {words}, got {wanted}`."""

    name: str
    wanted: float
    most: float
    words: str
    hint: str


def excess_of(array: Array, chip: Chip) -> Excess | None:
    """The first of its chip's limits that an array breaks; None where it can be built."""
    return next(_excesses(array, chip), None)


def _excesses(array: Array, chip: Chip) -> Iterator[Excess]:
    takes, fewer = resources_of(array, chip), "fewer --rows or --cols"
    hints = dict.fromkeys(_WORDS, fewer + (", --precision bf16" if array.precision == "fp32" else ""))
    hints["block_ram_halves"] = f"{fewer}, a smaller --sram"
    limits = [
        *((words, getattr(takes, k), getattr(chip.has, k), "on the chip", hints[k]) for k, words in _WORDS.items()),
        ("clock", array.mhz, chip.most_mhz, "MHz, its block RAM's", "a lower --mhz"),
        ("on-chip memory", array.sram_bytes, chip.sram_bytes, "bytes of block RAM", "a smaller --sram"),
        ("memory bandwidth", array.dram_bytes_per_s / 1e9, chip.own.memory_gb_s, "GB/s", "a lower --bandwidth"),
    ]
    for name, wanted, most, words, hint in limits:
        if wanted is not None and most is not None and wanted > most * (1 + 1e-9):
            yield Excess(name, wanted, most, words, hint)
    least = 6 * least_half_bytes(array.behind)
    if least > array.sram_bytes:
        yield Excess("a fold's operands and results", least, array.sram_bytes, "bytes on the chip", "a larger --sram")


def check_option(option: str, value: float) -> float:
    """What an option puts in the place of a device's figure, in the range of a device's file: beyond is no hardware.

    Raises:
        UsageError: out of that range.
    """
    name, unit = _OPTIONS[option]
    return check_figure("systolic", name, value, option, unit)


def check_buildable(array: Array, chip: Chip) -> None:
    """Refuse an array that its chip cannot hold, clock or feed.

    The array of the device's own file is let through: it is costed as its source describes it, and the report says what
    it would take (`simulate.assumptions`).

    Raises:
        UsageError: more of something than the chip has, a faster clock, more on-chip memory, or more bandwidth.
    """
    own = chip.own
    as_described = (array.rows, array.cols, array.mhz) == (own.rows, own.cols, own.clock_mhz)
    allowed = tuple(_WORDS.values()) if as_described else ()
    found = next((each for each in _excesses(array, chip) if each.name not in allowed), None)
    if found is None:
        return
    raise UsageError(
        f"{array.rows} x {array.cols} {array.precision} cells at {array.mhz:g} MHz on {chip.device}: {found.name}",
        expected=f"at most {digits(found.most, 9)} {found.words}",
        got=digits(found.wanted, 9),
        hint=f"{found.hint}, or a --devices-file of a larger chip",
    )


def bank_halves(width_bits: int, numbers: int) -> int:
    """Halves of block RAM (18 Kb each) of one bank, in the shape that takes the fewest.

    Source: Xilinx UG473, table of RAMB18 shapes: 16K x 1, 8K x 2, 4K x 4, 2K x 9, 1K x 18, 512 x 36.
    """
    return min(-(-width_bits // wide) * -(-numbers // deep) for wide, deep in _HALF_BLOCKS)


def _buffer_halves(array: Array, chip: Chip) -> int:
    """Halves of all banks: a third of the memory for each operand and the results, in two halves of a buffer, which
    are one bank of an operand and two of results, each twice in ws and is. All of the chip's is all blocks.
    """
    copies = 2 if array.dataflow == "os" else 4
    banks = array.rows + (1 + copies) * array.cols
    if chip.has.block_ram_halves is not None and array.sram_bytes == chip.sram_bytes:
        return max(chip.has.block_ram_halves, banks)
    wide, holds = array.float_bytes, array.behind.buffers  # numbers in one half of a buffer
    left, top = (bank_halves(8 * wide, max(1, 2 * numbers)) for numbers in (holds.left, holds.top))
    results = bank_halves(8 * _SUM_BYTES, max(1, holds.results))
    return array.rows * left + array.cols * (top + copies * results)


@lru_cache(maxsize=65_536)
def synthesised(family: str, dataflow: str, rows: int, cols: int) -> Mapping[str, int]:
    """DSP blocks, look-up tables and flip-flops of an array behind its DMA, without the memory of its buffers.

    Raises:
        UsageError: a family that is not in the table.
    """
    fits, names = _fits()
    beside = behind_dma(family, dataflow)
    values = _terms(rows, cols) @ fits[family, _cells(dataflow)]
    return {name: math.ceil(value - 1e-6) + beside[name] for name, value in zip(names, values, strict=True)}


@cache
def behind_dma(family: str, dataflow: str) -> Mapping[str, int]:
    """DSP blocks, look-up tables and flip-flops that a DMA, walkers and ports of buffers take at the least.

    Raises:
        UsageError: a family that is not in the table.
    """
    table = _table()
    names = table["counts"][:3]
    alone = {tuple(row[:4]): row[4] for row in table["accelerators"]}
    more = [
        [with_dma - without for with_dma, without in zip(counts, alone[family, _cells(dataflow), *size], strict=True)]
        for name, array, *size, counts in table["behind_dma"]
        if (name, array) == (family, _cells(dataflow))
    ]
    if not more:
        known = sorted({row[0] for row in table["behind_dma"]})
        raise UsageError("family of the FPGA", expected=" or ".join(known), got=family)
    return {name: min(each) for name, each in zip(names, list(zip(*more, strict=True))[:3], strict=True)}


def _cells(dataflow: str) -> str:
    return "os" if dataflow == "os" else "ws"  # `is` has the cells of ws


def _terms(rows: int, cols: int) -> NDArray[np.float64]:
    return np.array([1.0, rows, cols, rows * cols])


def _least_squares(terms: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The best coefficients of which none is negative, (4,): the best of all subsets of the terms."""
    best, least = np.zeros(terms.shape[1]), np.inf
    for size in range(1, terms.shape[1] + 1):
        for chosen in combinations(range(terms.shape[1]), size):
            found = np.linalg.lstsq(terms[:, chosen], counts, rcond=None)[0]
            error = float(np.sum((terms[:, chosen] @ found - counts) ** 2))
            if (found >= 0).all() and error < least:
                best, least = np.zeros(terms.shape[1]), error
                best[list(chosen)] = found
    return best


@lru_cache(maxsize=1)
def _fits() -> tuple[dict[tuple[str, str], NDArray[np.float64]], list[str]]:
    """For each family and array what `fit_counts` finds, and the names of what is counted."""
    table = _table()
    return fit_counts(table["accelerators"]), table["counts"][:3]


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads((files(__package__) / "rtl_resources.json").read_text(encoding="utf-8"))
    return table


def fit_counts(counted: Sequence[Any]) -> dict[tuple[str, str], NDArray[np.float64]]:
    """Coefficients of `1, rows, cols, rows·cols`, (4, 3), of DSP blocks, look-up tables and flip-flops.

    Args:
        counted: rows of the table: family, array, rows, columns, counts.
    """
    groups: dict[tuple[str, str], list[tuple[int, int, list[int]]]] = {}
    for family, array, rows, cols, counts in counted:
        groups.setdefault((family, array), []).append((rows, cols, counts[:3]))
    fits = {}
    for key, measured in groups.items():
        weights = np.array([1.0 / (rows * cols) for rows, cols, _ in measured])[:, None]  # relative error
        terms = np.array([_terms(rows, cols) for rows, cols, _ in measured])
        counts = np.array([counts for *_, counts in measured], dtype=np.float64)
        each = [_least_squares(weights * terms, column) for column in (weights * counts).T]
        fits[key] = np.stack(each, axis=1)
    return fits
