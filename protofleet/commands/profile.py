"""`protofleet profile`: the cost of a bundle on devices (predicted, simulated) and on this machine (measured).

`hw_profiles` predicts, and `edge_client` runs a bundle. This command does both. It imports only what the options need,
so `--measure` works on a board with the base install, without onnx and torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.console.interrupt import interruptible
from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.methods import LOAD_HELP, METHODS, closing_method, load_method
from protofleet.contract.names import known
from protofleet.contract.printable import printable
from protofleet.hw_profiles.devices.host import cpu_name
from protofleet.hw_profiles.devices.load import BUSY, check_idle
from protofleet.hw_profiles.devices.measure import read_measurement
from protofleet.hw_profiles.devices.schema import Device, find_device, load_devices, read_device_files
from protofleet.hw_profiles.latency.precisions import ON_PROCESSORS
from protofleet.hw_profiles.latency.published_rows import OWN_DEVICE
from protofleet.hw_profiles.memory.liveness import LARGEST_SEARCHED
from protofleet.hw_profiles.reports.page import check_pages
from protofleet.hw_profiles.units import digits, size, time_text

__all__ = ["profile_command"]

_MOST_SAMPLES = 1_000_000_000
_SHORT = {"onnxruntime": "ort", "tensorrt": "trt"}


# arguments: each is an option, as typer reads them
def profile_command(
    bundle: Annotated[Path | None, typer.Argument(metavar="F.bundle", help="the bundle to profile")] = None,
    devices: Annotated[
        str, typer.Option(help="device names, comma-separated; default all, or host with --measure")
    ] = "",
    list_devices: Annotated[bool, typer.Option("--list", help="list the devices and end")] = False,
    devices_file: Annotated[list[Path] | None, typer.Option(help="device files of your own (TOML)")] = None,
    device: Annotated[
        list[Path] | None, typer.Option(help="predict for the device of this file alone, e.g. of --calibrate")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="measure small graphs here, some minutes, and write this board's device file")
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="measure on this machine")] = False,
    under_load: Annotated[
        bool, typer.Option("--under-load", help="measure although other processes are busy; the result is marked")
    ] = False,
    per_operator: Annotated[
        bool, typer.Option("--per-operator", help="with --measure, each kind of operator of inference, too")
    ] = False,
    measured: Annotated[
        Path | None, typer.Option(help="read back what --measure --json wrote, here or elsewhere")
    ] = None,
    seconds: Annotated[float, typer.Option(help="of measuring, for each number of threads and phase")] = 3.0,
    batch: Annotated[int, typer.Option(help="B of inference")] = 1,
    samples: Annotated[int, typer.Option(help="local samples N in a round")] = 1000,
    runtime: Annotated[str, typer.Option(help="of the main figure, e.g. ncnn, tflite, onnxruntime, tensorrt")] = "",
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8; default what the runtime takes there")] = "",
    threads: Annotated[
        str, typer.Option(help="numbers, comma-separated, for --measure; 1 or all for predictions")
    ] = "",
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help=JSON_HELP.format("the report"))] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write the report as one HTML page")] = None,
) -> None:
    """Latency, memory and energy of a bundle on devices, predicted; with --measure, on this machine."""
    if method is not None:
        load_method(method)
    if html_file is not None:
        check_pages()
        _check_onnx("--html")
    known = load_devices(devices_file or ())
    own = read_device_files(device or ())
    known |= own
    console = beside(json_file)
    if list_devices:
        _show_devices(known.values(), console)
        return
    if calibrate is not None:
        _calibrate(calibrate, threads, under_load, console)
        return
    if bundle is None:
        raise UsageError(
            "profile", expected="a bundle file, or --list", got="neither", hint="protofleet profile --list"
        )
    _check_options(batch, samples, seconds, precision)
    if not measure and threads not in ("", "1", "all"):
        raise UsageError("--threads", expected="1 or all for predictions", got=threads, hint="--measure for others")
    if per_operator and not measure:
        raise UsageError("--per-operator", expected="--measure beside it", got="none")
    everywhere = ["host"] if measure else [name for name in known if name != OWN_DEVICE]
    named = _named(devices) if devices else list(own) or everywhere
    chosen = [find_device(name, known) for name in named]
    record = read_measurement(measured) if measured else None
    if measure:
        _check_board(chosen)
        counts = _thread_counts(threads)
        if not under_load:
            check_idle()
        with interruptible():  # the processes that measure are ended
            record = _measure(bundle, counts, seconds, batch, per_operator, console)
    if measure and not _has_onnx():
        write_json(json_file, record)
        _show_measured(record or {}, console)
        traced = (record or {}).get("operators", {"rows": []})["rows"]
        _show_operators([{"op": r["op"], "nodes": r["nodes"], "measured_ms": r["ms"]} for r in traced], console)
        needs = f"predictions need the onnx package: {install_command('export')}"
        console.print(needs, style="dim", markup=False, soft_wrap=True)
        return
    choice = {"batch": batch, "samples": samples, "runtime": runtime or None, "precision": precision or None}
    report = _report(bundle, chosen, choice | {"threads": "1" if threads == "1" else "all"}, record)
    if measure:
        _keep_predicted(report)
    write_json(json_file, report)  # before it is shown: whoever reads along may leave (`| head`)
    if html_file is not None:
        from protofleet.hw_profiles.reports.profile_page import profile_page

        write_text(html_file, profile_page(report), option="--html")
    _show(report, console)


def _named(devices: str) -> list[str]:
    """The names of `--devices`, each once."""
    names = list(dict.fromkeys(name.strip() for name in devices.split(",") if name.strip()))
    if not names:
        raise UsageError("--devices", expected="names with commas between", got=devices, hint="profile --list")
    return names


def _calibrate(path: Path, threads: str, under_load: bool, console: Console) -> None:
    """Measure the suite here and write the device file; say how well it does, and what disturbed it."""
    from protofleet.commands.calibrate import calibrate_board, check_writable

    check_writable(path)
    cores = len(os.sched_getaffinity(0))
    counts = _thread_counts(threads) if threads else [1, 2][: max(1, min(2, cores))]
    if not counts or counts[0] != 1:
        raise UsageError("--threads", expected="1 among the numbers with --calibrate", got=threads)
    if not under_load:
        check_idle(option="--calibrate")
    found = calibrate_board(path, threads=counts, progress=lambda line: console.print(line, style="dim"))
    rows = [
        (fit.part, str(fit.threads), str(fit.graphs), f"{100 * fit.median:.1f} %", f"{100 * fit.p90:.1f} %")
        for fit in found.fits
    ]
    show_table(console, ("part", "threads", "graphs", "median error", "p90"), rows, words=(0,), title=found.board)
    console.print("the errors are those of graphs that were left out of the fit", style="dim")
    notes = [f"governor {found.governor}, expected performance"] * (found.governor not in ("performance", "unknown"))
    notes += ["the processor was held back meanwhile"] * bool(found.throttled)
    notes += [f"others took {found.others or 0:.2f} processors, expected at most {BUSY:g}"] * found.under_load
    for note in notes:
        console.print(f"calibrated with {note}: the file says so", style="yellow", highlight=False, soft_wrap=True)
    console.print(f"-> {path}; protofleet profile F.bundle --device {path}", highlight=False, soft_wrap=True)


def _check_board(chosen: Iterable[Device]) -> None:
    """That what is measured here is laid beside no other board's calibration.

    Raises:
        UsageError: a file is another board's.
    """
    from protofleet.edge_client.hardware.process_metrics import board_name

    here = (board_name(), cpu_name())
    for device in chosen:
        there = device.calibration
        if there is not None and (there.board, there.processor) != here:
            raise UsageError(
                f"--measure beside {device.name}", expected=f"a file that was calibrated on this board, {here[0]}",
                got=f"one of {there.board}, {there.processor}", hint="--device with this board's file, or no --measure",
            )  # fmt: skip


def _check_onnx(what: str) -> None:
    """Raise where onnx is missing: predictions need the bundle's graphs, and pages show predictions."""
    if not _has_onnx():
        raise UsageError(
            what, expected="the onnx package, for predictions from the bundle's graphs", got="none installed",
            hint=f"{install_command('export')}, or --measure alone, which needs nothing more",
        )  # fmt: skip


