"""Energy is power times time, with the range of both."""

from __future__ import annotations

from math import sqrt

import pytest

from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.energy import energy

DEVICES = load_devices()


def test_power_times_time_on_a_raspberry_pi_4() -> None:
    spent = energy(DEVICES["raspberry-pi-4"], "fp32", 100.0, 90.0, 120.0)
    assert spent is not None
    assert (spent.low_w, spent.high_w) == (6.3, 7.2)
    assert spent.mj == pytest.approx(sqrt(6.3 * 7.2) * 100)
    assert spent.low_mj == pytest.approx(6.3 * 90)
    assert spent.high_mj == pytest.approx(7.2 * 120)


def test_int8_has_its_own_watts() -> None:
    spent = energy(DEVICES["raspberry-pi-4"], "int8", 10.0)
    assert spent is not None
    assert (spent.low_w, spent.high_w) == (7.0, 7.5)
    assert "MLPerf" in spent.basis


def test_no_power_no_figure() -> None:
    assert energy(DEVICES["fpga-vc707-32x64"], "fp32", 10.0) is None
