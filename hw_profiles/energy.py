"""Energy of a computation: the board's power while it computes, times how long it takes.

A board's power is a range (its modes, its spread over networks), and so is a predicted time:

    low       low power times the short time
    high      high power times the long time
    middle    the geometric mean of the powers times the predicted time

On a Raspberry Pi 4 the measured range is narrow (6.3 to 7.2 W in fp32, 7.0 to 7.5 W in int8). There, power times time
is a good first model. On boards whose data sheet only gives modes it is an order of magnitude. The power while the
board waits is not included. See docs/hardware.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from protofleet.hw_profiles.devices.schema import Device

__all__ = ["Energy", "energy"]


@dataclass(frozen=True)
class Energy:
    """Millijoules, with a range, and the watts they came from."""

    mj: float
    low_mj: float
    high_mj: float
    low_w: float
    high_w: float
    basis: str


def energy(
    device: Device, precision: str, ms: float, low_ms: float | None = None, high_ms: float | None = None
) -> Energy | None:
    """Energy of `ms` of computing on a device; None where its file gives no power.

    Args:
        precision: `int8` takes the int8 watts where the file has them.
        low_ms, high_ms: the interval of `ms`; `ms` itself where it is exact.
    """
    power = device.power
    if power is None:
        return None
    low_w, high_w, name = power.active_low_w, power.active_high_w, "active"
    if precision == "int8" and power.int8_low_w is not None and power.int8_high_w is not None:
        low_w, high_w, name = power.int8_low_w, power.int8_high_w, "int8"
    return Energy(
        mj=sqrt(low_w * high_w) * ms,
        low_mj=low_w * (ms if low_ms is None else low_ms),
        high_mj=high_w * (ms if high_ms is None else high_ms),
        low_w=low_w,
        high_w=high_w,
        basis=device.sources[f"power.{name}_low_w"],
    )
