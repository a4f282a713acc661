"""Many arrays for one network, as one versioned value and as CSV: what `protofleet cost sweep` writes.

    subject    the network, and how it was read
    device     the chip, and what it has
    axes       the values that were tried
    objectives what the front is of
    energy     picojoules of each operation and access, with their source
    points     every array that can be built, then SphereFed's       simulated; memory and energy predicted
    sentence   the fastest array and the smallest that none beats, for the first screen
    refused    how many cannot, by reason, with the first of each

A method is `inference` (a forward pass), `fedavg`, or one of ours: a training step where it trains, a forward pass and
its sums where it does not. See docs/hardware.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import asdict
from math import isfinite
from typing import Any

from protofleet.contract.methods import METHODS
from protofleet.contract.names import known
from protofleet.hw_profiles.accelerator.access_energy import OPERATIONS, SOURCE
from protofleet.hw_profiles.accelerator.sweep import Point, Sweep, Task
from protofleet.hw_profiles.reports.subject import Subject
from protofleet.hw_profiles.reports.which_board import which_array

__all__ = ["COLUMNS", "SCHEMA", "default_methods", "sweep_csv", "sweep_report", "tasks_of"]

SCHEMA = 1
INFERENCE, FEDAVG = "inference", "fedavg"
OBJECTIVES = ("photo_ms", "photo_mj", "memory_bytes", "chip_share")
COLUMNS = (
    "method", "batch", "rows", "cols", "dataflow", "precision", "sram_bytes", "bandwidth_gb_s", "mhz", "batch_ms",
    "photo_ms", "photo_mj", "photo_mj_low", "photo_mj_high", "memory_bytes", "dram_bytes", "utilisation", "dsp_slices",
    "luts", "flip_flops", "block_rams", "chip_share", "front", "published",
)  # fmt: skip


def default_methods(subject: Subject) -> tuple[str, ...]:
    """Inference, and the bundle's own method or, of a network alone, FedAvg."""
    return INFERENCE, FEDAVG if subject.manifest is None else subject.manifest.method


def tasks_of(subject: Subject) -> Callable[[str, int], Task]:
    """What each method asks of the array, by name and batch.

    Raises:
        UsageError: an unknown method.
    """

    def task(name: str, batch: int) -> Task:
        known((INFERENCE, FEDAVG, *METHODS), name, "--method", f"{INFERENCE}, {FEDAVG} or a method")
        forward = subject.inference_at(batch)
        if name == INFERENCE:
            return Task(name, batch, (forward,))
        if name != FEDAVG and not METHODS[name].trains:
            calibration = subject.calibration(METHODS[name], batch)
            return Task(name, batch, (forward, calibration.device), "sums features", calibration.uplink_bytes)
        training = subject.baseline() if name == FEDAVG else subject.training(METHODS[name])
        return Task(name, batch, (subject.derived_step(batch, training),), "trains")

    return task


def sweep_report(subject: Subject, found: Sweep) -> dict[str, Any]:
    """Everything a sweep found, as JSON-ready values."""
    chip = found.chip
    report = {
        "schema": SCHEMA,
        "command": "cost sweep",
        "subject": {"name": subject.name, "source": subject.source, "classes": subject.classes},
        "device": {
            "name": chip.device,
            "family": chip.family,
            "most_mhz": chip.most_mhz if isfinite(chip.most_mhz) else None,
            **asdict(chip.has),
        },
        "axes": asdict(found.axes),
        "objectives": list(OBJECTIVES),
        "energy": {"source": SOURCE, "operations": {name: asdict(each) for name, each in OPERATIONS.items()}},
        "refused": [asdict(each) for each in found.refused],
        "points": [_point(point) for point in found.points],
        "assumptions": _assumptions(),
    }
    return report | {"sentence": which_array(report)}


def sweep_csv(report: Mapping[str, Any]) -> str:
    """The points, one a line under `COLUMNS`; unknown figures are empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(point[name]) for name in COLUMNS} for point in report["points"])
    return text.getvalue()


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return int(value)
    return f"{value:.6g}" if isinstance(value, float) else value


def _point(point: Point) -> dict[str, Any]:
    array, takes = point.array, point.takes
    low, middle, high = point.photo_mj
    return {
        "method": point.method,
        "batch": point.batch,
        "rows": array.rows,
        "cols": array.cols,
        "dataflow": array.dataflow,
        "precision": array.precision,
        "sram_bytes": array.sram_bytes,
        "bandwidth_gb_s": array.dram_bytes_per_s / 1e9,
        "mhz": array.mhz,
        "batch_ms": point.batch_ms,
        "photo_ms": point.photo_ms,
        "photo_mj": middle,
        "photo_mj_low": low,
        "photo_mj_high": high,
        "memory_bytes": point.memory_bytes,
        "dram_bytes": point.dram_bytes,
        "utilisation": point.utilisation,
        "dsp_slices": takes.dsp_slices,
        "luts": takes.luts,
        "flip_flops": takes.flip_flops,
        "block_rams": None if takes.block_ram_halves is None else takes.block_ram_halves / 2,
        "chip_share": point.share,
        "front": point.front,
        "published": point.published,
    }


def _assumptions() -> list[str]:
    return [
        "cycles, traffic and stalls are those of `protofleet cost`: the closed form that equals the array in Verilog",
        "a front is of points of one method: what no other point of it beats in a photo's time and energy, memory, and "
        "the largest share of anything on the chip",
        "time and energy are of one photo of a batch; a bandwidth that nothing waits for costs nothing here",
        f"energy is counted access by access, {SOURCE}; an FPGA takes several times more, and neither leakage nor "
        "clocks nor the registers in the cells are counted: it compares arrays, and is no battery's bill",
        "DSP blocks, look-up tables and flip-flops of int8 are from Yosys' synthesis of the Verilog; of bf16 and fp32 "
        "only DSP blocks are known, as an assumption (1 and 5 of each cell), so their share of the chip is too small",
        "block RAM: a bank for each row and column of operands, two for each column of results, four in ws and is; a "
        "third of the on-chip memory for each operand and the results",
        "a DMA of one byte a cycle on 2x2 cells is in these counts: a wider bus and more cells take more of it",
        "int8 answers are not those of fp32, and methods do not learn the same: neither is in these figures",
    ]
