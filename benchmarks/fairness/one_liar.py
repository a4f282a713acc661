"""What one lying device does to a fleet of five: accuracy without it, with its lie merged as it is, and as we merge it.

    python -m benchmarks.fairness.one_liar [--rounds 5] [--samples 1500] [--json FILE]

FedProto: five devices train a `small_cnn` on the shipped Fashion-MNIST subset, through the cores that devices and
aggregator run. From round 2 on the fifth one lies: its means times a factor, or a count. Printed is the mean accuracy
of the four honest devices' nearest prototypes on test images of all classes. FFC: unit features of the same untrained
backbone in one round; the fifth device's sums are forged. "as it is" merges without `aggregator/ingest/validation.py`
and `aggregator/screening/outliers.py`; the last column names what stopped the lie.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.outliers import Traits, screen
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DivergedError, WireError
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import RULES, Rule
from protofleet.contract.sums.plausibility import largest_norm
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.data.partition import Partition, partition

RUN, DEVICES = b"run1", 5
NAMES = [f"device-{i + 1}" for i in range(DEVICES)]


def _scaled(factor: float) -> Callable[[Statistic], Statistic]:
    return lambda s: ClassMeans.from_means(s.means * factor, s.counts)  # type: ignore[union-attr]


def _claims(count: int) -> Callable[[Statistic], Statistic]:
    """Other classes' means under its own labels, and as many samples of each as it likes to say."""
    return lambda s: ClassMeans.from_means(np.roll(s.means, 1, axis=0), np.where(s.present, count, 0))  # type: ignore[union-attr]


def _full(s: Statistic) -> ClassMeans:
    """A liar may as well hold every class: its own mean row where it has none."""
    assert isinstance(s, ClassMeans)
    rows = np.where(s.present[:, None], s.means, s.means[s.present].mean(axis=0))
    return ClassMeans.from_means(rows, np.maximum(s.counts, 30))


def _indefinite(s: Statistic) -> Statistic:
    assert isinstance(s, FeatureGram)
    rng, matrix = np.random.default_rng(0), s.matrix
    signs = np.triu(rng.choice([-1.0, 1.0], matrix.shape), 1)
    forged = matrix * (signs + signs.T + np.eye(len(matrix)))
    return replace(s, gram=forged[np.triu_indices(len(forged))])


def _limit(s: Statistic) -> Statistic:
    assert isinstance(s, FeatureGram)
    signs = np.random.default_rng(0).choice([-1.0, 1.0], s.cross.shape)
    return replace(s, cross=signs * s.counts[:, None])


PROTOTYPE_LIES = {
    "times 1e15": _scaled(1e15),
    "times 1000": _scaled(1000.0),
    "times −10": _scaled(-10.0),
    "count 4,294,967,295, rows swapped": _claims(2**32 - 1),
    "count 90,000, rows swapped": _claims(90_000),
}
BY_RULE = ("times 1000", "times −10", "count 4,294,967,295, rows swapped")
SUM_LIES = {"indefinite Gram": _indefinite, "cross sums at the limit": _limit}


def _traits(statistic: Statistic) -> Traits:
    longest = 0.0 if isinstance(statistic, FeatureGram) else largest_norm(statistic.means)
    return Traits(longest, int(statistic.counts.sum()), longest)


@dataclass
class Fleet:
    """The honest data, and devices made anew for each attack."""

    bundle: Bundle
    shares: list[LocalData]
    test: LocalData

    def devices(self) -> list[Device]:
        bench = CompiledGraphs(self.bundle, keep=True)
        pairs = zip(NAMES, self.shares, strict=True)
        return [Device(self.bundle, share, name, test=self.test, graphs=bench) for name, share in pairs]


def prepare(samples: int, folder: Path) -> Fleet:
    data = load_dataset("fashion_mnist_subset")
    train = take(data.train, np.random.default_rng(0).permutation(len(data.train))[:samples])
    path = folder / "attacks.bundle"
    build_bundle(
        method_name="fedproto", out=path, backbone="small_cnn", labels=data.labels, input_shape=data.input_shape
    )
    shares = [take(train, part) for part in partition(train.y, Partition("uneven", DEVICES, 0.5), seed=0)]
    return Fleet(read_bundle(path), shares, data.test)


