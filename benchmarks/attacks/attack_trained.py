"""Membership in what a device sends that has trained: FedProto's and FedPR's class means, FedHP's learned prototypes.

The device trains the shipped backbone for one round on its samples, by the code it runs
(`edge_client/device/device.py`), and what it sends is of that network, which never leaves. So the attacker trains
shadows: devices of its own, of as many public samples each, from the same bundle (shadow models: Shokri et al., 2017).

    class means          candidates' features are those of the first shadow; how far two shadows' features of the same
                         photos lie apart counts as noise of the likelihood ratio
    learned prototypes   the projection of a candidate's feature on what the prototype differs by from the shadows'
                         mean, both in deviations of public features
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.attacks.attack_grounds import Ground
from benchmarks.attacks.attack_membership import Population, Success, likelihood_ratio, projection, success
from benchmarks.attacks.attack_releases import Part, draw
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.methods import method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.demo.shipped import BACKBONE, shipped_bundle

__all__ = ["trained"]

METHODS = ("fedproto", "fedhp")
SHADOWS = 4
MEMBERS, OTHERS, PUBLIC = 40, 999, 3_000
RUN = b"run1"


def trained(ground: Ground, samples: tuple[int, ...], seeds: int) -> list[tuple[int, str, list[Success]]]:
    """For each number of samples a class and each method, how well the attack does, by seed."""
    found = []
    with TemporaryDirectory() as folder:
        for name in METHODS:
            bundle = _bundle(name, Path(folder))
            for count in samples:
                attack = _Shadows(bundle, ground, count)
                each = [attack.on(_Sent(bundle, ground.targets, *_drawn(ground, count, seed))) for seed in range(seeds)]
                found.append((count, name, each))
    return found


def _drawn(ground: Ground, count: int, seed: int) -> tuple[list[NDArray[np.intp]], list[NDArray[np.intp]]]:
    return draw(ground.targets, count, np.random.default_rng(seed))


class _Sent:
    """What one device sends after a round on `members` of each class, and with which network.

    Attributes:
        means: (C, D) as sent.
    """

    def __init__(
        self, bundle: Bundle, part: Part, members: list[NDArray[np.intp]], others: list[NDArray[np.intp]]
    ) -> None:
        self.bundle, self.members, self.others = bundle, members, others
        rows = np.concatenate(members)
        device = Device(bundle, LocalData(part.x[rows], part.y[rows]), "device", secret=bytes(32))
        m = bundle.manifest
        asked = Announcement(RUN, 1, "open", m.method, bundle.sha256)
        sent = device.run_round(asked, GlobalState(RUN, 0, 0)).contribution
        self.means = sent.statistic(method(m.method).statistic, m.classes, m.features).means  # type: ignore[attr-defined]
        self._weights = {**bundle.params, **device.state()}

    def features(self, x: NDArray[np.uint8]) -> NDArray[np.float64]:
        """(N, D) of images, by the network as it has trained it."""
        return CompiledGraphs(self.bundle).extractor(self._weights).features(x).astype(np.float64)


class _Shadows:
    """The attacker's own devices of `count` public samples a class."""

    def __init__(self, bundle: Bundle, ground: Ground, count: int) -> None:
        public, self._part, self._count = ground.public, ground.targets, count
        self._learned = bundle.manifest.method == "fedhp"
        shadows = []
        for seed in range(SHADOWS):
            shadows.append(_Sent(bundle, public, *draw(public, count, np.random.default_rng(100 + seed))))
        self._first = shadows[0]
        features = [shadow.features(public.x[:PUBLIC]) for shadow in shadows[:2]]
        self._population = Population.of(features[0], public.y[:PUBLIC], ground.classes)
        self._noise = float(np.sqrt(((features[0] - features[1]) ** 2).mean()))
        self._expected = np.mean([shadow.means for shadow in shadows], axis=0)

    def on(self, sent: _Sent) -> Success:
        """How well it tells the members of what a device sent."""
        ours, theirs = [], []
        for label, (mine, rest) in enumerate(zip(sent.members, sent.others, strict=True)):
            chosen = mine[:MEMBERS]
            candidates = self._first.features(self._part.x[np.concatenate([chosen, rest[:OTHERS]])])
            scores = self._scores(sent.means[label], candidates, label)
            ours.append(scores[: len(chosen)])
            theirs.append(scores[len(chosen) :])
        return success(ours, theirs)

    def _scores(self, mean: NDArray[np.float64], candidates: NDArray[np.float64], label: int) -> NDArray[np.float64]:
        known = self._population
        seen, spread = known.deviations(candidates, label), np.sqrt(known.variances)
        if self._learned:
            return projection((mean - self._expected[label]) @ known.basis / spread, seen / spread)
        return likelihood_ratio(known.deviations(mean, label), seen, self._count, known.variances, self._noise)


def _bundle(name: str, folder: Path) -> Bundle:
    """The shipped backbone's weights in a bundle of another method."""
    shipped = shipped_bundle()
    weights, out = folder / "weights.safetensors", folder / f"{name}.bundle"
    kept = {key: np.asarray(value) for key, value in shipped.params.items() if key.startswith("backbone.")}
    save_file(kept, weights)
    m = shipped.manifest
    build_bundle(
        backbone=BACKBONE,
        method_name=name,
        labels=m.labels,
        input_shape=m.input_shape,
        out=out,
        weights=weights,
        hyper=dict(method(name).first_run),
        mean=m.mean,
        std=m.std,
    )
    return read_bundle(out)
