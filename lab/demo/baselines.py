"""What a demo's run amounts to: the fleet's own records, and the baselines beside it.

The figures come from what the processes wrote and sent: each device's `history.jsonl` and `--json`, the aggregator's
`--json`, and the head as it stands retained on the broker. Three baselines are computed here (docs/accuracy.md):

- *public images alone*: ridge regression on the public images' features. What whoever made the bundle could answer;
- *a device alone*: the same devices from the same bundles, with the same seeds and the same number of epochs, and no
  word from the others (for a method that trains nothing, each device is a fleet of its own);
- *pooled ridge*: all devices' features in one matrix, and ridge regression solved on it directly. It is the ceiling of
  FFC, and what FFC must equal.

A fourth, *bundle as shipped*, each device says itself, in its log and its history.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract import topics
from contract.bundle import Bundle, Manifest
from contract.errors import LinkError
from contract.link import Address, Link, Received
from contract.messages import GlobalPart
from contract.methods import closing_method, method
from contract.methods.ffc import ridge_of
from contract.ridge import Ridge, solve
from contract.sphere import unit_rows
from contract.state import GlobalCollector
from contract.statistics import FeatureGram
from contract.wire import decode
from edge_client.data import LocalData
from edge_client.evaluate import Evaluation
from edge_client.extractor import Extractor
from edge_client.knowledge import Knowledge
from edge_client.predictor import Predictor
from lab.demo.story import Images
from lab.engine.deployed import Course, RoundRecord, local_only, simulate

__all__ = [
    "Beside",
    "Comparison",
    "Evidence",
    "Shown",
    "baselines",
    "compare",
    "public_answers",
    "read_history",
    "received_head",
    "ridge_head",
]

Float64 = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the processes wrote and sent.

    Attributes:
        aggregate: the aggregator's `--json`.
        clients: each device's `--json`.
        histories: each device's rounds.
        head: (C, D) as received from the broker; None without an FFC round.
    """

    aggregate: Mapping[str, Any]
    clients: Sequence[Mapping[str, Any]]
    histories: Sequence[list[dict[str, Any]]]
    head: Float64 | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """The head that came over the air, beside the pooled solution.

    Attributes:
        relative_error: ‖W − W*‖_F / ‖W*‖_F.
        equal_predictions: on how many test images both answer the same.
        answers: of the pooled head on the test images, (N,).
    """

    relative_error: float
    equal_predictions: int
    answers: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shown:
    """A few test images and what was answered about them.

    Attributes:
        rows: of the test images.
        public, alone, fleet: class numbers, one for each.
    """

    rows: NDArray[np.int64]
    public: NDArray[np.int64]
    alone: NDArray[np.int64]
    fleet: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Beside:
    """The baselines.

    Attributes:
        public: (devices, N) what the public images alone answer on the test images, over each device's backbone.
        pooled: the pooled ridge solution, and how the received head differs from it; None without an FFC round.
        records: local-only rounds; empty for a method that trains nothing.
        alone: each device's evaluation without the others; `Method.alone_way` says which of its answers
        counts.
        shown: what the first device answers about a few images, alone and with the fleet.
    """

    public: NDArray[np.int64]
    pooled: Comparison | None
    records: list[RoundRecord]
    alone: list[Evaluation]
    shown: Shown


