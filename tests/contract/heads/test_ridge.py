"""Which ridge FFC's head gets, from the sums alone: against the criterion from features, and where it matters."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pooled_head import solve_head

from protofleet.contract.errors import StatisticError
from protofleet.contract.heads.covariance import within_gram
from protofleet.contract.heads.discriminant import choose_ridge_within, discriminant_head, doubted_choice, without_bias
from protofleet.contract.heads.ridge import RidgeHead, choose_ridge, doubt, evened, is_uneven, scarce_or_uneven, solve
from protofleet.contract.heads.spectrum import RIDGES, Spectrum, least_error, solved_directly
from protofleet.contract.heads.sphere import projection, unit_rows
from protofleet.contract.sums.statistics import FeatureGram

SIZES = st.sampled_from([(4, 6), (6, 6), (12, 6), (60, 6), (3, 20), (20, 20), (200, 20)])  # (N, D)


def _sums(z: np.ndarray, y: np.ndarray, classes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    cross = np.zeros((classes, z.shape[1]))
    np.add.at(cross, y, z)
    return z.T @ z, cross, np.bincount(y, minlength=classes)


def _auto(z: np.ndarray, y: np.ndarray, classes: int) -> RidgeHead:
    return solve(*_sums(z, y, classes), "auto")


def _draw(samples: int, width: int, seed: int, classes: int = 3) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, samples)
    return rng.normal(size=(classes, width))[y] + rng.normal(size=(samples, width)), y


def _from_features(z: np.ndarray, y: np.ndarray, classes: int, ridge: float) -> tuple[float, float]:
    """GCV and degrees of freedom by the hat matrix, as the textbook has them."""
    n, width = z.shape
    hat = z @ np.linalg.inv(z.T @ z + ridge * (z**2).sum() / width * np.eye(width)) @ z.T
    targets = np.eye(classes)[y]
    error = ((targets - hat @ targets) ** 2).sum()
    return (error / n) / (1 - np.trace(hat) / n) ** 2, float(np.trace(hat))


@given(SIZES, st.integers(0, 10_000))
@settings(max_examples=40, deadline=None)
def test_the_criterion_is_that_of_the_features(size: tuple[int, int], seed: int) -> None:
    z, y = _draw(*size, seed)
    choice = _auto(z, y, 3).choice
    assert choice is not None
    brute = np.array([_from_features(z, y, 3, ridge) for ridge in RIDGES])
    # the hat matrix loses digits where 1 − df/N is small (N < D and a small ridge): there its own rounding decides
    np.testing.assert_allclose(choice.criterion, brute[:, 0], rtol=1e-5)
    np.testing.assert_allclose(choice.freedom, brute[:, 1], rtol=1e-8)
    assert (choice.criterion > 0).all()
    most = max(len(z) / 3 + 2 * len(np.unique(y)), brute[-1, 1]) * (1 + 1e-8)  # degrees of freedom
    taken = [criterion for criterion, freedom in brute if freedom <= most]
    assert choice.criterion[np.searchsorted(RIDGES, choice.ridge)] <= min(taken) * (1 + 1e-5)
    assert choice.is_limited or brute[:, 0].min() >= 0.9 * min(taken) * (1 - 1e-5)


def test_it_is_leave_one_out_where_all_samples_have_the_same_leverage() -> None:
    """A circulant matrix of features: then GCV is PRESS, the error of N heads of which each has not seen one sample."""
    rng = np.random.default_rng(0)
    row = rng.normal(size=8)
    z, y = np.stack([np.roll(row, shift) for shift in range(8)]), rng.integers(0, 2, 8)
    choice, targets = _auto(z, y, 2).choice, np.eye(2)[y]
    assert choice is not None
    for ridge, found in zip(RIDGES[::4], choice.criterion[::4], strict=True):
        penalty, press = ridge * (z**2).sum() / 8, 0.0
        for left in range(8):
            others = np.arange(8) != left
            head = np.linalg.solve(z[others].T @ z[others] + penalty * np.eye(8), z[others].T @ targets[others])
            press += ((targets[left] - z[left] @ head) ** 2).sum() / 8
        assert found == pytest.approx(press, rel=1e-6)


@given(SIZES, st.integers(0, 10_000), st.sampled_from([1e-3, 7.0, 1e4]))
@settings(max_examples=30, deadline=None)
def test_units_rotations_and_the_classes_order_change_nothing(size: tuple[int, int], seed: int, unit: float) -> None:
    z, y = _draw(*size, seed)
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(size[1], size[1])))
    order = np.array([2, 0, 1])
    plain = _auto(z, y, 3)
    for other, expected in (
        (_auto(unit * z, y, 3), plain.weights / unit),
        (_auto(z @ q, y, 3), plain.weights @ q),
        (_auto(z, np.argsort(order)[y], 3), plain.weights[order]),
    ):
        assert other.ridge == plain.ridge
        np.testing.assert_allclose(other.weights, expected, atol=1e-8 * np.abs(expected).max())


def test_more_of_the_same_sums_is_the_same_head_for_a_given_ridge_and_a_smaller_one_by_itself() -> None:
    a, cross, counts = _sums(*_draw(40, 20, 1), 3)
    np.testing.assert_allclose(solve(9 * a, 9 * cross, 9 * counts, 0.1).weights, solve(a, cross, counts, 0.1).weights)
    assert solve(9 * a, 9 * cross, 9 * counts, "auto").ridge < solve(a, cross, counts, "auto").ridge


def test_merged_devices_choose_as_the_pooled_data() -> None:
    z, y = _draw(300, 20, 2)
    pooled, merged = FeatureGram.of(z, y, 3), FeatureGram.zero(3, 20)
    for device in range(7):
        merged = merged.merge(FeatureGram.of(z[device::7], y[device::7], 3))
    np.testing.assert_allclose(solve_head(merged, "auto"), solve_head(pooled, "auto"), atol=1e-12)
    np.testing.assert_allclose(solve_head(pooled, "auto"), solve_head(pooled, _auto(z, y, 3).ridge), atol=1e-12)


def test_edges_give_finite_heads_and_a_ridge_of_the_grid() -> None:
    z, y = _draw(30, 12, 3)
    dead = z * (np.arange(12) > 3)
    wide = unit_rows(np.random.default_rng(0).normal(size=(50, 64)))
    cases = {
        "one class": (z, np.zeros(30, int), 3),
        "one sample": (z[:1], y[:1], 3),
        "a class without examples": (z[y != 1], y[y != 1], 3),
        "dead features": (dead, y, 3),
        "as many samples as features": (z[:12], y[:12], 3),
        "fitted without error": (np.eye(12), np.arange(12) % 3, 3),
        "projected": (wide @ projection(64, 8, 0), np.arange(50) % 3, 3),
    }
    for name, (features, labels, classes) in cases.items():
        solved = _auto(features, labels, classes)
        assert solved.choice is not None, name
        assert solved.choice.by == "gcv", name
        assert solved.ridge in RIDGES, name
        assert np.isfinite(solved.weights).all(), name
        assert (solved.choice.criterion > 0).all(), name  # infinite is a criterion that means nothing; NaN fails here
        assert solved.weights[np.bincount(labels, minlength=classes) > 0].any(axis=1).all(), name
        assert not solved.weights[np.bincount(labels, minlength=classes) == 0].any(), name


def test_a_direction_that_no_sample_has_is_none_and_a_class_without_samples_has_no_row() -> None:
    z = np.random.default_rng(3).normal(size=(5, 12))
    values = Spectrum.of(z.T @ z).values
    assert np.count_nonzero(values) == 5
    assert not np.signbit(values).any()
    found = solve(z.T @ z, np.stack([z.sum(axis=0), np.ones(12)]), [5, 0], 0.1).weights
    assert found[0].any()
    assert not found[1].any()


def test_of_ridges_that_are_as_good_the_largest_is_taken() -> None:
    """Each sample has a direction of its own, and all are as long: no ridge changes any answer."""
    cross = np.eye(6)[[0, 1]] + np.eye(6)[[2, 3]] + np.eye(6)[[4, 5]]
    for seed in range(5):
        q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(6, 6)))  # which one is the least, rounding says
        for a, sums in ((np.eye(6), cross), (q @ q.T, cross @ q)):
            chosen = choose_ridge(Spectrum.of(a), sums, [3, 3])
            np.testing.assert_allclose(chosen.criterion, chosen.criterion[0], rtol=1e-12)
            assert chosen.ridge == RIDGES[-1]


def test_however_little_a_small_ridge_leaves_the_criterion_is_that_of_the_kernel_or_none() -> None:
    """With K = Z Zᵀ it is N ‖(K + λI)⁻¹ Y‖² / tr((K + λI)⁻¹)², without a subtraction."""
    ridges = np.logspace(-12, 1, 14)
    for seed in range(5):
        z, y = _draw(8, 8, seed)
        found = choose_ridge(Spectrum.of(z.T @ z), _sums(z, y, 3)[1], np.bincount(y), ridges=ridges)
        for ridge, criterion in zip(ridges, found.criterion, strict=True):
            inverse = np.linalg.inv(z @ z.T + ridge * (z**2).sum() / 8 * np.eye(8))
            expected = 8 * ((inverse @ np.eye(3)[y]) ** 2).sum() / np.trace(inverse) ** 2
            assert criterion == pytest.approx(expected, rel=1e-3)
        again = [0, 1, 2, 0, 1, 2, 0, 1, 2]  # three samples, three times: fitted without error, whatever rounding says
        fitted = choose_ridge(Spectrum.of(z[again].T @ z[again]), 3 * z[:3], [3, 3, 3], ridges=ridges)
        assert (fitted.criterion > 0).all()
        assert np.isinf(fitted.criterion[ridges < 1e-9]).all()


def test_each_end_of_the_grid_is_taken_where_it_is_the_best() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(400) % 3
    exact = _auto(np.c_[np.eye(3)[y], rng.normal(size=400)], y, 3)  # three features are the labels
    assert exact.ridge == pytest.approx(1e-4)
    z = rng.normal(size=(30, 20))
    nothing = _auto(np.concatenate([z, -z]), np.arange(60) % 2, 2)  # what speaks for a class speaks against it as well
    assert nothing.ridge == pytest.approx(1e3)


def test_nothing_to_go_by_is_said_and_gives_the_fixed_ridge() -> None:
    nothing = solve(np.zeros((4, 4)), np.zeros((2, 4)), np.zeros(2), "auto")
    zeros = _auto(np.zeros((9, 4)), np.arange(9) % 2, 2)
    for solved in (nothing, zeros):
        assert not solved.weights.any()
    assert nothing.choice is not None
    assert (nothing.ridge, nothing.choice.by) == (0.3, "flat")


def _unit_features(samples: int, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Unit rows as a network gives them: a mean that all share, few directions that vary much, ten classes."""
    common = np.random.default_rng(99)
    decay = np.arange(1, width + 1) ** -0.4
    centres, mean = common.normal(size=(10, width)) * decay * 0.45, np.abs(common.normal(size=width)) * 0.5
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 10, samples)
    return unit_rows(mean + centres[y] + rng.normal(size=(samples, width)) * decay), y


