"""Liars in a round over frozen features: fleets, lies, and what a round of real messages comes to. For other files.

    python -m benchmarks.fairness.liars --honest [--seeds 10]     who is accused where nobody lies
    python -m benchmarks.fairness.liars --large 1000 [--classes 100]    seconds and memory of judging so many, D = 1,280

`benchmarks/fairness/liars_table.py` has accuracy by lie and rule, and who was named.

Ten devices share 3,000 photos of the Fashion-MNIST subset, class by class as a spread draws it, as features of a
`small_cnn` that was pretrained on others (D = 128; `benchmarks/heads/frozen_features.py`). None, one, two or three of
them lie; each lie is told in the words of the wire, checked as on arrival (`aggregator/ingest/validation.py`),
screened and merged as in production (`aggregator/merging/merge_round.py`). Which devices lie is drawn; the rest is the
same with and without them.

    label flip   each of its photos is said to be of the next class
    times 1000   its rows, or sums, times 1000; times −10 likewise
    random       its photos are random directions, for the classes that it has
    colluding    all its photos are said to be of class 0, by every liar
    informed     as label flip, of photos of all classes: it claims every class, and knows what they look like
    huge count   as label flip, each photo said to be a thousand
    squares      FFC: its class means are true, all else of its squares lies along the directions that its head needs
    heavy squares  the same, each photo said to be a thousand

No number in the product was chosen on these photos (docs/decisions/158).
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.frozen_features import Frozen, shipped
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.merging.merge_round import Messages, Result, merge_round, traits_of
from protofleet.aggregator.merging.next_global import next_global
from protofleet.aggregator.screening.contradictions import contradicted
from protofleet.aggregator.screening.outliers import Screening, Suspects
from protofleet.contract.errors import WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import Method, Value
from protofleet.contract.methods import method as method_of
from protofleet.contract.sums.merge_rules import Rule
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.sums.triangle import pack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Contribution
from protofleet.lab.data.partition import Partition, partition
from tests.support.pooled_head import solve_head

RUN, BUNDLE, DEVICES, SAMPLES, OWN = b"run1", bytes(32), 10, 3_000, 200
SPREADS = {
    "iid": Partition("iid", DEVICES),
    "Dir(0.5)": Partition("dirichlet", DEVICES, 0.5, min_classes=1),
    "Dir(0.1)": Partition("dirichlet", DEVICES, 0.1, min_classes=1, min_client_samples=1),
    "one class": Partition("pathological", DEVICES, classes_per_client=1, min_classes=1),
}

Guard = Literal["as it is", "bounds", "ours"]
Photos = tuple[NDArray[np.float64], NDArray[np.int64]]
"""Unit features (N, D) of some photos, and labels (N,)."""


@dataclass(frozen=True, eq=False)
class Lie:
    """One way to lie: which photos, said to be of which classes and how many, and what is done to the sums of them."""

    photos: Callable[[Photos, Photos, np.random.Generator], Photos] = lambda mine, all_classes, rng: mine
    factor: float = 1.0
    claims: int = 1
    forged: Callable[[Statistic], Statistic] = lambda made: made


def _flipped(photos: Photos) -> Photos:
    return photos[0], (photos[1] + 1) % 10


def _random(photos: Photos, rng: np.random.Generator) -> Photos:
    towards = unit_rows(rng.normal(size=(10, photos[0].shape[1])))[photos[1]]
    return np.asarray(unit_rows(towards + 0.5 * unit_rows(rng.normal(size=photos[0].shape)))), photos[1]


def _squares(made: Statistic) -> Statistic:
    """The sums of photos that leave their class mean only along the directions that a head of them tells apart by."""
    if not isinstance(made, FeatureGram):
        return made
    held, counts = made.counts > 0, made.counts[made.counts > 0, None]
    head = solve_head(made, 0.01)[held]
    ways = np.linalg.svd(head - head.mean(axis=0), full_matrices=False)[2][: max(1, len(head) - 1)]
    between = made.cross[held].T @ (made.cross[held] / counts)
    rest = float(made.counts.sum() - np.trace(between))
    return FeatureGram(pack_triangle(between + rest * ways.T @ ways / len(ways)), made.cross, made.counts)


LIES: Mapping[str, Lie] = {
    "label flip": Lie(lambda mine, all_classes, rng: _flipped(mine)),
    "times 1000": Lie(factor=1_000.0),
    "times −10": Lie(factor=-10.0),
    "random": Lie(lambda mine, all_classes, rng: _random(mine, rng)),
    "colluding": Lie(lambda mine, all_classes, rng: (mine[0], np.zeros_like(mine[1]))),
    "informed": Lie(lambda mine, all_classes, rng: _flipped(all_classes)),
    "huge count": Lie(lambda mine, all_classes, rng: _flipped(mine), claims=1_000),
}
SQUARES: Mapping[str, Lie] = {"squares": Lie(forged=_squares), "heavy squares": Lie(forged=_squares, claims=1_000)}


@dataclass
class Named:
    """Who was refused or left out, and who was suspected and no more: liars and others, counted."""

    out: list[int] = field(default_factory=lambda: [0, 0])
    suspected: list[int] = field(default_factory=lambda: [0, 0])
    liars: int = 0

    def add(self, out: set[str], suspected: set[str], liars: set[str]) -> None:
        for counts, names in ((self.out, out), (self.suspected, suspected)):
            counts[0] += len(names & liars)
            counts[1] += len(names - liars)
        self.liars += len(liars)

    def words(self) -> str:
        return f"{self.out[0]}/{self.liars}, {self.out[1]}" + (
            f" ({sum(self.suspected)})" if any(self.suspected) else ""
        )


def statistic(name: str, photos: Photos, classes: int) -> Statistic:
    """What a device of NCM or FFC sends of its photos."""
    return method_of(name).statistic.of(*photos, classes)  # type: ignore[attr-defined, no-any-return]


def round_of(
    name: str,
    sent: Mapping[str, Statistic],
    test: Photos,
    *,
    rule: Rule = "mean",
    guard: Guard = "ours",
    vouched: Collection[str] = (),
    max_share: float | None = None,
) -> tuple[float, set[str], set[str]]:
    """Accuracy after one round of these statistics, who was refused or left out, and who was suspected."""
    found, shape = method_of(name), next((s.classes, s.width) for s in sent.values())
    hyper, taken = found.resolve({}), dict[str, Contribution]()
    for device in sorted(sent):
        arrived = _arrived(found.name, sent[device], shape, checked=guard != "as it is")
        if arrived is not None:
            taken[device] = arrived
    messages: Callable[[], Iterator[tuple[str, Contribution]]] = lambda: iter(taken.items())  # noqa: E731
    result = guarded(found, messages, hyper, shape, rule, guard, vouched, max_share)
    state = next_global(GlobalState(RUN, 0, 0), found, result.merged, round=1, hyper=hyper)
    answer = found.shared_answers(state, *shape, hyper)[found.way]
    right = float((answer(test[0].astype(np.float32)) == test[1]).mean())
    out = {each.device for each in result.findings if each.left_out} | (sent.keys() - taken.keys())
    return right, out, {each.device for each in result.findings if each.verdict == "suspected"}


def guarded(
    found: Method,
    messages: Messages,
    hyper: Mapping[str, Value],
    shape: tuple[int, int],
    rule: Rule,
    guard: Guard,
    vouched: Collection[str] = (),
    max_share: float | None = None,
) -> Result:
    """What a round comes to: as it is, within the bounds on length and weight alone, or as production merges it."""
    if guard == "as it is":
        merged = found.merge(lambda: (m.statistic(found.statistic, *shape) for _, m in messages()), rule, hyper)
        return Result(merged, (), "", "")
    suspects: Suspects = "ignore" if guard == "bounds" else "leave-out"
    how = Screening(max_share, suspects, tuple(vouched))
    options: dict[str, Any] = {"classes": shape[0], "width": shape[1], "rule": rule}
    return merge_round(found, messages, traits_of(found, messages, hyper), hyper, how=how, **options)


def _arrived(name: str, sent: Statistic, shape: tuple[int, int], *, checked: bool) -> Contribution | None:
    """A contribution as the aggregator has it; None where it is refused."""
    made = Contribution.of(sent, run=RUN, round=1, method=name, bundle=BUNDLE, extractor=BUNDLE)
    payload = encode(made, method_of(name).encoding)
    message = decode(payload, limit_bytes=max(len(payload), 1 << 16))
    assert isinstance(message, Contribution)
    if not checked:
        return message
    try:
        check_content(message, Terms(extractor=BUNDLE), bundles=(BUNDLE,), classes=shape[0], width=shape[1])
    except WireError:
        return None
    return message


@dataclass(frozen=True, eq=False)
class Fleet:
    """Devices' photos, `OWN` more that an operator may have, and a draw of who lies: the first `n` of `order`."""

    shares: Mapping[str, Photos]
    own: Photos
    test: Photos
    order: Sequence[str]
    seed: int

    @classmethod
    def of(cls, frozen: Frozen, spread: Partition, seed: int, samples: int = SAMPLES) -> Fleet:
        rng = np.random.default_rng([seed, spread.clients])
        mixed = rng.permutation(len(frozen.fit[1]))
        drawn, own = mixed[:samples], mixed[samples : samples + OWN]
        z, y = frozen.fit[0][drawn], frozen.fit[1][drawn]
        parts = partition(y, spread, seed=seed)
        shares = {f"device-{at:03}": (z[part], y[part]) for at, part in enumerate(parts)}
        held = frozen.fit[0][own], frozen.fit[1][own]
        return cls(shares, held, frozen.test, list(rng.permutation(sorted(shares))), seed)

    def sent(self, name: str, lie: Lie, liars: int) -> dict[str, Statistic]:
        """By device, the first `liars` of the order lying."""
        rng, told = np.random.default_rng([self.seed, 1]), dict[str, Statistic]()
        everything = [np.concatenate(each) for each in zip(*self.shares.values(), strict=True)]
        for device, mine in self.shares.items():
            if device not in self.order[:liars]:
                told[device] = statistic(name, mine, 10)
                continue
            some = rng.permutation(len(everything[1]))[: len(mine[1])]
            made = statistic(name, lie.photos(mine, (everything[0][some], everything[1][some]), rng), 10)
            told[device] = _claimed(_times(lie.forged(made), lie.factor), lie.claims)
        return told


