"""Measures a bundle on this machine: the protocol of measuring, and its record.

The caller knows how to run a bundle, and this module knows how to time it. For each number of threads the caller passes
a function that loads inference, and one that loads the training step if there is one. Each is measured in a process of
its own, so that its peak memory is its own and no run affects the next:

1. Load.
2. Warm up until the times settle.
3. Run for a while, and keep every time, the processor time beside the clock, and what other processes took meanwhile.

The record has the median and the 99th percentile, the time to load, the peak resident set, the temperature before and
after, and whether the processor was throttled. It is plain JSON. `profile` reads it back and shows it beside its
predictions. A client puts its `status_metrics` into its status message. Only numpy and the standard library are needed.
See docs/hardware.md.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert

from protofleet.contract.errors import DataError
from protofleet.hw_profiles.devices.host import cpu_name, cpu_temperature_c, throttling
from protofleet.hw_profiles.devices.load import Watch

__all__ = ["SCHEMA", "Timing", "best_run", "measured_run", "operator_times", "read_measurement", "record", "time_runs"]

SCHEMA = 1
_WARM_UP_RUNS = 3
_WARM_UP_SHARE = 0.2
_MIN_RUNS = 10


@dataclass(frozen=True)
class Timing:
    """Times of many runs of one function, in milliseconds."""

    median_ms: float
    p99_ms: float
    runs: int


def time_runs(run: Callable[[], object], *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Warm up, then run for about `seconds`, at least ten times, and keep every time.

    Args:
        run: one inference or one step.
        seconds: time of measuring. Before it, a fifth of that time, and at least three runs, is for warming up.
        clock: monotonic seconds.
    """
    start, warm = clock(), 0
    while warm < _WARM_UP_RUNS or clock() - start < seconds * _WARM_UP_SHARE:
        run()
        warm += 1
    times_s: list[float] = []
    start = clock()
    while len(times_s) < _MIN_RUNS or clock() - start < seconds:
        before = clock()
        run()
        times_s.append(clock() - before)
    return Timing(float(np.median(times_s)) * 1e3, float(np.quantile(times_s, 0.99)) * 1e3, len(times_s))


def measured_run(
    load: Callable[[], Callable[[], object]], *, seconds: float, peak_rss_bytes: Callable[[], int]
) -> dict[str, Any]:
    """Load and time one function in this process, with the process's peak memory.

    Args:
        load: returns the function to time.
        peak_rss_bytes: returns the peak of this process so far; 0 where unknown.
    """
    at_rest = peak_rss_bytes()
    began = time.perf_counter()
    run = load()
    load_ms = (time.perf_counter() - began) * 1e3
    before, throttled_before = cpu_temperature_c(), throttling()
    watch, ran = Watch(), 0

    def counted() -> None:
        nonlocal ran
        run()
        ran += 1

    timing = time_runs(counted, seconds=seconds)
    load_beside = watch.load()
    throttled_after = throttling()
    return {
        "load_ms": round(load_ms, 3),
        "median_ms": round(timing.median_ms, 4),
        "p99_ms": round(timing.p99_ms, 4),
        "runs": timing.runs,
        "cpu_ms": round(load_beside.own_s * 1e3 / ran, 4),
        "load_average": load_beside.average,
        "other_processors": None if load_beside.others is None else round(load_beside.others, 3),
        "under_load": load_beside.busy,
        "peak_rss_bytes": peak_rss_bytes(),
        "rss_before_load_bytes": at_rest,
        "temperature_c": [before, cpu_temperature_c()],
        "throttled": None if not throttled_after else throttled_after != throttled_before,
    }


