"""Photos to follow the tutorial with: `python docs/sample_photos.py FOLDER` (extra `parquet`).

Three devices' folders, `kitchen`, `hall` and `porch`, each with photos of three kinds of clothes of which it shares one
with each other device, and `new`, with photos that none of them has. They are the shipped images, larger and in colour.
"""

from __future__ import annotations

import sys
from pathlib import Path

from PIL import Image, ImageOps

from protofleet.contract.errors import ProtofleetError
from protofleet.lab.data.datasets import load_dataset

HELD = {
    "kitchen": ("bag", "boot", "dress"),
    "hall": ("dress", "sandal", "shirt"),
    "porch": ("shirt", "trouser", "bag"),
}
NAMES = {
    "Bag": "bag",
    "Ankle boot": "boot",
    "Dress": "dress",
    "Sandal": "sandal",
    "Shirt": "shirt",
    "Trouser": "trouser",
}
EACH, NEW = 40, 20


def main(folder: Path) -> None:
    data = load_dataset("fashion_mnist_subset")
    for number, label in enumerate(data.labels):
        name = NAMES.get(label)
        images = iter(data.train.x[data.train.y == number][..., 0])
        places = [device for device, held in HELD.items() if name in held]
        places = [place for place in places for _ in range(EACH)] + ["new"] * (NEW if name else 0)
        for index, place in enumerate(places):
            path = folder / place / str(name) / f"{index:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture = ImageOps.colorize(Image.fromarray(next(images)), "midnightblue", "wheat")
            picture.resize((96 + index % 64, 128), Image.Resampling.BICUBIC).save(path, quality=90)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ProtofleetError as error:
        sys.exit(f"error: {error}")
