"""Noised sums: what one sample moves, for any data; the grid of what leaves; an attack that finds too little noise.

The attack knows everything but whether one sample is there, and uses every number that leaves, as the guarantee says it
may: the likelihood ratio of the two Gaussians is then the best test there is. `benchmarks/privacy/epsilon_audit.py`
    has more.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import MethodError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.privacy import noised_sums, secret_noise
from protofleet.contract.privacy.noised_sums import SumNoise, on_grid
from protofleet.contract.privacy.secret_noise import SecretNoise, key_of
from protofleet.contract.sums.statistics import Statistic

C, D = 4, 6
NAMES = ("ffc-dp", "ncm-dp")
MULTIPLIER = 2.0


class Nothing:
    """In place of noise: the sums as they are, on their grid."""

    def whole_normal(self, shape: tuple[int, ...], deviation: float, /) -> np.ndarray:
        return np.zeros(shape, np.int64)


class Samples:
    """Features and labels, as a method sees a device's."""

    min_samples = 1

    def __init__(self, name: str, z: np.ndarray, y: np.ndarray, secret: bytes | None = None, blocks: int = 1) -> None:
        self.hyper = method(name).resolve({"noise_multiplier": MULTIPLIER})
        self.classes, self.width, self.params = C, D, {}
        self.asked, self._z, self._y, self._blocks = np.ones(C, bool), z, y, blocks
        self._secret = secret

    def features(self, extractor: str) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        assert extractor == "bundle"
        yield from zip(np.array_split(self._z, self._blocks), np.array_split(self._y, self._blocks), strict=True)

    def secret_noise(self, *of: bytes | np.ndarray) -> object:
        return Nothing() if self._secret is None else SecretNoise(key_of(self._secret, *of))


def parts(name: str, statistic: Statistic) -> np.ndarray:
    """All numbers that leave, each in units of the deviation of its own noise."""
    noise = method(name).mechanism(method(name).resolve({"noise_multiplier": MULTIPLIER}))
    found = [statistic.rows(statistic.row_fields()[0]) / noise.row_deviation, statistic.sizes / noise.count_deviation]
    if statistic.triangle is not None:
        scale = np.full((D, D), math.sqrt(2.0))
        np.fill_diagonal(scale, 1.0)
        found.append(statistic.triangle * scale[np.triu_indices(D)] / noise.gram_deviation)
    return np.concatenate([each.ravel() for each in found])


def released(name: str, z: np.ndarray, y: np.ndarray, secret: bytes | None = None, blocks: int = 1) -> np.ndarray:
    return parts(name, method(name).summarise(Samples(name, z, y, secret, blocks)))


