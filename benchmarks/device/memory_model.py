"""Predicted against measured peak memory of our own client, each backbone by a model that was not fitted on it.

    python -m benchmarks.device.memory_model [--fit | --kept-back] [--json F] [--keep FOLDER]

Each case is exported into a bundle and given to a real client: `protofleet client` on the embedded broker, with
`protofleet aggregate` running two rounds of the bundle's method and one of FFC. What the client itself reports gives up
to three measured points a case: its resident set when it is connected and waits (`waiting`), its peak after the
method's rounds (`rounds`), and its peak at the end (`ffc`). Prediction: `protofleet.hw_profiles.memory.process_rss`.

The table leaves one backbone out at a time: the coefficients, and the margin of the upper bound, are fitted on all
other backbones, then the left-out one is predicted. A point is covered when its measured peak is at most its upper
bound, which is made to hold 95 of 100. `--kept-back` tries the model that ships on twenty configurations of which it
was fitted on none. `--fit` writes `hw_profiles/memory/client_memory.json` from all points, with what the check said.
With `--keep` the bundles and measurements stay in a folder and are taken from there the next time. Exits with 1 when
more than one point in ten is not covered, or the median error of the central estimate is above 15 %; with
`--kept-back`, when more than one configuration is not covered, or that error is above 6 %.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from benchmarks.device.device_memory import rss_mb
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method
from protofleet.edge_client.hardware.process_metrics import versions
from protofleet.hw_profiles.memory.process_rss import (
    _RANGED,
    COEFFICIENTS,
    Model,
    Terms,
    client_memory,
    load_model,
    memory_terms,
)
from protofleet.hw_profiles.workload.constant_folding import fold_weights
from protofleet.hw_profiles.workload.from_onnx import bundle_workloads

_PHASES = {"rounds": ("loading", "inference", "training"), "ffc": ("loading", "inference", "training", "closing")}
_START = {"session_bytes": 1e7, "node_bytes": 1e4, "weight_factor": 2.0, "arena_factor": 1.3, "gram_factor": 6.0}
_HELD = 0.95  # of configurations that the model has not seen, how many the upper bound is to hold
_LEAST_MARGIN = 0.1


class Point(NamedTuple):
    """One measured peak. `idle`: what the process itself takes while it waits, its samples and weights aside."""

    name: str
    backbone: str
    phase: str
    measured: int
    idle: int
    terms: Terms


class Case(NamedTuple):
    """A bundle and how many images the device holds."""

    backbone: str
    side: int
    channels: int
    batch: int
    method: str
    samples: int

    @property
    def name(self) -> str:
        return f"{self.backbone} {self.side}x{self.side}x{self.channels} B{self.batch} {self.method}"


CASES = (
    Case("fedproto_mnist", 28, 1, 8, "fedproto", 1000),
    Case("fedhp_mnist", 28, 1, 16, "fedhp", 600),
    Case("small_cnn", 28, 1, 16, "fedproto", 1000),
    Case("small_cnn", 28, 1, 64, "fedhkd", 600),
    Case("small_cnn", 32, 3, 16, "ffc", 2000),
    Case("fedhp_cifar", 32, 3, 64, "fedhp", 600),
    Case("spherefed_convnet", 32, 3, 64, "spherefed", 600),
    Case("squeezenet1_1", 64, 3, 32, "fedproto", 160),
    Case("mobilenet_v2", 32, 3, 32, "spherefed", 160),
    Case("mobilenet_v2", 64, 3, 16, "ffc", 600),
    Case("mobilenet_v3_small", 64, 3, 16, "fedpr", 160),
    Case("torchvision:regnet_x_800mf", 128, 3, 16, "ffc", 160),
    Case("torchvision:efficientnet_b1", 96, 3, 8, "fedproto", 160),
    Case("torchvision:resnext50_32x4d", 128, 3, 16, "ncm", 160),
    Case("torchvision:mnasnet0_5", 96, 3, 16, "fedproto", 160),
    Case("torchvision:alexnet", 96, 3, 16, "ncm", 160),
    Case("torchvision:shufflenet_v2_x0_5", 128, 3, 16, "fedcof", 160),
    Case("torchvision:regnet_y_800mf", 64, 3, 8, "fedproto", 160),
)

KEPT_BACK = (
    Case("torchvision:efficientnet_b0", 160, 3, 16, "ncm", 160),
    Case("torchvision:efficientnet_b0", 96, 3, 8, "fedproto", 160),
    Case("torchvision:resnet50", 160, 3, 16, "ncm", 160),
    Case("torchvision:resnet50", 64, 3, 8, "fedproto", 160),
    Case("torchvision:resnet18", 96, 3, 16, "fedproto", 160),
    Case("torchvision:resnet18", 160, 3, 16, "ffc", 160),
    Case("torchvision:resnet34", 128, 3, 8, "fedcof", 160),
    Case("mobilenet_v2", 160, 3, 16, "ncm", 300),
    Case("mobilenet_v2", 96, 3, 8, "fedproto", 160),
    Case("mobilenet_v3_small", 160, 3, 32, "ffc", 160),
    Case("torchvision:mobilenet_v3_large", 160, 3, 16, "fedcof", 160),
    Case("torchvision:mobilenet_v3_large", 64, 3, 16, "spherefed", 160),
    Case("torchvision:shufflenet_v2_x1_0", 128, 3, 16, "ncm", 160),
    Case("torchvision:shufflenet_v2_x1_0", 64, 3, 16, "fedproto", 160),
    Case("squeezenet1_1", 160, 3, 16, "ncm", 160),
    Case("torchvision:mnasnet1_0", 128, 3, 16, "ffc", 160),
    Case("torchvision:regnet_y_400mf", 160, 3, 16, "ncm", 160),
    Case("torchvision:densenet121", 96, 3, 8, "ncm", 160),
    Case("small_cnn", 64, 3, 32, "fedproto", 600),
    Case("spherefed_convnet", 32, 3, 16, "spherefed", 2000),
)  # of --kept-back: written down before the model was mended, and never fitted


def measure_case(case: Case, folder: Path) -> dict[str, Any]:
    """A device's life in the fleet: bytes while it waits, after the method's rounds, after FFC's."""
    bundle = _export(case, folder)
    rng = np.random.default_rng(0)
    for name, count in (("train", case.samples), ("test", 64)):
        x = rng.integers(0, 256, (count, case.side, case.side, case.channels), dtype=np.uint8)
        np.savez(folder / f"{name}.npz", x=x, y=np.arange(count) % 10)
    front_door = [sys.executable, "-m", "protofleet"]
    with EmbeddedBroker() as broker, tempfile.TemporaryDirectory(dir=folder) as life:
        common = [f"--bundle={bundle}", f"--broker={broker.url}"]
        device = [f"--data={folder / 'train.npz'}", f"--test={folder / 'test.npz'}", "--id=pi-1"]
        files = [f"--state={life}/state", f"--json={life}/summary.json"]
        client = subprocess.Popen(
            [*front_door, "client", "--until-finished", *common, *device, *files], stderr=subprocess.PIPE, text=True
        )
        assert client.stderr is not None
        while "connected" not in client.stderr.readline():
            assert client.poll() is None, "the client ended"
        time.sleep(1.0)
        waiting = rss_mb(client.pid)[0] * 1e6
        rounds = ["--calibrate"] if method(case.method).trains else []
        store = [f"--store={life}/run.sqlite", "--rounds=2", "--quiet", *rounds]
        subprocess.run([*front_door, "aggregate", *common, *store], check=True, timeout=1200)
        client.communicate(timeout=120)
        lines = [json.loads(line) for line in Path(life, "state", "history.jsonl").read_text().splitlines()]
        peak = json.loads(Path(life, "summary.json").read_text())["peak_rss_bytes"]
    own = [line["peak_rss_bytes"] for line in lines if line["method"] != "ffc" and rounds]
    return {"waiting": round(waiting), **({"rounds": max(own)} if own else {}), "ffc": peak}