def _check_options(batch: int, samples: int, seconds: float, precision: str) -> None:
    for name, value in (("--batch", batch), ("--samples", samples)):
        if value < 1:
            raise UsageError(name, expected="a positive integer", got=value)
    if batch > LARGEST_SEARCHED:
        raise UsageError("--batch", expected=f"at most {LARGEST_SEARCHED:,}", got=batch)
    if samples > _MOST_SAMPLES:
        raise UsageError("--samples", expected=f"at most {_MOST_SAMPLES:,}", got=samples)
    if not 0 < seconds <= 3600:
        raise UsageError("--seconds", expected="a number from 0 to 3600", got=seconds)
    if precision:
        known(ON_PROCESSORS, precision, "--precision")


def _thread_counts(threads: str) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    counts = sorted({1, cores} | ({2} if cores >= 4 else set()))
    if threads and threads != "all":
        try:
            counts = sorted({int(number) for number in threads.split(",")})
        except ValueError:
            raise UsageError("--threads", expected="numbers, comma-separated", got=threads) from None
        if counts[0] < 1 or counts[-1] > cores:
            raise UsageError("--threads", expected=f"numbers from 1 to {cores}, the processors here", got=threads)
    return counts


def _measure(
    bundle: Path, counts: Sequence[int], seconds: float, batch: int, per_operator: bool, console: Console
) -> dict[str, Any]:
    from protofleet.commands.measure import measure_bundle

    return measure_bundle(
        bundle,
        threads=counts,
        seconds=seconds,
        batch=batch,
        per_operator=per_operator,
        progress=lambda line: console.print(line, style="dim"),
    )


