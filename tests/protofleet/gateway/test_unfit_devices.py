"""One device cannot silence its site: whose sums cannot go up with the others' is left out, by name."""

from __future__ import annotations

import functools
import random
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import CLASSES, WIDTH
from aggregator_samples import means as local_means
from gateway_samples import (
    DEVICES,
    drawn,
    gathered,
    goes_up,
    opened,
    sends,
    site_of,
    standing_above,
    standing_site,
    steps,
    whole,
)

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.fixed_point import FixedPoint
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import MAX_COUNT, Contribution, Status
from protofleet.gateway.standing_site import StandingSite
from protofleet.gateway.unfit_devices import fitted
from tests.aggregator.merging.test_exact_sums import means

__all__ = ["whole"]

LIMIT = 1 << 22


def claims(samples: int, name: str = "ncm", axis: int = 0) -> Statistic:
    """So many samples of class 0, all of them the same unit feature."""
    sums = np.zeros((CLASSES, WIDTH))
    sums[0, axis], counts = samples, np.array([samples, 0, 0])
    if name == "ncm":
        return UnitMeans(sums, counts)
    gram = np.zeros(WIDTH * (WIDTH + 1) // 2)
    gram[0] = samples
    return FeatureGram(gram, sums, counts)


def told(site: StandingSite) -> list[tuple[str, str]]:
    return [(decision.device, decision.outcome) for decision in site.core.stalled(0.0)]


# ── what fits ───────────────────────────────────────────────────────────────────────────────────────────────────────


def exact(numbers: dict[int, float], counts: tuple[int, int] = (1, 1)) -> ExactSum:
    values = np.zeros(4)
    values[list(numbers)] = list(numbers.values())
    return ExactSum(FixedPoint.of(values), np.array(counts))


FITS: list[tuple[dict[str, ExactSum], set[str]]] = [
    ({"a": exact({0: LIMIT - 2.0}), "b": exact({0: 1.0})}, set()),
    ({"a": exact({0: LIMIT - 1.0}), "b": exact({0: 1.0})}, {"a"}),
    ({"a": exact({0: -LIMIT + 0.0}), "b": exact({1: 1.0})}, set()),
    ({"a": exact({0: -LIMIT + 0.0}), "b": exact({0: -1.0}), "c": exact({0: 5.0, 1: LIMIT / 2})}, set()),
    ({"a": exact({0: -LIMIT + 0.0}), "b": exact({0: -1.0}), "c": exact({1: LIMIT / 2})}, {"a"}),
    ({"a": exact({0: 3e6}), "b": exact({0: 2e6}), "c": exact({0: 1e6}), "d": exact({1: 4e6})}, {"a"}),
    ({"a": exact({0: 3e6}), "b": exact({1: 3e6}), "c": exact({0: 2e6, 1: 2e6})}, {"a", "b"}),
    ({"a": exact({0: 9e6}), "b": exact({0: -8e6, 2: 1.0}), "c": exact({1: 1.0})}, set()),
    ({"a": exact({0: 9e6, 3: 5e6}), "b": exact({0: -8e6}), "c": exact({1: 1.0})}, {"a", "b"}),
    ({"a": exact({0: 4e6}), "b": exact({0: 1e6}), "c": exact({1: 9e5}), "d": exact({1: 4e6})}, {"a", "d"}),
    ({"a": exact({0: 4e6}), "b": exact({0: 3.5e6}), "c": exact({1: 3e6}), "d": exact({1: 2e6})}, {"a", "c"}),
    ({"a": exact({}, (MAX_COUNT - 1, 0)), "b": exact({}, (2, 7)), "c": exact({}, (0, MAX_COUNT))}, {"a", "c"}),
]


@pytest.mark.parametrize(("sums", "out"), FITS)
def test_who_makes_most_of_what_is_too_large_is_left_out(sums: dict[str, ExactSum], out: set[str]) -> None:
    """Whatever the order they come in; who has large numbers elsewhere stays."""
    for seed in range(4):
        order = sorted(sums)
        random.Random(seed).shuffle(order)
        total = rest = exact({}, (0, 0))
        for device in order:
            total = total.add(sums[device])
            rest = rest if device in out else rest.add(sums[device])
        found = fitted(total, len(sums), lambda order=order: ((d, sums[d]) for d in order), max_samples=10**12)  # type: ignore[misc]
        assert set(found.left_out) == out
        assert found.total.equal(rest)
        found.total.numbers.words()


def test_of_many_devices_the_sums_of_a_few_are_in_memory() -> None:
    """And who is left out is the same: of 300 with 100,000 each more than half, those whose names come first."""
    alive, most = weakref.WeakSet[ExactSum](), 0

    def sums() -> Iterator[tuple[str, ExactSum]]:
        nonlocal most
        for number in range(300):
            its = exact({0: 1e5})
            alive.add(its)
            most = max(most, len(alive))
            yield f"{number:03}", its

    total = ExactSum(FixedPoint.of(np.array([1e5, 0, 0, 0])), np.array([1, 1]))
    for _ in range(299):
        total = total.add(exact({0: 1e5}))
    found = fitted(total, 300, sums, max_samples=10)
    assert list(found.left_out) == [f"{number:03}" for number in range(300 - 41)]
    assert found.total.numbers.to_float().tolist() == [41e5, 0, 0, 0]
    assert most < 20


def test_who_is_among_the_heaviest_for_a_number_that_fits_by_then_stays() -> None:
    """However many they are: one liar makes a class too large, and sixty with less another one."""
    honest = {f"honest {number}": exact({0: 1e5}) for number in range(20)}
    sums = {"a": exact({0: 4e6})} | honest | {f"liar {number}": exact({1: 8e4}) for number in range(60)}
    total = functools.reduce(ExactSum.add, sums.values())
    found = fitted(total, len(sums), sums.items, max_samples=10)
    assert len(found.left_out) == 1 + 8
    assert honest.keys().isdisjoint(found.left_out)


def test_who_says_more_than_may_be_above_is_left_out_first() -> None:
    sums = {"a": exact({0: 3e6}, (100, 0)), "b": exact({0: 3e6}, (9, 21)), "c": exact({}, (0, 1))}
    total = sums["a"].add(sums["b"]).add(sums["c"])
    found = fitted(total, 3, sums.items, max_samples=30)
    assert found.left_out == {"a": "100 samples, and at most 30 of one device are taken above"}
    assert fitted(sums["b"].add(sums["c"]), 2, pytest.fail, max_samples=16).left_out == {}  # nobody is asked for


# ── where sums stand ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["ncm", "ffc"])
def test_a_device_that_claims_millions_is_left_out_and_told_why(tmp_path: Path, whole: Bundle, name: str) -> None:
    """The others go up without it; also when it was there before, and what it sends then is taken like any other's."""
    most = {"max_samples": 10_000_000}
    above, site = standing_above(tmp_path, whole, name, **most), standing_site(tmp_path, whole, name, **most)
    direct = standing_above(tmp_path / "direct", whole, name)
    for seed, device in enumerate(DEVICES[:3]):
        for core in (site.core, direct):
            sends(core, whole, device, drawn(name, seed), 1)
    sends(site.core, whole, "liar", claims(5_000_000, name), 1)
    steps(site.core)
    (refused,) = site.core.stalled(0.0)
    assert (refused.device, refused.outcome, refused.cause) == ("liar", "rejected", "content")
    assert refused.reason.startswith("with its 5,000,000 samples the site's sums are beyond what one gateway can send")
    assert refused.receipt is not None
    assert (refused.receipt.round, refused.receipt.status, len(refused.receipt.digest) > 0) == (1, "rejected", True)
    up = site.contribution(above.announcement(), 1)
    (taken,) = above.take([("site", encode(up))], 0.0)
    assert (taken.outcome, up.devices) == ("committed", 3)
    assert above.standing.total.equal(direct.standing.total)
    site.settled = site.generations
    assert told(site) == [(device, "committed") for device in DEVICES[:3]]
    (late,) = sends(site.core, whole, "liar", claims(5_000_000, name), 1)
    assert late.outcome == "late"  # it numbers what it sends next above that
    assert sends(site.core, whole, "liar", claims(1_000, name), 2) == []
    site.settled = site.generations
    assert told(site) == [("liar", "committed")]
    assert site.contribution(above.announcement(), 2).devices == 4


def test_of_several_heavy_devices_the_heaviest_goes_whoever_came_last(tmp_path: Path, whole: Bundle) -> None:
    """And one that had been told that it counts hears that it does not any more; also what it is told is durable."""
    most = {"max_samples": 10_000_000}
    site = standing_site(tmp_path, whole, "ncm", **most)
    sends(site.core, whole, "first", claims(3_000_000), 1)
    steps(site.core)
    site.settled = site.generations
    assert told(site) == [("first", "committed")]
    sends(site.core, whole, "second", claims(2_000_000), 1)
    sends(site.core, whole, "third", claims(2_000_000, axis=1), 1)
    steps(site.core)
    (refused,) = site.core.stalled(0.0)
    assert (refused.device, refused.outcome, refused.receipt.round) == ("first", "rejected", 1)  # type: ignore[union-attr]
    assert refused.receipt.digest == b""  # type: ignore[union-attr]  # it has its receipt, so it is news
    site.core.parts.store.close()
    again = standing_site(tmp_path, whole, "ncm", **most)
    assert (steps(again.core), again.generations) == ([], {"second": 1, "third": 1})
    again.core.status("first", encode(Status(True, b"1" * 8, 1)), 0.0)
    assert told(again) == [("first", "late")]  # of whom nothing stands, and who may send


def test_a_site_that_was_killed_before_it_left_somebody_out_does_so_then(tmp_path: Path, whole: Bundle) -> None:
    most = {"max_samples": 10_000_000}
    site = standing_site(tmp_path, whole, "ncm", **most)
    sends(site.core, whole, "liar", claims(5_000_000), 1)
    sends(site.core, whole, "a", means(0), 1)
    site.core.parts.store.close()
    again = standing_site(tmp_path, whole, "ncm", **most)
    steps(again.core)
    assert (told(again), again.generations) == ([("liar", "rejected")], {"a": 1})


@pytest.mark.parametrize("rounds", [False, True])
def test_a_site_takes_no_more_samples_of_a_device_than_the_aggregator_above(
    tmp_path: Path, whole: Bundle, rounds: bool
) -> None:
    """It is told how many that may be; its own limit holds, too, and what came before is let go of."""
    above = standing_above(tmp_path, whole, "ncm", max_samples=100)
    site = standing_site(tmp_path, whole, "ncm", max_samples=300)
    if rounds:
        above, site = opened(tmp_path / "r", whole, "ncm", ("a", "b"), max_samples=100)  # type: ignore[assignment]
    else:
        sends(site.core, whole, "before", claims(200), 1)
        steps(site.core)
        site.hold_to(above.announcement(), 0.0)
        steps(site.core)
        assert told(site) == [("before", "rejected")]
    (refused,) = sends(site.core, whole, "a", claims(101), 0 if rounds else 1)
    assert (refused.outcome, "at most 100 samples of one device" in refused.reason) == ("rejected", True)
    sends(site.core, whole, "b", claims(100), 0 if rounds else 1)
    assert site.core.announcement().max_samples == 0  # which is for gateways alone
    a = above.announcement()
    payload = goes_up(site, a) if rounds and steps(site.core) else encode(site.contribution(a, 1))  # type: ignore[arg-type]
    (taken,) = above.take([("site", payload)], 0.0)
    assert (a.max_samples, taken.outcome) == (100, "committed")


# ── in rounds ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_in_rounds_the_heaviest_is_left_out_of_what_goes_up(tmp_path: Path, whole: Bundle) -> None:
    """The line names it; after a kill it is the same."""
    above, site = opened(tmp_path, whole, "fedproto", DEVICES[:4])
    mine = local_means(1)
    sends(site.core, whole, "d", mine.from_means(mine.means * 0, [0, 0, 0]))  # which is none of the site's devices
    for device, factor, count in (("a", 1.0, 10), ("b", 1.1, 20), ("c", 4.5, 900_000)):
        sends(site.core, whole, device, mine.from_means(mine.means * factor, [count, 10, 0]))
    gathered(site, whole)
    (found,) = (finding for finding in site.core.findings if finding.left_out)
    assert (found.device, "with its 900,010 samples" in found.reason) == ("c", True)
    payload = goes_up(site, above.announcement())
    message = decode(payload)
    assert isinstance(message, Contribution)
    assert (message.devices, message.samples) == (2, 50)
    (taken,) = above.take([("site", payload)], 0.0)
    assert taken.outcome == "committed"
    site.core.parts.store.close()
    assert goes_up(site_of(tmp_path, whole), above.announcement()) == payload
