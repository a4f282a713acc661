"""Milliseconds a photo and memory of answering, beside the same network in eager torch, in the same run.

    python -m benchmarks.device.predict [--seconds 5] [--json FILE]

For three backbones with random weights: a 640 x 480 JPEG to an answer, one photo at a time, one thread, each engine in
a process of its own with a device's settings of malloc, rounds of both in turn so that other work on the machine meets
both. `ours` is `Predictor.photos`, with class means for ten classes; `torch` decodes and resizes with Pillow,
normalises, runs the eager network and finds the nearest class mean. Prints the median of the processor time of a
photo, and peak RSS (VmHWM) in MB of 1,000,000 bytes; `alone` is without decoding: pixels in memory to an answer.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from protofleet.contract.files.json_output import write_json

SUBJECTS = (("small_cnn", (64, 64, 3)), ("mobilenet_v2", (128, 128, 3)), ("resnet18", (128, 128, 3)))
TURNS, SEED = 3, 0
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "524288"}
ROOT = Path(__file__).resolve().parents[2]


def ours(folder: Path, backbone: str, shape: tuple[int, int, int]) -> tuple[Callable[[], object], Callable[[], object]]:
    """A photo to an answer, and pixels to an answer, by our predictor."""
    from protofleet.contract.bundle.bundle_file import read_bundle
    from protofleet.contract.wire.global_state import GlobalState
    from protofleet.contract.wire.messages import ClassRows
    from protofleet.edge_client.answers.knowledge import Knowledge
    from protofleet.edge_client.answers.predictor import Predictor

    bundle = read_bundle(folder / f"{backbone}.bundle")
    rows = np.random.default_rng(SEED).normal(size=(10, bundle.manifest.features))
    rows /= 2 * np.linalg.norm(rows, axis=1, keepdims=True)
    state = GlobalState(bytes(4), 1, 1, {"means": ClassRows(np.arange(10, dtype=np.uint16), rows)})
    predictor = Predictor(bundle, Knowledge(state=state))
    photo, pixels = str(folder / "photo.jpg"), np.zeros((1, *shape), np.uint8)
    return lambda: list(predictor.photos([("photo", photo)], together=1)), lambda: predictor(pixels)


def torch_eager(
    folder: Path, backbone: str, shape: tuple[int, int, int]
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same in eager torch."""
    import torch

    from protofleet.export.backbones.backbone import build_backbone

    torch.set_num_threads(1)
    net, width = build_backbone(backbone, shape, seed=SEED)
    net.eval()
    means = torch.from_numpy(np.random.default_rng(SEED).normal(size=(10, width)).astype(np.float32))

    def answer(pixels: np.ndarray) -> object:
        with torch.inference_mode():
            x = torch.from_numpy(pixels).permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5)
            z = torch.nn.functional.normalize(net(x))
            return torch.cdist(z, means).argmin(dim=1)

    def read() -> object:
        with Image.open(folder / "photo.jpg") as image:
            small = image.convert("RGB").resize((shape[1], shape[0]), Image.Resampling.BILINEAR)
        return answer(np.array(small)[None])

    return read, lambda: answer(np.zeros((1, *shape), np.uint8))


def measured(folder: Path, engine: str, index: int, seconds: float) -> dict[str, float]:
    """In this process: median processor milliseconds of both, and peak memory."""
    from protofleet.edge_client.hardware.process_metrics import peak_rss_bytes

    runs = (ours if engine == "ours" else torch_eager)(folder, *SUBJECTS[index])
    found = {}
    for name, run in zip(("photo_ms", "alone_ms"), runs, strict=True):
        for _ in range(3):
            run()
        times, end = [], time.monotonic() + seconds / 2
        while time.monotonic() < end or len(times) < 5:
            began = time.process_time()
            run()
            times.append(1e3 * (time.process_time() - began))
        found[name] = statistics.median(times)
    return found | {"peak_mb": peak_rss_bytes() / 1e6}


def _in_process(folder: Path, engine: str, index: int, seconds: float) -> dict[str, float]:
    words = [sys.executable, __file__, "--one", engine, str(index), str(folder), "--seconds", str(seconds)]
    env = {**os.environ, **MALLOC, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return json.loads(subprocess.run(words, check=True, capture_output=True, text=True, env=env).stdout)


def _prepare(folder: Path) -> None:
    from protofleet.export.bundles.build import build_bundle

    for backbone, shape in SUBJECTS:
        out, labels = folder / f"{backbone}.bundle", [str(number) for number in range(10)]
        build_bundle(backbone=backbone, method_name="ncm", labels=labels, input_shape=shape, out=out)
    pixels = np.random.default_rng(SEED).integers(0, 256, (12, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((640, 480), Image.Resampling.BICUBIC).save(folder / "photo.jpg", quality=88)


def main() -> None:
    """Export, run both engines in turn, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        engine, index, folder = args.one
        print(json.dumps(measured(Path(folder), engine, int(index), args.seconds)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        _prepare(Path(name))
        print(f"{'backbone':20} {'engine':7} {'ms a photo':>11} {'ms alone':>9} {'peak MB':>8}")
        for index, (backbone, shape) in enumerate(SUBJECTS):
            turns = [(e, _in_process(Path(name), e, index, args.seconds)) for e in ("ours", "torch") * TURNS]
            for engine in ("ours", "torch"):
                values = {k: statistics.median(f[k] for e, f in turns if e == engine) for k in turns[0][1]}
                rows.append({"backbone": backbone, "input": shape, "engine": engine, **values})
                photo, alone, peak = values.values()
                print(
                    f"{backbone + f' {shape[0]} px':20} {engine:7} {photo:11.2f} {alone:9.2f} {peak:8.0f}", flush=True
                )
    write_json(args.json, rows)


if __name__ == "__main__":
    main()