def _report(
    bundle: Path, devices: Sequence[Device], choice: Mapping[str, Any], record: Mapping[str, Any] | None
) -> dict[str, Any]:
    _check_onnx("predictions")
    from protofleet.hw_profiles.reports.profile_report import Choice, profile_report

    return profile_report(read_bundle(bundle), devices, Choice(**choice), record)


def _has_onnx() -> bool:
    from importlib.util import find_spec

    return find_spec("onnx") is not None


def _show_devices(devices: Iterable[Device], console: Console) -> None:
    rows = [
        (device.name, ", ".join(device.processors), f"{device.memory.ram_bytes / 2**30:.3g} GiB", device.title)
        for device in devices
    ]
    show_table(console, ("name", "processors", "memory", "title"), rows, words=(0, 1, 3))


def _keep_predicted(report: Mapping[str, Any]) -> None:
    """What was predicted for this machine goes into its status, too, beside the fastest run that was measured."""
    metrics = report["measured"]["status_metrics"]
    for phase, name in (("inference", "profile_inference"), ("training_step", "profile_train_step")):
        rows = [row for row in report["comparison"] if row["phase"] == phase and row.get("predicted_ms") is not None]
        if rows and f"{name}_ms" in metrics:
            fastest = min(rows, key=lambda row: (bool(row.get("under_load")), row["median_ms"]))
            metrics[f"{name}_predicted_ms"] = float(fastest["predicted_ms"])
    here = {row["device"] for row in report["comparison"]}
    for memory in (each["memory"] for each in report["devices"] if each["name"] in here):
        metrics["profile_memory_predicted_bytes"] = float(memory["peak_bytes"])
        metrics["profile_memory_at_most_bytes"] = float(memory["peak_bytes_at_most"])
        metrics["profile_memory_samples"] = float(report["samples"])


_FLEET_COLUMNS = ("device", "latency", "8 of 10", "by", "ground", "step", "round", "at most", "fits")


