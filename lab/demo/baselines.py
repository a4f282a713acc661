"""The results of a demo's run: the fleet's own records, and the baselines.

The fleet's figures come from its processes: each device's `history.jsonl` and `--json`, the aggregator's `--json`, and
the head that the broker retains. Three baselines are computed here (docs/accuracy.md):

- *public images alone*: ridge regression on the public images' features. The maker of the bundle could answer this.
  There is no such figure where the backbone was trained on other data.
- *a device alone*: the same devices from the same bundles, with the same seeds and the same number of epochs, without
  the others. For a method that trains nothing, each device is a fleet of its own.
- *pooled ridge*: ridge regression on all devices' features in one matrix. It is the ceiling of FFC, and FFC must equal
  it.
- *other ways*: what the fleet would answer with more or fewer bytes, by the same photos over the same backbone. Only
  for a method that trains nothing.

For these the features of all images are computed once.

Each device reports a fourth one itself, *bundle as shipped*, in its log and its history.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.bundle.uplink_bytes import rungs
from protofleet.contract.errors import LinkError
from protofleet.contract.heads.ridge import Ridge, solve
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import closing_method, method
from protofleet.contract.methods.ffc import agreed_projection, ridge_of
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.global_state import GlobalCollector
from protofleet.contract.wire.messages import GlobalPart
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.answers.predictor import Predictor
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.demo.story import Images
from protofleet.lab.engine.deployed import Course, RoundRecord, local_only, simulate

__all__ = [
    "Beside",
    "Comparison",
    "Evidence",
    "OtherWay",
    "Shown",
    "baselines",
    "compare",
    "public_answers",
    "read_history",
    "received_head",
    "ridge_head",
]

Float64 = NDArray[np.float64]
_THREADS = 4  # at most
_ONE_ROUND = Course(rounds=1, calibrate=False)
_OTHER_WAYS = ("ncm", "fedcof groups=1", "ffc project=256", "ffc discriminant project=256", "ffc", "ffc discriminant")


@dataclass(frozen=True, eq=False)
class Evidence:
    """The output of the processes.

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
    """The received head compared with the pooled solution.

    Attributes:
        relative_error: ‖W − W*‖_F / ‖W*‖_F.
        equal_predictions: number of test images with the same answer from both.
        answers: of the pooled head on the test images, (N,).
    """

    relative_error: float
    equal_predictions: int
    answers: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Shown:
    """A few test images and the answers about them.

    Attributes:
        rows: rows of the test images.
        public, alone, fleet: answered class numbers, one for each image; `public` is None without public images.
    """

    rows: NDArray[np.int64]
    public: NDArray[np.int64] | None
    alone: NDArray[np.int64]
    fleet: NDArray[np.int64]


@dataclass(frozen=True)
class OtherWay:
    """A way that trains nothing, over the same features.

    Attributes:
        name: as `protofleet advise` has it.
        right: share of the test images that the fleet would answer right.
        uplink_bytes: largest contribution of a device that holds every class.
    """

    name: str
    right: float
    uplink_bytes: int


@dataclass(frozen=True, eq=False)
class Beside:
    """The baselines.

    Attributes:
        public: (devices, N) answers to the test images by the public images alone, over each device's backbone; None
            without public images.
        pooled: the pooled ridge solution, and how the received head differs from it; None without an FFC round.
        records: local-only rounds; empty for a method that trains nothing.
        alone: each device's evaluation without the others. `Method.alone_way` names the answer that counts.
        shown: the first device's answers about a few images, alone and with the fleet.
        others: the other ways, fewest bytes first; none for a method that trains.
    """

    public: NDArray[np.int64] | None
    pooled: Comparison | None
    records: list[RoundRecord]
    alone: list[Evaluation]
    shown: Shown
    others: list[OtherWay]


