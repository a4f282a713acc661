"""Devices as data: one TOML file each, read, checked, frozen.

- A file names a device and its kinds of processor (`cpu`, `gpu`, `systolic`). It gives numbers, each as
  `{ value = 4, source = "…" }`, so that every figure of a report can be traced.
- `load_devices` reads the files in `hw_profiles/devices/` and the user's own (`--devices-file`: a file of one device,
  or of several in `[[device]]` tables). It refuses a number that is missing, unsourced or absurd, with its name and the
  expected range.
- `FIELDS` below is the whole schema.
- For the device `host`, this machine's own figures replace cores, clock and memory.
- A file that `profile --calibrate` wrote has a section of measurements, too (`calibrated`).

See docs/hardware.md.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.names import named
from protofleet.contract.printable import as_written
from protofleet.hw_profiles.devices.calibrated import Calibration, parse_calibration
from protofleet.hw_profiles.devices.host import detect_host

__all__ = [
    "FIELDS", "Cpu", "Device", "Field", "Gpu", "Memory", "Power", "SystolicArray", "check_figure", "find_device",
    "load_devices", "read_device_files",
]  # fmt: skip


@dataclass(frozen=True)
class Field:
    """One number a device file may hold: its range (inclusive), and whether its section is useless without it."""

    low: float
    high: float
    required: bool = True
    whole: bool = False


# section -> number -> range. A section is optional unless the device has no processor at all.
FIELDS: Mapping[str, Mapping[str, Field]] = {
    "cpu": {
        "cores": Field(1, 256, whole=True),
        "clock_ghz": Field(0.05, 8),
        "fp32_macs_per_cycle": Field(0.05, 128),
        "fp16_macs_per_cycle": Field(0.05, 256, required=False),
        "int8_macs_per_cycle": Field(0.05, 1024),
        "memory_gb_s": Field(0.05, 1000),
    },
    "gpu": {
        "lanes": Field(1, 65536, whole=True),
        "clock_ghz": Field(0.05, 4),
        "fp16_macs_per_lane": Field(0.5, 64),
        "int8_macs_per_lane": Field(0.5, 128),
        "memory_gb_s": Field(0.5, 10000),
    },
    "systolic": {
        "rows": Field(1, 4096, whole=True),
        "cols": Field(1, 4096, whole=True),
        "clock_mhz": Field(1, 5000),
        "special_lanes": Field(1, 65536, whole=True),
        "memory_gb_s": Field(0.05, 10000),
        "sram_bits": Field(1024, 1e12, whole=True),
        "dsp_slices": Field(1, 1e6, required=False, whole=True),
        "luts": Field(1, 1e8, required=False, whole=True),
        "flip_flops": Field(1, 1e8, required=False, whole=True),
        "block_rams": Field(1, 1e6, required=False, whole=True),
        "most_mhz": Field(1, 5000, required=False),
    },
    "memory": {
        "ram_bytes": Field(1 << 20, 1 << 44, whole=True),
        "reserved_bytes": Field(0, 1 << 42, whole=True),
    },
    "power": {
        "idle_w": Field(0.01, 1000, required=False),
        "active_low_w": Field(0.01, 3000),
        "active_high_w": Field(0.01, 3000),
        "int8_low_w": Field(0.01, 3000, required=False),
        "int8_high_w": Field(0.01, 3000, required=False),
    },
}
_TEXTS = ("name", "title", "rows", "note", "family")
_CALIBRATION = "calibration"


@dataclass(frozen=True)
class Cpu:
    """A CPU: multiply-accumulates are per core and cycle; memory in GB/s (1e9) of the whole chip."""

    cores: int
    clock_ghz: float
    fp32_macs_per_cycle: float
    int8_macs_per_cycle: float
    memory_gb_s: float
    fp16_macs_per_cycle: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU: `lanes` fp32 multiply-accumulates a cycle, and how many more a lane does in fp16 and int8."""

    lanes: int
    clock_ghz: float
    fp16_macs_per_lane: float
    int8_macs_per_lane: float
    memory_gb_s: float


@dataclass(frozen=True)
class SystolicArray:
    """rows x cols multiply-accumulate cells, a special unit of `special_lanes` elements a cycle, on-chip memory.

    Attributes:
        dsp_slices, luts, flip_flops, block_rams: of the chip, blocks of 36 Kb; None where nothing is known.
        most_mhz: the fastest clock that the chip's own blocks take.
    """

    rows: int
    cols: int
    clock_mhz: float
    special_lanes: int
    memory_gb_s: float
    sram_bits: int
    dsp_slices: int | None = None
    luts: int | None = None
    flip_flops: int | None = None
    block_rams: int | None = None
    most_mhz: float | None = None