@st.composite
def samples(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Features that a network could give, and some that a liar or a broken network would."""
    n, rng = draw(st.integers(0, 6)), np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["normal", "one-hot", "alike", "opposite", "zero", "tiny", "huge", "none"]))
    z = rng.normal(size=(n, D))
    if kind in ("one-hot", "alike", "opposite"):
        z = np.eye(D)[rng.integers(0, D, n) if kind == "one-hot" else np.zeros(n, int)]
        z = z * (-1.0) ** np.arange(n)[:, None] if kind == "opposite" else z
    scale = {"zero": 0.0, "tiny": 1e-30, "huge": 1e30, "none": np.nan}.get(kind, 1.0)
    return (z * scale).astype(np.float32), rng.integers(0, draw(st.integers(1, C)), n)


# ── what one sample moves ──


@pytest.mark.parametrize("name", NAMES)
@given(data=samples(), one=samples(), other=samples())
@settings(max_examples=60, deadline=None)
def test_no_sample_moves_all_that_leaves_by_more_than_is_stated(name, data, one, other) -> None:
    z, y = data
    here = released(name, z, y)
    mechanism = method(name).mechanism(method(name).resolve({"noise_multiplier": MULTIPLIER}))
    cost = mechanism.release(np.bincount(y, minlength=C))
    rounding = 1e-4  # of what leaves, half a step of its grid each
    if len(one[1]):
        more = released(name, np.concatenate([z, one[0][:1]]), np.append(y, one[1][:1]))
        assert np.linalg.norm(more - here) <= 1 / cost.add_remove + rounding
        if len(other[1]):
            changed = released(name, np.concatenate([z, other[0][:1]]), np.append(y, other[1][:1]))
            assert np.linalg.norm(more - changed) <= 1 / cost.replace + rounding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(5))
def test_the_bound_for_one_sample_more_is_reached_by_every_unit_feature(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    z, y = rng.normal(size=(5, D)), rng.integers(0, C, 5)
    moved = np.linalg.norm(released(name, z, y) - released(name, z[:-1], y[:-1]))
    assert 0.999 / MULTIPLIER <= moved <= 1.0001 / MULTIPLIER


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_for_one_sample_replaced_is_reached(name: str) -> None:
    """By two opposite features of one class, since rows of sums have most of the budget."""
    one, other = (released(name, sign * np.eye(D)[:1], np.array([0])) for sign in (1, -1))
    cost = method(name).mechanism(method(name).resolve({"noise_multiplier": MULTIPLIER})).release(np.zeros(C, int))
    assert np.linalg.norm(one - other) == pytest.approx(1 / cost.replace, rel=0.01)
    assert np.linalg.norm(one - other) <= 1 / cost.replace + 1e-4


@given(gram=st.just(0.0) | st.floats(1e-6, 0.9), count=st.floats(0.01, 0.09))
def test_what_a_replaced_sample_costs_is_the_largest_over_all_pairs(gram: float, count: float) -> None:
    """A search over the angle between two features, of one class or of two."""
    t, rows = np.linspace(-1, 1, 2001), 1 - gram - count
    same, two = 2 * gram * (1 - t**2) + 2 * rows * (1 - t), 2 * gram * (1 - t**2) + 2 * rows + 2 * count
    wanted = max(same.max(), two.max())
    assert SumNoise(1.0, gram, count).replaced() == pytest.approx(wanted, rel=1e-5)


def test_three_equal_parts_are_root_three_and_root_six() -> None:
    """Noise of deviation √3·m on sums that move by √3 and √6; without A, √2·m for √2 and 2."""
    third, half = SumNoise(5.0, 1 / 3, 1 / 3), SumNoise(5.0, 0.0, 0.5)
    deviations = third.gram_deviation, third.row_deviation, third.count_deviation
    assert deviations == pytest.approx((5 * math.sqrt(3),) * 3)
    cost = third.release(np.zeros(3, int))
    assert (cost.add_remove, cost.replace) == pytest.approx((5.0, 5 * math.sqrt(3) / math.sqrt(6)))
    assert (half.row_deviation, half.count_deviation) == pytest.approx((5 * math.sqrt(2),) * 2)
    assert half.release(np.zeros(3, int)).replace == pytest.approx(5 * math.sqrt(2) / 2)
    assert cost.covers_all
    assert not cost.public


@pytest.mark.parametrize(
    "given_shares", [(0.0, 0.2, 0.1), (-1.0, 0.5, 0.1), (math.inf, 0.3, 0.1), (1.0, 0.9, 0.1), (1.0, 0.2, 0.0)]
)
def test_no_noise_and_shares_that_leave_nothing_are_refused(given_shares: tuple[float, float, float]) -> None:
    with pytest.raises(MethodError):
        SumNoise(*given_shares)


# ── exact sums, and the grid ──


@pytest.mark.parametrize("name", NAMES)
def test_sums_are_the_same_in_any_order_and_by_any_blocks(name: str) -> None:
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(40, D)).astype(np.float32), rng.integers(0, C, 40)
    order = rng.permutation(40)
    first = released(name, z, y, b"secret")
    np.testing.assert_array_equal(released(name, z[order], y[order], b"secret", blocks=7), first)
    assert np.abs(released(name, z, y, b"other") - first).min() > 0


@given(z=st.lists(st.floats(-1e3, 1e3), min_size=D, max_size=D))
def test_on_the_grid_no_norm_exceeds_one(z: list[float]) -> None:
    rows = on_grid(unit_rows(np.array([z])))
    steps = rows * 2.0**16
    np.testing.assert_array_equal(steps, np.rint(steps))
    assert int((steps.astype(object) ** 2).sum()) <= 2**32  # in whole numbers


def test_what_leaves_is_a_whole_number_of_steps_whatever_the_sums_are() -> None:
    """All numbers of one grid, none of which is out of reach of any sum: their last bits show nothing."""
    noised = SumNoise(MULTIPLIER, 0.0, 0.5).noised_rows
    deviations = []
    for value in (0.0, 2.0**-32, 1e5 + 2.0**-32):
        steps = np.ldexp(noised(np.full((C, 500), value), SecretNoise(bytes(32))), 32)
        np.testing.assert_array_equal(steps, np.rint(steps))
        assert {int(step) % 8 for step in steps.ravel()} == set(range(8))
        deviations.append(steps - 2.0**32 * value)
    np.testing.assert_array_equal(deviations[0], deviations[1])
    np.testing.assert_array_equal(deviations[0], deviations[2])


def test_whole_noise_comes_as_often_as_it_should() -> None:
    """Pearson's χ² over the deviations and over what is left of them, at 1 in 10⁵: 60,000 numbers of 2¹⁴ + 1 steps."""
    deviation = 2.0**14 + 1.0
    found = SecretNoise(bytes(32)).whole_normal((60_000,), deviation)
    edges = np.array([-math.inf, *np.arange(-3.0, 3.1, 0.25), math.inf]) * deviation
    below = np.array([0.5 * math.erfc(-(edge - 0.5) / deviation / math.sqrt(2)) for edge in edges])
    for counts, expected in (
        (np.histogram(found, edges)[0], np.diff(below) * len(found)),
        (np.bincount(found % 16, minlength=16), np.full(16, len(found) / 16)),
    ):
        degrees = len(counts) - 1
        statistic = float(((counts - expected) ** 2 / expected).sum())
        assert statistic < degrees * (1 - 2 / (9 * degrees) + 4.3 * math.sqrt(2 / (9 * degrees))) ** 3


def test_exact_thresholds_say_how_many_deviations_away_a_number_begins() -> None:
    weights = [math.exp(-j * j / 2) for j in range(10)]
    shares = np.cumsum(weights)[:-1] / sum(weights)
    np.testing.assert_allclose(secret_noise._thresholds() / 2.0**64, shares, rtol=1e-15)
    assert np.diff(secret_noise._thresholds().astype(object)).min() > 0


@pytest.mark.parametrize("multiplier", [1e-5, 1e9])
def test_noise_that_its_grid_cannot_hold_is_refused(multiplier: float) -> None:
    with pytest.raises(MethodError, match="noise, expected deviations of"):
        SumNoise(multiplier, 0.2, 0.05)


def test_a_feature_that_is_no_number_counts_as_zero() -> None:
    assert not on_grid(np.array([[np.inf, -np.inf, np.nan]])).any()


@pytest.mark.parametrize(("gram", "count"), [(0.0, 0.05), (0.2, 0.05), (0.9, 0.05), (0.05, 0.9)])
def test_noise_of_any_part_is_within_what_the_server_allows_for(gram: float, count: float) -> None:
    mechanism = SumNoise(MULTIPLIER, gram, count)
    largest = MULTIPLIER / math.sqrt(min(share for share in (gram, count, mechanism.row_share) if share))
    assert mechanism.longest(9) >= largest * 3
    assert np.isinf(mechanism.largest_norm(np.ones(2, int), D)).all()  # how many samples there are is not told


def test_the_noise_is_box_and_mullers_of_the_stream_and_no_number_comes_twice() -> None:
    """Over more numbers than are made at once, and over two calls: a part with the noise of another would take it
    out by a subtraction."""
    key, counts = bytes(range(32)), (2**15 + 3, 5)
    made = SecretNoise(key)
    found = np.concatenate([made.standard_normal((count,)) for count in counts])
    wanted: list[float] = []
    for block, count in enumerate((2**15, 3, 5)):
        pairs = (count + 1) // 2
        bits = hashlib.shake_256(key + block.to_bytes(8, "big")).digest(16 * pairs)
        numbers = [int.from_bytes(bits[at : at + 8], "little") >> 11 for at in range(0, 16 * pairs, 8)]
        radius = [math.sqrt(-2 * math.log((n + 1) / 2**53)) for n in numbers[:pairs]]
        angle = [2 * math.pi * n / 2**53 for n in numbers[pairs:]]
        both = [[r * side(a) for r, a in zip(radius, angle, strict=True)] for side in (math.cos, math.sin)]
        wanted += [*both[0], *both[1]][:count]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)
    assert len(np.unique(found)) == len(found)


