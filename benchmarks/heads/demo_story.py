"""How well the demo's story is told, by how it is set up: on images that the demo does not have.

    python -m benchmarks.heads.demo_story --from DIR [--seeds 3] [--public 200] [--dealt 200] [--epochs 10,20] [--known
        even]

DIR holds the whole Fashion-MNIST as parquet. For each seed, 600 images of each class to train on and 200 to ask about
are drawn from its training split, without those of the shipped subset: nothing here is chosen on a test image. They are
divided as in `lab/demo/story.py`, over five devices, and `small_cnn` is pretrained on the public ones. A line for each
setting: by seed, which percentage is right on all classes and, after a slash, on those that are not public.

- `public`: a head in closed form of the public images; `alone`: FFC's of one device's, mean over devices;
- `ncm`, `fedcof`, `ffc`: what the fleet answers after one round of each.
"""

from __future__ import annotations

import argparse
import io
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image

from protofleet.contract.methods import method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.local_samples import LocalSamples
from protofleet.lab.data.make_subset import SEED, TRAIN_PER_CLASS, draw_balanced
from protofleet.lab.demo import story
from protofleet.lab.demo.from_scratch import pretrain, recipe

CLASSES, ASKED_PER_CLASS, DEVICES = 10, 200, 5
METHODS = ("ncm", "fedcof", "ffc")
KNOWN = {"even": np.arange(0, CLASSES, 2), "odd": np.arange(1, CLASSES, 2), "first": np.arange(CLASSES // 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="source", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    for name, default in (("public", "200"), ("dealt", "200"), ("epochs", "10"), ("known", "even")):
        parser.add_argument(f"--{name}", default=default, help="one or more, with commas between")
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = pq.read_table(given.source / "train.parquet")
    sets = [(seed, *_drawn(table, seed)) for seed in range(given.seeds)]
    for known in given.known.split(","):
        for public in map(int, given.public.split(",")):
            for epochs in map(int, given.epochs.split(",")):
                for dealt in map(int, given.dealt.split(",")):
                    found: dict[str, list[str]] = defaultdict(list)
                    for seed, train, asked in sets:
                        for name, right in _told(train, asked, seed, KNOWN[known], public, dealt, epochs).items():
                            found[name].append(right)
                    words = "  ".join(f"{name} {' '.join(rights)}" for name, rights in found.items())
                    print(f"{known} {public} public, {dealt} dealt, {epochs} epochs:  {words}", flush=True)


def _drawn(table: pq.Table, seed: int) -> tuple[LocalData, LocalData]:
    """To train on, and to ask about."""
    labels = table["label"].to_numpy()
    shipped = draw_balanced(labels, TRAIN_PER_CLASS, np.random.default_rng(SEED))
    rest = np.setdiff1d(np.arange(len(labels)), shipped)
    order = rest[np.random.default_rng(seed).permutation(len(rest))]
    of_class = [order[labels[order] == number] for number in range(CLASSES)]
    cut = (slice(TRAIN_PER_CLASS), slice(TRAIN_PER_CLASS, TRAIN_PER_CLASS + ASKED_PER_CLASS))
    parts = [np.concatenate([rows[part] for rows in of_class]) for part in cut]
    return tuple(LocalData(_pixels(table, rows), labels[rows].astype(np.int64)) for rows in parts)  # type: ignore


def _pixels(table: pq.Table, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    cells = table["image"].take(rows).to_pylist()
    return np.stack([np.asarray(Image.open(io.BytesIO(cell["bytes"])))[..., None] for cell in cells])


def _told(
    train: LocalData, asked: LocalData, seed: int, known: NDArray[np.int64], public: int, dealt: int, epochs: int
) -> dict[str, str]:
    with (
        patch.object(story, "public_classes", lambda classes: known),
        patch.object(story, "PUBLIC_PER_CLASS", public),
        patch.object(story, "DEALT_PER_CLASS", dealt),
    ):
        rows = story.rows_of(train.y, CLASSES, seed, "drawn")
        parts = [LocalData(train.x[part], train.y[part]) for part in rows]
        images = story.Images("drawn", tuple("0123456789"), *parts, asked, 0)
        shares = story.deal(images, DEVICES, seed)
        new = images.new[asked.y]
    plan = recipe("ffc")
    plan = replace(plan, pretraining={**plan.pretraining, "epochs": epochs})
    model, _ = pretrain(parts[0], CLASSES, plan, "small_cnn", seed=seed, on_epoch=lambda epoch, loss: None)
    seen, *held, about = (LocalData(model.features(part.x), part.y) for part in (parts[0], *shares, asked))

    def right(name: str, devices: Sequence[LocalData]) -> NDArray[np.float64]:
        hits = _answers(name, devices, about.x) == about.y
        return np.array([hits.mean(), hits[new].mean()])

    found = {"public": right("ffc", [seen]), "alone": np.mean([right("ffc", [share]) for share in held], axis=0)}
    found |= {name: right(name, held) for name in METHODS}
    return {name: f"{100 * everything:.0f}/{100 * on_new:.0f}" for name, (everything, on_new) in found.items()}


class _Given:
    """Features that are there already, as an extractor gives them."""

    def blocks(self, x: NDArray[np.float32]) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        yield slice(0, len(x)), x


def _answers(name: str, devices: Sequence[LocalData], asked: NDArray[np.float32]) -> NDArray[np.int64]:
    """What a fleet of these devices answers after one round: class numbers (N,) for features (N, D)."""
    found, width = method(name), asked.shape[1]
    hyper = found.resolve({})
    facts = {"classes": CLASSES, "width": width, "hyper": hyper, "params": {}, "secret": bytes(32)}
    given = {"extractor": lambda name: _Given(), "own_means": lambda: None}
    statistics = [found.summarise(LocalSamples(each, **facts, **given)) for each in devices]
    rows = found.next_rows({}, found.merge(lambda: iter(statistics), "mean", hyper), hyper)
    state = GlobalState(bytes(4), 1, 1, rows)
    return found.shared_answers(state, CLASSES, width, hyper)[found.way](asked)


if __name__ == "__main__":
    main()