WIDTH = 160


@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 1 / 2, 3 / 4, 1.0, 4 / 3, 2.0, 4.0, 8.0])
def test_the_ridge_never_dips_between_an_eighth_and_eight_times_as_many_samples_as_features(share: float) -> None:
    test_z, test_y = _unit_features(3000, WIDTH, 1)
    behind, against_mean, other_form = [], [], []
    for seed in range(2, 5):
        z, y = _unit_features(round(share * WIDTH), WIDTH, seed)
        a, cross, counts = _sums(z, y, 10)
        spectrum = Spectrum.of(a)
        right = [float(((test_z @ spectrum.solve(cross, r).T).argmax(1) == test_y).mean()) for r in RIDGES]
        chosen = right[int(np.searchsorted(RIDGES, choose_ridge(spectrum, cross, counts).ridge))]
        means = cross / np.maximum(counts, 1)[:, None]
        nearest = (test_z @ means.T - 0.5 * (means**2).sum(1)).argmax(1)
        behind.append(max(right) - chosen)
        against_mean.append(chosen - float((nearest == test_y).mean()))
        within = within_gram(a, cross, counts)
        rows = without_bias(discriminant_head(within), within)
        other_form.append(float(((test_z @ rows.T).argmax(1) == test_y).mean()) - float((nearest == test_y).mean()))
        if share == 1.0:  # the trap is there: the smallest ridge of the grid is far behind
            assert right[0] < max(right) - 0.1
    assert np.mean(behind) <= 0.02
    assert np.mean(against_mean) >= -0.03
    assert np.mean(other_form) >= -0.03