def read_history(path: Path) -> list[dict[str, Any]]:
    """A device's rounds in order; of a round that stands there twice, the last line."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rounds = {(line["round"], line["method"]): line for line in lines}
    return [rounds[key] for key in sorted(rounds)]


def received_head(broker: str, fleet: str, manifest: Manifest, *, patience_s: float = 15.0) -> Float64:
    """The head (C, D) as any device receives it: from the retained global state on the broker.

    Raises:
        LinkError: when there is none in time.
    """
    collector, deadline = GlobalCollector(), time.monotonic() + patience_s
    link = Link(Address.parse(broker), f"pf-{fleet}-observer", subscriptions=[topics.global_all(fleet)]).open()
    try:
        while time.monotonic() < deadline:
            event = link.receive(0.2)
            if not isinstance(event, Received) or not event.payload:
                continue
            link.acknowledge(event)
            part = decode(event.payload)
            state = collector.add(part) if isinstance(part, GlobalPart) else None
            if state is not None and state.head is not None:
                return state.head.dense(manifest.classes, manifest.features)[0]
    finally:
        link.close()
    raise LinkError(
        "the fleet's head", expected="it retained on the broker", got="nothing", hint="the aggregator's log"
    )


def ridge_head(features: Float64, labels: NDArray[np.int64], classes: int, ridge: Ridge) -> Float64:
    """Ridge regression of one-hot labels on unit features, directly: W (C, D).

    Args:
        features: (N, D) float64.
        ridge: λ in units of trace(ZᵀZ)/D, as FFC's hyper-parameter gives it; `auto` chooses it from these features.
    """
    z = unit_rows(features)  # (N, D)
    gram, width = z.T @ z, z.shape[1]
    if ridge == "auto":
        sums = FeatureGram.of(z, labels, classes)
        ridge = solve(sums.matrix, sums.cross, sums.counts, "auto").ridge
    penalty = ridge * np.trace(gram) / width * np.eye(width)
    onehot = np.eye(classes)[labels]  # (N, C)
    return np.asarray(np.linalg.solve(gram + penalty, z.T @ onehot).T)


def compare(head: Float64, bundle: Bundle, shares: Sequence[LocalData], test: LocalData, ridge: Ridge) -> Comparison:
    """Solve the pooled problem over the bundle's extractor and set `head` beside it."""
    extractor = Extractor(bundle, bundle.params)
    pooled = np.concatenate([extractor.features(share.x) for share in shares]).astype(np.float64)
    labels = np.concatenate([share.y for share in shares])
    best = ridge_head(pooled, labels, bundle.manifest.classes, ridge)
    unseen = extractor.features(test.x).astype(np.float64)
    answers, received = (np.asarray((unseen @ w.T).argmax(axis=1), dtype=np.int64) for w in (best, head))
    error = float(np.linalg.norm(head - best) / np.linalg.norm(best))
    return Comparison(error, int((answers == received).sum()), answers)


def public_answers(bundle: Bundle, images: Images) -> NDArray[np.int64]:
    """What the public images alone teach: class numbers (N,) of the test images, always of a class that they show."""
    extractor = Extractor(bundle, bundle.params)
    seen, asked = (unit_rows(extractor.features(part.x).astype(np.float64)) for part in (images.public, images.test))
    sums = FeatureGram.of(seen, images.public.y, images.classes)
    head = solve(sums.matrix, sums.cross, sums.counts, "auto").weights  # (C, D)
    return np.asarray(np.where(sums.counts > 0, asked @ head.T, -np.inf).argmax(axis=1), dtype=np.int64)


def baselines(
    bundles: Sequence[Bundle],
    names: Sequence[str],
    shares: Sequence[LocalData],
    images: Images,
    evidence: Evidence,
    rounds: int,
    states: Sequence[Path],
    *,
    on_round: Callable[[int], None],
) -> Beside:
    """All of them.

    Args:
        bundles: each device's.
        states: each device's state directory, as it was left.
        on_round: called with the rounds that local training has done.
    """
    bundle, test, row = bundles[0], images.test, method(bundles[0].manifest.method)
    ridge = ridge_of(closing_method().settled_in(bundle.manifest.hyper))
    pooled = None if evidence.head is None else compare(evidence.head, bundle, shares, test, ridge)
    answers = {each.sha256: public_answers(each, images) for each in bundles}
    public = np.stack([answers[each.sha256] for each in bundles])
    if row.trains:
        local = local_only(
            bundles,
            shares,
            test,
            rounds=rounds,
            run=bytes.fromhex(evidence.aggregate["run"]),
            names=names,
            on_round=lambda record: on_round(record.round),
        )
        device, records, alone = local.devices[0], local.records, local.evaluations
        knowledge = Knowledge(device.state(), device.own_means(), None, rounds)
    else:
        course = Course(rounds=1, calibrate=False)
        fleets_of_one = [simulate(bundle, [share], test, course) for share in shares]
        records, alone = [], [each.evaluations[0] for each in fleets_of_one]
        knowledge = Knowledge(state=fleets_of_one[0].state)
    way = closing_method().way if evidence.head is not None else row.way
    return Beside(public, pooled, records, alone, _shown(bundle, knowledge, states[0], public[0], images, way))


def _shown(bundle: Bundle, alone: Knowledge, state: Path, public: NDArray[np.int64], images: Images, way: str) -> Shown:
    """The first test image of each class, asked of the first device: of what it would know alone, and, as `protofleet
    predict --state` asks, of what it has on its disk."""
    rows = np.array([int(np.flatnonzero(images.test.y == number)[0]) for number in np.unique(images.test.y)])
    own = Predictor(bundle, alone, way=method(bundle.manifest.method).alone_way(bundle.manifest.head))
    _, kept, _ = Knowledge.of_state(state)
    x = images.test.x[rows]
    return Shown(rows, public[rows], own(x).classes, Predictor(bundle, kept, way=way)(x).classes)
