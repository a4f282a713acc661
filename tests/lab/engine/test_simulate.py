"""The simulation against loops a reader can believe, on real images: FedProto's means, FFC's head, sampling, seeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from lab_samples import shares, shipped, some

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.heads.ridge import solve
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.sampling import sampled
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.extractor import Extractor
from protofleet.lab.engine.deployed import Course, RoundRecord, local_only, run_id, simulate


@pytest.fixture(scope="module")
def bundle(lab_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(lab_bundle(lr=0.02, momentum=0.9))


@pytest.fixture(scope="module")
def sphere(lab_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(lab_bundle("ffc", form="ridge"))


TEST = some(shipped().test, 8)


def test_prototypes_are_the_count_weighted_means_of_what_the_devices_hold(bundle: Bundle) -> None:
    held = shares()
    ran = simulate(bundle, held, TEST, Course(rounds=2, calibrate=False))
    total, counts = np.zeros((10, 50)), np.zeros(10)
    for device, share in zip(ran.devices, held, strict=True):
        features = Extractor(bundle, {**bundle.params, **device.state()}).features(share.x)
        for z, y in zip(features.astype(np.float64), share.y, strict=True):
            total[y] += z
            counts[y] += 1
    assert ran.state.prototypes is not None
    rows, present = ran.state.prototypes.dense(10, 50)
    assert present.tolist() == (counts > 0).tolist()
    np.testing.assert_allclose(rows[present], total[present] / counts[present, None], rtol=1e-5, atol=1e-6)


def test_accuracy_is_what_counting_right_answers_gives(bundle: Bundle) -> None:
    held = shares()
    ran = simulate(bundle, held, TEST, Course(rounds=1, calibrate=False))
    assert ran.state.prototypes is not None
    rows, _ = ran.state.prototypes.dense(10, 50)
    everything, own = [], []
    for device, share in zip(ran.devices, held, strict=True):
        features = Extractor(bundle, {**bundle.params, **device.state()}).features(TEST.x).astype(np.float64)
        right = np.array([np.argmin([np.linalg.norm(z - c) for c in rows]) for z in features]) == TEST.y
        everything.append(right.mean())
        own.append(right[np.isin(TEST.y, np.unique(share.y))].mean())
    assert ran.records[-1].all_classes["prototype"] == pytest.approx(np.mean(everything))
    assert ran.records[-1].own_classes["prototype"] == pytest.approx(np.mean(own))


def test_ffc_is_ridge_regression_on_the_pooled_features(sphere: Bundle) -> None:
    held = shares()
    ran = simulate(sphere, held, TEST, Course(rounds=1))
    pooled = np.concatenate([Extractor(sphere, sphere.params).features(share.x) for share in held]).astype(np.float64)
    z = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    onehot = np.eye(10)[np.concatenate([share.y for share in held])]
    sums = FeatureGram.of(z, onehot.argmax(axis=1), 10)
    chosen = solve(sums.matrix, sums.cross, sums.counts, "auto").ridge
    penalty = chosen * (z**2).sum() / z.shape[1]
    augmented = np.concatenate([z, np.sqrt(penalty) * np.eye(z.shape[1])])
    best = np.linalg.lstsq(augmented, np.concatenate([onehot, np.zeros((z.shape[1], 10))]), rcond=None)[0].T
    assert ran.state.head is not None
    head, _ = ran.state.head.dense(10, 50)
    assert np.linalg.norm(head - best) <= 1e-6 * np.linalg.norm(best)


def test_a_calibrating_course_ends_in_one_ffc_round(bundle: Bundle) -> None:
    seen: list[RoundRecord] = []
    ran = simulate(bundle, shares(), TEST, Course(rounds=2), on_round=seen.append)
    assert [record.method for record in seen] == ["fedproto", "fedproto", "ffc"]
    assert seen == ran.records
    assert "linear" in seen[-1].all_classes
    assert "linear" not in seen[0].all_classes


def test_the_same_seed_gives_the_same_course_and_another_does_not(bundle: Bundle) -> None:
    first, again, other = (
        simulate(bundle, shares(), TEST, Course(rounds=2, calibrate=False, seed=seed)).records for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_sampling_is_the_contracts(bundle: Bundle) -> None:
    ran = simulate(bundle, shares(), TEST, Course(rounds=4, calibrate=False, fraction=0.5, seed=9, evaluate_every=4))
    names = [f"device-{number}" for number in (1, 2, 3)]
    # each round's seed is the first from the course's on that samples somebody
    for record in ran.records:
        seed = next(s for s in range(9, 99) if any(sampled(n, record.round, s, 0.5) for n in names))
        assert record.participants == sum(sampled(n, record.round, seed, 0.5) for n in names)
    assert [bool(record.all_classes) for record in ran.records] == [False, False, False, True]


def test_small_classes_are_withheld(bundle: Bundle) -> None:
    held = shares()
    everything = sum(len(share) for share in held)
    least = int(min(np.bincount(share.y)[np.unique(share.y)].min() for share in held)) + 1
    ran = simulate(bundle, held, TEST, Course(rounds=1, calibrate=False, min_samples=least))
    whole = simulate(bundle, held, TEST, Course(rounds=1, calibrate=False))
    assert everything
    assert ran.records[0].uplink_bytes < whole.records[0].uplink_bytes


def test_local_only_is_a_federation_without_word_from_the_others(bundle: Bundle) -> None:
    """One round from the same seeds: the first round of a federation has no prototypes yet, so both train the same."""
    alone = local_only(bundle, shares(), TEST, rounds=2, run=run_id(0))
    together = simulate(bundle, shares(), TEST, Course(rounds=2, calibrate=False, seed=0))
    assert alone.records[0].loss == together.records[0].loss
    assert alone.records[0].own_classes["head"] == together.records[0].own_classes["head"]
    assert alone.records[1].loss != together.records[1].loss
    assert [record.uplink_bytes for record in alone.records] == [0.0, 0.0]


def test_local_only_needs_a_method_that_trains(sphere: Bundle) -> None:
    with pytest.raises(UsageError, match="expected a method that trains, got ffc"):
        local_only(sphere, shares(), TEST, rounds=1, run=run_id(0))


def test_a_device_without_samples_takes_no_part(bundle: Bundle, sphere: Bundle) -> None:
    """With training and with FFC, federated and alone: the records are those of the others."""
    nobody = LocalData(TEST.x[:0], TEST.y[:0])
    course = Course(rounds=1, calibrate=False)
    for each in (bundle, sphere):
        without, beside = (simulate(each, parts, TEST, course) for parts in (shares(), [*shares(), nobody]))
        assert beside.records == without.records
        assert len(beside.devices) == 4
    run = run_id(0)
    assert (
        local_only(bundle, [*shares(), nobody], TEST, rounds=1, run=run).records
        == local_only(bundle, shares(), TEST, rounds=1, run=run).records
    )
    with pytest.raises(UsageError, match="expected a client with samples, got none"):
        simulate(bundle, [nobody], TEST, course)