@pytest.mark.parametrize("name", NAMES)
def test_sums_that_differ_in_anything_have_noise_of_their_own(name: str) -> None:
    """Two pairs of features with one sum, whose products differ; other features of as many samples; other classes."""
    low, high = ([[0.8, *(side * 0.6 * np.eye(D - 1)[at])] for side in (1, -1)] for at in (0, 1))
    sets = [(np.array(low), [0, 0]), (np.array(high), [0, 0]), (-np.array(low), [0, 0]), (np.array(low), [1, 1])]
    sets = sets if name == "ffc-dp" else sets[1:]
    noises = [released(name, z, np.array(y), b"secret") - released(name, z, np.array(y), blocks=1) for z, y in sets]
    for at, one in enumerate(noises):
        for other in noises[at + 1 :]:
            assert np.abs(one - other).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_other_noise_is_other_noise_and_no_multiple_of_it(name: str) -> None:
    """The same samples under two multipliers: of x + 2n and x + 3n anybody could compute x."""
    z, y = np.eye(D)[:3], np.array([0, 1, 1])
    noises = []
    for multiplier in (2.0, 3.0):
        samples = Samples(name, z, y, b"secret")
        samples.hyper = method(name).resolve({"noise_multiplier": multiplier})
        made = [each.ravel() for each in method(name).summarise(samples).arrays()]
        samples._secret = None
        exact = [each.ravel() for each in method(name).summarise(samples).arrays()]
        noises.append((np.concatenate(made) - np.concatenate(exact)) / multiplier)
    assert np.abs(noises[0] - noises[1]).max() > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_of_a_class_that_is_withheld_nothing_is_sent(name: str) -> None:
    samples = Samples(name, np.eye(D)[:3], np.array([0, 1, 1]), b"secret")
    samples.asked = np.arange(C) != 1
    sent = method(name).summarise(samples)
    assert not sent.rows(sent.row_fields()[0])[1].any()
    assert not sent.sizes[1].any()
    assert sent.counts.tolist() == [1, 0, 1, 1]


