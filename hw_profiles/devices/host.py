"""This machine's own figures: processor, memory, and temperature and throttling while it works.

Everything is read from Linux's own files. Missing figures are left out, never guessed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["cpu_name", "cpu_temperature_c", "detect_host", "governor", "throttling"]

_PROC = Path("/proc")
_SYS = Path("/sys")
# Multiply-accumulates per core and cycle that a set of vector instructions allows: (flag, fp32, int8).
_VECTORS = (
    ("avx512_vnni", 32.0, 128.0),
    ("avx512f", 32.0, 64.0),
    ("avx_vnni", 16.0, 64.0),
    ("avx2", 16.0, 32.0),
    ("asimddp", 8.0, 32.0),
    ("asimd", 4.0, 8.0),
)


def detect_host() -> dict[str, tuple[float, str]]:
    """The known numbers of this machine: `section.number` of a device file to (value, source)."""
    numbers: dict[str, tuple[float, str]] = {}
    numbers["cpu.cores"] = (len(os.sched_getaffinity(0)), "read here: CPUs this process may use")
    clock = _clock_ghz()
    if clock is not None:
        numbers["cpu.clock_ghz"] = clock
    flags = set(re.findall(r"[a-z0-9_]+", _line(_PROC / "cpuinfo", r"(?:flags|Features)")))
    for flag, fp32, int8 in _VECTORS:
        if flag in flags:
            numbers["cpu.fp32_macs_per_cycle"] = (
                fp32,
                f"read here: /proc/cpuinfo has {flag}, two vector units assumed",
            )
            numbers["cpu.int8_macs_per_cycle"] = (
                int8,
                f"read here: /proc/cpuinfo has {flag}, two vector units assumed",
            )
            break
    total, free = _meminfo("MemTotal"), _meminfo("MemAvailable")
    if total and free:
        numbers["memory.ram_bytes"] = (total, "read here: MemTotal of /proc/meminfo")
        numbers["memory.reserved_bytes"] = (total - free, "read here: MemTotal - MemAvailable of /proc/meminfo")
    return numbers


def cpu_name() -> str:
    """The processor's own name, or the board's, or nothing."""
    name = _line(_PROC / "cpuinfo", r"(?:model name|Model)")
    if name:
        return name
    try:
        return (_PROC / "device-tree/model").read_text(encoding="utf-8", errors="replace").strip("\0\n ")
    except OSError:
        return ""


def cpu_temperature_c() -> float | None:
    """The hottest thermal zone in °C; None where the system does not tell."""
    readings = []
    for zone in sorted((_SYS / "class/thermal").glob("thermal_zone*/temp")):
        try:
            readings.append(int(zone.read_text()) / 1000)
        except (OSError, ValueError):
            continue
    return max(readings) if readings else None


def governor() -> str:
    """What chooses the clock of the first processor, or nothing."""
    try:
        return (_SYS / "devices/system/cpu/cpu0/cpufreq/scaling_governor").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def throttling() -> dict[str, int]:
    """Counters that rise when the processor is held back, by name; empty where the system does not tell.

    x86 counts thermal throttle events per core; a Raspberry Pi has one word of flags (bit 0 under-voltage, bit 1 clock
    capped, bit 2 throttled, bits 16 to 18 the same since boot).
    """
    counters: dict[str, int] = {}
    cores = (_SYS / "devices/system/cpu").glob("cpu[0-9]*/thermal_throttle/core_throttle_count")
    counts = [value for value in map(_whole, cores) if value is not None]
    if counts:
        counters["core_throttle_count"] = sum(counts)
    for path in (_SYS / "devices/platform/soc").glob("soc:firmware/get_throttled"):
        try:
            counters["raspberry_pi_flags"] = int(path.read_text().strip(), 16)
        except (OSError, ValueError):
            continue
    return counters


def _clock_ghz() -> tuple[float, str] | None:
    highest = _whole(_SYS / "devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq")
    if highest:
        return highest / 1e6, "read here: cpuinfo_max_freq of cpu0"
    now = _line(_PROC / "cpuinfo", "cpu MHz")
    return (float(now) / 1e3, "read here: cpu MHz of /proc/cpuinfo") if now else None


def _meminfo(name: str) -> int:
    line = _line(_PROC / "meminfo", name)
    return int(line.split()[0]) * 1024 if line else 0


def _line(path: Path, name: str) -> str:
    """The value of the first `name: value` line of a file, or nothing."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(rf"^{name}\s*:\s*(.*)$", text, flags=re.MULTILINE)
    return match[1].strip() if match else ""


def _whole(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
