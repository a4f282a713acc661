"""Noised sums at the aggregator: what an honest device sends passes; a count, a class less, or too much does not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.aggregator.screening.outliers import Traits, screen
from protofleet.contract.errors import WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.privacy.noised_heads import adassp_penalty, edge, noised_head, noised_means, told_apart
from protofleet.contract.privacy.secret_noise import SecretNoise, key_of
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.sums.triangle import pack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import ClassRows, Contribution, Encoding

C, D, BUNDLE = 5, 16, bytes(32)
NAMES = ("ffc-dp", "ncm-dp")


def noised(name: str, samples: int = 60, seed: int = 0, multiplier: float = 3.731) -> Statistic:
    rng, found = np.random.default_rng(seed), method(name)
    noise = found.mechanism(found.resolve({"noise_multiplier": multiplier}))
    z, y = unit_rows(rng.normal(size=(samples, D))), rng.integers(0, C, samples)
    normal, onehot = SecretNoise(key_of(b"secret", bytes([seed]))), np.eye(C)[y]
    parts = [noise.noised_triangle(pack_triangle(z.T @ z), D, normal)] if name == "ffc-dp" else []
    parts += [noise.noised_rows(onehot.T @ z, normal), noise.noised_counts(np.bincount(y, minlength=C), normal)]
    return found.statistic.build(parts, np.ones(C, np.int64))


def message(statistic: Statistic, name: str, encoding: Encoding = "f32") -> Contribution:
    made = Contribution.of(statistic, run=b"run1", round=1, method=name, bundle=BUNDLE)
    back = decode(encode(made, encoding))
    assert isinstance(back, Contribution)
    return back


def check(sent: Contribution, **terms: object) -> None:
    noise = method(sent.method).mechanism(method(sent.method).resolve({}))
    given = Terms(encoding="f32", min_samples=5, max_samples=1000, noise=noise, **terms)
    check_content(sent, given, bundles=(BUNDLE,), classes=C, width=D)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("encoding", ["f64", "f32", "f16", "int8"])
@pytest.mark.parametrize("samples", [0, 1, 900])
def test_an_honest_devices_noised_sums_pass_whatever_it_has(name: str, encoding: Encoding, samples: int) -> None:
    """Also where the fleet asks for five samples of a class: nobody can tell, and nobody asks."""
    for seed in range(3):
        check(message(noised(name, samples, seed), name, encoding))


@pytest.mark.parametrize("name", NAMES)
def test_a_count_or_a_missing_class_would_tell_of_the_samples_and_is_refused(name: str) -> None:
    good = message(noised(name), name)
    with pytest.raises(WireError, match="counts, expected 1 of every class, since they are to say nothing"):
        check(replace(good, counts=good.counts + np.uint64(1)))
    body = ClassRows(good.body.classes[:-1], good.body.rows[:-1])
    fewer = replace(good, body=body, counts=good.counts[:-1], further=tuple(rows[:-1] for rows in good.further))
    with pytest.raises(WireError, match="expected one of every class, whatever there is, got 4"):
        check(fewer)
    check(fewer, withheld=(C - 1,)) if name == "ncm-dp" else None
    if name == "ffc-dp":
        check(replace(fewer, triangle=good.triangle), withheld=(C - 1,))


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_more_than_a_device_may_have_are_refused(name: str) -> None:
    good = message(noised(name), name)
    check(replace(good, further=(good.further[0] + 900.0,)))
    wrong = {
        "a sum of class": replace(good, body=ClassRows(good.body.classes, good.body.rows + 1000.0)),
        "a sum of class 2": replace(good, further=(good.further[0] + 2000.0 * (np.arange(C) == 2)[:, None],)),
    }
    if good.triangle is not None:
        wrong["gram"] = replace(good, triangle=good.triangle * 1000.0)
    for words, sent in wrong.items():
        with pytest.raises(WireError, match=words):
            check(sent)


def test_nobody_is_left_out_for_having_many_samples_which_nobody_knows() -> None:
    sent = [noised("ncm-dp", count, seed) for seed, count in enumerate((5, 5, 900))]
    noise = method("ncm-dp").mechanism(method("ncm-dp").resolve({}))
    traits = {f"d{n}": Traits.of(message(each, "ncm-dp"), noise) for n, each in enumerate(sent)}
    assert not screen(lambda: sent, traits).findings


# ── what is made of them ──


def test_a_class_without_samples_is_not_answered_where_counts_can_tell() -> None:
    deviation = np.full(4, 10.0)
    assert told_apart(np.array([300.0, 250.0, 15.0, -9.0]), deviation).tolist() == [True, True, False, False]
    assert told_apart(np.array([90.0, 50.0, 15.0, -9.0]), deviation).all()  # none is clear


@pytest.mark.parametrize("width", [40, 160])
def test_the_edge_is_where_the_noises_eigenvalues_end(width: int) -> None:
    noise = method("ffc-dp").mechanism(method("ffc-dp").resolve({}))
    packed = noise.noised_triangle(np.zeros(width * (width + 1) // 2), width, SecretNoise(bytes(32)))
    full = np.zeros((width, width))
    full[np.triu_indices(width)] = packed
    values = np.linalg.eigvalsh(full, UPLO="U")
    assert np.abs(values).max() == pytest.approx(edge(width, noise.gram_deviation), rel=0.15)
    assert np.abs(values).max() < adassp_penalty(0.0, width, noise.gram_deviation)


def test_adassp_takes_no_ridge_where_the_smallest_eigenvalue_is_clear_of_the_noise() -> None:
    bound = 2.0 * np.sqrt(30 * np.log(2 * 30**2 / 0.05))
    assert adassp_penalty(-5.0, 30, 2.0) == pytest.approx(bound)
    assert adassp_penalty(1.5 * bound, 30, 2.0) == pytest.approx(0.5 * bound)
    assert adassp_penalty(1e6, 30, 2.0) == 0.0


def test_the_head_is_the_naive_solution_with_no_negative_eigenvalue() -> None:
    rng = np.random.default_rng(0)
    half, cross = rng.normal(size=(6, 6)), rng.normal(size=(3, 6))
    gram = half + half.T  # as much below 0 as above
    values, vectors = np.linalg.eigh(gram)
    for ridge, penalty in (("auto", 0.5 * edge(6, 2.0)), (0.7, 0.7 * np.maximum(values, 0).mean())):
        raised = (vectors * (np.maximum(values, 0) + penalty)) @ vectors.T
        found, words = noised_head(gram, cross, 2.0, ridge)
        np.testing.assert_allclose(found, np.linalg.solve(raised, cross.T).T, rtol=1e-9)
        assert ("from the noise" in words) == (ridge == "auto")


def test_means_without_noise_are_the_means_and_in_noise_move_to_the_mean_of_all() -> None:
    rng = np.random.default_rng(0)
    means, n, present = rng.normal(size=(4, D)), np.array([50.0, 40.0, 60.0, 0.0]), np.arange(4) < 3
    sums = means * n[:, None]
    np.testing.assert_allclose(noised_means(sums, n, np.zeros(4), present)[:3], means[:3])
    drawn = noised_means(sums, n, np.full(4, 1e4), present)
    overall = sums.sum(axis=0) / n.sum()
    np.testing.assert_allclose(drawn[:3] - overall, 0.01 * (means[:3] - overall))
    assert not drawn[3].any()


def test_a_noisy_count_below_one_counts_as_one() -> None:
    sums, everywhere = np.random.default_rng(0).normal(size=(3, D)), np.ones(3, bool)
    found = noised_means(sums, np.array([-2.0, 0.0, 9.0]), np.ones(3), everywhere)
    np.testing.assert_array_equal(found, noised_means(sums, np.array([1.0, 1.0, 9.0]), np.ones(3), everywhere))


def test_means_are_drawn_by_the_part_of_their_spread_that_noise_explains() -> None:
    rng = np.random.default_rng(1)
    sums, n, deviation = (
        20 * rng.normal(size=(4, D)),
        np.array([50.0, 40.0, 60.0, 30.0]),
        np.array([9.0, 8.0, 7.0, 6.0]),
    )
    means, overall = sums / n[:, None], sums.sum(axis=0) / n.sum()
    explained = sum(D * (d / count) ** 2 for d, count in zip(deviation, n, strict=True))
    drawn = 1 - explained / ((means - overall) ** 2).sum()
    assert 0.1 < drawn < 0.9
    found = noised_means(sums, n, deviation, np.ones(4, bool))
    np.testing.assert_allclose(found, overall + drawn * (means - overall))


def test_the_ridge_reckons_with_the_noise_of_all_devices() -> None:
    found, one = method("ffc-dp"), noised("ffc-dp")
    hyper = found.resolve({"noise_multiplier": 3.731})
    deviation = found.mechanism(hyper).gram_deviation
    parts = [*one.arrays()]
    for devices in (1, 9):
        merged = found.statistic.build(parts, np.full(C, devices, np.int64))
        head = found.next_rows({}, merged, hyper)["head"].rows
        wanted, _ = noised_head(merged.matrix, merged.cross, math.sqrt(devices) * deviation, "auto")
        np.testing.assert_allclose(head, wanted[found._present(merged, hyper)])
