"""Predicted against measured peak memory of our own client, over backbones that the model was not fitted on.

    python benchmarks/memory_model.py [--fit] [--json F]

Each backbone is exported into a bundle; a fresh process then loads it with the device's own code, trains three steps
(or extracts three batches) and reports its `VmHWM`. Prediction: `hw_profiles.client_memory`. With `--fit` the model's
coefficients are first fitted, by least squares on the relative error, on the backbones marked `fit` below, and
`hw_profiles/client_memory.json` is written; the table is of the other ones either way.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from contract.bundle import read_bundle
from hw_profiles.client_memory import COEFFICIENTS, client_memory, memory_terms
from hw_profiles.graph import bundle_workloads

# backbone, input side, channels, batch, method, whether it is used to fit
CASES = (
    ("fedproto_mnist", 28, 1, 8, "fedproto", True),
    ("small_cnn", 32, 3, 16, "fedproto", True),
    ("squeezenet1_1", 64, 3, 32, "fedproto", True),
    ("resnet18", 32, 3, 16, "fedproto", True),
    ("small_cnn", 28, 1, 64, "fedproto", False),
    ("fedhp_cifar", 32, 3, 64, "fedproto", False),
    ("spherefed_convnet", 32, 3, 64, "spherefed", False),
    ("mobilenet_v2", 32, 3, 32, "spherefed", False),
    ("mobilenet_v3_small", 64, 3, 16, "fedproto", False),
    ("vgg13", 32, 3, 32, "fedproto", False),
    ("resnet18", 64, 3, 32, "spherefed", False),
    ("efficientnet_b0", 64, 3, 8, "fedproto", False),
)
CHILD = """
import json, sys
import numpy as np
from contract.bundle import read_bundle
from edge_client.data import LocalData
from edge_client.extractor import Extractor
from edge_client.measure import peak_rss_bytes, rss_bytes
from edge_client.trainer import Trainer
path, mode = sys.argv[1:]
base = rss_bytes()
bundle = read_bundle(path)
m = bundle.manifest
rng = np.random.default_rng(0)
x = rng.integers(0, 256, (3 * m.batch, *m.input_shape), dtype=np.uint8)
y = rng.integers(0, m.classes, 3 * m.batch).astype(np.int64)
if mode == "training":
    trainer = Trainer(bundle)
    trainer.load_state(bundle.params)
    trainer.fit(LocalData(x, y), epochs=1, lr=1e-3, given={}, seed=0)
else:
    Extractor(bundle, bundle.params).features(x)
print(json.dumps({"base": base, "peak": peak_rss_bytes()}))
"""


def main() -> int:
    """Export, measure, fit where asked, print and store the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [row for number, case in enumerate(CASES) for row in _rows(case, Path(folder) / f"{number}.bundle")]
    if options.fit:
        _write_coefficients(rows)
    for row in rows:
        predicted = _predict(row, _coefficients())
        row["predicted_bytes"] = predicted
        row["error_percent"] = 100 * (predicted / row["measured_bytes"] - 1)
    fitted_on = {case[0] for case in CASES if case[-1]}
    checked = [row for row in rows if row["name"].split()[0] not in fitted_on]
    _print(rows)
    summary = {
        "rows": len(checked),
        "backbones": len({row["name"] for row in checked}),
        "median_error_percent": median(abs(row["error_percent"]) for row in checked),
        "worst_error_percent": max(abs(row["error_percent"]) for row in checked),
    }
    print(
        f"{summary['rows']} rows of {summary['backbones']} backbones not fitted on at any size: median error "
        f"{summary['median_error_percent']:.1f} %, worst {summary['worst_error_percent']:.1f} %"
    )
    if options.json:
        report = {"schema": 1, "machine": _machine(), "summary": summary, "rows": rows}
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 0 if summary["median_error_percent"] <= 15 else 1


def _rows(case: tuple[Any, ...], path: Path) -> list[dict[str, Any]]:
    backbone, side, channels, batch, method, fitted = case
    shape = f"{side}x{side}x{channels}"
    command = ["export", "--backbone", backbone, "--method", method, "--classes", "10", "--input", shape]
    command += ["--batch", str(batch), "--out", str(path)]
    subprocess.run([sys.executable, "-m", "protofleet", *command], check=True, capture_output=True, text=True)
    features, step = bundle_workloads(read_bundle(path), batch=batch)
    rows = []
    for mode, workload in (("inference", features), ("training", step)):
        found = _measure(path, mode)
        rows.append(
            {
                "name": f"{backbone} {side}x{side}x{channels} B{batch}",
                "mode": mode,
                "fitted": fitted,
                "base_bytes": found["base"],
                "measured_bytes": found["peak"],
                "terms": memory_terms(workload, training=mode == "training"),
            }
        )
        print(f"measured {rows[-1]['name']} {mode}: {found['peak'] / 1e6:.1f} MB", flush=True)
    return rows


def _measure(path: Path, mode: str) -> dict[str, int]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), mode],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return json.loads(done.stdout)


def _factors(row: dict[str, Any]) -> list[float]:
    """What each coefficient multiplies in this row, in the order of `COEFFICIENTS`."""
    terms = row["terms"]
    inference = row["mode"] == "inference"
    return [1.0, 1.0, terms["nodes"], terms["weights"] if inference else 0.0, terms["arena"]]


def _predict(row: dict[str, Any], coefficients: dict[str, float]) -> float:
    known = row["terms"]["weights"] + row["terms"]["state"]
    return known + sum(c * f for c, f in zip(coefficients.values(), _factors(row), strict=True))


def _write_coefficients(rows: list[dict[str, Any]]) -> None:
    """Base from the processes themselves; the other four by least squares on the relative error."""
    fitted = [row for row in rows if row["fitted"]]
    base = median(row["base_bytes"] for row in rows)
    target = [row["measured_bytes"] - row["terms"]["weights"] - row["terms"]["state"] - base for row in fitted]
    weight = np.array([1 / row["measured_bytes"] for row in fitted])
    matrix = np.array([_factors(row)[1:] for row in fitted])
    solution, *_ = np.linalg.lstsq(matrix * weight[:, None], np.array(target) * weight, rcond=None)
    values = dict(zip(COEFFICIENTS, [float(base), *map(float, solution)], strict=True))
    document = {
        "schema": 1,
        "kind": "measured",
        "machine": _machine(),
        "command": "python benchmarks/memory_model.py --fit",
        "fitted_on": [f"{row['name']} {row['mode']}" for row in fitted],
        "coefficients": values,
    }
    target_file = Path(sys.modules[client_memory.__module__].__file__ or "").with_name("client_memory.json")
    target_file.write_text(json.dumps(document, indent=1) + "\n")
    print("fitted", {name: round(value, 3) for name, value in values.items()})


def _coefficients() -> dict[str, float]:
    from hw_profiles.client_memory import load_coefficients

    load_coefficients.cache_clear()
    return load_coefficients()


def _machine() -> dict[str, str]:
    from contract.runtime import ort

    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "onnxruntime": ort.__version__,
    }


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'backbone':34} {'mode':10} {'measured':>9} {'predicted':>9} {'error':>8}")
    for row in rows:
        mark = "  (fitted on)" if row["fitted"] else ""
        print(
            f"{row['name']:34} {row['mode']:10} {row['measured_bytes'] / 1e6:7.1f}MB "
            f"{row['predicted_bytes'] / 1e6:7.1f}MB "
            f"{row['error_percent']:+7.1f}%{mark}"
        )


if __name__ == "__main__":
    sys.exit(main())
