"""What the demo's story on colour photos loses by how small its photos are encoded.

    python -m benchmarks.heads.demo_photos --from DIR [--seeds 5] [--qualities 95,85,75,60]

DIR holds the Sign Language Digits Dataset, a folder for each digit. All of its photos go through the extractor of the
extra `photos`, as they are and encoded anew as `python -m protofleet.lab.demo.make_photos` does. For each seed 50 of
each class are dealt to five devices, four classes each, and 100 others are asked about. A line for each encoding: bytes
of a photo, and by way of answering which percentage is right, mean over seeds, the least and the most in brackets.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.data.datasets import take
from protofleet.lab.demo.baselines import other_ways
from protofleet.lab.demo.make_photos import SIDE, encoded
from protofleet.lab.demo.photos import HELD_SHARE, PHOTO_DATA, PhotoFiles, drawn_rows, photo_bundle
from protofleet.lab.demo.story import Images, deal
from protofleet.lab.engine.deployed import Course, simulate

ASKED_PER_CLASS, DEVICES = 100, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--qualities", default="95,85,75,60", help="of JPEG")
    given = parser.parse_args()
    paths = sorted(path for path in given.source.glob("*/*.JPG") if Image.open(path).size == (SIDE, SIDE))
    names = [f"{path.parent.name}/{path.name}" for path in paths]
    with tempfile.TemporaryDirectory() as folder:
        bundle = photo_bundle(sorted({path.parent.name for path in paths}), "ffc", Path(folder) / "b.bundle").bundle
        for quality in [None, *map(int, given.qualities.split(","))]:
            contents = [path.read_bytes() if quality is None else encoded(path, quality) for path in paths]
            size = np.mean([len(content) for content in contents])
            told = _told(bundle, PhotoFiles(names, contents), given.seeds)
            words = "; ".join(f"{way} {_spread(rights)}" for way, rights in told.items())
            print(f"{'source' if quality is None else quality:>6}  {size:6,.0f} bytes  {words}", flush=True)


def _told(bundle: Bundle, files: PhotoFiles, seeds: int) -> dict[str, list[float]]:
    """By way of answering: the share of right answers for each seed."""
    extractor, found = Extractor(bundle, bundle.params), defaultdict(list)
    all_of = LocalData(extractor.features(files.decoded(bundle.manifest.input_shape)), files.numbers)
    for seed in range(seeds):
        dealt, asked = (take(all_of, rows) for rows in drawn_rows(all_of.y, seed, ASKED_PER_CLASS))
        images = Images(PHOTO_DATA, files.labels, None, dealt, asked, 0, held_share=HELD_SHARE)
        shares = deal(images, DEVICES, seed)
        course = Course(rounds=1, calibrate=False)
        alone = [simulate(bundle, [share], asked, course).evaluations[0] for share in shares]
        found["alone"].append(float(np.mean([one.all_classes["linear"] for one in alone])))
        for way in other_ways(bundle, shares, asked):
            found[way.name].append(way.right)
    return found


def _spread(rights: list[float]) -> str:
    return f"{100 * np.mean(rights):.1f} ({100 * min(rights):.0f} to {100 * max(rights):.0f})"


if __name__ == "__main__":
    main()
