"""`protofleet cost sweep`: many arrays for one network on one chip, and which no other beats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.contract.console.sizes import read_size
from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.names import listed
from protofleet.contract.printable import printable
from protofleet.hw_profiles.accelerator.chip import Chip, check_option, chip_of
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.simulate import array_of
from protofleet.hw_profiles.accelerator.sweep import Axes, sweep
from protofleet.hw_profiles.devices.schema import find_device, load_devices
from protofleet.hw_profiles.latency.precisions import ON_ARRAYS
from protofleet.hw_profiles.reports.page import check_pages
from protofleet.hw_profiles.reports.subject import load_subject
from protofleet.hw_profiles.reports.sweep_page import sweep_page
from protofleet.hw_profiles.reports.sweep_report import default_methods, sweep_csv, sweep_report, tasks_of
from protofleet.hw_profiles.units import digits, percent, size, time_text

__all__ = ["sweep_command"]

Value = TypeVar("Value")
_MORE = "with commas between"
_SHOWN = 12


# arguments: each is an option, as typer reads them
def sweep_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="F.bundle|F.onnx|BACKBONE", help="a bundle, an ONNX file, or one of SphereFed's backbones"
        ),
    ],
    device: Annotated[str, typer.Option(help="a device with a systolic array: its chip")] = "fpga-vc707-32x64",
    devices_file: Annotated[list[Path] | None, typer.Option(help="device files of your own")] = None,
    rows: Annotated[str, typer.Option(help=f"numbers, {_MORE}")] = "8,16,32,64",
    cols: Annotated[str, typer.Option(help=f"numbers, {_MORE}")] = "8,16,32,64",
    dataflow: Annotated[str, typer.Option(help=f"of {listed(DATAFLOWS)}, {_MORE}")] = "os,ws,is",
    precision: Annotated[str, typer.Option(help=f"of {listed(ON_ARRAYS)}, {_MORE}")] = "int8,bf16,fp32",
    sram: Annotated[
        str | None, typer.Option(help="on-chip memory: 512KiB,1MiB; default 1/8, 1/4, 1/2 of the chip's")
    ] = None,
    bandwidth: Annotated[str | None, typer.Option(help=f"GB/s of memory, {_MORE}; default the board's")] = None,
    mhz: Annotated[str, typer.Option(help=f"clocks, {_MORE}")] = "100,200",
    batch: Annotated[str | None, typer.Option(help=f"numbers, {_MORE}; default the bundle's, or 64")] = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"inference, fedavg or methods, {_MORE}; default inference and the bundle's, or fedavg"),
    ] = None,
    depthwise: Annotated[str, typer.Option(help="per-channel, as SCALE-Sim, or packed side by side")] = "per-channel",
    classes: Annotated[int | None, typer.Option(help="C; default the bundle's, or 100")] = None,
    side: Annotated[int | None, typer.Option(help="input side of a named backbone; default 32")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="write all points as CSV")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write all points as one HTML page")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help=JSON_HELP.format("all points"))] = None,
) -> None:
    """Many arrays for one network: which no other beats in time, energy, memory and share of the chip."""
    if html_file is not None:
        check_pages()
    board = find_device(device, load_devices(devices_file or ()))
    base = array_of(board, depthwise=depthwise)
    chip = chip_of(board)
    batches = None if batch is None else _values("--batch", batch, _count)
    subject = load_subject(target, classes=classes, side=side, batch=None if batches is None else batches[0])
    axes = Axes(
        rows=_values("--rows", rows, _count),
        cols=_values("--cols", cols, _count),
        dataflow=_values("--dataflow", dataflow, _name),
        precision=_values("--precision", precision, _name),
        sram_bytes=_default_sram(chip) if sram is None else _values("--sram", sram, _size),
        dram_bytes_per_s=(chip.dram_bytes_per_s,)
        if bandwidth is None
        else tuple(gbs * 1e9 for gbs in _values("--bandwidth", bandwidth, _number)),
        mhz=_values("--mhz", mhz, _number),
        batch=batches or (subject.batch,),
        method=default_methods(subject) if method is None else _values("--method", method, _name),
    )
    report = sweep_report(subject, sweep(axes, chip, tasks_of(subject), base=base, depthwise=base.depthwise))
    write_json(json_file, report)  # before it is shown: whoever reads along may leave (`| head`)
    if csv_file is not None:
        write_text(csv_file, sweep_csv(report), option="--csv")
    if html_file is not None:
        options = [word for file in devices_file or () for word in ("--devices-file", str(file))]
        options += [] if side is None else ["--side", str(side)]
        options += ["--depthwise", base.depthwise] if base.depthwise != "per-channel" else []
        write_text(html_file, sweep_page(report, target, options), option="--html")
    _show(report, beside(json_file))


def _default_sram(chip: Chip) -> tuple[int, ...]:
    """Parts of the chip's: not all of it, since banks of whole blocks leave some of it unused."""
    return tuple(chip.sram_bytes // part for part in (8, 4, 2))


def _values(option: str, text: str, read: Callable[[str, str], Value]) -> tuple[Value, ...]:
    """A list with commas between, each value once."""
    return tuple(dict.fromkeys(read(option, part.strip()) for part in text.split(",")))


def _count(option: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 4096:
        raise UsageError(option, expected="whole numbers from 1 to 4096, with commas between", got=text or "nothing")
    return int(text)


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(option, expected="numbers, with commas between", got=text or "nothing")
    return check_option(option, value)


def _size(option: str, text: str) -> int:
    return read_size(text, option, least="1KiB")


def _name(option: str, text: str) -> str:
    return text


def _show(report: Mapping[str, Any], console: Console) -> None:
    points = [point for point in report["points"] if not point["published"]]
    texts = (report["subject"]["name"], report["subject"]["source"], report["device"]["name"])
    name, source, device = (escape(printable(text)) for text in texts)
    console.print(f"[bold]{escape(printable(report['sentence']))}[/bold]", highlight=False)
    console.print(
        f"[bold]{name}[/bold] ({source}) on [bold]{device}[/bold]: {len(points):,} arrays and tasks "
        "(time simulated; energy and memory predicted)"
    )
    for refused in report["refused"]:
        console.print(f"left out {refused['count']:,}: {refused['reason']}, first {refused['first']}", highlight=False)
    for name in dict.fromkeys(point["method"] for point in points):
        front = sorted((p for p in points if p["method"] == name and p["front"]), key=lambda point: point["photo_ms"])
        shown = _spread(front, _SHOWN)
        console.print(
            f"\n[bold]{name}[/bold]: {len(front)} that no other beats, {len(shown)} of them from fast to slow"
        )
        published = [p for p in report["points"] if p["method"] == name and p["published"]][:1]
        show_table(console, _COLUMNS, [_row(point) for point in (*shown, *published)], words=(0, 1))
    console.print("assumptions", style="dim")
    for line in report["assumptions"]:
        console.print(f"  - {line}", style="dim", highlight=False)


_COLUMNS = ("array", "dataflow", "batch", "MHz", "SRAM", "a photo", "energy", "memory", "DSP", "LUT", "of the chip")


def _row(point: Mapping[str, Any]) -> tuple[str, ...]:
    name = f"{point['rows']}x{point['cols']} {point['precision']}" + (" SphereFed's" if point["published"] else "")
    luts = "" if point["luts"] is None else f"{point['luts']:,}"
    dsps = "" if point["dsp_slices"] is None else f"{point['dsp_slices']:,}"
    return (
        name, point["dataflow"], str(point["batch"]), f"{point['mhz']:g}", size(point["sram_bytes"]),
        time_text(point["photo_ms"]), f"{digits(point['photo_mj'])} mJ", size(point["memory_bytes"]), dsps, luts,
        percent(point["chip_share"], 0),
    )  # fmt: skip


def _spread(points: list[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """At most so many of a sorted list, first and last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