def _export(case: Case, folder: Path) -> Path:
    bundle = folder / "fleet.bundle"
    shape = f"{case.side}x{case.side}x{case.channels}"
    command = ["export", "--backbone", case.backbone, "--method", case.method, "--classes", "10", "--input", shape]
    command += ["--batch", str(case.batch), "--out", str(bundle)]
    if method(case.method).trains:
        command += ["--set", "epochs=1", "--set", "lr=0.0001"]
    if not bundle.exists():
        subprocess.run([sys.executable, "-m", "protofleet", *command], check=True, capture_output=True, text=True)
    return bundle


def measured(cases: Sequence[Case], keep: Path) -> list[dict[str, Any]]:
    """One row for each case, measured now or read back from `keep`."""
    found = []
    for case in cases:
        folder = keep / case.name.replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / "measured.json"
        if not record.exists():
            record.write_text(json.dumps(measure_case(case, folder)))
        points = json.loads(record.read_text())
        print(case.name, {name: f"{value / 1e6:.1f} MB" for name, value in points.items()}, flush=True)
        found.append(
            {
                "name": case.name,
                "backbone": case.backbone,
                "samples": case.samples,
                "points": points,
                "bundle": folder / "fleet.bundle",
            }
        )
    return found


def points_of(rows: Sequence[dict[str, Any]]) -> list[Point]:
    """Every measured peak with the terms of its bundle."""
    found = []
    for row in rows:
        bundle = read_bundle(row["bundle"])
        features, step = bundle_workloads(bundle, batch=bundle.manifest.extraction_batch)
        terms = memory_terms(bundle.manifest, fold_weights(features), step, row["samples"])
        idle = row["points"]["waiting"] - terms.data - terms.weights
        peaks = row["points"]
        for phase in ("rounds", "ffc") if peaks.get("rounds") != peaks["ffc"] else ("ffc",):  # each peak once
            if phase in peaks:
                found.append(Point(row["name"], row["backbone"], phase, peaks[phase], idle, terms))
    return found


