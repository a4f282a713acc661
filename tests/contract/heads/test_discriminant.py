"""FedCOF's covariance from class means, and the heads made of it: against naive loops, drawn samples and theory."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.covariance import MeanSpread, WithinClass, random_groups, within_gram
from protofleet.contract.heads.discriminant import (
    LinearHead,
    choose_ridge_within,
    chosen_in_words,
    discriminant_head,
    nearest_mean_head,
    within_ridge_head,
    without_bias,
)
from protofleet.contract.heads.spectrum import RIDGES

SIZES = [1, 2, 3, 5, 9]  # of the groups of a class: unequal on purpose


def _groups(rng: np.random.Generator, z: np.ndarray, y: np.ndarray, classes: int, devices: int, groups: int) -> list:
    """(mean, count, class) of every group of every device."""
    sent = []
    for mine in np.array_split(rng.permutation(len(y)), devices):
        into = random_groups(y[mine], groups, 1, rng)
        for label in range(classes):
            for group in range(groups):
                rows = z[mine][(y[mine] == label) & (into == group)]
                if len(rows):
                    sent.append((rows.mean(axis=0), len(rows), label))
    return sent


def _spread(sent: list, classes: int) -> MeanSpread:
    means, counts, labels = zip(*sent, strict=True)
    return MeanSpread.of(np.array(means), counts, labels, classes)


def _draw(samples: int, width: int, classes: int, seed: int, apart: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Classes with one covariance whose deviations fall from 1 to about a tenth. (N, D), (N,)"""
    common, rng = np.random.default_rng(7), np.random.default_rng(seed)
    deviations = np.geomspace(1.0, 0.1, width)
    y = rng.integers(0, classes, samples)
    centres = apart * common.normal(size=(classes, width)) * np.geomspace(0.3, 0.1, width)
    return centres[y] + rng.normal(size=(samples, width)) * deviations, y


def _right(head: LinearHead, z: np.ndarray, y: np.ndarray) -> float:
    return float((head.scores(z).argmax(axis=1) == y).mean())


def test_the_estimate_is_the_papers_for_one_class() -> None:
    rng = np.random.default_rng(0)
    means, counts = rng.normal(size=(5, 4)), np.array(SIZES)
    overall = (counts[:, None] * means).sum(axis=0) / counts.sum()
    naive = np.zeros((4, 4))
    for mean, count in zip(means, counts, strict=True):
        naive += count * np.outer(mean - overall, mean - overall) / (len(counts) - 1)
    within = MeanSpread.of(means, counts, np.zeros(5, int), 1).within
    np.testing.assert_allclose(within.covariance, naive, atol=1e-12)
    np.testing.assert_allclose(within.means[0], overall)
    assert within.freedom == 4


def test_the_estimate_is_unbiased_for_groups_of_any_sizes_and_classes_with_unequal_many() -> None:
    rng = np.random.default_rng(1)
    mixing = rng.normal(size=(3, 3))
    true = mixing @ mixing.T
    labels = [0] * 5 + [1] * 2 + [2]  # class 2 came as one group: it says nothing of the covariance
    counts = [*SIZES, 4, 1, 7]
    centres, total, draws = 5 * rng.normal(size=(3, 3)), np.zeros((3, 3)), 2000
    for _ in range(draws):
        means = [(centres[c] + rng.normal(size=(n, 3)) @ mixing.T).mean(0) for n, c in zip(counts, labels, strict=True)]
        total += MeanSpread.of(means, counts, labels, 3).within.covariance / draws
    # five degrees of freedom: an entry deviates by at most √(2/5) of the largest, the mean of 2,000 by a 44th of that
    np.testing.assert_allclose(total, true, atol=5 * np.sqrt(2 / 5 / draws) * np.abs(true).max())


