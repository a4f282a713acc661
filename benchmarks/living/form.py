"""Why the living demo's head is a discriminant: a class that is new is a rare one.

    python -m benchmarks.living.form

Heads of the demo's dealt photos by both forms of FFC's closed form, with so many of each of nine classes and so few of
the tenth, asked about dealt photos that are in neither: the test images play no part. Means over draws.
"""

from __future__ import annotations

import numpy as np
import typer

from protofleet.contract.methods import method
from protofleet.contract.methods.ffc import closed_form, prepared
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.demo.shipped import read_images, shipped_bundle

SIZES = ((15, 15), (60, 10), (60, 20), (100, 20), (100, 60))
ASKED = 100  # of each class


def main(draws: int = 5) -> None:
    """Print right on all classes, and on the tenth, by form and sizes."""
    images, bundle = read_images(), shipped_bundle()
    y, last = images.dealt.y, images.classes - 1
    features = Extractor(bundle, bundle.params).features(images.dealt.x)
    print("| photos of nine classes, of the tenth | " + " | ".join(f"{most}, {few}" for most, few in SIZES) + " |")
    print("| --- " * (1 + len(SIZES)) + "|")
    for form in ("ridge", "discriminant"):
        hyper = method("ffc").resolved_in(bundle.manifest.hyper) | {"form": form}
        z, right = prepared(features, hyper), np.zeros((draws, len(SIZES), 2))
        for draw in range(draws):
            order = [np.random.default_rng(draw).permutation(np.flatnonzero(y == c)) for c in range(images.classes)]
            asked = np.concatenate([rows[-ASKED:] for rows in order])
            for column, (most, few) in enumerate(SIZES):
                seen = np.concatenate([rows[: few if c == last else most] for c, rows in enumerate(order)])
                head = closed_form(FeatureGram.of(z[seen], y[seen], images.classes), hyper)
                named = (z[asked] @ head.T).argmax(axis=1) == y[asked]
                right[draw, column] = named.mean(), named[y[asked] == last].mean()
        print(f"| {form} | " + " | ".join(f"{a:.1%}, {b:.1%}" for a, b in right.mean(axis=0)) + " |")


if __name__ == "__main__":
    typer.run(main)
