"""How well a board's own calibration predicts networks and training steps that it has not seen.

    python -m benchmarks.hardware.calibrated_board [--markdown results/calibrated-board.md] [--turns 3] [--threads 1,2]
    python -m benchmarks.hardware.calibrated_board --work DIR --tables      the tables of times that were kept in DIR

Measures the suite and, between its turns, the twelve networks and six steps of `calibration_subjects` by the device's
own code, in this process: one thread by its processor time, two by the clock. Of each turn the lower quartile of runs
stands, of the turns the least, for graphs and subjects alike. Then it fits as `profile --calibrate` does, and predicts
from the file. The transfer: the same with the data sheet alone, with 5, with 20 and with all graphs, picked evenly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.hardware.calibration_subjects import INFERENCE, TRAINING
from protofleet.commands.calibrate import Measured, device_text, measure_suite
from protofleet.commands.measure import load_inference, load_training
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.export.bundles.build import build_bundle
from protofleet.hw_profiles.calibration.amounts import AMOUNTS, amounts_of, is_step
from protofleet.hw_profiles.calibration.fit import datasheet_costs, fit_costs
from protofleet.hw_profiles.calibration.suite import cases
from protofleet.hw_profiles.devices.host import cpu_name
from protofleet.hw_profiles.devices.load import Watch
from protofleet.hw_profiles.devices.schema import Device, load_devices, parse_devices
from protofleet.hw_profiles.latency.predict import predict
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads
from protofleet.hw_profiles.workload.model import Workload

GOALS = {"inference": (10.0, 20.0), "training": (8.0, 20.0)}
WIDEST = 1.6
LABELS = [str(number) for number in range(10)]


def subjects(folder: Path) -> list[dict[str, Any]]:
    """Bundles of all subjects, exported once to a folder."""
    found = []
    for backbone, shape, batch in (*((b, s, 0) for b, s in INFERENCE), *TRAINING):
        name = f"{backbone.rpartition(':')[2]} {shape[0]}x{shape[1]}" + (f" B{batch}" if batch else "")
        path = folder / f"{name.replace(' ', '-')}.bundle"
        if not path.exists():
            method = "fedproto" if batch else "ncm"
            build_bundle(
                backbone=backbone, method_name=method, labels=LABELS, input_shape=shape, out=path, batch=batch or 1
            )
        found.append({"name": name, "path": str(path), "batch": batch, "part": "training" if batch else "inference"})
    return found


def subject_ms(subject: dict[str, Any], threads: int, seconds: float) -> float:
    """The lower quartile of some runs."""
    load = load_training if subject["batch"] else load_inference
    run: Callable[[], object] = load(subject["path"], threads, subject["batch"] or 1)
    clock = time.thread_time if threads == 1 else time.perf_counter
    for _ in range(3):
        run()
    times: list[float] = []
    until = time.monotonic() + seconds
    while len(times) < 7 or time.monotonic() < until:
        before = clock()
        run()
        times.append(clock() - before)
    return float(np.quantile(times, 0.25)) * 1e3


def measure(folder: Path, turns: int, threads: Sequence[int], seconds: float) -> dict[str, Any]:
    """Suite and subjects in turn; the least of the turns, those before among them."""
    found = subjects(folder)
    kept = folder / "times.json"
    none: dict[str, Any] = {"turns": 0, "suite": {}, "subjects": {}}
    before = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else none
    suite, times = before["suite"], before["subjects"]
    for key in map(str, threads):
        suite.setdefault(key, [float("inf")] * len(cases()))
        times.setdefault(key, [float("inf")] * len(found))
    watch, memory_gb_s = Watch(), before.get("memory_gb_s", 0.0)
    for turn in range(before["turns"], before["turns"] + turns):
        once = measure_suite(threads, lambda line: None, turns=1)
        memory_gb_s = max(memory_gb_s, once.memory_gb_s)
        for count in threads:
            key = str(count)
            suite[key] = [min(pair) for pair in zip(suite[key], once.ms[count], strict=True)]
            for index, subject in enumerate(found):
                times[key][index] = min(times[key][index], subject_ms(subject, count, seconds))
        others = watch.load().others
        ahead = os.sched_getscheduler(0) in (os.SCHED_FIFO, os.SCHED_RR)  # as under `chrt -f 10`
        table = {"turns": turn + 1, "others": others, "ahead": ahead, "memory_gb_s": memory_gb_s}
        table |= {"suite": suite, "subjects": times}
        kept.write_text(json.dumps(table), encoding="utf-8")
        print(f"turn {turn + 1}: others took {others or 0:.2f} processors", flush=True)
    return json.loads(kept.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def workload_of(subject: dict[str, Any]) -> tuple[Workload, Workload | None]:
    """What is predicted, and of a step its network's inference graph."""
    forward, step = bundle_workloads(read_bundle(subject["path"]), batch=1)
    return (step, fold_weights(forward)) if subject["batch"] and step else (fold_weights(forward), None)


