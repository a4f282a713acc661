"""A fleet of 30 devices with 100 photos each: what each mode shows of their photos, and how right its answers are.

    fleet   who is a member, from what is seen in the open mode (each device's), the blinded one (the sum of all) and
            the noised one (each device's, by ε), beside the accuracy that the same messages give
    cost    accuracy by `--min-samples`, and the share of photos that its classes withhold, for small fleets too

Photos are dealt at random, so a device has about ten of each class. Attacks are those of the other tables: likelihood
ratio, leverage, and of FFC-DP's matrix the second moment; FFC-DP's features are projected to 256 columns, as accuracy
under noise asks for (docs/methods.md). Candidates are a device's own photos and 999 of each class that nobody has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.attacks.attack_gram import Span
from benchmarks.attacks.attack_membership import Success, success
from benchmarks.attacks.attack_noise import mechanism_of, noised_gram, quadratic
from benchmarks.attacks.attack_releases import EPSILONS, ROUNDING, Part, over_the_wire
from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import METHODS
from protofleet.contract.methods.ffc import NARROW, prepared
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.privacy.noised_sums import feature_sums, on_grid
from protofleet.contract.privacy.secret_noise import SecretNoise
from protofleet.contract.sums.statistics import FeatureGram, Statistic, shareable
from protofleet.lab.data.partition import Partition, partition
from protofleet.lab.engine.frozen_heads import Features, Rung, measure

if TYPE_CHECKING:
    from benchmarks.attacks.prototype_attacks import Attacker

__all__ = ["cost", "fleet"]

DEVICES, PHOTOS, ATTACKED = 30, 100, 6
OTHERS = 999
LEAST = (1, 2, 5, 20)
SMALL = ((5, 15), (5, 30), (5, 100), (30, 100))
Rows = NDArray[np.intp]
Scores = Callable[[Rows, int], NDArray[np.float64]]
Row = dict[str, object]


def fleet(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """A row for each mode: how well the attack does, and the accuracy of the fleet."""
    part, public = attacker.ground.targets, attacker.ground.public
    narrow = [Part(each.x, _projected(each.z), each.y) for each in (part, public)]
    modes: list[tuple[str, str, float, Part, Part]] = [("NCM, open", "ncm", 0.0, part, public)]
    modes += [("NCM, blinded", "ncm", -1.0, part, public)]
    modes += [(f"NCM-DP, ε = {epsilon:g}", "ncm-dp", epsilon, part, public) for epsilon in EPSILONS]
    modes += [("FFC, open", "ffc", 0.0, part, public), ("FFC, blinded", "ffc", -1.0, part, public)]
    modes += [(f"FFC-DP, ε = {epsilon:g}", "ffc-dp", epsilon, *narrow) for epsilon in EPSILONS]
    for name, method, epsilon, mine, known in modes:
        found, right = [], []
        for seed in range(seeds):
            dealt, rest = _dealt(part, seed)
            found.append(_attacked(attacker, method, epsilon, mine, known, dealt, rest, seed))
            right.append(_accuracy(attacker, method, epsilon, part, dealt, seed))
        yield {"mode": name, **_words(found), "accuracy, %": _spread(right)}


def _dealt(part: Part, seed: int) -> tuple[list[Rows], list[Rows]]:
    """Each device's photos, and of each class those that nobody has."""
    order = np.random.default_rng(seed).permutation(len(part.y))
    mine, rest = order[: DEVICES * PHOTOS], order[DEVICES * PHOTOS :]
    return np.array_split(mine, DEVICES), [rest[part.y[rest] == label] for label in range(int(part.y.max()) + 1)]


def _attacked(
    attacker: Attacker, method: str, epsilon: float, part: Part, public: Part, dealt: list[Rows], rest: list[Rows],
    seed: int,
) -> Success:  # fmt: skip
    rng, ours, theirs = np.random.default_rng(seed), [], []
    together = np.concatenate(dealt)
    for mine in dealt[:ATTACKED]:
        seen = together if epsilon < 0 else mine
        scores = _scores(attacker, method, max(epsilon, 0.0), part, public, seen, rng)
        for label, others in enumerate(rest):
            members = mine[part.y[mine] == label]
            if len(members):
                found = scores(np.concatenate([members, others[:OTHERS]]), label)
                ours.append(found[: len(members)])
                theirs.append(found[len(members) :])
    return success(ours, theirs)


