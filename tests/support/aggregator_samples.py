"""Small statistics, contributions and a bundle for the aggregator's tests."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
from contract_samples import empty_graph

from protofleet.aggregator.store.durable_store import Store
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest, StateTensor, extractor_of, write_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic
from protofleet.contract.wire.messages import Contribution

RUN, BUNDLE = b"run1", bytes(range(32))
CLASSES, WIDTH = 3, 4


def means(seed: int = 0, count: int = 10) -> ClassMeans:
    rng = np.random.default_rng(seed)
    return ClassMeans.from_means(rng.normal(size=(CLASSES, WIDTH)), [count, count + 1, 0])


def gram(seed: int = 0, samples: int = 30) -> FeatureGram:
    rng = np.random.default_rng(seed)
    return FeatureGram.of(unit_rows(rng.normal(size=(samples, WIDTH))), rng.integers(0, CLASSES, samples), CLASSES)


def contribution(
    statistic: Statistic | None = None,
    *,
    run: bytes = RUN,
    round: int = 1,
    method: str = "fedproto",
    bundle: bytes = BUNDLE,
    extractor: bytes = b"",
    class_list: bytes = b"",
) -> Contribution:
    key = {"run": run, "round": round, "method": method, "bundle": bundle}
    return Contribution.of(statistic or means(), **key, extractor=extractor, class_list=class_list)  # type: ignore[arg-type]


def extractor(name: str, bundle: bytes = BUNDLE) -> bytes:
    """What a round of this method over `manifest()`s bundle sums the features of."""
    return extractor_of(manifest(), bundle, method(name))


def manifest(*, classes: int = CLASSES, width: int = WIDTH, name: str = "fedproto") -> Manifest:
    row = method(name)
    return Manifest(
        schema=SCHEMA,
        version=1,
        protofleet="0.1.0",
        backbone="opaque",
        provenance="made for a test",
        method=name,
        head=row.heads[0],
        hyper=row.resolve({}),
        labels=tuple(f"class-{i}" for i in range(classes)),
        features=width,
        input_shape=(4, 4, 1),
        mean=(0.5,),
        std=(0.5,),
        batch=8,
        opset=18,
        state=(StateTensor(name="backbone.weight", shape=(2, 2), role="param"),),
        members={},
    )


def bundle_file(path: Path, *, version: int = 1, **shape: object) -> bytes:
    """Write a bundle whose graphs are opaque, which is all an aggregator ever sees of them; its sha256."""
    made = msgspec.structs.replace(manifest(**shape), version=version)  # type: ignore[arg-type]
    params = {"backbone.weight": np.ones((2, 2), np.float32)}
    return write_bundle(path, made, features=empty_graph(), train_step=empty_graph(), params=params)


def unassigned(store: Store) -> dict[str, int]:
    """Messages by outcome that belong to no round of this run."""
    return {outcome: messages for (number, outcome), messages in store.tallies().items() if number == 0}