def run(
    fleet: Fleet,
    method: str,
    rounds: int,
    lie: Callable[[Statistic], Statistic] | None,
    *,
    guarded: bool,
    rule: Rule = "mean",
    liar: bool = True,
) -> tuple[float, str]:
    """(accuracy of the honest devices, what stopped the lie)."""
    devices, state, refused = fleet.devices(), GlobalState(RUN, 0, 0), ""
    manifest, died = fleet.bundle.manifest, 0
    found_method = method_of(method)
    hyper, extractor = found_method.resolved_in(manifest.hyper), fleet.bundle.extractor(found_method)
    for number in range(1, rounds + 1):
        asked = Announcement(RUN, number, "open", method, fleet.bundle.sha256)
        given: dict[str, Statistic] = {}
        for name, device in zip(NAMES, devices, strict=True):
            if name == NAMES[-1] and not liar:
                continue
            try:
                sent = device.run_round(asked, state).contribution
            except DivergedError:
                died += name != NAMES[-1]
                sent = device.sit_out(asked).contribution
            statistic = sent.statistic(found_method.statistic, manifest.classes, manifest.features)
            if name == NAMES[-1] and lie is not None and (number > 1 or rounds == 1):
                statistic = lie(statistic if method == "ffc" else _full(statistic))
                origin = {"bundle": fleet.bundle.sha256, "extractor": extractor}
                sent = Contribution.of(statistic, run=RUN, round=number, method=method, **origin)
                try:
                    if guarded:
                        bundles = (fleet.bundle.sha256,)
                        terms, shape = Terms(extractor=extractor), (manifest.classes, manifest.features)
                        check_content(sent, terms, bundles=bundles, classes=shape[0], width=shape[1])
                except WireError as error:
                    refused = str(error)
                    continue
            given[name] = statistic
        source = lambda given=given: list(given.values())  # noqa: E731
        if guarded:
            traits = {name: _traits(statistic) for name, statistic in given.items()}
            screened = screen(source, traits, suspects="leave-out")
            source, found = screened.source, [f.reason for f in screened.findings]
            refused = found[0] if found else refused
        merged = found_method.merge(source, rule, hyper)
        state = next_global(state, found_method, merged, round=number, hyper=hyper)
    way = "linear" if method == "ffc" else "prototype"
    found = [device.evaluate(state) for device in devices[:-1]]
    accuracy = float(np.mean([e.all_classes[way] for e in found if e is not None]))
    return accuracy, refused + (f"; {died} rounds of honest devices diverged" if died else "")


def by_rule(fleet: Fleet, rounds: int) -> Iterator[tuple[str, dict[str, float], str]]:
    """Lies of `BY_RULE` to FedProto: accuracy by rule, merged as it is and as we merge it, and what stopped it."""
    for name in ("nobody lies", *BY_RULE):
        found, stopped = dict[str, float](), ""
        for guarded in (False, True):
            for rule in RULES:
                lie = PROTOTYPE_LIES.get(name)
                right, stopped = run(fleet, "fedproto", rounds, lie, guarded=guarded, rule=rule)
                found[f"{rule}, {'ours' if guarded else 'as it is'}"] = right
        yield name, found, stopped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--samples", type=int, default=1_500)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        fleet = prepare(options.samples, Path(folder))
        for method, lies, rounds in (("fedproto", PROTOTYPE_LIES, options.rounds), ("ffc", SUM_LIES, 1)):
            honest, _ = run(fleet, method, rounds, None, guarded=True)
            without, _ = run(fleet, method, rounds, None, guarded=True, liar=False)
            print(f"{method}: five honest devices {honest:.1%}, four of them {without:.1%}", flush=True)
            for name, lie in lies.items():
                before, harm = run(fleet, method, rounds, lie, guarded=False)
                after, refused = run(fleet, method, rounds, lie, guarded=True)
                print(f"  {name:<36} as it is {before:6.1%}   ours {after:6.1%}   {harm} | {refused}", flush=True)
                rows.append({"method": method, "lie": name, "before": before, "after": after, "refused": refused})
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.attacks/1", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
