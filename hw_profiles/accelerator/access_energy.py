"""Energy of an accelerator's arithmetic and of its accesses to memory, counted access by access.

    arithmetic    every multiply-accumulate that the array does, zeros of a packed diagonal included; every number that
                  the special unit takes is an addition
    on-chip       every number that the array reads from or writes to a bank of its buffers; a partial sum that is added
                  to is read once more
    DDR           every byte that crosses the pins

The picojoules are Horowitz's, "Computing's energy problem (and what we can do about it)", ISSCC 2014, figure 1.1.9:
45 nm, 0.9 V. They are those of an ASIC of 2014. An FPGA takes several times more, and neither leakage nor clocks nor
the registers within the cells are in them: they compare arrays with each other, and are no battery's bill.

A buffer's access is his cache's, per 64 bits, in proportion to the bits; between his sizes, and below, by a straight
line in logarithms (about the square root of the size). DDR is a range, 1.3 to 2.6 nJ per 64 bits; the middle is its
geometric mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log, sqrt
from types import MappingProxyType

from protofleet.contract.names import named

__all__ = ["OPERATIONS", "SOURCE", "Energies", "Operation", "access_pj", "energies"]

SOURCE = "Horowitz, ISSCC 2014, figure 1.1.9: 45 nm, 0.9 V"
_SRAM_PJ_PER_64_BITS = ((8 * 1024, 10.0), (32 * 1024, 20.0), (1024 * 1024, 100.0))  # bytes, pJ
_DRAM_PJ_PER_64_BITS = (1300.0, 2600.0)


@dataclass(frozen=True)
class Operation:
    """Picojoules of one operation in a format.

    Attributes:
        multiply_pj: of two numbers.
        accumulate_pj: of a product onto a sum of 32 bits.
        add_pj: of two numbers, in the special unit.
        words: which of Horowitz's operations these are.
    """

    multiply_pj: float
    accumulate_pj: float
    add_pj: float
    words: str

    @property
    def mac_pj(self) -> float:
        """One multiply-accumulate."""
        return self.multiply_pj + self.accumulate_pj


OPERATIONS: Mapping[str, Operation] = MappingProxyType(
    {
        "fp32": Operation(3.7, 0.9, 0.9, "32-bit floating-point multiplication and addition"),
        "bf16": Operation(1.1, 0.9, 0.4, "16-bit floating-point multiplication, 32-bit addition"),
        "int8": Operation(0.2, 0.1, 0.03, "8-bit integer multiplication, 32-bit integer addition"),
    }
)


@dataclass(frozen=True)
class Energies:
    """Picojoules of each thing an array does, in one format, with banks of one size.

    Attributes:
        operand_pj, result_pj: of one number in a bank of operands, read, and in one of results, read or written.
        dram_pj: of one byte; lowest, middle, highest.
    """

    mac_pj: float
    add_pj: float
    operand_pj: float
    result_pj: float
    dram_pj: tuple[float, float, float]


def energies(precision: str, number_bytes: int, sram_bytes: int, rows: int, cols: int) -> Energies:
    """Of an array whose memory is a third for each operand and the results, in a bank for each row and column.

    Both operands' accesses are those of the larger of their banks.
    """
    operation = named(OPERATIONS, precision, "precision")
    operand = access_pj(number_bytes, sram_bytes / 3 / min(rows, cols))
    low, high = (pj / 8 for pj in _DRAM_PJ_PER_64_BITS)
    return Energies(
        operation.mac_pj, operation.add_pj, operand, access_pj(4, sram_bytes / 3 / cols), (low, sqrt(low * high), high)
    )


def access_pj(number_bytes: int, bank_bytes: float) -> float:
    """One number from a bank of so many bytes."""
    (near, near_pj), (far, far_pj) = _SRAM_PJ_PER_64_BITS[:2]
    if bank_bytes > far:
        (near, near_pj), (far, far_pj) = _SRAM_PJ_PER_64_BITS[1:]
    slope = log(far_pj / near_pj) / log(far / near)
    return float(near_pj * (bank_bytes / near) ** slope * number_bytes / 8)
