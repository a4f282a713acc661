"""A photo's features in int8 beside float: processor time, one thread, and the cosine of both, in one run.

    python -m benchmarks.heads.int8_photo          # mobilenet_v2 and resnet18, what ships as photos
    python -m benchmarks.heads.int8_photo --data DIR --px 64 128 --backbone resnet18

Each network is exported, and its int8 form (`export/graphs/precision.py`) calibrated on 256 photos; the next 256 are
asked about. Photos are enlarged bilinearly. Both forms run in sessions as a device opens them and take turns, one run
each, so that other work on the machine meets both; the fastest run counts. The ratio is float's time to int8's. Weights
are initial ones, unless the backbone brings its own: `--backbone
benchmarks.heads.pretrained_fleet:efficientnet_lite0` has ImageNet's.

Printed beside it: whether this processor has dot products of 8-bit integers, without which int8 gains little.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.pretrained_fleet import SCALE, enlarged
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.training.onnx_session import Running, open_session
from protofleet.export.bundles.build import build_bundle
from protofleet.export.graphs.precision import features_fp32, features_int8
from protofleet.lab.data.datasets import load_dataset, take

BACKBONES = ("mobilenet_v2", "resnet18")
_CALIBRATION, _ASKED = 256, 256
_DOT_PRODUCTS = ("avx512_vnni", "avx_vnni", "asimddp", "i8mm")  # as /proc/cpuinfo calls them


def main() -> None:
    """Export, convert, run in turn, print one table."""
    options = _options()
    print(f"dot products of 8-bit integers: {', '.join(dot_products()) or 'none that this system names'}")
    print("\n| backbone | px | photos at a time | float, ms a photo | int8 | ratio | cosine, mean | least |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    data = load_dataset(options.data).train
    rows = np.random.default_rng(0).permutation(len(data))[: _CALIBRATION + _ASKED]
    for px in options.px:
        x = enlarged(take(data, rows), px).x
        x = x if x.shape[3] == 3 else x.repeat(3, axis=3)
        calibration, asked = x[:_CALIBRATION], x[_CALIBRATION:]
        for backbone in options.backbone:
            whole, integer = both_forms(backbone, px, calibration)
            cosine = cosines(*(features(form, asked) for form in (whole, integer)))
            for together in options.together:
                ms = [1e3 * each / together for each in in_turn((whole, integer), asked[:together], options.repeats)]
                print(
                    f"| {backbone.rpartition(':')[2]} | {px} | {together} | {ms[0]:.2f} | {ms[1]:.2f} | "
                    f"{ms[0] / ms[1]:.2f} | {cosine.mean():.4f} | {cosine.min():.4f} |",
                    flush=True,
                )


def dot_products() -> list[str]:
    """The instructions for dot products of 8-bit integers that Linux names of this processor."""
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [name for name in _DOT_PRODUCTS if name in words]


def both_forms(backbone: str, px: int, calibration: NDArray[np.uint8]) -> tuple[Running, Running]:
    """Sessions of a network's features in float and in int8."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "features.bundle"
        scale = SCALE if backbone.endswith(":efficientnet_lite0") else {}
        labels = [str(number) for number in range(10)]
        build_bundle(backbone=backbone, method_name="ncm", labels=labels, input_shape=(px, px, 3), out=path, **scale)
        bundle = read_bundle(path)
        graphs = (features_fp32(bundle), features_int8(bundle, calibration))
    whole, integer = (open_session(graph.SerializeToString(), "features")[0] for graph in graphs)
    return whole, integer


def features(form: Running, x: NDArray[np.uint8]) -> NDArray[np.float32]:
    """(N, D) of images (N, H, W, c)."""
    return np.concatenate([form.run(["z"], {"x": x[start : start + 64]})[0] for start in range(0, len(x), 64)])


def cosines(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """(N,) of the rows of two (N, D)."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))


def in_turn(forms: tuple[Running, ...], x: NDArray[np.uint8], repeats: int) -> list[float]:
    """Seconds of processor time of each form's fastest run on these images."""
    seconds: list[list[float]] = [[] for _ in forms]
    for _ in range(repeats):
        for form, times in zip(forms, seconds, strict=True):
            start = time.process_time()
            form.run(["z"], {"x": x})
            times.append(time.process_time() - start)
    return [min(times) for times in seconds]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="fashion_mnist_subset", help="a data set of the lab's, or a folder")
    parser.add_argument("--backbone", nargs="+", default=list(BACKBONES))
    parser.add_argument("--px", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--together", type=int, nargs="+", default=[1, 8], help="photos in a run")
    parser.add_argument("--repeats", type=int, default=30)
    return parser.parse_args()


if __name__ == "__main__":
    main()