@dataclass(frozen=True)
class Memory:
    """RAM in bytes, and the part that the system and its services keep."""

    ram_bytes: int
    reserved_bytes: int

    @property
    def usable_bytes(self) -> int:
        """The memory that is left for our process."""
        return self.ram_bytes - self.reserved_bytes


@dataclass(frozen=True)
class Power:
    """Watts of the whole board while it computes, as a range, and while it waits."""

    active_low_w: float
    active_high_w: float
    idle_w: float | None = None
    int8_low_w: float | None = None
    int8_high_w: float | None = None


@dataclass(frozen=True)
class Device:
    """A checked device file.

    Attributes:
        name: its name on the command line.
        title: its name in reports.
        rows: its name in the published latency rows; empty without rows.
        note: one line that a reader must know.
        family: of its FPGA, as Yosys names it; empty for anything else.
        sources: where each number comes from, by `section.number`.
        calibration: what was measured on it, where somebody did.
    """

    name: str
    title: str
    memory: Memory
    cpu: Cpu | None = None
    gpu: Gpu | None = None
    systolic: SystolicArray | None = None
    power: Power | None = None
    rows: str = ""
    note: str = ""
    family: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    calibration: Calibration | None = None

    @property
    def processors(self) -> tuple[str, ...]:
        """Its kinds of processor, of `cpu`, `gpu` and `systolic`."""
        return tuple(kind for kind in _PROCESSORS if getattr(self, kind) is not None)


_PROCESSORS = ("cpu", "gpu", "systolic")
_SECTIONS = {"cpu": Cpu, "gpu": Gpu, "systolic": SystolicArray, "memory": Memory, "power": Power}


def load_devices(files: Iterable[str | Path] = ()) -> dict[str, Device]:
    """The shipped devices and those of `files`, by name. Of two with one name the later wins.

    Raises:
        UsageError: a file cannot be read, or one of its numbers is missing, unsourced or out of range.
    """
    shipped = sorted(
        resources.files("protofleet.hw_profiles").joinpath("devices").iterdir(), key=lambda entry: entry.name
    )
    texts = [(entry.name, entry.read_text(encoding="utf-8")) for entry in shipped if entry.name.endswith(".toml")]
    found = [device for origin, text in texts for device in parse_devices(text, origin)]
    devices = {device.name: device for device in found} | read_device_files(files)
    return {name: _with_host_numbers(device) if name == "host" else device for name, device in devices.items()}


def read_device_files(files: Iterable[str | Path]) -> dict[str, Device]:
    """The devices of these files alone, by name.

    Raises:
        UsageError: as `load_devices`.
    """
    found = [each for path in files for each in _devices(read_toml(path, f"device file {path}"), str(path))]
    return {device.name: device for device in found}


def find_device(name: str, devices: Mapping[str, Device]) -> Device:
    """The device of this name.

    Raises:
        UsageError: with the nearest names.
    """
    return named(devices, name, "unknown device", "a device of `profile --list`")


def check_figure(section: str, name: str, value: float, option: str, unit: str) -> float:
    """A figure of the command line that takes the place of a device's, in the range that a file's has.

    Raises:
        UsageError: out of that range.
    """
    rule = FIELDS[section][name]
    if not rule.low <= value <= rule.high:
        raise UsageError(option, expected=f"{_range(rule)} {unit}".strip(), got=f"{value:g}")
    return value