def tables(folder: Path, measured: dict[str, Any]) -> list[str]:
    """The page's lines."""
    found = subjects(folder)
    ms = {int(count): times for count, times in sorted(measured["suite"].items())}
    text, calibration = device_text(
        "calibrated", Measured(ms, measured["others"], None, 0.0, None, measured["memory_gb_s"])
    )
    device = parse_devices(text, "here")[0]
    host = load_devices()["host"]
    workloads = [workload_of(subject) for subject in found]
    lines = [
        f"On {cpu_name()}, {platform.machine()}, ONNX Runtime {ort.__version__}, Python {platform.python_version()}; "
        f"{measured['turns']} turns, other processes took {measured['others'] or 0:.2f} processors meanwhile"
        f"{', this one went first (chrt -f 10)' if measured.get('ahead') else ''}.",
        "",
    ]
    for count in ms:
        lines += _subjects_table(count, found, workloads, device, host, measured["subjects"][str(count)])
    lines += ["## Errors of graphs of the suite that were left out", ""]
    lines += ["| part | threads | graphs | median | p90 | high/low |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for fit in calibration.fits:
        lines.append(
            f"| {fit.part} | {fit.threads} | {fit.graphs} | {100 * fit.median:.1f} % | {100 * fit.p90:.1f} % | "
            f"{np.exp(2 * fit.half_width):.2f} |"
        )
    return [*lines, "", *_transfer(ms, found, workloads, device, measured)]


def _subjects_table(
    count: int, found: list[dict[str, Any]], workloads: list[tuple[Workload, Workload | None]], device: Device,
    host: Device, times: list[float],
) -> list[str]:  # fmt: skip
    measure_by = "processor time" if count == 1 else "clock"
    lines = [f"## {count} thread{'s' * (count > 1)}, {measure_by}", ""]
    lines += ["| | measured ms | predicted | error | 8 of 10 | inside | without the file |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | --- | ---: |"]
    errors: dict[str, list[float]] = {"inference": [], "training": []}
    inside: dict[str, list[bool]] = {"inference": [], "training": []}
    without: dict[str, list[float]] = {"inference": [], "training": []}
    widths: dict[str, float] = {}
    threads: Any = "1" if count == 1 else "all"
    for subject, (workload, forward), real in zip(found, workloads, times, strict=True):
        entry = predict(workload, device, threads=threads, forward=forward)
        general = predict(workload, host, runtime="onnxruntime", precision="fp32", threads=threads, forward=forward)
        part, held = subject["part"], entry.low_ms <= real <= entry.high_ms
        errors[part].append(100 * (entry.ms / real - 1))
        without[part].append(100 * (general.ms / real - 1))
        inside[part].append(held)
        widths[part] = entry.high_ms / entry.low_ms
        lines.append(
            f"| {subject['name']} | {real:.3f} | {entry.ms:.3f} | {errors[part][-1]:+.1f} % | "
            f"{entry.low_ms:.3g} to {entry.high_ms:.3g} | {'yes' if held else 'no'} | {without[part][-1]:+.1f} % |"
        )
    lines += ["", "| | subjects | median | p90 | high/low | inside 80 % | goal | without the file |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: |"]
    for part in errors:
        median, p90 = _spread(errors[part])
        aim, reach = GOALS[part]
        met = median <= aim and p90 <= reach and widths[part] <= WIDEST
        plain = " / ".join(f"{value:.1f} %" for value in _spread(without[part]))
        lines.append(
            f"| {part} | {len(errors[part])} | {median:.1f} % | {p90:.1f} % | {widths[part]:.2f} | "
            f"{sum(inside[part])} of {len(inside[part])} | {aim:g} / {reach:g} %, {WIDEST}: "
            f"{'met' if met else 'missed'} | {plain} |"
        )
    return [*lines, ""]


def _transfer(
    ms: dict[int, list[float]], found: list[dict[str, Any]], workloads: list[tuple[Workload, Workload | None]],
    device: Device, measured: dict[str, Any],
) -> list[str]:  # fmt: skip
    """Median and p90 of the subjects' errors by how many graphs were measured, one thread."""
    assert device.cpu is not None
    prior = datasheet_costs(device.cpu.clock_ghz, device.cpu.fp32_macs_per_cycle, device.cpu.memory_gb_s)
    lines = ["## By how many graphs of each part are measured, one thread", ""]
    lines += ["| graphs | inference median | p90 | training median | p90 |", "| --- | ---: | ---: | ---: | ---: |"]
    for wanted in (0, 5, 20, 10_000):
        cells = []
        for part in ("inference", "training"):
            rows = [index for index, case in enumerate(cases()) if case.part == part]
            number = min(wanted, len(rows))
            picked = [rows[int((place + 0.5) * len(rows) / number)] for place in range(number)] if number else []
            amounts = np.array([cases()[index].amounts for index in picked]).reshape(number, len(AMOUNTS))
            whole = np.array([cases()[index].whole for index in picked], bool)
            costs = np.exp(fit_costs(amounts, np.array(ms[1])[picked], prior, whole).log_ms)
            errors = []
            for subject, (workload, _), real in zip(found, workloads, measured["subjects"]["1"], strict=True):
                if subject["part"] == part:
                    errors.append(100 * (amounts_of(workload, training=is_step(workload)) @ costs / real - 1))
            cells += [f"{value:.1f} %" for value in _spread(errors)]
        name = {0: "none: the data sheet", 10_000: "all"}.get(wanted, str(wanted))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _spread(errors: Sequence[float]) -> tuple[float, float]:
    sizes = np.abs(errors)
    return float(np.median(sizes)), float(np.quantile(sizes, 0.9))


def main() -> None:
    """Measure, or read what was measured, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each subject in each turn")
    parser.add_argument("--work", type=Path, help="keep bundles and times in this folder, and go on with them")
    parser.add_argument("--tables", action="store_true", help="of the times that --work has")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        threads = [int(count) for count in args.threads.split(",")]
        kept = folder / "times.json"
        times = json.loads(kept.read_text(encoding="utf-8")) if args.tables else None
        times = times or measure(folder, args.turns, threads, args.seconds)
        lines = tables(folder, times)
    head = ["# A calibrated board: networks and steps that it had not seen", ""]
    given = f"--turns {times['turns']} --threads {','.join(sorted(times['suite']))}"
    command = f"python -m benchmarks.hardware.calibrated_board {given} --markdown results/calibrated-board.md"
    head += ["```", command, "```", ""]
    text = "\n".join([*head, *lines]) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