def _show(report: Mapping[str, Any], console: Console) -> None:
    subject, uplink = report["subject"], report["uplink"]
    console.print(f"[bold]{escape(printable(report['sentence']))}[/bold]", highlight=False)
    console.print(
        f"[bold]{subject['backbone']}[/bold], {subject['method']}, {subject['parameters']:,} parameters, "
        f"{subject['inference_macs'] / 1e6:,.1f} M multiply-accumulates at batch {subject['batch']}"
    )
    console.print(_uplink_line(uplink))
    console.print(_ladder_line(uplink["without_training"]), style="dim", highlight=False)
    rows = [_fleet_row(device) for device in report["devices"]]
    show_table(console, _FLEET_COLUMNS, rows, words=(0, 3, 4, 8), title=f"a round is {report['samples']:,} samples")
    console.print(_LEGEND, style="dim", highlight=False)
    for line in dict.fromkeys(_grounds(report["devices"])):
        console.print(line, style="yellow", highlight=False)
    for line in dict.fromkeys(_extrapolations(report["devices"])):
        console.print(line, style="yellow", highlight=False)
    if report["measured"]:
        _show_measured(report["measured"], console, report["comparison"])
    _show_operators(report["operators"], console)
    if subject["unmodelled"]:
        named = ", ".join(f"{op} x{count}" for op, count in subject["unmodelled"].items())
        console.print(f"[yellow]not modelled[/yellow], priced as element-wise work: {named}")
    for line in report["assumptions"]:
        console.print(f"  - {line}", style="dim", highlight=False)


_GROUND = {"interpolated": "inter", "extrapolated": "extra", "no ground": "none"}
_LEGEND = (
    "latency of inference and step by an array: simulated; all else predicted. 8 of 10: where 8 of 10 latencies would "
    "lie, in ms. at most: upper bound of our client's memory, samples included, over rounds and the closing one, which "
    "decides what fits. ?: extrapolated. ground: inter-, extrapolated or none, and the model's median error where it "
    "knows as little"
)


def _uplink_line(uplink: Mapping[str, Any]) -> str:
    own, closing, fedavg = (size(uplink[f"{what}_bytes"]) for what in ("contribution", "closing", "fedavg"))
    if uplink["method"] == uplink["closing_method"]:
        return f"up once {closing} ({uplink['closing_statistic']}), measured; FedAvg would send {fedavg} each round"
    title = METHODS[uplink["closing_method"]].title
    once = f"once for {title} {closing} ({uplink['closing_statistic']})"
    return f"up per round {own} ({uplink['statistic']}), {once}, measured; FedAvg would send {fedavg} each round"


def _ladder_line(rungs: Sequence[Mapping[str, Any]]) -> str:
    """What each way without training sends, fewest bytes first."""
    ways = ", ".join(f"{rung['way']} ({size(rung['bytes'])})" for rung in rungs if rung["bytes"] is not None)
    return f"up once without training: {ways}; protofleet advise measures their accuracy on your photos"