def _with_copies(z: np.ndarray, y: np.ndarray, copies: float, noise: float) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(9)
    source = rng.permutation(len(z))[: max(1, round(copies * len(z)))]
    return np.r_[z, unit_rows(z[source] + noise * unit_rows(rng.normal(size=(len(source), z.shape[1]))))], np.r_[
        y, y[source]
    ]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("copies", [0.01, 0.05, 0.2])
def test_photos_that_are_there_twice_do_not_make_the_head_fit_single_ones(copies: float, noise: float) -> None:
    test_z, test_y = _unit_features(3000, WIDTH, 1)
    lost, lost_by_least, limited = [], [], []
    for seed in range(2, 5):
        z, y = _with_copies(*_unit_features(WIDTH * 3 // 4, WIDTH, seed), copies, noise)
        a, cross, counts = _sums(z, y, 10)
        spectrum = Spectrum.of(a)
        right = [float(((test_z @ spectrum.solve(cross, r).T).argmax(1) == test_y).mean()) for r in RIDGES]
        choice = choose_ridge(spectrum, cross, counts)
        lost.append(max(right) - right[int(np.searchsorted(RIDGES, choice.ridge))])
        lost_by_least.append(max(right) - right[int(choice.criterion.argmin())])
        limited.append(choice.is_limited)
    assert max(lost) <= 0.01
    assert all(limited) or noise or np.mean(lost_by_least) <= 0.02
    if copies >= 0.05 or not noise:  # the trap is there: what is best by the criterion alone is far behind
        assert np.mean(lost_by_least) > 0.1


def test_classes_that_nobody_has_leave_no_more_room() -> None:
    z, y = _with_copies(*_unit_features(WIDTH * 3 // 4, WIDTH, 2), 0.05, 0.0)
    few, many = (choose_ridge(Spectrum.of(a), cross, counts) for a, cross, counts in (_sums(z, y, n) for n in (10, 90)))
    assert few.is_limited
    assert (many.ridge, many.is_limited) == (few.ridge, True)


@pytest.mark.parametrize("copies", [0.05, 0.2])
def test_the_discriminant_fits_no_single_photos_either(copies: float) -> None:
    for seed in range(2, 5):
        z, y = _with_copies(*_unit_features(WIDTH * 3 // 4, WIDTH, seed), copies, 0.0)
        within = within_gram(*_sums(z, y, 10))
        found = choose_ridge_within(within)
        free = int(found.error.argmin())  # what it would be without a bound
        most = within.freedom / 3 + 2 * 10
        assert found.freedom[int(np.searchsorted(RIDGES, found.ridge))] <= most < found.freedom[free]
        assert found.is_limited
        assert "photos are there twice" in doubted_choice(within)


def test_the_least_error_is_taken_among_those_with_few_degrees_of_freedom() -> None:
    df = [90.0, 60.0, 50.0, 20.0, 5.0]
    for error, samples, place, limited in (
        ([1.0, 2.0, 3.0, 4.0, 5.0], 90, 2, True),  # 30 + 2 · 10 degrees of freedom, and no more
        ([5.0, 4.0, 3.0, 2.0, 2.5], 90, 3, False),
        ([2.8, 4.0, 3.0, 3.0, 3.5], 90, 3, False),  # not a tenth less
        ([1.0, 2.0, 3.0, 4.0, 5.0], 300, 0, False),
        ([9.0, 9.0, 3.0, 3.0, 4.0], 90, 3, False),  # the largest of those within rounding
        ([1.0, 2.0, 3.0, 4.0, np.inf], 90, 2, True),
    ):
        found = least_error(error, df, samples, 10)
        assert found is not None
        assert (found.place, found.is_limited) == (place, limited)
    all_too_many = least_error([1.0, 2.0], [9.0, 8.0], 3, 2)
    assert all_too_many is not None
    assert all_too_many.place == 1
    assert least_error([1.0, np.inf], [9.0, 1.0], 6, 0) is None


@pytest.mark.parametrize("precision", [np.float32, np.float16])
def test_sums_that_were_rounded_on_their_way_choose_the_same_ridge(precision: type) -> None:
    a, cross, counts = _sums(*_unit_features(WIDTH // 2, WIDTH, 2), 10)
    rounded = solve(a.astype(precision), cross.astype(precision), counts, "auto")
    assert rounded.choice is not None
    assert rounded.choice.by == "gcv"
    assert rounded.ridge == solve(a, cross, counts, "auto").ridge


def test_noised_sums_are_known_by_their_negative_eigenvalues_and_made_positive_again() -> None:
    a, cross, counts = _sums(*_unit_features(WIDTH // 2, WIDTH, 2), 10)
    rng = np.random.default_rng(0)
    scale = np.trace(a) / WIDTH
    noise = np.triu(rng.normal(size=a.shape)) * scale
    noised = a + noise + np.triu(noise, 1).T
    lowest = float(np.linalg.eigvalsh(noised)[0])
    solved = solve(noised, cross + rng.normal(size=cross.shape) * scale, counts, "auto")
    assert solved.choice is not None
    assert solved.choice.by == "noised"
    assert solved.ridge == pytest.approx(-lowest / (np.trace(noised) / WIDTH))
    told = solve(a, cross, counts, "auto", noised=True)
    assert told.choice is not None
    assert (told.ridge, told.choice.by) == (0.3, "noised")


def test_up_to_a_tenth_of_the_scale_is_rounding_and_no_ridge_below_ten_times_it_is_looked_at() -> None:
    for lowest, by in ((-0.01, "gcv"), (-0.099, "gcv"), (-0.101, "noised")):
        a = np.diag([2.0, 1.0, 1.0 - lowest, lowest])  # a trace of 4
        choice = solve(a, np.diag([1.0, 0.5, 0.4, 0.0])[:2], [20, 20], "auto").choice
        assert choice is not None
        assert choice.by == by
        np.testing.assert_array_equal(np.isfinite(choice.criterion), -10 * lowest <= RIDGES)


def test_a_direction_of_noise_below_zero_takes_no_part_in_the_head() -> None:
    """One eigenvalue of −0.1 among tens: with a ridge that just cancels it, it would be all of the head."""
    a = np.diag([30.0, 20.0, 10.0, -0.1])
    head = solve(a, np.ones((2, 4)), np.array([30, 30]), 0.1 / (a.trace() / 4)).weights
    np.testing.assert_allclose(head[0], [1 / 30.1, 1 / 20.1, 1 / 10.1, 1 / 0.1])


def test_a_ridge_that_is_rounding_beside_the_sums_is_none() -> None:
    """Directions that no sample has would be divided by it."""
    z, y = _draw(5, 8, 0)
    tiny, none = (solve(*_sums(z, y, 3), ridge).weights for ridge in (1e-18, 0.0))
    np.testing.assert_allclose(tiny, none, atol=1e-9)


def test_what_does_not_fit_is_refused() -> None:
    a, cross, counts = _sums(*_draw(9, 4, 0), 3)
    for bad in ((a[:3], cross, counts), (a, cross[:, :3], counts), (a, cross, counts[:2]), (a * np.nan, cross, counts)):
        with pytest.raises(StatisticError):
            solve(*bad, "auto")
    with pytest.raises(StatisticError, match="0 or more"):
        solve(a, cross, counts, -1.0)


def test_no_doubt_about_a_ridge_that_was_chosen() -> None:
    gram = FeatureGram.of(*_draw(16, 16, 0), 3)
    assert doubt(gram, 1e-6)
    assert not doubt(gram, "auto")
    for samples, doubted in ((3, False), (4, True), (64, True), (65, False)):  # up to four times more or fewer
        assert bool(doubt(FeatureGram.of(*_draw(samples, 16, 0), 3), 1e-6)) is doubted
    assert doubt(gram, 0.099)
    assert not doubt(gram, 0.1)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        *(([0, 0], ""), ([4, 4, 0], ""), ([5, 3, 0], ""), ([24, 5, 0], "")),
        ([4, 3, 0], "3.5 samples a class are few"),
        ([25, 0, 5], "one class has 25 samples, another 5"),
    ],
)
def test_few_samples_of_the_classes_there_are_or_very_unequal_ones_are_worth_a_word(counts: list, said: str) -> None:
    words = scarce_or_uneven(np.array(counts))
    assert words.startswith(said)
    assert bool(words) is bool(said)
    assert not said or "try --form discriminant" in words


def test_rows_are_evened_by_the_root_of_a_class_s_share_and_equal_counts_leave_them_as_they_are() -> None:
    head = np.random.default_rng(0).normal(size=(4, 5))
    counts = np.array([90, 10, 0, 20])  # 40 on the average, of three classes
    np.testing.assert_allclose(evened(head, counts), head / np.sqrt([[90 / 40], [10 / 40], [1], [20 / 40]]))
    np.testing.assert_array_equal(evened(head, np.full(4, 7)), head)
    np.testing.assert_array_equal(evened(head, np.zeros(4, np.int64)), head)
    for counts, uneven in (([20, 10, 0], True), ([19, 10, 0], False), ([5, 0, 0], False), ([0, 0, 0], False)):
        assert is_uneven(np.array(counts)) is uneven


@pytest.mark.parametrize("seed", range(3))
def test_labels_of_one_class_no_longer_draw_the_answers_about_others(seed: int) -> None:
    """Sixty more of one of ten classes make a ridge head worse at the nine others; with even rows they do not."""
    rng = np.random.default_rng(seed)
    middles = rng.normal(size=(10, 60))

    def drawn(y: np.ndarray) -> np.ndarray:
        return np.asarray(unit_rows(middles[y] + 2.5 * rng.normal(size=(len(y), 60))))

    y = np.concatenate([np.repeat(np.arange(10), 3), np.zeros(60, np.int64)])
    z, asked = drawn(y), np.repeat(np.arange(1, 10), 200)
    others = drawn(asked)
    before, after = (_auto(z[:n], y[:n], 10).weights for n in (30, 90))
    mended = evened(after, np.bincount(y))
    right = [((others @ head.T).argmax(axis=1) == asked).mean() for head in (before, after, mended)]
    assert right[1] < right[0] - 0.08
    assert right[2] > right[0] - 0.02


def test_the_direct_solution_is_taken_where_features_are_dead_and_leaves_no_shift_behind():
    """What is added for the Cholesky factor, so that a singular A has one, is taken away again."""
    draw = np.random.default_rng(4)
    z = np.concatenate([draw.standard_normal((30, 20)), np.zeros((30, 5))], axis=1)
    a, rows = z.T @ z, draw.standard_normal((3, 25))
    ridge = 3e6 * 25 * np.finfo(np.float64).eps * 25  # λ = 3e6 times what counts as rounding
    found = solved_directly(a, rows, ridge)
    assert found is not None
    penalty = ridge * np.trace(a) / 25
    left = found @ (a + penalty * np.eye(25)) - rows
    assert np.abs(left).max() < 1e-8
