"""Whether devices with the wheel protofleet-kernels end where devices without it do, and at the same bits each time.

    python -m benchmarks.lab.kernels_accuracy                   # FedProto and SphereFed, five devices, five rounds
    python -m benchmarks.lab.kernels_accuracy --rounds 10 --samples 8000

Real devices of one process train on the shipped images, once by the portable step and twice by the wheel's form of it.
Prints the accuracy over all classes after the last round, by way of answering, and exits with 1 where two runs with the
wheel differ in a bit, of any device's state or of any figure, or where an accuracy is more than two points from the
portable one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.native_kernels import FORM, installed_kernels
from protofleet.edge_client.data import LocalData
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset
from protofleet.lab.engine.deployed import Course, Simulation, simulate

DEVICES, BATCH, FAR = 5, 32, 0.02


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=4000, help="of all devices")
    parser.add_argument("--backbone", default="small_cnn")
    options = parser.parse_args()
    if installed_kernels() is None:
        raise SystemExit("error: protofleet-kernels is not installed (pip install ./kernels)")
    fine = True
    for name in ("fedproto", "spherefed"):
        portable, kernels = _bundles(name, options.backbone)
        runs = {
            fleet: _run(bundle, options.rounds, options.samples)
            for fleet, bundle in {"portable": portable, "kernels": kernels, "kernels again": kernels}.items()
        }
        first = _shares(runs["portable"])
        for fleet, run in runs.items():
            off = max(abs(share - first[way]) for way, share in _shares(run).items())
            fine &= off <= FAR
            shares = ", ".join(f"{way} {share:.4f}" for way, share in _shares(run).items())
            print(f"{name:10} {fleet:14} loss {run.records[-1].loss:.6f}  {shares}", flush=True)
        same = _all_of(runs["kernels"]) == _all_of(runs["kernels again"])
        fine &= same
        print(f"{name:10} two runs with the wheel {'are the same to the bit' if same else 'DIFFER'}")
    return 0 if fine else 1


def _bundles(method_name: str, backbone: str) -> tuple[Bundle, Bundle]:
    """The fleet's bundle with the portable step, and with the wheel's form as its step."""
    data = load_dataset("fashion_mnist_subset")
    with tempfile.TemporaryDirectory() as folder:
        build_bundle(
            backbone=backbone,
            method_name=method_name,
            labels=data.labels,
            input_shape=data.input_shape,
            out=Path(folder) / "fleet.bundle",
            batch=BATCH,
            for_kernels=True,
        )
        bundle = read_bundle(Path(folder) / "fleet.bundle")
    return replace(bundle, forms={}), replace(bundle, train_step=bundle.forms[FORM], forms={})


def _run(bundle: Bundle, rounds: int, samples: int) -> Simulation:
    data = load_dataset("fashion_mnist_subset")
    rows = np.random.default_rng(0).permutation(len(data.train.y))[:samples]
    shares = [LocalData(data.train.x[part], data.train.y[part]) for part in np.array_split(rows, DEVICES)]
    return simulate(bundle, shares, LocalData(data.test.x, data.test.y), Course(rounds=rounds, calibrate=False))


def _shares(run: Simulation) -> dict[str, float]:
    return run.records[-1].all_classes


def _all_of(run: Simulation) -> tuple[str, list[dict[str, bytes]]]:
    """Every figure of a run, and every device's state."""
    states = [{name: value.tobytes() for name, value in device.state().items()} for device in run.devices]
    return str([record.as_json() for record in run.records]), states


if __name__ == "__main__":
    sys.exit(main())