def _times(made: Statistic, factor: float) -> Statistic:
    """Rows times a factor, a triangle times its absolute value, which has squares on its diagonal."""
    rows = {each.name for each in made.row_fields()}
    fields = zip(made.FIELDS, made.arrays(), strict=True)
    return made.build([value * (factor if each.name in rows else abs(factor)) for each, value in fields], made.counts)


def _claimed(made: Statistic, times: int) -> Statistic:
    """As if each photo had been there so many times."""
    return made.build([value * times for value in made.arrays()], made.counts * times) if times > 1 else made


def accused(frozen: Sequence[Frozen], seeds: int) -> Iterator[dict[str, Any]]:
    """Where nobody lies: by features, spread and size, how many of how many devices are accused and suspected."""
    for kind in frozen:
        for label, spread in SPREADS.items():
            for devices in (3, 5, 10, 20, 50):
                totals = [0, 0, 0]
                for seed in range(seeds):
                    sized = replace(spread, clients=devices)
                    fleet = Fleet.of(kind, sized, seed, samples=min(200 * devices, len(kind.fit[1])))
                    sent = {device: statistic("ncm", photos, 10) for device, photos in fleet.shares.items()}
                    told = contradicted(lambda sent=sent: iter(sent.values()), list(sent))
                    totals = [
                        totals[0] + len(sent),
                        totals[1] + sum(each.accused for each in told),
                        totals[2] + sum(not each.accused for each in told),
                    ]
                yield {"features": kind.name, "spread": label, "devices": devices, "of": totals[0],
                       "accused": totals[1], "suspected": totals[2]}  # fmt: skip


