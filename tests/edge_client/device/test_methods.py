"""What a device sends in the rounds of each method, and a calibration on projected features, against naive sums."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edge_samples import RUN, announcement, fashion

from protofleet.aggregator.merging.next_global import next_global
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import MethodError
from protofleet.contract.heads.sphere import projection, unit_rows
from protofleet.contract.methods import METHODS, method
from protofleet.contract.methods.fedhkd import HyperKnowledge
from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.sums.merge_rules import merge
from protofleet.contract.sums.statistics import ClassMeans, FeatureGram, Statistic, class_sums
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.extractor import Extractor

LEARNED = "prototypes.learned"
CLASSES, OWN = 10, (0, 3, 8)
PROJECT, SEED, RIDGE = 24, 5, 1e-3


def _features(bundle: Bundle, device: Device | None, data: LocalData) -> np.ndarray:
    state = {} if device is None else device.state()
    return Extractor(bundle, {**bundle.params, **state}).features(data.x).astype(np.float64)


def test_fedhp_starts_from_the_global_prototypes_and_sends_what_it_learned(
    mnist_like_bundle: Callable[..., Path],
) -> None:
    bundle = read_bundle(mnist_like_bundle("fedhp", hyper={"epochs": 1, "prototype_lr": 1e-9, "lr": 1e-9}))
    data, width = fashion(bundle, 30, OWN), bundle.manifest.features
    rows = np.random.default_rng(0).normal(size=(2, width))
    state = GlobalState(RUN, 1, 1, {"prototypes": ClassRows(np.array([3, 5], np.uint16), rows)})
    device = Device(bundle, data, "pi-1")
    sent = device.run_round(announcement(bundle, 2), state).contribution
    assert sent.body.classes.tolist() == list(OWN)  # and none of class 5, which it has no sample of
    assert sent.counts.tolist() == [int((data.y == label).sum()) for label in OWN]
    learned = device.state()[LEARNED]  # hardly moved, at that rate: the global ones, and its own where there is none
    np.testing.assert_allclose(learned[[3, 5]], rows, atol=1e-5)
    np.testing.assert_allclose(learned[[0, 8]], bundle.params[LEARNED][[0, 8]], atol=1e-5)
    np.testing.assert_allclose(sent.body.rows, learned[list(OWN)], rtol=1e-6)


def test_fedhkd_sends_means_of_features_and_of_what_its_head_says(mnist_like_bundle: Callable[..., Path]) -> None:
    bundle = read_bundle(mnist_like_bundle("fedhkd", hyper={"epochs": 1, "temperature": 0.7}))
    data = fashion(bundle, 30, OWN)
    device = Device(bundle, data, "pi-1")
    sent = device.run_round(announcement(bundle), None).contribution
    z, state = _features(bundle, device, data), device.state()
    for row, label in enumerate(OWN):
        mine = [f for f, y in zip(z, data.y, strict=True) if y == label]
        soft = np.zeros(CLASSES)
        for f in mine:
            logits = [
                (float(w @ f) + float(b)) / 0.7 for w, b in zip(state["head.weight"], state["head.bias"], strict=True)
            ]
            raised = [math.exp(v - max(logits)) for v in logits]
            soft += np.array(raised) / sum(raised) / len(mine)
        np.testing.assert_allclose(sent.body.rows[row], sum(mine) / len(mine), rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(sent.further[0][row], soft, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", ["fedhkd", "fedhp", "fedpr"])
def test_small_classes_are_withheld_by_every_method(name: str, mnist_like_bundle: Callable[..., Path]) -> None:
    bundle = read_bundle(mnist_like_bundle(name, hyper={"epochs": 1}))
    whole = fashion(bundle, 30, OWN)
    few = np.concatenate([np.flatnonzero(whole.y == 0)[:2], np.flatnonzero(whole.y != 0)])
    data = LocalData(whole.x[few], whole.y[few])
    sent = Device(bundle, data, "pi-1").run_round(announcement(bundle, min_samples=3), None).contribution
    assert sent.body.classes.tolist() == [3, 8]
    kind = HyperKnowledge if name == "fedhkd" else ClassMeans
    assert method(name).statistic is kind
    assert np.flatnonzero(sent.statistic(kind, CLASSES, bundle.manifest.features).counts).tolist() == [3, 8]


def test_over_frozen_features_means_are_of_unit_features_and_groups_are_drawn_from_the_devices_secret(
    mnist_like_bundle: Callable[..., Path],
) -> None:
    """Eight to ten samples of each class, and none in a group of fewer than three; features are of any length."""
    bundle = read_bundle(mnist_like_bundle())
    data = fashion(bundle, 28, OWN)

    def sent(name: str, secret: bytes) -> Statistic:
        device = Device(bundle, data, "pi-1", secret=secret)
        contribution = device.run_round(announcement(bundle, 1, name, min_samples=3), None).contribution
        return contribution.statistic(method(name).statistic, CLASSES, bundle.manifest.features)

    z = unit_rows(_features(bundle, None, data))
    sums, counts = class_sums(z, data.y, CLASSES)
    means, groups, same, other = (
        sent(*which) for which in (("ncm", b"1"), ("fedcof", b"1"), ("fedcof", b"1"), ("fedcof", b"2"))
    )
    np.testing.assert_allclose(means.sums, sums, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(means.counts, counts)
    for label in OWN:
        mine = slice(label * groups.GROUPS, (label + 1) * groups.GROUPS)
        into = counts[label] // 3
        sizes = [len(range(k, counts[label], into)) for k in range(into)]
        assert groups.counts[mine].tolist() == sizes + [0] * (groups.GROUPS - into)
        np.testing.assert_allclose(groups.sums[mine].sum(axis=0), sums[label], rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(groups.sums, same.sums)
    assert not np.allclose(groups.sums, other.sums)


@pytest.fixture(scope="module")
def projected(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    hyper = {"epochs": 1, "project": PROJECT, "project_seed": SEED, "ridge": RIDGE}
    return read_bundle(mnist_like_bundle("spherefed", hyper=hyper))


def test_ffc_on_projected_features_is_ridge_regression_on_projected_features(projected: Bundle) -> None:
    """Pooled, by least squares on the rows themselves; and it answers as that head does."""
    parts = [fashion(projected, 60, classes, seed=i) for i, classes in enumerate(((0, 3, 8), (3, 5), (1, 8, 9)))]
    test = fashion(projected, 200, tuple(range(10)), purpose="test")
    devices = [Device(projected, data, f"pi-{i}", test=test) for i, data in enumerate(parts)]
    asked = announcement(projected, 1, "ffc")
    payloads = [encode(device.run_round(asked, None).contribution, "f64") for device in devices]
    assert max(map(len, payloads)) < 8 * (PROJECT * (PROJECT + 1) // 2 + CLASSES * PROJECT) + 256
    merged = merge(lambda: [decode(payload).statistic(FeatureGram, CLASSES, PROJECT) for payload in payloads])
    hyper = method("ffc").resolve({"ridge": RIDGE, "form": "ridge"})
    state = next_global(GlobalState(RUN, 0, 0), method("ffc"), merged, round=1, hyper=hyper)

    def prepared(data: LocalData) -> np.ndarray:
        z = _features(projected, None, data)
        return (z / np.linalg.norm(z, axis=1, keepdims=True)) @ projection(z.shape[1], PROJECT, SEED)

    z, y = np.concatenate([prepared(data) for data in parts]), np.concatenate([data.y for data in parts])
    penalty = math.sqrt(RIDGE * (z**2).sum() / PROJECT) * np.eye(PROJECT)
    targets = np.concatenate([np.eye(CLASSES)[y], np.zeros((PROJECT, CLASSES))])
    head = np.linalg.lstsq(np.concatenate([z, penalty]), targets, rcond=None)[0].T
    found, present = state.head.dense(CLASSES, PROJECT)
    assert np.flatnonzero(present).tolist() == [0, 1, 3, 5, 8, 9]
    np.testing.assert_allclose(found, head, rtol=1e-6, atol=1e-9)
    evaluation = devices[0].evaluate(state)
    right = (prepared(test) @ head.T).argmax(axis=1) == test.y
    assert evaluation.all_classes["linear"] == pytest.approx(right.mean())


def test_a_projection_of_all_columns_loses_nothing(mnist_like_bundle: Callable[..., Path], projected: Bundle) -> None:
    width = projected.manifest.features
    heads = []
    for project in (0, width):
        hyper = {"epochs": 1, "project": project, "project_seed": SEED, "ridge": RIDGE}
        bundle = read_bundle(mnist_like_bundle("spherefed", hyper=hyper))
        sent = Device(bundle, fashion(bundle, 60, OWN), "pi-1").run_round(announcement(bundle, 1, "ffc"), None)
        statistic = sent.contribution.statistic(FeatureGram, CLASSES, width)
        heads.append(
            next_global(
                GlobalState(RUN, 0, 0), method("ffc"), statistic, round=1, hyper=method("ffc").resolve({"ridge": RIDGE})
            ).head.rows
        )
    np.testing.assert_allclose(heads[1] @ projection(width, width, SEED).T, heads[0], rtol=1e-5, atol=1e-8)


def test_what_a_method_does_not_declare_stays_on_the_device(
    mnist_like_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = read_bundle(mnist_like_bundle("fedproto", hyper={"epochs": 1}))
    device = Device(bundle, fashion(bundle, 6, OWN), "pi-1")
    more = type("More", (ClassMeans,), {})
    for made, got in (
        (FeatureGram.zero(CLASSES, 128), "feature-gram"),
        (ClassMeans.zero(CLASSES, 9 * 128), "10 classes, width 1152"),
        (ClassMeans.zero(9 * CLASSES, 128), "90 classes, width 128"),
        (more.zero(CLASSES, 128), "class-means"),
        (np.ones((CLASSES, 128)), "ndarray"),
    ):
        lying = type("Lying", (FedProto,), {"summarise": lambda self, local, made=made: made})()
        monkeypatch.setitem(METHODS._known, "fedproto", lying)  # type: ignore[attr-defined]
        with pytest.raises(MethodError, match=f"expected class-means of 10 classes, width 128, got {got}"):
            device.run_round(announcement(bundle), None)
