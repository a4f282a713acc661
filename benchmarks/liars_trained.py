"""What liars do to FedProto's prototypes in one round, by rule, and who is named; as `benchmarks/liars.py` for ncm.

    python benchmarks/liars_trained.py [--seeds 3] [--rounds 2] [--samples 2000] [--json FILE]

Ten devices train a `small_cnn` on the shipped Fashion-MNIST subset, dealt as Dir(0.5), through the cores that devices
and aggregator run. All rounds but the last are honest. In the last none, one, two or three of them lie: their means
times 1000 or −10, in random directions of the usual length, or those of a device that trained all rounds with each
label moved to the next class, or with every photo said to be of class 0. It is screened and merged as in production.
Accuracy is the mean over `ASKED` devices that never lie of their nearest prototype on 500 test photos of all classes;
alone: of their own prototypes. What several rounds of a lie do to training is in `benchmarks/attacks.py`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from liars import Named, show

from aggregator.merging import merge_round, traits_of
from aggregator.outliers import Suspects
from aggregator.state import next_global
from contract.bundle import Bundle, read_bundle
from contract.errors import DivergedError
from contract.messages import Announcement, Contribution
from contract.methods import method as method_of
from contract.rules import RULES, Rule
from contract.sphere import unit_rows
from contract.state import GlobalState
from contract.statistics import ClassMeans
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.device import Device
from export.build import build_bundle
from lab.data.datasets import load_dataset, take
from lab.data.partition import Partition, partition

RUN, DEVICES, CLASSES, ASKED = b"run1", 10, 10, 7
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
                self.before = self.merged(self.sent, "mean", "ignore")[0]
        self.honest = [made[name] for name in order[3 : 3 + ASKED]]
        for lie, forge in FORGED.items():
            self.lies[lie] = {name: forge(self.sent[name], rng) for name in self.liars}

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
        self, given: Mapping[str, ClassMeans], rule: Rule, suspects: Suspects
    ) -> tuple[GlobalState, set[str], set[str]]:
        """The state after a round, who was left out, and who was suspected."""
        m = self._bundle.manifest
        hyper, key = FOUND.settled_in(m.hyper), {"run": RUN, "round": 1, "method": FOUND.name}
        made = {
            name: Contribution.of(given[name], **key, bundle=self._bundle.sha256)  # type: ignore[arg-type]
            for name in sorted(given)
        }
        messages = lambda: iter(made.items())  # noqa: E731
        options: dict[str, Any] = {"classes": m.classes, "width": m.features, "rule": rule, "suspects": suspects}
        result = merge_round(FOUND, messages, traits_of(FOUND, messages, hyper), hyper, **options)
        state = next_global(self.before, FOUND, result.merged, round=1, hyper=hyper)
        doubted = {each.device for each in result.findings if each.verdict == "suspected"}
        return state, {each.device for each in result.findings if each.left_out}, doubted

    def accuracy(self, state: GlobalState, way: str = "prototype") -> float:
        found = [device.evaluate(state) for device in self.honest]
        return float(np.mean([each.all_classes[way] for each in found if each is not None]))

    def with_liars(self, lie: str, liars: int) -> dict[str, ClassMeans]:
        return self.sent | {name: self.lies[lie][name] for name in self.liars[:liars]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--samples", type=int, default=2_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns: list[tuple[Rule, Suspects]] = [*((rule, "ignore") for rule in RULES), ("mean", "leave-out")]
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    with TemporaryDirectory() as folder:
        data, path = load_dataset("fashion_mnist_subset"), Path(folder) / "liars.bundle"
        build_bundle(
            method_name=FOUND.name, out=path, backbone="small_cnn", labels=data.labels, input_shape=data.input_shape
        )
        for seed in range(options.seeds):
            rng = np.random.default_rng(seed)
            train = take(data.train, rng.permutation(len(data.train))[: options.samples])
            test = take(data.test, rng.permutation(len(data.test))[:500])
            parts = partition(train.y, Partition("dirichlet", DEVICES, 0.5, min_classes=1), seed=seed)
            fleet = Fleet(read_bundle(path), [take(train, part) for part in parts], test, seed, options.rounds)
            alone = fleet.accuracy(fleet.before, "own_prototype")
            print(f"seed {seed}: honest devices alone {alone:.1%}", flush=True)
            for lie, liars in [("none", 0), *((lie, n) for lie in fleet.lies for n in (1, 2, 3))]:
                row = rows.setdefault((lie, liars), {"accuracy": {}, "named": Named()})
                given = fleet.with_liars(lie, liars) if liars else fleet.sent
                for rule, suspects in columns:
                    state, out, doubted = fleet.merged(given, rule, suspects)
                    row["accuracy"].setdefault(f"{rule}, {suspects}", []).append(fleet.accuracy(state))
                row["named"].add(out, doubted, set(fleet.liars[:liars]))
                without = {name: sent for name, sent in given.items() if name not in fleet.liars[:liars]}
                state, _, _ = fleet.merged(without, "mean", "ignore")
                row["accuracy"].setdefault("without them", []).append(fleet.accuracy(state))
                row["accuracy"].setdefault("alone", []).append(alone)
    names = list(next(iter(rows.values()))["accuracy"])
    print(f"| fedproto: lie | liars of {DEVICES} | {' | '.join(names)} | named: liars, others (suspected) |")
    print("| --- |" + " ---: |" * (len(names) + 2))
    for (lie, liars), row in rows.items():
        print(f"| {lie} | {liars} | {' | '.join(map(show, row['accuracy'].values()))} | {row['named'].words()} |")
    if options.json:
        found = [{"lie": lie, "liars": n, **row, "named": row["named"].words()} for (lie, n), row in rows.items()]
        content = {"schema": "protofleet.benchmark.liars-trained/1", "rows": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
