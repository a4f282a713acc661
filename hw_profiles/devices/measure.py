"""What a bundle takes on the machine this runs on: the protocol of measuring, and the record that comes out of it.

The room below knows how to run a bundle; this one knows how to time it. For each number of threads the caller hands in
a way to load and run inference, and one for the training step where there is one. Each is measured in a process of its
own, so that the peak of its memory is its own and one run leaves nothing to the next: load, warm up until times
settle, then run for a while and keep every time. The record says the median and the 99th percentile, the time to load,
the peak resident set, the temperature before and after and whether the processor was held back. It is plain JSON:
`profile` reads it back and lays it beside its predictions; its `status_metrics` are what a client puts into its status
message. Needs numpy and the standard library only. See docs/hardware.md.
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
from typing import Any

import numpy as np

from contract.errors import DataError
from hw_profiles.devices.host import cpu_name, cpu_temperature_c, throttling

__all__ = ["SCHEMA", "Timing", "best_run", "measured_run", "read_measurement", "record", "time_runs"]

SCHEMA = 1
_WARM_UP_RUNS = 3
_WARM_UP_SHARE = 0.2
_MIN_RUNS = 10


@dataclass(frozen=True)
class Timing:
    """Times of one thing run many times, in milliseconds."""

    median_ms: float
    p99_ms: float
    runs: int


def time_runs(run: Callable[[], object], *, seconds: float, clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Warm up, then run for about `seconds`, at least ten times, and keep every time.

    Args:
        run: one inference or one step.
        seconds: of measuring; a fifth of it, and at least three runs, go to warming up first.
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
    """Load and time one thing in this process, whose peak memory it is.

    Args:
        load: returns what to run.
        peak_rss_bytes: of this process so far; 0 where the system does not tell.
    """
    at_rest = peak_rss_bytes()
    began = time.perf_counter()
    run = load()
    load_ms = (time.perf_counter() - began) * 1e3
    before, held_before = cpu_temperature_c(), throttling()
    timing = time_runs(run, seconds=seconds)
    held = throttling()
    return {
        "load_ms": round(load_ms, 3),
        "median_ms": round(timing.median_ms, 4),
        "p99_ms": round(timing.p99_ms, 4),
        "runs": timing.runs,
        "peak_rss_bytes": peak_rss_bytes(),
        "rss_before_load_bytes": at_rest,
        "temperature_c": [before, cpu_temperature_c()],
        "throttled": None if not held else held != held_before,
    }


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
        DataError: not such a file, or of another schema.
    """
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read measurement {path}", expected="JSON of profile --measure", got=error) from None
    found = table.get("measured", table) if isinstance(table, dict) else None
    if not isinstance(found, dict) or found.get("kind") != "measured" or found.get("schema") != SCHEMA:
        raise DataError(f"measurement {path}", expected=f"a measurement of schema {SCHEMA}", got="another file")
    for run in found.get("runs", ()):
        for key in ("median_ms", "p99_ms", "threads", "batch"):
            value = run.get(key) if isinstance(run, dict) else None
            if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise DataError(f"measurement {path}: {key}", expected="a positive number", got=repr(value))
    return found


def best_run(measured: Mapping[str, Any], phase: str) -> Mapping[str, Any] | None:
    """The fastest run of a phase over all numbers of threads; None when it was not measured."""
    runs = [run for run in measured["runs"] if run["phase"] == phase]
    return min(runs, key=lambda run: run["median_ms"]) if runs else None


def _status_metrics(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What is worth a place in a status message: the fastest of each phase, its memory, its threads."""
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
        if run["throttled"] is not None:
            metrics[f"{name}_throttled"] = float(run["throttled"])
    return metrics


def _cores() -> int:
    return len(os.sched_getaffinity(0))
