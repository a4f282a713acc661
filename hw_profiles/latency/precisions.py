"""The formats of numbers that something computes in, in one table: their bytes, and how fast each kind of processor is.

A further one is its line in `PRECISIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protofleet.hw_profiles.devices.schema import Cpu, Gpu

__all__ = ["ON_ARRAYS", "ON_PROCESSORS", "PRECISIONS", "NumberFormat"]


@dataclass(frozen=True)
class NumberFormat:
    """One format.

    Attributes:
        number_bytes: of one number.
        cpu_macs: multiply-accumulates of a core in a cycle; None where no CPU computes in it.
        cpu_ops: other operations of a core in a cycle.
        gpu_macs: how many more than in fp32 a lane does.
        dsps_per_mac: DSP blocks of one cell of an array; None where no array computes in it.
        on_arrays: what an array computes in, where this is asked for.
        trains: whether anybody trains in it.
    """

    number_bytes: int
    on_arrays: str
    cpu_macs: Callable[[Cpu], float] | None = None
    cpu_ops: Callable[[Cpu], float] = lambda cpu: cpu.fp32_macs_per_cycle
    gpu_macs: Callable[[Gpu], float] = lambda gpu: 1.0
    dsps_per_mac: int | None = None
    trains: bool = True


def _fp16_macs(cpu: Cpu) -> float:
    return cpu.fp16_macs_per_cycle or cpu.fp32_macs_per_cycle


PRECISIONS: Mapping[str, NumberFormat] = MappingProxyType(
    {
        "fp32": NumberFormat(4, "fp32", lambda cpu: cpu.fp32_macs_per_cycle, dsps_per_mac=5),
        "fp16": NumberFormat(2, "bf16", _fp16_macs, _fp16_macs, lambda gpu: gpu.fp16_macs_per_lane),
        "bf16": NumberFormat(2, "bf16", dsps_per_mac=1),
        "int8": NumberFormat(
            1,
            "int8",
            lambda cpu: cpu.int8_macs_per_cycle,
            gpu_macs=lambda gpu: gpu.int8_macs_per_lane,
            dsps_per_mac=1,
            trains=False,
        ),
    }
)
ON_PROCESSORS = tuple(name for name, numbers in PRECISIONS.items() if numbers.cpu_macs is not None)
ON_ARRAYS = tuple(name for name, numbers in PRECISIONS.items() if numbers.dsps_per_mac is not None)