def fit(points: Sequence[Point]) -> Model:
    """Base from the waiting processes; the others by least squares on the relative error, none below zero; no margin.

    A device's peak is that of the hungriest thing it does, so which one that was is guessed and fitted in turn.
    """
    base = float(median(point.idle for point in points))
    model = Model(
        {name: _START.get(name, base) for name in COEFFICIENTS}, 1.0, largest_terms([p.terms for p in points])
    )
    for _ in range(6):
        rows, target = zip(*(_equation(point, model, base) for point in points), strict=True)
        weight = np.array([1 / point.measured for point in points])
        solution = _not_negative(np.array(rows) * weight[:, None], np.array(target) * weight)
        model = replace(model, coefficients=dict(zip(COEFFICIENTS, [base, *map(float, solution)], strict=True)))
    return model


def _not_negative(matrix: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares; a coefficient that would be below zero is none."""
    kept = list(range(matrix.shape[1]))
    while True:
        solution = np.zeros(matrix.shape[1])
        solution[kept] = np.linalg.lstsq(matrix[:, kept], target, rcond=None)[0]
        if solution.min() >= 0:
            return solution
        kept.remove(int(solution.argmin()))


def _equation(point: Point, model: Model, base: float) -> tuple[list[float], float]:
    """What each coefficient but the base multiplies, and what they have to add up to."""
    found, t = client_memory(point.terms, model), point.terms
    what = max(_PHASES[point.phase], key=lambda name: getattr(found, name))
    known = base + t.data + t.weights
    if what == "training":
        return [1, t.step_nodes, 0, t.step_arena, 0], point.measured - known - 2 * t.trained - t.state
    return [1, t.nodes, t.weights, t.arena, t.gram * (what == "closing")], point.measured - known - t.trained


def estimate(point: Point, model: Model) -> int:
    """What the model says of a measured point."""
    found = client_memory(point.terms, model)
    return max(getattr(found, name) for name in _PHASES[point.phase])


def with_margin(points: Sequence[Point]) -> Model:
    """A fit of all points, with the margin that its own left-out backbones ask for."""
    short = [found.measured / estimate(found, model) for found, model in left_out(points, fit)]
    rank = min(ceil(_HELD * (len(short) + 1)), len(short))  # split conformal: the bound holds that share, or all seen
    return replace(fit(points), margin=max(1 + _LEAST_MARGIN, sorted(short)[rank - 1]))


def left_out(points: Sequence[Point], make: Callable[[Sequence[Point]], Model]) -> list[tuple[Point, Model]]:
    """Each point with a model of all other backbones."""
    models = {
        name: make([p for p in points if p.backbone != name]) for name in dict.fromkeys(p.backbone for p in points)
    }
    return [(point, models[point.backbone]) for point in points]


def table(pairs: Sequence[tuple[Point, Model]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The table and its summary: every point beside what its model says, margin included."""
    rows = []
    for point, model in pairs:
        central = estimate(point, model)
        bound = client_memory(point.terms, model).at_most(central)
        rows.append(
            {
                "name": point.name,
                "phase": point.phase,
                "measured_bytes": point.measured,
                "predicted_bytes": central,
                "at_most_bytes": bound,
                "error_percent": 100 * (central / point.measured - 1),
                "covered": point.measured <= bound,
                "extrapolated": list(client_memory(point.terms, model).beyond),
                "terms": asdict(point.terms),
            }
        )
    errors = [abs(row["error_percent"]) for row in rows]
    summary = {
        "points": len(rows),
        "backbones": len({point.backbone for point, _ in pairs}),
        "covered": sum(row["covered"] for row in rows),
        "median_error_percent": median(errors),
        "worst_error_percent": max((row["error_percent"] for row in rows), key=abs),
        "median_bound_over_measured": median(row["at_most_bytes"] / row["measured_bytes"] for row in rows),
    }
    return rows, summary


def largest_terms(found: list[Terms]) -> dict[str, int]:
    """The largest of each term: what a model that was fitted on these has seen."""
    return {name: max(asdict(terms)[name] for terms in found) for name in _RANGED}


def main() -> int:
    """Measure, check by leaving backbones out, fit where asked, store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="write hw_profiles/memory/client_memory.json")
    parser.add_argument(
        "--kept-back", action="store_true", help="the model that ships, on configurations that it was not fitted on"
    )
    parser.add_argument("--json", type=Path, help="write the table")
    parser.add_argument("--keep", type=Path, help="folder of bundles and measurements, read back where they are there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        points = points_of(measured(KEPT_BACK if options.kept_back else CASES, options.keep or Path(folder)))
    if options.kept_back:
        rows, summary = table([(point, load_model()) for point in points])
        _print(rows, summary, "by the model that ships, fitted on none of them,")
        least = len(KEPT_BACK) - 1
        covered = sum(all(r["covered"] for r in rows if r["name"] == case.name) for case in KEPT_BACK)
        print(f"{covered} of {len(KEPT_BACK)} configurations within the bound, {least} asked for")
        good = covered >= least and summary["median_error_percent"] <= 6
    else:
        rows, summary = table(left_out(points, with_margin))
        _print(rows, summary, "each left out of fit and margin,")
        good = summary["covered"] >= 0.9 * summary["points"] and summary["median_error_percent"] <= 15
    if options.fit:
        _write(with_margin(points), points, summary)
    if options.json:
        report = {"schema": 2, "machine": _machine(), "summary": summary, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if good else 1


def _write(model: Model, points: Sequence[Point], summary: dict[str, Any]) -> None:
    document = {
        "schema": 2,
        "kind": "measured",
        "machine": _machine(),
        "command": "python -m benchmarks.device.memory_model --fit",
        "fitted_on": [f"{point.name} {point.phase}" for point in points],
        "coefficients": dict(model.coefficients),
        "margin": round(model.margin, 4),
        "largest": dict(model.largest),
        "check": summary,
    }
    target = Path(sys.modules[client_memory.__module__].__file__ or "").with_name("client_memory.json")
    target.write_text(json.dumps(document, indent=1) + "\n")
    print("fitted", {name: round(value, 3) for name, value in model.coefficients.items()}, "margin", model.margin)


def _machine() -> dict[str, str]:
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        **{name: value for name, value in versions().items() if name != "protofleet"},
    }


def _print(rows: Sequence[dict[str, Any]], summary: dict[str, Any], how: str) -> None:
    print(f"{'backbone':46} {'after':7} {'measured':>9} {'estimate':>9} {'error':>8} {'at most':>9}")
    for row in rows:
        figures = [f"{row[name] / 1e6:7.1f}MB" for name in ("measured_bytes", "predicted_bytes", "at_most_bytes")]
        error = f"{row['error_percent']:+7.1f}%"
        marks = f"{'' if row['covered'] else '  NOT COVERED'}{'  extrapolated' if row['extrapolated'] else ''}"
        print(f"{row['name']:46} {row['phase']:7} {figures[0]} {figures[1]} {error} {figures[2]}{marks}")
    print(
        f"{summary['covered']} of {summary['points']} points of {summary['backbones']} backbones, {how} "
        "are at most the upper bound; central estimate: median error "
        f"{summary['median_error_percent']:.1f} %, worst {summary['worst_error_percent']:+.1f} %; bound over measured: "
        f"median {summary['median_bound_over_measured']:.2f}"
    )


if __name__ == "__main__":
    sys.exit(main())
