"""What liars do to FedProto's prototypes, by rule, and who is named: for `benchmarks/fairness/liars_table.py`.

Ten devices train a `small_cnn` on Fashion-MNIST, through the cores that devices and aggregator run. All rounds but the
last are honest. In the last none, one, two or three of them lie: their means times 1000 or −10, in random directions of
the usual length, or those of a device that trained all rounds with each label moved to the next class, or with every
photo said to be of class 0, or the former with each photo said to be a thousand. Accuracy is the mean over `ASKED`
devices that never lie of their nearest prototype on `TEST` test photos of all classes; alone: of their own prototypes.
What several rounds of a lie do to training is in `benchmarks/fairness/one_liar.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fairness.liars import Guard, guarded
from protofleet.aggregator.merging.next_global import next_global
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DivergedError
from protofleet.contract.heads.answers import nearest_answer
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.data.partition import Partition, partition

RUN, DEVICES, CLASSES, ASKED, TEST = b"run1", 10, 10, 7, 1_000
Labels = Callable[[np.ndarray[Any, np.dtype[np.int64]]], np.ndarray[Any, np.dtype[np.int64]]]
FOUND = method_of("fedproto")


def _scaled(factor: float) -> Callable[[ClassMeans, np.random.Generator], ClassMeans]:
    return lambda sent, rng: ClassMeans.from_means(sent.means * factor, sent.counts)


def _random(sent: ClassMeans, rng: np.random.Generator) -> ClassMeans:
    lengths = np.sqrt((sent.means**2).sum(axis=1, keepdims=True))
    return ClassMeans.from_means(unit_rows(rng.normal(size=sent.means.shape)) * lengths, sent.counts)


FORGED = {"times 1000": _scaled(1_000.0), "times −10": _scaled(-10.0), "random": _random}
RELABELLED: Mapping[str, Labels] = {"label flip": lambda y: (y + 1) % CLASSES, "colluding": lambda y: np.zeros_like(y)}


class Fleet:
    """Some rounds of ten devices, honest, and what those that may lie send instead in the last.

    Attributes:
        before: the state that the last round began with.
        sent: by device, what it honestly sends in the last round.
        lies: by lie and device.
        honest: some devices that never lie, as they are after training in the last round.
        liars: the names of those that may, in the order in which they begin to.
    """

    def __init__(self, bundle: Bundle, shares: Sequence[LocalData], test: LocalData, seed: int, rounds: int) -> None:
        bench, self._bundle = CompiledGraphs(bundle, keep=True), bundle
        named = {f"device-{at}": share for at, share in enumerate(shares)}
        made = {name: Device(bundle, share, name, test=test, graphs=bench) for name, share in named.items()}
        order = [str(name) for name in np.random.default_rng([seed, 2]).permutation(sorted(named))]
        self.liars, self.before = order[:3], GlobalState(RUN, 0, 0)
        others = {
            lie: {
                name: Device(bundle, LocalData(named[name].x, relabel(named[name].y)), name, test=test, graphs=bench)
                for name in self.liars
            }
            for lie, relabel in RELABELLED.items()
        }
        rng, self.lies = np.random.default_rng([seed, 1]), dict[str, dict[str, ClassMeans]]()
        for number in range(1, rounds + 1):
            self.sent = {name: self._round(device, number, self.before) for name, device in made.items()}
            for lie, devices in others.items():
                self.lies[lie] = {name: self._round(each, number, self.before) for name, each in devices.items()}
            if number < rounds:
                self.before = self.merged(self.sent, "mean", "bounds")[0]
        self.honest = [made[name] for name in order[3 : 3 + ASKED]]
        for lie, forge in FORGED.items():
            self.lies[lie] = {name: forge(self.sent[name], rng) for name in self.liars}
        flips = self.lies["label flip"]
        self.lies["huge count"] = {name: ClassMeans(s.sums * 1_000, s.counts * 1_000) for name, s in flips.items()}
        self._labels = test.y
        self._seen = [np.concatenate([z for _, z in d._extractor("local").blocks(test.x)]) for d in self.honest]

    def _round(self, device: Device, number: int, state: GlobalState) -> ClassMeans:
        asked, m = Announcement(RUN, number, "open", FOUND.name, self._bundle.sha256), self._bundle.manifest
        try:
            sent = device.run_round(asked, state).contribution
        except DivergedError:
            sent = device.sit_out(asked).contribution
        found = sent.statistic(ClassMeans, m.classes, m.features)
        assert isinstance(found, ClassMeans)
        return found

    def merged(
        self, given: Mapping[str, ClassMeans], rule: Rule, guard: Guard
    ) -> tuple[GlobalState, set[str], set[str]]:
        """The state after a round, who was left out, and who was suspected."""
        m = self._bundle.manifest
        hyper, key = FOUND.resolved_in(m.hyper), {"run": RUN, "round": 1, "method": FOUND.name}
        made = {
            name: Contribution.of(given[name], **key, bundle=self._bundle.sha256)  # type: ignore[arg-type]
            for name in sorted(given)
        }
        result = guarded(FOUND, lambda: iter(made.items()), hyper, (m.classes, m.features), rule, guard)
        state = next_global(self.before, FOUND, result.merged, round=1, hyper=hyper)
        doubted = {each.device for each in result.findings if each.verdict == "suspected"}
        return state, {each.device for each in result.findings if each.left_out}, doubted

    def accuracy(self, state: GlobalState) -> float:
        """Of the honest devices' features, as they are after the last round's training, by these prototypes."""
        m = self._bundle.manifest
        answer = nearest_answer(*state.prototypes.dense(m.classes, m.features))
        return float(np.mean([(answer(seen) == self._labels).mean() for seen in self._seen]))

    def alone(self) -> float:
        """By each device's own prototypes."""
        found = [device.evaluate(self.before) for device in self.honest]
        return float(np.mean([each.all_classes["own_prototype"] for each in found if each is not None]))

    def with_liars(self, lie: str, liars: int) -> dict[str, ClassMeans]:
        return self.sent | {name: self.lies[lie][name] for name in self.liars[:liars]}


def fleets(spread: Partition, seeds: int, rounds: int, samples: int, directory: str, folder: Path) -> Iterator[Fleet]:
    """One for each seed, trained.

    Args:
        samples: of the fleet; all that there are for 0.
        directory: Fashion-MNIST in the Hub's layout; the shipped subset where it is empty.
        folder: for the bundle.
    """
    data, path = load_dataset(directory or "fashion_mnist_subset"), folder / "liars.bundle"
    build_bundle(
        method_name=FOUND.name, out=path, backbone="small_cnn", labels=data.labels, input_shape=data.input_shape
    )
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        train = take(data.train, rng.permutation(len(data.train))[: samples or None])
        test = take(data.test, rng.permutation(len(data.test))[:TEST])
        parts = partition(train.y, spread, seed=seed)
        yield Fleet(read_bundle(path), [take(train, part) for part in parts], test, seed, rounds)