def test_groups_of_one_sample_and_ffcs_sums_are_the_pooled_covariance() -> None:
    z, y = _draw(60, 5, 3, 2)
    naive = sum((z[y == c] - z[y == c].mean(0)).T @ (z[y == c] - z[y == c].mean(0)) for c in range(3)) / (60 - 3)
    cross = np.array([z[y == c].sum(0) for c in range(3)])
    for within in (MeanSpread.of(z, np.ones(60), y, 3).within, within_gram(z.T @ z, cross, np.bincount(y))):
        np.testing.assert_allclose(within.covariance, naive, atol=1e-12)
        assert within.freedom == 57


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_merging_is_addition_in_any_order(seed: int, devices: int, groups: int) -> None:
    rng = np.random.default_rng(seed)
    sent = _groups(rng, *_draw(50, 4, 3, seed), 3, devices, groups)
    whole, merged = _spread(sent, 3), MeanSpread.of(np.zeros((0, 4)), [], [], 3)
    for one in rng.permutation(len(sent)):
        merged = merged.merge(_spread([sent[one]], 3))
    np.testing.assert_allclose(merged.within.covariance, whole.within.covariance, atol=1e-12)
    np.testing.assert_array_equal(merged.groups, whole.groups)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 5), st.integers(0, 10_000)
)
@settings(max_examples=60, deadline=None)
def test_random_groups_are_even_and_never_below_the_least(
    labels: list[int], groups: int, least: int, seed: int
) -> None:
    y = np.array(labels)
    into = random_groups(y, groups, least, np.random.default_rng(seed))
    for label in np.unique(y):
        sizes = np.bincount(into[y == label])
        assert sizes.max() - sizes.min() <= 1
        assert len(sizes) == max(1, min(groups, (y == label).sum() // least))
        assert sizes.min() >= least or len(sizes) == 1
    same = random_groups(y, groups, least, np.random.default_rng(seed))
    np.testing.assert_array_equal(into, same)


def test_groups_are_drawn_and_do_not_follow_the_order_of_the_samples() -> None:
    drawn = [random_groups(np.zeros(40, int), 2, 1, np.random.default_rng(seed)) for seed in range(20)]
    assert len({each.tobytes() for each in drawn}) == 20
    both_first = np.mean([each[0] == each[2] for each in drawn])  # one after the other they would always, or never, be
    assert 0.1 < both_first < 0.9


def test_a_class_that_nobody_has_does_not_make_the_others_scarce() -> None:
    within = _within(np.eye(2), np.eye(3, 2), [4, 4, 0], 6)
    assert not within.is_scarce(4)
    assert within.is_scarce(5)


def _within(covariance: np.ndarray, means: np.ndarray, counts: list[int], freedom: int) -> WithinClass:
    return WithinClass(means, np.array(counts), covariance, freedom)


def test_heads_are_the_distances_they_stand_for() -> None:
    rng = np.random.default_rng(3)
    mixing, means, z = rng.normal(size=(4, 4)), rng.normal(size=(3, 4)), rng.normal(size=(40, 4))
    within = _within(mixing @ mixing.T, means, [9, 9, 9], 24)
    penalty = 0.1 * np.trace(within.covariance) / 4
    inverse = np.linalg.inv(within.covariance + penalty * np.eye(4))
    apart = z[:, None] - means[None]
    for head, metric in ((nearest_mean_head(within), np.eye(4)), (discriminant_head(within, 0.1), inverse)):
        distances = np.einsum("ncd,de,nce->nc", apart, metric, apart)
        np.testing.assert_array_equal(head.scores(z).argmax(1), distances.argmin(1))
    large = discriminant_head(within, 1e9).scores(z).argmax(1)
    np.testing.assert_array_equal(large, nearest_mean_head(within).scores(z).argmax(1))


def test_the_ridge_form_is_the_papers() -> None:
    """G = Σ_c n_c (Σ + λI) + N μμᵀ, W = G⁻¹ Σ z over the class, rows of norm 1."""
    rng = np.random.default_rng(4)
    mixing, means, counts = rng.normal(size=(4, 4)), rng.normal(size=(3, 4)), np.array([5, 9, 2])
    within = _within(mixing @ mixing.T, means, [5, 9, 2], 13)
    overall = counts @ means / 16
    penalised = within.covariance + 0.1 * np.trace(within.covariance) / 4 * np.eye(4)
    rows = np.linalg.solve(16 * penalised + 16 * np.outer(overall, overall), (counts[:, None] * means).T).T
    expected = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    np.testing.assert_allclose(within_ridge_head(within, 0.1).weights, expected, atol=1e-12)


@pytest.mark.parametrize(("devices", "groups"), [(4, 1), (4, 4), (40, 1), (0, 0)])
def test_the_chosen_ridge_is_near_the_best_and_beats_the_nearest_mean(devices: int, groups: int) -> None:
    """From FedCOF's means, and (0 devices) from FFC's sums, near as many degrees of freedom as features."""
    width, classes = 120, 4
    test_z, test_y = _draw(6000, width, classes, 1)
    behind, gained = [], []
    for seed in range(2, 6):
        z, y = _draw(600 if devices else width, width, classes, seed)
        if devices:
            within = _spread(_groups(np.random.default_rng(seed), z, y, classes, devices, groups), classes).within
        else:
            cross = np.array([z[y == c].sum(0) for c in range(classes)])
            within = within_gram(z.T @ z, cross, np.bincount(y, minlength=classes))
        best = max(_right(discriminant_head(within, r), test_z, test_y) for r in RIDGES)
        chosen = _right(discriminant_head(within), test_z, test_y)
        behind.append(best - chosen)
        gained.append(chosen - _right(nearest_mean_head(within), test_z, test_y))
    assert np.mean(behind) <= 0.02
    assert np.mean(gained) >= (0.01 if devices * groups > 4 or not devices else -0.02)


def test_the_estimated_error_is_the_one_on_new_samples() -> None:
    """Two classes, where pairs are all there is: estimated from 200 samples in 80 directions, tried on 20,000."""
    test_z, test_y = _draw(20_000, 80, 2, 1)
    estimates, errors = [], []
    for seed in range(2, 12):
        z, y = _draw(200, 80, 2, seed)
        cross = np.array([z[y == c].sum(0) for c in range(2)])
        within = within_gram(z.T @ z, cross, np.bincount(y))
        found = choose_ridge_within(within)
        estimates.append(found.error[::7])
        errors.append([1 - _right(discriminant_head(within, float(r)), test_z, test_y) for r in RIDGES[::7]])
    np.testing.assert_allclose(np.mean(estimates, axis=0), np.mean(errors, axis=0), atol=0.02)


def test_the_estimated_error_is_the_formula_pair_by_pair() -> None:
    rng = np.random.default_rng(6)
    mixing, means, counts, freedom = rng.normal(size=(5, 5)), rng.normal(size=(4, 5)), np.array([3, 40, 0, 9]), 30
    means[2] = 0.0
    within = _within(mixing @ mixing.T, means, counts.tolist(), freedom)
    s, found, here = within.covariance, choose_ridge_within(within), [0, 1, 3]
    for ridge, error in zip(RIDGES, found.error, strict=True):
        h = np.linalg.inv(s + ridge * np.trace(s) / 5 * np.eye(5))
        left = 1 - np.trace(h @ s) / freedom
        wrong = []
        for i, j in ((i, j) for i in here for j in here if i != j):
            apart = means[i] - means[j]
            margin = apart @ h @ apart / 2 - np.trace(h @ s) / left / counts[i]
            wrong.append(math.erfc(margin * left / math.sqrt(2 * apart @ h @ s @ h @ apart)) / 2)
        assert error == pytest.approx(np.mean(wrong), abs=3e-7)
    assert found.ridge == RIDGES[found.error.argmin()]


def test_of_ridges_that_are_as_good_the_largest_is_taken() -> None:
    """All directions vary alike, and that is known for sure: no ridge changes any answer."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        q, _ = np.linalg.qr(rng.normal(size=(4, 4)))
        found = choose_ridge_within(_within(q @ q.T, rng.normal(size=(3, 4)), [50] * 3, 10**15))
        np.testing.assert_allclose(found.error, found.error[0], rtol=1e-10)
        assert found.ridge == RIDGES[-1]


@pytest.mark.parametrize(("samples", "width", "devices", "groups"), [(240, 40, 4, 2), (400, 80, 8, 4)])
def test_of_means_of_several_photos_each_the_least_error_is_taken_and_of_single_ones_within_a_bound(
    samples: int, width: int, devices: int, groups: int
) -> None:
    """A copy is one of several in its group's mean; where a group is one photo it is a head of its own."""
    z, y = _draw(samples, width, 4, 0)
    several = _spread(_groups(np.random.default_rng(0), z, y, 4, devices, groups), 4)
    found = choose_ridge_within(several.within)
    place = int(np.searchsorted(found.ridges, found.ridge))
    assert found.freedom[place] > several.within.freedom / 3 + 2 * 4
    assert (place, found.is_limited) == (int(found.error.argmin()), False)
    once = _spread(
        [(mean, 1, label) for mean, _, label in _groups(np.random.default_rng(0), z, y, 4, devices, groups)], 4
    )
    single = choose_ridge_within(once.within)
    assert single.freedom[int(np.searchsorted(single.ridges, single.ridge))] <= once.within.freedom / 3 + 2 * 4


@given(st.integers(0, 10_000), st.sampled_from([1e-3, 40.0]))
@settings(max_examples=20, deadline=None)
def test_units_rotations_and_the_classes_order_change_no_answer(seed: int, unit: float) -> None:
    z, y = _draw(60, 6, 3, seed)
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(6, 6)))
    order = np.array([2, 0, 1])

    def ridge_and_scores(x: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
        within = MeanSpread.of(x, np.ones(60), labels, 3).within
        return choose_ridge_within(within).ridge, discriminant_head(within).scores(x)

    ridge, scores = ridge_and_scores(z, y)
    others = [(unit * z, y, scores), (z @ q, y, scores), (z, np.argsort(order)[y], scores[:, order])]
    for x, labels, expected in others:
        found, given = ridge_and_scores(x, labels)
        assert found == ridge
        np.testing.assert_allclose(given, expected, rtol=1e-6, atol=1e-6)


def test_where_nothing_is_known_of_the_covariance_the_head_is_the_nearest_mean() -> None:
    z, y = _draw(30, 6, 3, 0)
    one_device = _spread(_groups(np.random.default_rng(0), z, y, 3, 1, 1), 3)
    same = MeanSpread.of(np.ones((4, 6)), np.ones(4), [0, 0, 1, 1], 3)
    for spread in (one_device, same):
        within, head = spread.within, discriminant_head(spread.within)
        assert choose_ridge_within(within).ridge == np.inf
        np.testing.assert_array_equal(head.scores(z), nearest_mean_head(within).scores(z))
        assert np.isfinite(within_ridge_head(within).weights).all()
    words = chosen_in_words(one_device.within)
    assert words == "nearest class mean, since nothing tells how features vary within a class"


@pytest.mark.parametrize("each", [2, 3, 4, 5, 12])
def test_with_few_samples_a_class_the_head_is_never_behind_the_nearest_mean(each: int) -> None:
    """Below four it is the nearest mean itself: the ridge that would be chosen is points behind it here."""
    width, classes, behind = 60, 6, []
    test_z, test_y = _draw(4000, width, classes, 1, apart=2.0)
    for seed in range(2, 10):
        z, y = _draw(4000, width, classes, seed, apart=2.0)
        chosen = np.concatenate([np.flatnonzero(y == c)[:each] for c in range(classes)])
        within = MeanSpread.of(z[chosen], np.ones(len(chosen)), y[chosen], classes).within
        head, nearest = discriminant_head(within), nearest_mean_head(within)
        assert np.array_equal(head.weights, nearest.weights) == (each < 4)
        words = chosen_in_words(within)
        assert (f"{each}.0 samples a class are too few" in words) == (each < 4)
        behind.append(_right(nearest, test_z, test_y) - _right(head, test_z, test_y))
        assert not np.array_equal(discriminant_head(within, 0.1).weights, nearest.weights)  # as given is as given
    assert np.mean(behind) <= 0.01


def test_ridges_within_rounding_of_the_sums_are_not_chosen() -> None:
    """Directions in which nothing varies seem to when sums were rounded, and a small ridge would build on them."""
    z, y = _draw(300, 40, 3, 5, apart=2.0)
    z[:, 20:] = 1.0
    cross = np.array([z[y == c].sum(0) for c in range(3)])
    rounded = (z.T @ z).astype(np.float16).astype(np.float64)
    within = within_gram((rounded + rounded.T) / 2, cross.astype(np.float16), np.bincount(y))
    assert within.spectrum.noise > 0
    found = choose_ridge_within(within)
    assert found.ridge * within.spectrum.scale >= 10 * within.spectrum.noise
    test_z, test_y = _draw(4000, 40, 3, 1, apart=2.0)
    test_z[:, 20:] = 1.0
    exact = within_gram(z.T @ z, cross, np.bincount(y))
    gap = _right(discriminant_head(exact), test_z, test_y) - _right(discriminant_head(within), test_z, test_y)
    assert gap <= 0.02


@pytest.mark.parametrize("head", [nearest_mean_head, discriminant_head, within_ridge_head])
def test_a_class_without_examples_is_never_the_answer(head: object) -> None:
    z, y = _draw(200, 6, 4, 0)
    z, y = z[y != 1], y[y != 1]
    within = _spread(_groups(np.random.default_rng(0), z, y, 4, 5, 2), 4).within
    made = head(within)  # type: ignore[operator]
    assert not made.weights[1].any()
    for answers in (made.scores(-z), made.scores(z)):
        assert np.isfinite(np.delete(answers, 1, axis=1)).all()
        assert 1 not in answers.argmax(axis=1)


def test_without_bias_the_answers_stay() -> None:
    """Features with a mean that all share, as a ReLU network's have, stand in for a constant."""
    z, y = _draw(2000, 40, 4, 0, apart=2.0)
    z = z + 3.0
    within = MeanSpread.of(z, np.ones(2000), y, 5).within
    head = discriminant_head(within)
    rows = without_bias(head, within)
    assert (head.scores(z).argmax(1) == (z @ rows.T).argmax(1)).mean() >= 0.98
    np.testing.assert_array_equal((z @ rows.T).argmax(1), (9 * z @ rows.T).argmax(1))
    assert 4 not in (z @ rows.T).argmax(1)  # no examples: its row is zero
    alone = MeanSpread.of(z[y == 2], np.ones((y == 2).sum()), y[y == 2], 5).within
    assert set((z @ without_bias(discriminant_head(alone), alone).T).argmax(1)) == {2}
    assert not without_bias(head, MeanSpread.of(np.zeros((0, 40)), [], [], 5).within).any()


def test_without_bias_and_without_a_common_mean_no_noise_takes_its_place() -> None:
    """Where nothing stands in for a constant the biases are lost; dividing by what is nearly 0 would lose the head."""
    z, y = _draw(2000, 40, 4, 0, apart=2.0)
    z[y == 0] *= 0.1
    z -= np.array([z[y == c].mean(0) for c in range(4)]).mean(0)
    within = MeanSpread.of(z, np.ones(2000), y, 4).within
    head = discriminant_head(within)
    assert (head.scores(z).argmax(1) == (z @ without_bias(head, within).T).argmax(1)).mean() >= 0.8


def test_what_does_not_fit_is_refused() -> None:
    ok = np.ones((2, 3))
    for means, counts, labels in (
        (ok, [1], [0, 0]),
        (ok * np.inf, [1, 1], [0, 0]),
        (ok, [1, -1], [0, 0]),
        (ok, [1, 1], [0, 5]),
    ):
        with pytest.raises(StatisticError, match="group means"):
            MeanSpread.of(means, counts, labels, 2)
    with pytest.raises(StatisticError, match="merge"):
        MeanSpread.of(ok, [1, 1], [0, 1], 2).merge(MeanSpread.of(ok[:, :2], [1, 1], [0, 1], 2))
