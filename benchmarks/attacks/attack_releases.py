"""What an attacker sees of class means: each defence's release, through the code that devices and aggregator run.

A release is that of one device, or the sum of several devices' that a helper and an aggregator open together; encoded
and decoded as on the wire; with FedHKD's or NCM-DP's noise where there is some. Of standing sums the attacker sees the
difference of two, which is the sum of what has come between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from dp_accounting import get_sigma_gaussian
from numpy.typing import NDArray

from protofleet.contract.heads.covariance import random_groups
from protofleet.contract.methods import METHODS
from protofleet.contract.methods.fedcof import GroupMeans
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.methods.ncm_dp import NoisedMeans
from protofleet.contract.privacy.mechanism import RowNoise
from protofleet.contract.privacy.noised_sums import SumNoise, feature_sums, on_grid
from protofleet.contract.privacy.secret_noise import SecretNoise
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution, Encoding
from protofleet.edge_client.data.samples import LocalData, sample_keys
from protofleet.edge_client.standing.sample_choice import choose

__all__ = [
    "DEFENCES",
    "EPSILONS",
    "NOISED",
    "ROUNDING",
    "Defence",
    "Part",
    "difference",
    "draw",
    "groups",
    "noise_for",
    "over_the_wire",
    "released",
]

ROUNDING = {"f64": 2.0**-53, "f32": 2.0**-25, "f16": 2.0**-12, "int8": 1 / 254 / math.sqrt(3)}  # of a row's largest

DELTA = 1e-5
_GROUPS = int(METHODS["fedcof"].hyper["groups"].default)


@dataclass(frozen=True, eq=False)
class Part:
    """Images (N, H, W, c) uint8, unit features (N, D) and labels (N,)."""

    x: NDArray[np.uint8]
    z: NDArray[np.float64]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class Defence:
    """What stands between a class's features and who sees the release.

    Attributes:
        name: the table's column.
        devices: k, whose sum alone is seen.
        noise: FedHKD's σ, over features of norm 1 at most.
        epsilon: of one release of NCM-DP, at δ = 1e-5, for one sample more or fewer.
        releases: how often the same samples are released, with fresh noise each time; the attacker averages.
    """

    name: str
    encoding: Encoding = "f32"
    devices: int = 1
    noise: float = 0.0
    epsilon: float = 0.0
    releases: int = 1

    @property
    def is_noised(self) -> bool:
        return self.noise + self.epsilon > 0


DEFENCES = (
    Defence("none, f32"),
    Defence("f16", "f16"),
    Defence("int8", "int8"),
    Defence("sum of 10", devices=10),
    Defence("sum of 30", devices=30),
    Defence("FedHKD σ = 0.1", noise=0.1),
    Defence("FedHKD σ = 1", noise=1.0),
)
EPSILONS = (8.0, 4.0, 2.0, 1.0, 0.5)
NOISED = (
    Defence("no noise"),
    *(Defence(f"ε = {epsilon:g}", epsilon=epsilon) for epsilon in EPSILONS),
    Defence("ε = 8, ten times", epsilon=8.0, releases=10),
)


def draw(part: Part, count: int, rng: np.random.Generator) -> tuple[list[NDArray[np.intp]], list[NDArray[np.intp]]]:
    """For each class `count` members at random, and all the others."""
    shuffled = [rng.permutation(np.flatnonzero(part.y == label)) for label in range(int(part.y.max()) + 1)]
    return [rows[:count] for rows in shuffled], [rows[count:] for rows in shuffled]


def over_the_wire(statistic: Statistic, method: str, encoding: Encoding) -> Statistic:
    """What the aggregator has of a statistic that a device sent."""
    sent = Contribution.of(statistic, run=b"runx", round=1, method=method, bundle=bytes(32))
    found = decode(encode(sent, encoding))
    assert isinstance(found, Contribution)
    return found.statistic(type(statistic), statistic.classes, statistic.width)


def released(
    defence: Defence, part: Part, members: list[NDArray[np.intp]], rng: np.random.Generator
) -> tuple[NDArray[np.float64], float]:
    """Class means (C, D) of these members of each class, as the attacker has them, and the deviation of their noise."""
    rows = np.concatenate(members)
    exact = UnitMeans.of(part.z[rows], part.y[rows], len(members))
    count = int(exact.counts.min())
    if defence.epsilon:
        return _noised(defence, part.z[rows], exact, rng)
    mechanism = RowNoise(clip=1.0, noise=defence.noise, predictions=False) if defence.noise else None
    seen = []
    for _ in range(defence.releases):
        sent = mechanism.released(exact, rng) if mechanism else exact
        seen.append(over_the_wire(sent, "ncm" if mechanism is None else "fedproto", defence.encoding).means)  # type: ignore[attr-defined]
    means = np.mean(seen, axis=0)
    deviation = math.hypot(2.0 * defence.noise / count, ROUNDING[defence.encoding] * float(np.abs(means).max()))
    return means, deviation / math.sqrt(defence.releases)


def _noised(
    defence: Defence, z: NDArray[np.float64], exact: UnitMeans, rng: np.random.Generator
) -> tuple[NDArray[np.float64], float]:
    """NCM-DP's; the attacker is given how many samples there are, which the device does not tell."""
    found = METHODS["ncm-dp"]
    mechanism = noise_for(defence.epsilon, float(found.hyper["count_share"].default))
    labels, size, seen = np.repeat(np.arange(exact.classes), exact.counts), int(exact.counts.min()), []
    for _ in range(defence.releases):
        secret = SecretNoise(rng.bytes(32))
        sums = mechanism.noised_rows(feature_sums(on_grid(z), labels, exact.classes), secret)
        sizes = mechanism.noised_counts(exact.counts, secret)
        sent = NoisedMeans(sums, sizes, np.ones(exact.classes, np.int64))
        seen.append(over_the_wire(sent, found.name, "f32").sums)  # type: ignore[attr-defined]
    return np.mean(seen, axis=0) / size, mechanism.row_deviation / size / math.sqrt(defence.releases)


