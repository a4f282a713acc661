"""The cost of each operator class by the data sheet: the latency model's starting point, before any row is seen.

- A class is bound by multiply-accumulates, by scalar operations, by bytes, or by a fixed cost per launch. `_COSTS` says
  by which and how many. It follows from how such kernels work, not from the published rows.
- Winograd F(2..4, 3x3) needs 2.25 to 4 times fewer products but transforms every input and output element. A depthwise
  product uses each loaded weight once and each input a few times. A swish is an exponential, a division and a product.
- `EFFICIENCY` is the share of a data sheet's peak that good kernels reach. For memory it is STREAM's share on a
  Raspberry Pi 4 (5.5 of 12.8 GB/s).

The fit then learns the departure of each class on each device and runtime. See docs/hardware.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.latency.operator_classes import CLASSES
from protofleet.hw_profiles.latency.precisions import ON_PROCESSORS, PRECISIONS

__all__ = ["Precision", "Processor", "Rates", "Threads", "device_rates", "log_cost_ms"]

Precision = Literal["fp32", "fp16", "int8"]
Processor = Literal["cpu", "gpu"]
Threads = Literal["1", "all"]

EFFICIENCY = {"cpu": {"mac": 0.6, "op": 0.5, "byte": 0.43}, "gpu": {"mac": 0.4, "op": 0.5, "byte": 0.7}}
_LAUNCH_CYCLES = {"cpu": 15_000, "gpu": 30_000}  # dispatch, thread barrier; on a GPU the kernel launch
# class -> how many multiply-accumulates, scalar operations, bytes-worth of elements, launches one unit costs
_COSTS: dict[str, tuple[float, float, float, float]] = {
    "pointwise": (1, 0, 0, 0),
    "winograd": (0.4, 0, 0, 0),
    "tiles": (0, 12, 0, 0),
    "window": (1, 0, 0, 0),
    "patches": (0, 1, 0, 0),
    "depthwise3": (3, 0, 0, 0),
    "depthwise5": (3, 0, 0, 0),
    "dense": (2, 0, 0, 0),
    "traffic": (0, 0, 1, 0),
    "pool": (0, 4, 1, 0),
    "exponential": (0, 15, 0, 0),
    "piecewise": (0, 4, 0, 0),
    "elementwise": (0, 0, 1, 0),
    "launches": (0, 0, 0, 1),
    "squeeze": (0, 0, 0, 2),
}


@dataclass(frozen=True)
class Rates:
    """What a processor does in a millisecond at its data sheet's peak, and what a launch costs.

    Attributes:
        macs, ops: multiply-accumulates, scalar operations per ms.
        bytes: per ms.
        launch_ms: per launch.
        element_bytes: of one number at this precision.
    """

    macs: float
    ops: float
    bytes: float
    launch_ms: float
    element_bytes: int


def device_rates(
    device: Device, processor: Processor, precision: Precision, threads: Threads, clock_ghz: float | None = None
) -> Rates:
    """The peak rates of a device's processor.

    Args:
        clock_ghz: in place of the device file's, for a row that ran at another clock.

    Raises:
        UsageError: the device has no such processor.
    """
    numbers = PRECISIONS[known(ON_PROCESSORS, precision, "precision")]
    if processor == "gpu":
        if device.gpu is None:
            raise UsageError(f"{device.name} has no GPU", expected="a device with [gpu]", got="cpu")
        gpu, clock = device.gpu, clock_ghz or device.gpu.clock_ghz
        lanes = gpu.lanes * clock * 1e6
        launch_ms = _LAUNCH_CYCLES["gpu"] / (clock * 1e6)
        return Rates(lanes * numbers.gpu_macs(gpu), lanes, gpu.memory_gb_s * 1e6, launch_ms, numbers.number_bytes)
    if device.cpu is None:
        raise UsageError(f"{device.name} has no CPU", expected="a device with [cpu]", got="another")
    cpu, clock = device.cpu, clock_ghz or device.cpu.clock_ghz
    cycles = clock * 1e6 * (1 if threads == "1" else cpu.cores)  # per ms
    macs, ops = numbers.cpu_macs(cpu), numbers.cpu_ops(cpu)
    launch_ms = _LAUNCH_CYCLES["cpu"] / (clock * 1e6)
    return Rates(cycles * macs, cycles * ops, cpu.memory_gb_s * 1e6, launch_ms, numbers.number_bytes)


def log_cost_ms(rates: Rates, processor: Processor) -> NDArray[np.float64]:
    """Natural logarithm of the milliseconds that one unit of each class costs: (K,) in the order of `CLASSES`."""
    reach = EFFICIENCY[processor]
    unit = (
        1 / (rates.macs * reach["mac"]),
        1 / (rates.ops * reach["op"]),
        rates.element_bytes / (rates.bytes * reach["byte"]),
        rates.launch_ms,
    )
    return np.log([float(np.dot(_COSTS[name], unit)) for name in CLASSES])
