"""`protofleet cost`: what training and inference cost on a systolic-array accelerator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.contract.console.sizes import read_size
from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.names import listed
from protofleet.contract.printable import printable
from protofleet.hw_profiles.accelerator.chip import check_buildable, check_option, chip_of, in_words, resources_of
from protofleet.hw_profiles.accelerator.dataflows import DATAFLOWS
from protofleet.hw_profiles.accelerator.round_cost import Setting
from protofleet.hw_profiles.accelerator.rtl_files import rtl_array, write_rtl
from protofleet.hw_profiles.accelerator.scalesim_files import topology_rows, topology_text
from protofleet.hw_profiles.accelerator.simulate import array_of
from protofleet.hw_profiles.devices.schema import find_device, load_devices
from protofleet.hw_profiles.memory.liveness import batch_text
from protofleet.hw_profiles.reports.cost_page import cost_page
from protofleet.hw_profiles.reports.cost_report import cost_report, step_cost
from protofleet.hw_profiles.reports.page import check_pages
from protofleet.hw_profiles.reports.subject import load_subject
from protofleet.hw_profiles.units import size, time_text

__all__ = ["cost_command"]


# arguments: each is an option, as typer reads them
def cost_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="F.bundle|F.onnx|BACKBONE", help="a bundle, an ONNX file, or one of SphereFed's backbones"
        ),
    ],
    device: Annotated[str, typer.Option(help="a device with a systolic array")] = "fpga-vc707-32x64",
    devices_file: Annotated[list[Path] | None, typer.Option(help="device files of your own")] = None,
    batch: Annotated[int | None, typer.Option(help="B; default the bundle's, or 64")] = None,
    classes: Annotated[int | None, typer.Option(help="C; default the bundle's, or 100")] = None,
    side: Annotated[int | None, typer.Option(help="input side of a named backbone; default 32")] = None,
    dataflow: Annotated[str, typer.Option(help=f"{listed(DATAFLOWS)}: what stays in the cells")] = "os",
    depthwise: Annotated[str, typer.Option(help="per-channel, as SCALE-Sim, or packed side by side")] = "per-channel",
    precision: Annotated[str, typer.Option(help="fp32, bf16 or int8")] = "fp32",
    rows: Annotated[int | None, typer.Option(help="in place of the device's")] = None,
    cols: Annotated[int | None, typer.Option(help="in place of the device's")] = None,
    mhz: Annotated[float | None, typer.Option(help="in place of the device's clock")] = None,
    sram: Annotated[str | None, typer.Option(help="on-chip memory in place of the device's: 512KiB")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="GB/s of memory in place of the device's")] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    samples: Annotated[int, typer.Option(help="local samples N in a round, as SphereFed's")] = 5_000,
    epochs: Annotated[
        int, typer.Option(help="local epochs in a round, as SphereFed's; profile and plan take the bundle's")
    ] = 10,
    json_file: Annotated[Path | None, typer.Option("--json", help=JSON_HELP.format("the report"))] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write the report as one HTML page")] = None,
    scalesim_csv: Annotated[Path | None, typer.Option(help="write SCALE-Sim's topology of the step's products")] = None,
    rtl: Annotated[Path | None, typer.Option(help="write the array as Verilog with a test bench to a folder")] = None,
) -> None:
    """What training and inference cost on a systolic-array accelerator: cycles, memory, traffic, by method.

    Many arrays on one chip: protofleet cost sweep.
    """
    for name, value in (("--samples", samples), ("--epochs", epochs)):
        if value < 1:
            raise UsageError(name, expected="a positive integer", got=value)
    if method is not None:
        load_method(method)
    if html_file is not None:
        check_pages()
    board = find_device(device, load_devices(devices_file or ()))
    array = array_of(board, dataflow=dataflow, depthwise=depthwise, precision=precision)
    given = {"rows": rows, "cols": cols, "mhz": mhz, "bandwidth": bandwidth}
    for name, value in given.items():
        if value is not None:
            check_option(f"--{name}", value)
    changes = {
        "rows": rows,
        "cols": cols,
        "mhz": mhz,
        "sram_bytes": None if sram is None else read_size(sram, "--sram", least="1KiB"),
    }
    changes["dram_bytes_per_s"] = None if bandwidth is None else bandwidth * 1e9
    array = replace(array, **{name: value for name, value in changes.items() if value is not None})  # type: ignore[arg-type]
    chip = chip_of(board)
    check_buildable(array, chip)
    verilog = rtl_array(array) if rtl is not None else None
    subject = load_subject(target, classes=classes, side=side, batch=batch)
    setting = Setting(samples, epochs, subject.batch)
    report = cost_report(subject, array, device=device, setting=setting, capacity_bytes=board.memory.usable_bytes)
    write_json(json_file, report)  # before it is shown: whoever reads along may leave (`| head`)
    if html_file is not None:
        write_text(html_file, cost_page(report), option="--html")
    if scalesim_csv is not None:
        text = topology_text(topology_rows(step_cost(subject, array).layers))
        write_text(scalesim_csv, text, option="--scalesim-csv")
    if rtl is not None and verilog is not None:
        write_rtl(rtl, verilog, takes=in_words(resources_of(array, chip), chip), family=chip.family or "xc7")
    _show(report, beside(json_file))


def _show(report: dict[str, Any], console: Console) -> None:
    subject, inference, array = report["subject"], report["inference"], report["array"]
    texts = (subject["name"], subject["source"], report["device"])
    name, source, device = (escape(printable(text)) for text in texts)
    console.print(f"[bold]{escape(printable(report['sentence']))}[/bold]", highlight=False)
    console.print(
        f"[bold]{name}[/bold] ({source}), {subject['classes']} classes, batch {subject['batch']}, on "
        f"[bold]{device}[/bold]: {array['rows']}x{array['cols']} at {array['mhz']:g} MHz, "
        f"{array['precision']}, "
        f"{array['dataflow']}, depthwise {array['depthwise']}"
    )
    console.print(
        f"forward pass  {time_text(inference['latency_ms'])} (simulated), {100 * inference['utilisation']:.1f} % of "
        f"the cells used, "
        f"{size(inference['dram_bytes'])} through DDR, {size(inference['memory']['peak_bytes'])} of memory (predicted)"
    )
    if subject["unmodelled"]:
        unmodelled = ", ".join(f"{op} x{n}" for op, n in subject["unmodelled"].items())
        console.print(f"[yellow]not modelled[/yellow]: {escape(printable(unmodelled))}")
    if report["methods"]:
        show_table(console, _METHOD_COLUMNS, _method_rows(report), words=(0, 1))
        for row in report["calibration"]:
            console.print(
                f"{row['method']}  {time_text(row['total_ms'])} (simulated): client {time_text(row['client_ms'])}, "
                f"server "
                f"{time_text(row['server_ms'])}, {size(row['uplink_bytes'])} up"
            )
        _show_claims(report, console)
    fits = report["memory"]["largest_batch"]
    console.print(
        f"largest batch in {size(report['memory']['capacity_bytes'])}: "
        f"{batch_text(fits['training'])} in training, {batch_text(fits['inference'])} in inference (predicted)"
    )
    console.print("assumptions", style="dim")
    for line in report["assumptions"]:
        console.print(f"  - {line}", style="dim", highlight=False)


_METHOD_COLUMNS = (
    "method", "classifier", "step", "forward", "input grad", "weight grad", "update", "round", "memory", "up",
    "time saved", "memory saved",
)  # fmt: skip


def _method_rows(report: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for row in report["methods"]:
        phases = [time_text(row["phases_ms"][p]) for p in ("forward", "input_gradient", "weight_gradient", "update")]
        saved = [f"{row['saved_percent'][k]:.2f} %" for k in ("latency", "memory")]
        figures = (time_text(row["step_ms"]), *phases, time_text(1e3 * row["round_s"]))
        rows.append(
            (row["method"], row["head"], *figures, size(row["memory"]["peak_bytes"]), size(row["uplink_bytes"]), *saved)
        )
    return rows


def _show_claims(report: dict[str, Any], console: Console) -> None:
    last = ""
    for row in report["claims"]:
        if row["claim_text"] != last:
            console.print(
                f"claim: up to {row['paper_percent']} % {row['claim_text']} (SphereFed); this model gives",
                highlight=False,
            )
        last = row["claim_text"]
        console.print(f"  {row['percent']:7.2f} %  {row['assumption']} ({row['kind']})", highlight=False)