def noise_for(epsilon: float, count_share: float, gram_share: float = 0.0) -> SumNoise:
    """The noise of one release that costs ε at δ = 1e-5."""
    return SumNoise(get_sigma_gaussian(epsilon, DELTA), gram_share, count_share)


def difference(
    part: Part, before: NDArray[np.intp], upcoming: NDArray[np.intp], least: int, encoding: Encoding
) -> tuple[NDArray[np.float64], NDArray[np.intp], float]:
    """The mean (D,) of what came to one class between two standing sums, which samples those are, and its rounding.

    Args:
        before: the class's samples in the sums that stand.
        upcoming: samples that come, one after the other, until the device sends again.
        least: `--min-samples`, announced.
    """
    label = int(part.y[before[0]])

    def keys(rows: NDArray[np.intp]) -> list[bytes]:
        return sample_keys(LocalData(part.x[rows], part.y[rows]))

    held = keys(before)
    for came in range(1, len(upcoming) + 1):
        now = np.concatenate([before, upcoming[:came]])
        chosen = choose(keys(now), held, least)
        if chosen.rows is None:
            continue
        rounding, sums = 0.0, []
        for rows in (before, now[chosen.rows]):
            seen = over_the_wire(UnitMeans.of(part.z[rows], part.y[rows], label + 1), "ncm", encoding)
            sums.append(seen.sums[label])  # type: ignore[attr-defined]
            rounding = math.hypot(rounding, ROUNDING[encoding] * float(np.abs(sums[-1]).max()))
        new = now[chosen.rows][len(before) :]
        return (sums[1] - sums[0]) / len(new), new, rounding / len(new)
    raise AssertionError("nothing was sent")


def groups(
    part: Part, members: list[NDArray[np.intp]], least: int, rng: np.random.Generator
) -> list[list[tuple[NDArray[np.float64], int]]]:
    """For each class the means (D,) of FedCOF's random groups and their sizes, as the aggregator has them."""
    rows, places = np.concatenate(members), GroupMeans.GROUPS
    drawn = part.y[rows] * places + random_groups(part.y[rows], _GROUPS, least, rng)
    sent = GroupMeans.of(part.z[rows], drawn, len(members) * places)
    seen = over_the_wire(sent, "fedcof", "f32")
    assert isinstance(seen, GroupMeans)
    each = [range(label * places, (label + 1) * places) for label in range(len(members))]
    return [[(seen.means[at], int(seen.counts[at])) for at in slots if seen.counts[at]] for slots in each]
