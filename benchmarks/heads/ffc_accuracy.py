"""How near FFC's head over the wire comes to pooled ridge regression, by tensor encoding.

    python -m benchmarks.heads.ffc_accuracy [--width 1280] [--samples 6000] [--classes 100] [--devices 5] [--ridge 0.3]

Unit features as a ReLU backbone gives them are spread over devices; each device's Gram and cross sums are encoded,
decoded, merged and solved by the code that the aggregator runs. The reference is ridge regression by least squares on
the pooled features themselves, in float64, which never forms a Gram matrix. Printed for each encoding: the relative
error of the head (Frobenius), the share of held-out predictions that agree, and the bytes a device sends.

Encoding rounds the sums themselves: relative errors of 6e-8 (f32) or 5e-4 (f16) in A are amplified in A⁻¹ b by the
condition number of A + λI, which is printed. That is why sums travel as f64 by default.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.heads.ridge import FIXED
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution
from tests.support.pooled_head import solve_head

TARGET = 1e-6


def features(samples: int, width: int, classes: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Clustered, non-negative, correlated unit features: a random two-layer ReLU network over class clusters."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, classes, samples)
    inputs = rng.normal(size=(classes, 64))[y] + 2.5 * rng.normal(size=(samples, 64))
    hidden = np.maximum(inputs @ rng.normal(size=(64, 512)) / 8, 0)
    z = np.maximum(hidden @ rng.normal(size=(512, width)) / 16, 0)
    return unit_rows(z.astype(np.float32)), y


def pooled_ridge(z: NDArray[np.float64], y: NDArray[np.int64], classes: int, ridge: float) -> NDArray[np.float64]:
    """(C, D) by least squares on [Z; sqrt(λ) I]."""
    width = z.shape[1]
    penalty = np.sqrt(ridge * (z**2).sum() / width) * np.eye(width)
    targets = np.concatenate([np.eye(classes)[y], np.zeros((width, classes))])
    return np.linalg.lstsq(np.concatenate([z, penalty]), targets, rcond=None)[0].T


def measure(width: int, samples: int, classes: int, devices: int, ridge: float) -> dict[str, object]:
    z, y = features(samples + samples // 4, width, classes)
    train, test = z[:samples], z[samples:].astype(np.float64)
    pooled = pooled_ridge(train.astype(np.float64), y[:samples], classes, ridge)
    parts = [FeatureGram.of(train[i::devices], y[:samples][i::devices], classes) for i in range(devices)]
    a = merge(lambda: parts).matrix
    condition = float(np.linalg.cond(a + ridge * np.trace(a) / width * np.eye(width)))
    rows = []
    for encoding in ("f64", "int32", "f32", "f16", "int8"):
        try:
            payloads = [
                encode(Contribution.of(p, run=b"runx", round=1, method="ffc", bundle=bytes(32)), encoding)
                for p in parts
            ]
        except WireError as error:
            rows.append({"encoding": encoding, "error": str(error)})
            continue
        received = [decode(payload).statistic(FeatureGram, classes, width) for payload in payloads]  # type: ignore[union-attr]
        head = solve_head(merge(lambda received=received: received), ridge)
        rows.append(
            {
                "encoding": encoding,
                "relative_error": float(np.linalg.norm(head - pooled) / np.linalg.norm(pooled)),
                "agreement": float(((test @ head.T).argmax(1) == (test @ pooled.T).argmax(1)).mean()),
                "accuracy": float(((test @ head.T).argmax(1) == y[samples:]).mean()),
                "payload_bytes": max(len(payload) for payload in payloads),
            }
        )
    accuracy = float(((test @ pooled.T).argmax(1) == y[samples:]).mean())
    return {"condition": condition, "ridge": ridge, "pooled_accuracy": accuracy, "encodings": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 1280), ("samples", 6000), ("classes", 100), ("devices", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ridge", type=float, default=FIXED)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.width, options.samples, options.classes, options.devices, options.ridge)
    print(f"D = {options.width}, C = {options.classes}, {options.samples} samples over {options.devices} devices")
    print(
        f"condition number of A + λI {result['condition']:.1e}, pooled ridge accuracy {result['pooled_accuracy']:.4f}"
    )
    print("encoding  relative error  agreement  accuracy  bytes per device")
    for row in result["encodings"]:  # type: ignore[attr-defined]
        if "error" in row:
            print(f"{row['encoding']:8}  {row['error']}")
            continue
        verdict = "meets" if row["relative_error"] <= TARGET else "misses"
        print(
            f"{row['encoding']:8}  {row['relative_error']:.1e} {verdict:6}  {row['agreement']:9.4f}  "
            f"{row['accuracy']:8.4f}  {row['payload_bytes']:>16,}"
        )
    print(f"target: relative error at most {TARGET:g}")
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.ffc/1", **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