def _scores(
    attacker: Attacker, method: str, epsilon: float, part: Part, public: Part, seen: Rows, rng: np.random.Generator
) -> Scores:
    z, y, classes = part.z[seen], part.y[seen], attacker.ground.classes
    counts = np.bincount(y, minlength=classes)
    if method == "ffc":
        sent = over_the_wire(FeatureGram.of(z, y, classes), "ffc", "f64")
        assert isinstance(sent, FeatureGram)
        span = Span(sent.matrix, ROUNDING["f64"])
        return lambda rows, label: -span.leverage(part.z[rows])
    if method == "ffc-dp":
        moments = [public.z[public.y == label].T @ public.z[public.y == label] for label in range(classes)]
        expected = sum(
            n * m / (public.y == label).sum() for label, (n, m) in enumerate(zip(counts, moments, strict=True))
        )
        excess = noised_gram(mechanism_of(method, epsilon), z, rng) - expected
        return lambda rows, label: quadratic(part.z[rows], excess)
    if epsilon:
        mechanism = mechanism_of(method, epsilon)
        sums = mechanism.noised_rows(feature_sums(on_grid(z), y, classes), SecretNoise(rng.bytes(32)))
        noise = mechanism.row_deviation
    else:
        told: Statistic = over_the_wire(UnitMeans.of(z, y, classes), "ncm", "f32")
        sums, noise = told.sums, 0.0  # type: ignore[attr-defined]

    def scores(rows: Rows, label: int) -> NDArray[np.float64]:
        count = int(counts[label])
        rounding = ROUNDING["f32"] * float(np.abs(sums[label]).max())
        off = (noise if epsilon else rounding) / count
        return attacker.scores(sums[label] / count, label, count, off, rows, noised=bool(epsilon))

    return scores


def _accuracy(attacker: Attacker, method: str, epsilon: float, part: Part, dealt: list[Rows], seed: int) -> float:
    hyper: dict[str, Any] = {}
    if epsilon > 0:
        hyper = {"noise_multiplier": mechanism_of(method, epsilon).multiplier}
        hyper |= {"project": NARROW} if method == "ffc-dp" and part.z.shape[1] >= 2 * NARROW else {}
    shares = [Features(part.z[mine], part.y[mine]) for mine in dealt]
    asked = Features(attacker.ground.public.z, attacker.ground.public.y)
    return measure(Rung("", method, hyper), shares, asked, attacker.ground.classes, seed=seed).accuracy


def _projected(z: NDArray[np.float64]) -> NDArray[np.float64]:
    if z.shape[1] < 2 * NARROW:
        return z
    hyper = {name: METHODS["ffc-dp"].hyper[name].default for name in ("project", "project_seed")}
    return np.asarray(unit_rows(prepared(z, {**hyper, "project": NARROW})), dtype=np.float64)


def cost(attacker: Attacker, seeds: int) -> Iterator[Row]:
    """Accuracy of NCM by `--min-samples`, and the share of photos that leave."""
    part = attacker.ground.targets
    for devices, photos in SMALL:
        for words, alpha in (("at random", 0.0), ("Dir(0.5)", 0.5)):
            row: Row = {"devices × photos": f"{devices} × {photos}, {words}"}
            for least in LEAST:
                told = [_with_least(attacker, part, devices, photos, alpha, least, seed) for seed in range(seeds)]
                row[f"min-samples {least}"] = (
                    f"{_spread([t[0] for t in told])}, {100 * np.mean([t[1] for t in told]):.0f}"
                )
            yield row


def _with_least(
    attacker: Attacker, part: Part, devices: int, photos: int, alpha: float, least: int, seed: int
) -> tuple[float, float]:
    """Accuracy of the fleet, chance where nothing leaves, and the share of its photos that do."""
    classes, rng = attacker.ground.classes, np.random.default_rng(seed)
    chosen = rng.permutation(len(part.y))[: devices * photos]
    spread = Partition("dirichlet", devices, alpha, min_classes=1, min_client_samples=1) if alpha else None
    parts: Sequence[Rows] = (
        np.array_split(np.arange(len(chosen)), devices)
        if spread is None
        else partition(part.y[chosen], spread, seed=seed)
    )
    shares = [Features(part.z[chosen[each]], part.y[chosen[each]]) for each in parts]
    leaving = float(np.mean(np.concatenate([shareable(share.y, classes, least) for share in shares])))
    asked = Features(attacker.ground.public.z, attacker.ground.public.y)
    try:
        return measure(Rung("", "ncm"), shares, asked, classes, min_samples=least, seed=seed).accuracy, leaving
    except StatisticError:
        return 1.0 / classes, 0.0


def _spread(values: Sequence[float]) -> str:
    return f"{100 * np.mean(values):.1f} ± {100 * np.std(values):.1f}"


def _words(found: list[Success]) -> Row:
    return {
        "area, %": _spread([each.auc for each in found]),
        "found at 1 %": f"{100 * np.mean([each.found[1] for each in found]):.1f}",
        "first of 1,000, %": f"{100 * np.mean([each.first for each in found]):.1f}",
    }