def read_history(path: Path) -> list[dict[str, Any]]:
    """A device's rounds in order. Of a repeated round the last line counts."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    rounds = {(line["round"], line["method"]): line for line in lines}
    return [rounds[key] for key in sorted(rounds)]


def received_head(broker: str, fleet: str, manifest: Manifest, *, patience_s: float = 15.0) -> Float64:
    """The head (C, D) as any device receives it: from the retained global state on the broker. It is (C, D') where
    features are projected.

    Raises:
        LinkError: no head arrives in time.
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
                closing = closing_method()
                width = closing.row_width(closing.resolved_in(manifest.hyper), manifest.features)
                return state.head.dense(manifest.classes, width)[0]
    finally:
        link.close()
    raise LinkError(
        "the fleet's head", expected="it retained on the broker", got="nothing", hint="the aggregator's log"
    )


def ridge_head(
    features: Float64, labels: NDArray[np.int64], classes: int, ridge: Ridge, project: Float64 | None = None
) -> Float64:
    """Direct ridge regression of one-hot labels on unit features: W (C, D), or (C, D') where they are projected.

    Args:
        features: (N, D) float64.
        ridge: λ in units of trace(ZᵀZ)/D, as FFC's hyper-parameter gives it; `auto` chooses it from these features.
        project: (D, D') that unit features are projected by; None for none.
    """
    z = _projected(unit_rows(features), project)
    gram, width = z.T @ z, z.shape[1]
    if ridge == "auto":
        sums = FeatureGram.of(z, labels, classes)
        ridge = solve(sums.matrix, sums.cross, sums.counts, "auto").ridge
    penalty = ridge * np.trace(gram) / width * np.eye(width)
    onehot = np.eye(classes)[labels]  # (N, C)
    return np.asarray(np.linalg.solve(gram + penalty, z.T @ onehot).T)


def compare(head: Float64, manifest: Manifest, shares: Sequence[LocalData], test: LocalData) -> Comparison:
    """Solve the pooled problem over the bundle's extractor, and compare `head` with it.

    Args:
        shares, test: features (N, D) in place of images.
    """
    hyper = closing_method().resolved_in(manifest.hyper)
    project = agreed_projection(manifest.features, hyper)
    pooled = np.concatenate([share.x for share in shares]).astype(np.float64)
    labels = np.concatenate([share.y for share in shares])
    best = ridge_head(pooled, labels, manifest.classes, ridge_of(hyper), project)
    unseen = _projected(test.x.astype(np.float64), project)
    answers, received = (np.asarray((unseen @ w.T).argmax(axis=1), dtype=np.int64) for w in (best, head))
    error = float(np.linalg.norm(head - best) / np.linalg.norm(best))
    return Comparison(error, int((answers == received).sum()), answers)


def _projected(z: Float64, project: Float64 | None) -> Float64:
    return z if project is None else np.asarray(z @ project)


def public_answers(bundle: Bundle, images: Images) -> NDArray[np.int64] | None:
    """Answers (N,) to the test images by the public images alone, which know only their own classes; None where there
    are none."""
    if images.public is None:
        return None
    extractor = Extractor(bundle, bundle.params)
    features, asked = (
        unit_rows(extractor.features(part.x).astype(np.float64)) for part in (images.public, images.test)
    )
    sums = FeatureGram.of(features, images.public.y, images.classes)
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
    """Compute all baselines.

    Args:
        bundles: the bundle of each device.
        states: the state directory of each device after its run.
        on_round: called with the number of rounds that local training has done.
    """
    bundle, test, row = bundles[0], images.test, method(bundles[0].manifest.method)
    answers = {one.sha256: public_answers(one, images) for one in bundles}
    each = [found for one in bundles if (found := answers[one.sha256]) is not None]
    public = np.stack(each) if each else None
    held, asked = ([], test) if row.trains and evidence.head is None else _features(bundle, shares, test)
    pooled = None if evidence.head is None else compare(evidence.head, bundle.manifest, held, asked)
    others = [] if row.trains else other_ways(bundle, held, asked)
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
        fleets_of_one = [simulate(bundle, [share], asked, _ONE_ROUND) for share in held]
        records, alone = [], [one.evaluations[0] for one in fleets_of_one]
        knowledge = Knowledge(state=fleets_of_one[0].state)
    way = closing_method().way if evidence.head is not None else row.way
    shown = _shown(bundle, knowledge, states[0], None if public is None else public[0], images, way)
    return Beside(public, pooled, records, alone, shown, others)


def other_ways(bundle: Bundle, shares: Sequence[LocalData], test: LocalData) -> list[OtherWay]:
    """What a fleet would answer by ways that train nothing, fewest bytes first.

    Args:
        shares, test: features (N, D) in place of images.
    """
    found = []
    for rung in rungs(bundle.manifest):
        if rung.name in _OTHER_WAYS and rung.uplink_bytes is not None:
            (*_, told) = simulate(rung.of_bundle(bundle), shares, test, _ONE_ROUND).evaluations
            found.append(OtherWay(rung.name, told.all_classes[rung.method.way], rung.uplink_bytes))
    return found


def _features(bundle: Bundle, shares: Sequence[LocalData], test: LocalData) -> tuple[list[LocalData], LocalData]:
    """The features (N, D) of all images, by the bundle's extractor."""
    threads = min(_THREADS, os.cpu_count() or 1)
    extractor = Extractor(bundle, bundle.params, threads)
    *held, asked = (LocalData(extractor.features(part.x), part.y) for part in (*shares, test))  # type: ignore[arg-type]
    return held, asked


def _shown(
    bundle: Bundle, alone: Knowledge, state: Path, public: NDArray[np.int64] | None, images: Images, way: str
) -> Shown:
    """The first device's answers to the first test image of each class: alone, and with its state directory, as
    `protofleet predict --state` answers."""
    rows = np.array([int(np.flatnonzero(images.test.y == number)[0]) for number in np.unique(images.test.y)])
    own = Predictor(bundle, alone, way=method(bundle.manifest.method).alone_way(bundle.manifest.head))
    _, kept, _ = Knowledge.of_state(state)
    x = images.test.x[rows]
    told, now = own(x).classes, Predictor(bundle, kept, way=way)(x).classes
    return Shown(rows, None if public is None else public[rows], told, now)