def operator_times(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The trace of many runs by kind of operator: how many a run has, and their milliseconds together; most first.

    Args:
        events: of ONNX Runtime's profiler. The first runs, which warm up, are left out where there are more.
    """
    runs: list[dict[str, list[float]]] = [{}]
    for event in events:
        if event.get("cat") == "Session" and event.get("name") == "model_run":  # written after its operators
            runs.append({})
        elif event.get("cat") == "Node" and str(event.get("name")).endswith("_kernel_time"):
            runs[-1].setdefault(str(event["args"]["op_name"]), []).append(float(event["dur"]) / 1e3)
    runs = [run for run in runs if run]
    kept = runs[_WARM_UP_RUNS:] or runs
    rows = [
        {
            "op": op,
            "nodes": len(kept[-1][op]),
            "ms": round(float(np.median([sum(run.get(op, ())) for run in kept])), 6),
        }
        for op in kept[-1]
    ] if kept else []  # fmt: skip
    return sorted(rows, key=lambda row: -row["ms"])


def record(
    runs: Sequence[Mapping[str, Any]], *, bundle: Mapping[str, Any], board: str, versions: Mapping[str, str]
) -> dict[str, Any]:
    """The whole record from its runs, each with `phase` (`inference` or `training_step`), `threads` and `batch`."""
    return {
        "schema": SCHEMA,
        "kind": "measured",
        "bundle": dict(bundle),
        "host": {
            "board": board,
            "cpu": cpu_name(),
            "cores": _cores(),
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "versions": dict(versions),
        },
        "runs": [dict(run) for run in runs],
        "status_metrics": _status_metrics(runs),
    }


def read_measurement(path: str | Path) -> dict[str, Any]:
    """A record that `profile --measure --json` wrote, alone or inside a report.

    Raises:
        DataError: the file is no such record, or of another schema.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read measurement {path}", expected="JSON of profile --measure", got=error) from None
    measured = table.get("measured", table) if isinstance(table, dict) else None
    if not isinstance(measured, dict) or measured.get("kind") != "measured" or measured.get("schema") != SCHEMA:
        raise DataError(f"measurement {path}", expected=f"a measurement of schema {SCHEMA}", got="another file")
    for run in measured.get("runs") or ():
        for key in ("median_ms", "p99_ms", "threads", "batch"):
            value = run.get(key) if isinstance(run, dict) else None
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise DataError(f"measurement {path}: {key}", expected="a positive number", got=repr(value))
    try:
        convert(measured, _Record)
    except ValidationError as error:
        raise DataError(f"measurement {path}", expected="what profile --measure writes", got=error) from None
    return measured


class _Bundle(Struct):
    sha256: str


class _Host(Struct):
    board: str
    cpu: str


class _Run(Struct):
    phase: Literal["inference", "training_step"]
    threads: int
    batch: int
    peak_rss_bytes: int
    temperature_c: tuple[float | None, float | None]
    throttled: bool | None = None
    other_processors: float | None = None
    under_load: bool | None = None
    cpu_ms: float | None = None


class _Operator(Struct):
    op: str
    nodes: int
    ms: Annotated[float, Meta(ge=0, le=1e12)]


class _Operators(Struct):
    threads: int
    batch: int
    rows: list[_Operator]


class _Record(Struct):
    """What is read of a record: other fields are let through."""

    bundle: _Bundle
    host: _Host
    runs: Annotated[list[_Run], Meta(min_length=1)]
    operators: _Operators | None = None


def best_run(measured: Mapping[str, Any], phase: str) -> Mapping[str, Any] | None:
    """The fastest run of a phase over all numbers of threads, one that was not under load where there is one; None
    where it was not measured."""
    runs = [run for run in measured["runs"] if run["phase"] == phase]
    return min(runs, key=lambda run: (bool(run.get("under_load")), run["median_ms"])) if runs else None


def _status_metrics(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures for a status message: the fastest run of each phase, its memory, its threads."""
    metrics: dict[str, float] = {}
    for phase, name in (("inference", "profile_inference"), ("training_step", "profile_train_step")):
        run = best_run({"runs": runs}, phase)
        if run is None:
            continue
        metrics |= {
            f"{name}_ms": float(run["median_ms"]),
            f"{name}_p99_ms": float(run["p99_ms"]),
            f"{name}_threads": float(run["threads"]),
            f"{name}_peak_rss_bytes": float(run["peak_rss_bytes"]),
        }
        if run["temperature_c"][1] is not None:
            metrics[f"{name}_temperature_c"] = float(run["temperature_c"][1])
        if run.get("under_load") is not None:
            metrics[f"{name}_under_load"] = float(run["under_load"])
        if run["throttled"] is not None:
            metrics[f"{name}_throttled"] = float(run["throttled"])
    return metrics


def _cores() -> int:
    return len(os.sched_getaffinity(0))