def parse_devices(text: str, origin: str) -> list[Device]:
    """The devices of one TOML text: one at the top level, or several as `[[device]]`."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"device file {origin}", expected="TOML", got=error) from None
    return _devices(table, origin)


def _devices(table: Mapping[str, Any], origin: str) -> list[Device]:
    tables = table.get("device", [table])
    if not isinstance(tables, list) or not all(isinstance(one, dict) for one in tables):
        raise UsageError(f"device file {origin}", expected="[[device]] tables", got="device of another form")
    return [_parse_device(one, origin) for one in tables]


def _parse_device(table: Mapping[str, Any], origin: str) -> Device:
    texts = {key: table.get(key, "") for key in _TEXTS}
    name = texts["name"]
    if not isinstance(name, str) or not name:
        raise UsageError(f"device file {origin}", expected='name = "…"', got="no name")
    where = f"device {name} ({origin})"
    for key in table:
        if key not in (*_TEXTS, *FIELDS, _CALIBRATION):
            raise UsageError(where, expected=f"only {', '.join((*_TEXTS, *FIELDS, _CALIBRATION))}", got=key)
    for key, value in texts.items():
        if not isinstance(value, str) or not value.isprintable():
            raise UsageError(f"{where}: {key}", expected="text of one line", got=as_written(value))
    sources: dict[str, str] = {}
    sections = {key: _parse_section(key, table[key], where, sources) for key in FIELDS if key in table}
    if "memory" not in sections:
        raise UsageError(where, expected="a [memory] section", got="none")
    if not any(kind in sections for kind in _PROCESSORS):
        raise UsageError(where, expected="a [cpu], [gpu] or [systolic] section", got="none")
    texts["title"] = texts["title"] or name
    measured = parse_calibration(table[_CALIBRATION], where) if _CALIBRATION in table else None
    device = Device(**texts, **sections, sources=sources, calibration=measured)
    _check_together(device, where)
    return device


def _parse_section(section: str, table: object, where: str, sources: dict[str, str]) -> Any:
    if not isinstance(table, dict):
        raise UsageError(f"{where}: [{section}]", expected="a table of numbers", got=as_written(table))
    fields = FIELDS[section]
    for key in table:
        if key not in fields:
            raise UsageError(
                f"{where}: {section}.{key}", expected="a known number", got=key, hint=near_names(key, fields)
            )
    values: dict[str, float | int] = {}
    for key, rule in fields.items():
        if key in table:
            values[key], sources[f"{section}.{key}"] = _parse_figure(table[key], rule, f"{where}: {section}.{key}")
        elif rule.required:
            raise UsageError(f"{where}: {section}.{key}", expected=_range(rule), got="nothing")
    return _SECTIONS[section](**values)


def _parse_figure(figure: object, rule: Field, where: str) -> tuple[float | int, str]:
    if not isinstance(figure, dict) or set(figure) != {"value", "source"}:
        raise UsageError(where, expected='{ value = …, source = "…" }', got=as_written(figure))
    value, source = figure["value"], figure["source"]
    number = not isinstance(value, bool) and isinstance(value, int | float)
    if not number or not rule.low <= value <= rule.high or (rule.whole and value != int(value)):
        raise UsageError(where, expected=_range(rule), got=as_written(value))
    if not isinstance(source, str) or not source.strip():
        raise UsageError(where, expected="a source in words", got=as_written(source))
    return (int(value) if rule.whole else float(value)), source


def _check_together(device: Device, where: str) -> None:
    """Relations between numbers that their own ranges cannot see."""
    memory, power = device.memory, device.power
    if memory.reserved_bytes >= memory.ram_bytes:
        raise UsageError(
            f"{where}: memory.reserved_bytes",
            expected=f"less than ram_bytes ({memory.ram_bytes})",
            got=memory.reserved_bytes,
        )
    if power is None:
        return
    if (power.int8_low_w is None) != (power.int8_high_w is None):
        raise UsageError(f"{where}: power", expected="int8_low_w and int8_high_w together", got="one of them")
    pairs = (("active", power.active_low_w, power.active_high_w), ("int8", power.int8_low_w, power.int8_high_w))
    for name, low, high in pairs:
        if low is not None and high is not None and low > high:
            raise UsageError(f"{where}: power.{name}_low_w", expected=f"at most {name}_high_w ({high})", got=low)


def _range(rule: Field) -> str:
    return f"{'a whole number' if rule.whole else 'a number'} from {rule.low:.15g} to {rule.high:.15g}"


def _with_host_numbers(device: Device) -> Device:
    """`host` with this machine's own figures in place of the file's numbers, each with its source."""
    detected = detect_host()
    sources = dict(device.sources) | {name: source for name, (_, source) in detected.items()}
    numbers = {name: value for name, (value, _) in detected.items()}
    memory = replace(device.memory, **{k.split(".")[1]: int(v) for k, v in numbers.items() if k.startswith("memory.")})
    if device.cpu is None:
        return replace(device, memory=memory, sources=sources)
    cpu = replace(device.cpu, **{k.split(".")[1]: v for k, v in numbers.items() if k.startswith("cpu.")})
    return replace(device, memory=memory, cpu=cpu, sources=sources)
