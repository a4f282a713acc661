"""Device files: what ships is whole and sourced, one's own is added, a wrong number is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract.errors import UsageError
from protofleet.hw_profiles.devices.schema import FIELDS, find_device, load_devices, parse_devices

SHIPPED = (
    "raspberry-pi-zero-2w",
    "raspberry-pi-4",
    "raspberry-pi-5",
    "jetson-nano",
    "jetson-xavier-nx",
    "jetson-orin-nano",
    "fpga-vc707-32x64",
    "host",
)
GOOD = """
name = "my-board"

[cpu]
cores = { value = 4, source = "data sheet" }
clock_ghz = { value = 1.5, source = "data sheet" }
fp32_macs_per_cycle = { value = 4, source = "data sheet" }
int8_macs_per_cycle = { value = 8, source = "data sheet" }
memory_gb_s = { value = 5, source = "data sheet" }

[memory]
ram_bytes = { value = 1000000000, source = "data sheet" }
reserved_bytes = { value = 200000000, source = "a guess" }

[power]
active_low_w = { value = 3, source = "measured" }
active_high_w = { value = 4, source = "measured" }
"""


def test_every_promised_device_ships() -> None:
    assert set(SHIPPED) <= set(load_devices())


@pytest.mark.parametrize("name", SHIPPED)
def test_every_number_says_where_it_is_from(name: str) -> None:
    device = load_devices()[name]
    for section, fields in FIELDS.items():
        part = getattr(device, section)
        for field in fields if part is not None else ():
            if getattr(part, field) is not None:
                assert device.sources[f"{section}.{field}"].strip()


def test_the_fpga_is_the_papers() -> None:
    array = load_devices()["fpga-vc707-32x64"].systolic
    assert array is not None
    assert (array.rows, array.cols, array.clock_mhz, array.memory_gb_s) == (32, 64, 100, 12.8)
    assert array.sram_bits == 37_080 * 1024


def test_host_is_this_machine() -> None:
    device = load_devices()["host"]
    assert device.cpu is not None
    assert device.cpu.cores == len(os.sched_getaffinity(0))
    assert device.sources["cpu.cores"].startswith("read here")


def test_own_file_adds_a_device(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)
    devices = load_devices([path])
    assert devices["my-board"].memory.usable_bytes == 800_000_000
    assert devices["my-board"].processors == ("cpu",)
    assert set(SHIPPED) <= set(devices)


def test_one_file_may_hold_several(tmp_path: Path) -> None:
    tables = []
    for name in ("one", "two"):
        body = GOOD.replace("my-board", name)
        for section in ("cpu", "memory", "power"):
            body = body.replace(f"[{section}]", f"[device.{section}]")
        tables.append("[[device]]\n" + body)
    assert [d.name for d in parse_devices("\n".join(tables), "x")] == ["one", "two"]


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ('cores = { value = 4, source = "data sheet" }', "", "cpu.cores"),
        ("value = 4, source", "value = 0, source", "cpu.cores"),
        ("cores = { value = 4,", "cores = { value = 4.5,", "cpu.cores"),
        ("value = 1.5", "value = 1500", "cpu.clock_ghz"),
        ("value = 1.5", "value = nan", "cpu.clock_ghz"),
        ("value = 1.5", "value = inf", "cpu.clock_ghz"),
        ("value = 1.5", f"value = {10**400}", "cpu.clock_ghz"),
        ("value = 1.5", f"value = 0x{'f' * 5000}", "got a number of more than 4,300 digits"),
        ("value = 1.5", 'value = "fast"', "cpu.clock_ghz"),
        ("value = 1.5", "value = true", "cpu.clock_ghz"),
        ('value = 1.5, source = "data sheet"', "value = 1.5", "cpu.clock_ghz"),
        ('value = 1.5, source = "data sheet"', 'value = 1.5, source = " "', "cpu.clock_ghz"),
        ("clock_ghz = ", "clock_mhz = ", "cpu.clock_mhz"),
        ("value = 200000000", "value = 2000000000", "memory.reserved_bytes"),
        ("active_low_w = { value = 3", "active_low_w = { value = 5", "power.active_low_w"),
        ("[power]", "[powers]", "powers"),
        ("[cpu]", "[[cpu]]", "[cpu]"),
        ('name = "my-board"', "", "name"),
        ('name = "my-board"', 'name = "my\\u001b[31mboard"', "text of one line"),
        ('name = "my-board"', 'name = "b"\ntitle = "a\\nb"', "title, expected text of one line"),
        ("value = 1000000000", "value = 1", "from 1048576 to 17592186044416"),
        ('name = "my-board"', "name = ", "TOML"),
    ],
)
def test_a_wrong_number_is_named(old: str, new: str, named: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as caught:
        parse_devices(GOOD.replace(old, new, 1), "my.toml")
    assert named in str(caught.value)
    assert "expected" in str(caught.value)


@given(st.floats() | st.integers())
def test_no_clock_out_of_range_gets_in(value: float) -> None:
    rule = FIELDS["cpu"]["clock_ghz"]
    text = GOOD.replace("value = 1.5", f"value = {value!r}")
    if rule.low <= value <= rule.high:
        assert parse_devices(text, "x")[0].cpu.clock_ghz == value  # type: ignore[union-attr]
    else:
        with pytest.raises(UsageError, match=r"clock_ghz|TOML"):
            parse_devices(text, "x")


def test_an_unknown_device_names_its_neighbours() -> None:
    with pytest.raises(UsageError, match="raspberry-pi-4"):
        find_device("raspbery-pi4", load_devices())


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml"):
        load_devices([tmp_path / "none.toml"])