def _grounds(devices: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A line for each latency and step that is not interpolated, with its reasons and the model's error."""
    lines: dict[str, list[str]] = {}
    for device in devices:
        for what, entry in (("latency", device["inference"][0]), ("step", device["training_step"])):
            if entry is not None and entry["support"] not in (None, "interpolated"):
                because = "; ".join(entry["support_reasons"])
                line = f"{what} {entry['support']}: {because}. The model's error: {entry['error']['text']}"
                lines.setdefault(line, []).append(device["name"])
    for line, names in lines.items():
        yield f"{', '.join(names)}: {line}"


def _extrapolations(devices: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    """A line for all devices whose memory estimate lies beyond all measurements in the same things."""
    lines: dict[str, list[str]] = {}
    for device in devices:
        if device["memory"]["extrapolated"]:
            beyond = ", ".join(device["memory"]["extrapolated"])
            lines.setdefault(f"memory extrapolated, beyond all that was measured: {beyond}", []).append(device["name"])
    for line, names in lines.items():
        yield f"{', '.join(names)}: {line}"


def _fleet_row(device: Mapping[str, Any]) -> tuple[str, ...]:
    main, step, memory = device["inference"][0], device["training_step"], device["memory"]
    runtime = "array" if main["processor"] == "systolic" else _SHORT.get(main["runtime"], main["runtime"])
    return (
        device["name"],
        _brief(main["latency_ms"]),
        f"{digits(main['low_ms'], 2)}–{digits(main['high_ms'], 2)}" if main["low_ms"] else "",
        runtime if runtime == "array" else f"{runtime} {main['precision']}",
        _GROUND.get(main["support"], "") + (f" ±{100 * main['error']['median']:.0f}%" if main["error"] else ""),
        _brief(step["latency_ms"]) if step else "–",
        _brief(step["round_s"] * 1e3) if step else "–",
        *_memory_cells(memory),
    )


def _memory_cells(memory: Mapping[str, Any]) -> tuple[str, str]:
    """The upper bound of the memory, and whether it fits."""
    most = memory["peak_bytes_at_most"]
    verdict = "yes" if memory["fits"] else "NO"
    if not memory["fits"] and memory["training_fits"]:
        verdict = f"not {closing_method().title}"
    elif not memory["fits"] and memory["inference_fits"]:
        verdict = "inference"
    return size(most), verdict + ("?" if memory["extrapolated"] else "")


def _brief(milliseconds: float) -> str:
    """A duration in seven characters."""
    return time_text(milliseconds).replace(" ", "")


def _show_operators(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    if not rows:
        return
    cells = [
        (row["op"], str(row["nodes"]), *("–" if row.get(k) is None else digits(row[k]) for k in _OPERATOR_FIGURES))
        for row in rows
    ]
    headings = ("operator", "nodes", "measured ms", "predicted ms")
    show_table(console, headings, cells, words=(0,), title="operators of an inference, by ONNX Runtime's trace")


_OPERATOR_FIGURES = ("measured_ms", "predicted_ms")


def _others(line: Mapping[str, Any]) -> str:
    """Processors that other processes took meanwhile, with a mark where it was too much."""
    if line.get("other_processors") is None:
        return "?"
    return f"{line['other_processors']:.2f}{' LOAD' if line['under_load'] else ''}"


def _beside(line: Mapping[str, Any]) -> str:
    """What was predicted for a measured line."""
    if not line.get("predicted_ms"):
        return "–"
    interval = f"{digits(line['low_ms'], 2)} – {digits(line['high_ms'], 2)}" if line["low_ms"] else line["support"]
    return f"{digits(line['predicted_ms'])} ({interval})"


_MEASURED_COLUMNS = ("what", "threads", "B", "median ms", "p99 ms", "cpu ms", "others", "peak MB", "°C", "predicted ms")


def _show_measured(record: Mapping[str, Any], console: Console, comparison: Sequence[Mapping[str, Any]] = ()) -> None:
    rows = []
    for line in comparison or record["runs"]:
        degrees = line["temperature_c"][1]
        cells = (
            line["phase"].replace("_", " "),
            str(line["threads"]),
            str(line["batch"]),
            digits(line["median_ms"]),
            digits(line["p99_ms"]),
            digits(line["cpu_ms"]) if line.get("cpu_ms") is not None else "?",
            _others(line),
            f"{line['peak_rss_bytes'] / 1e6:.1f}",
            "?" if degrees is None else f"{degrees:.0f}{' throttled' if line['throttled'] else ''}",
            _beside(line),
        )
        rows.append(cells)
    show_table(console, _MEASURED_COLUMNS, rows, title=f"measured on {record['host']['board']}")
    loaded = [line for line in record["runs"] if line.get("under_load") and line.get("other_processors") is not None]
    if loaded:
        worst = max(line["other_processors"] for line in loaded)
        console.print(
            f"measured under load, {len(loaded)} of {len(record['runs'])} runs: expected other processes to take at "
            f"most {BUSY:g} of a processor, got {worst:.2f}; end them and measure again",
            style="yellow", highlight=False, soft_wrap=True,
        )  # fmt: skip