def large(devices: int, classes: int) -> None:
    """Seconds and memory of the judgement alone, and of the merge of the same class means beside it."""
    rng, width = np.random.default_rng(0), 1_280
    centres = unit_rows(rng.normal(size=(classes, width)))
    kind, counts = method_of("ncm").statistic, np.full(classes, 20)

    def source() -> Iterator[Statistic]:
        for at in range(devices):
            noise = np.random.default_rng(at).normal(size=(classes, width)) / np.sqrt(20 * width)
            means = np.roll(centres, 1, axis=0) if at % 10 == 0 else centres
            yield kind.from_means(0.7 * means + 0.7 * noise, counts)  # type: ignore[attr-defined]

    begun, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in source():
        pass
    made_s = time.process_time() - begun
    told = contradicted(source, [f"device-{at:05}" for at in range(devices)])
    judged_s = time.process_time() - begun - made_s
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    accused = sum(each.accused for each in told)
    print(
        f"{devices:,} devices, {classes} classes, D = {width:,}: {judged_s:.1f} s of processor time; making the means "
    )
    print(f"once takes {made_s:.1f} of it; {more:.0f} MB more memory; {accused} accused, of {devices // 10} liars")


def show(values: Sequence[float]) -> str:
    """Mean and deviation over seeds, in percent."""
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--honest", action="store_true")
    parser.add_argument("--large", type=int, default=0)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.large:
        large(options.large, options.classes)
        return
    if not options.honest:
        parser.error("--honest or --large N; accuracy is in liars_table.py")
    found = list(accused(shipped(0), options.seeds))
    for row in found:
        print(row, flush=True)
    print("in all", *(sum(row[key] for row in found) for key in ("of", "accused", "suspected")))
    if options.json:
        content = {"schema": "protofleet.benchmark.accused/1", "rows": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