def test_the_noise_is_normal_and_each_part_has_its_own() -> None:
    mechanism, width = SumNoise(MULTIPLIER, 0.2, 0.1), 120
    normal = SecretNoise(key_of(b"secret", b"x"))
    packed = mechanism.noised_triangle(np.zeros(width * (width + 1) // 2), width, normal)
    full = np.zeros((width, width))
    full[np.triu_indices(width)] = packed
    assert np.diag(full).std() == pytest.approx(mechanism.gram_deviation, rel=0.2)
    beside = full[np.triu_indices(width, 1)]
    assert beside.std() == pytest.approx(mechanism.gram_deviation / math.sqrt(2), rel=0.03)
    rows = mechanism.noised_rows(np.zeros((40, 100)), normal)
    assert rows.std() == pytest.approx(mechanism.row_deviation, rel=0.05)
    assert mechanism.noised_counts(np.zeros(4000, int), normal).std() == pytest.approx(
        mechanism.count_deviation, rel=0.05
    )
    assert (np.abs(beside) < beside.std()).mean() == pytest.approx(0.6827, abs=0.02)


# ── the attack ──

TRIALS, DELTA = 800, 0.01


def _stated(multiplier: float, delta: float) -> float:
    """ε of a Gaussian mechanism (Balle and Wang, ICML 2018, theorem 8), by bisection."""
    mu = 1 / multiplier

    def missing(epsilon: float) -> float:
        upper, lower = (0.5 * math.erfc((epsilon / mu + s * mu / 2) / math.sqrt(2)) for s in (-1, 1))
        return upper - math.exp(epsilon) * lower - delta

    low, high = 0.0, 100.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if missing(middle) > 0 else (low, middle)
    return high


def _bound(hits: int, trials: int, *, upper: bool) -> float:
    """Clopper and Pearson's 99.5 % bound of a share, by bisection over the binomial tail."""

    def tail(p: float) -> float:
        logs = [math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in range(trials + 1)]
        chosen = range(hits + 1) if upper else range(hits, trials + 1)
        return sum(math.exp(logs[k] + k * math.log(p) + (trials - k) * math.log1p(-p)) for k in chosen)

    low, high = 1e-9, 1 - 1e-9
    for _ in range(30):
        middle = (low + high) / 2
        grows = tail(middle) > 0.005
        low, high = (middle, high) if grows == upper else (low, middle)
    return high if upper else low


def _found(name: str, looks_at: slice = slice(None)) -> float:
    """A lower bound of ε that the attack shows, at 99 %: is a sample there whose class nobody else has?"""
    rng = np.random.default_rng(3)
    z, y = rng.normal(size=(6, D)), np.array([0, 0, 1, 1, 2, 2])
    more = np.concatenate([z, np.eye(D)[:1]]), np.append(y, 3)
    base = released(name, z, y)
    moved = np.zeros_like(base)
    moved[looks_at] = (released(name, *more) - base)[looks_at]

    def scores(data: tuple[np.ndarray, np.ndarray], side: bytes, trials: int) -> np.ndarray:
        keys = (key_of(side, number.to_bytes(4, "big")) for number in range(trials))
        return np.array([(released(name, *data, key) - base) @ moved for key in keys])

    without, with_it = scores((z, y), b"without", TRIALS), scores(more, b"with", TRIALS)
    threshold = np.quantile(scores((z, y), b"threshold", 200), 0.945)
    true, false = int((with_it > threshold).sum()), int((without > threshold).sum())
    return math.log(max(_bound(true, TRIALS, upper=False) - DELTA, 1e-9) / _bound(false, TRIALS, upper=True))


def test_the_attack_finds_no_more_than_is_stated() -> None:
    assert 0 < _found("ffc-dp") < _stated(MULTIPLIER, DELTA)


def test_the_attack_finds_half_the_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = noised_sums._noised
    monkeypatch.setattr(
        noised_sums, "_noised", lambda values, deviation, normal: whole(values, 0.5 * deviation, normal)
    )
    assert _found("ffc-dp") > _stated(MULTIPLIER, DELTA)


def test_the_attack_finds_counts_without_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SumNoise, "noised_counts", lambda self, counts, normal: counts.astype(np.float64)[:, None])
    sizes = slice(C * D, C * D + C)
    assert _found("ncm-dp", sizes) > _stated(MULTIPLIER, DELTA)
