"""The device's core, method by method, against naive sums over its own features."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_samples import RUN, announcement, fashion
from pooled_head import solve_head

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError, MethodError, ProtofleetError, WireError
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Contribution, HelperTerms
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device, round_seed
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.extractor import Extractor

OWN = (0, 3, 8)


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle())


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> LocalData:
    return fashion(bundle, 45, OWN)


@pytest.fixture(scope="module")
def test(bundle: Bundle) -> LocalData:
    return fashion(bundle, 60, tuple(range(10)), purpose="test")


def device(bundle: Bundle, data: LocalData, name: str = "pi-1", **options: object) -> Device:
    return Device(bundle, data, name, **options)  # type: ignore[arg-type]


def contribution(result: object) -> Contribution:
    found = getattr(result, "contribution", None)
    assert isinstance(found, Contribution)
    return found


def state_of(rows: np.ndarray, classes: tuple[int, ...], *, head: bool = False) -> GlobalState:
    body = ClassRows(np.array(classes, np.uint16), rows)
    return GlobalState(RUN, 1, 1, {"head" if head else "prototypes": body})


def test_fedproto_sends_the_class_means_of_the_trained_extractor(bundle: Bundle, data: LocalData) -> None:
    pi = device(bundle, data)
    assert pi.own_means() is not None  # of the untrained one, and of no use after training
    result = pi.run_round(announcement(bundle), None)
    features = Extractor(bundle, {**bundle.params, **pi.state()}).features(data.x).astype(np.float64)
    sent = contribution(result)
    assert sent.body.classes.tolist() == list(OWN)
    for row, label in enumerate(OWN):
        mine = [z for z, y in zip(features, data.y, strict=True) if y == label]
        assert int(sent.counts[row]) == len(mine)
        np.testing.assert_allclose(sent.body.rows[row], sum(mine) / len(mine), rtol=1e-6, atol=1e-9)
    assert (sent.run, sent.round, sent.method, sent.bundle) == (RUN, 1, "fedproto", bundle.sha256[:4])
    assert (sent.triangle, sent.further, sent.extractor) == (None, (), b"")
    assert result.samples == len(data)
    assert result.steps == 3
    assert result.loss is not None


def test_ffc_sums_over_the_bundles_extractor_whatever_was_trained(bundle: Bundle, data: LocalData) -> None:
    fresh, trained = device(bundle, data), device(bundle, data)
    trained.run_round(announcement(bundle), None)
    asked = announcement(bundle, 2, "ffc")
    one, other = (contribution(pi.run_round(asked, None)) for pi in (fresh, trained))
    assert encode(one, "f64") == encode(other, "f64")
    width = bundle.manifest.features
    gram, cross = np.zeros((width, width)), np.zeros((10, width))
    for image, label in zip(data.x, data.y, strict=True):
        z = Extractor(bundle, bundle.params).features(image[None])[0].astype(np.float64)
        z /= np.sqrt((z**2).sum())
        gram += np.outer(z, z)
        cross[label] += z
    # One image at a time may be added up in another order than a batch: sums of up to 1,152 terms, in float32.
    _assert_near(one.statistic(FeatureGram, 10, width).matrix, gram)
    assert one.extractor == bundle.extractor(method("ffc"))[:4]
    _assert_near(one.body.rows, cross[list(OWN)])
    assert fresh.state() == {}


@pytest.mark.parametrize(
    ("fields", "by_factor"),
    [
        ({"factors": True}, True),
        ({"factors": True, "encoding": "f16"}, True),
        ({}, False),
        ({"factors": True, "helper": HelperTerms(bytes(32), 10, 36)}, False),
    ],
    ids=["invited", "invited in f16", "not invited", "blinded"],
)
def test_few_samples_go_up_as_a_factor_where_the_round_takes_it(
    bundle: Bundle, data: LocalData, fields: dict, by_factor: bool
) -> None:
    width = bundle.manifest.features
    assert len(data) <= width // 2
    asked = announcement(bundle, 2, "ffc", **fields)
    whole = contribution(device(bundle, data).run_round(announcement(bundle, 2, "ffc"), None))
    pi = device(bundle, data)
    sent = contribution(pi.run_round(asked, None))
    assert (sent.factor is not None, sent.triangle is None) == (by_factor, by_factor)
    assert sent.counts.tolist() == whole.counts.tolist()
    found, true = (each.statistic(FeatureGram, 10, width) for each in (sent, whole))
    assert np.abs(found.gram - true.gram).max() < 1e-3
    assert np.abs(found.cross - true.cross).max() < 1e-3
    again = contribution(pi.run_round(asked, None))
    assert encode(again, "f64") == encode(sent, "f64")  # a repeated round says nothing more
    later = contribution(pi.run_round(announcement(bundle, 3, "ffc", **fields), None))
    assert (encode(later, "f64")[60:] == encode(sent, "f64")[60:]) == (not by_factor)  # another rotation


def _assert_near(found: np.ndarray | None, wanted: np.ndarray | None) -> None:
    assert found is not None
    assert wanted is not None
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def test_spherefed_trains_and_sends_only_that_it_did(mnist_like_bundle: Callable[..., Path]) -> None:
    bundle = read_bundle(mnist_like_bundle("spherefed", hyper={"epochs": 1}))
    data = fashion(bundle, 45, OWN)
    pi = device(bundle, data, test=fashion(bundle, 20, OWN, purpose="test"))
    result = pi.run_round(announcement(bundle), None)
    assert len(result.contribution.body.classes) == 0
    assert len(encode(result.contribution)) < 60
    assert result.loss is not None
    state = pi.state()
    assert "head.weight" not in state  # frozen
    assert any(not np.array_equal(state[name], bundle.params[name]) for name in state)
    evaluation = pi.evaluate(None)
    assert evaluation is not None
    assert {"head", "personal"} <= set(evaluation.all_classes)
    extractor = Extractor(bundle, {**bundle.params, **state})  # FFC on what it has trained, and on nobody else's sums
    gram = FeatureGram.of(unit_rows(extractor.features(data.x).astype(np.float64)), data.y, 10)
    means = pi.own_means()
    assert means is not None
    np.testing.assert_allclose(means.head, solve_head(gram, "auto"), atol=1e-9)


def test_a_repeated_round_gives_the_identical_contribution(bundle: Bundle, data: LocalData) -> None:
    """As after a crash: a new process, the weights of the journal, the same announcement and global state."""
    first = device(bundle, data)
    first.run_round(announcement(bundle), None)
    saved = first.state()
    rows = np.random.default_rng(0).random((3, bundle.manifest.features), np.float32)
    shared = state_of(rows, OWN)
    one = first.run_round(announcement(bundle, 2, global_version=1), shared)
    again = device(bundle, data)
    again.restore(saved)
    two = again.run_round(announcement(bundle, 2, global_version=1), shared)
    assert encode(contribution(one), "f64") == encode(contribution(two), "f64")


def test_device_run_and_round_each_change_the_seed() -> None:
    seeds = {round_seed(name, run, number) for name in ("a", "b") for run in (b"1234", b"5678") for number in (1, 2)}
    assert len(seeds) == 8
    assert round_seed("pi-1", RUN, 7) == int.from_bytes(bytes.fromhex("10caa2c4cbd4215c"), "big")


def test_prototypes_pull_and_an_empty_state_is_local_training(bundle: Bundle, data: LocalData) -> None:
    far = np.full((3, bundle.manifest.features), 5.0, np.float32)
    losses = []
    for shared in (None, GlobalState(RUN, 0, 0), state_of(far, OWN)):
        losses.append(device(bundle, data).run_round(announcement(bundle), shared).loss)
    assert losses[0] == losses[1]
    assert losses[2] > losses[0] + 1.0  # type: ignore[operator]


def test_small_classes_are_withheld(bundle: Bundle, data: LocalData) -> None:
    keep = np.flatnonzero(data.y != 8)
    few = np.concatenate([keep, np.flatnonzero(data.y == 8)[:2]])
    thin = LocalData(data.x[few], data.y[few])
    for name in ("fedproto", "ffc"):
        sent = contribution(device(bundle, thin).run_round(announcement(bundle, 1, name, min_samples=3), None))
        assert sent.body.classes.tolist() == [0, 3], name
        all_sent = contribution(device(bundle, thin).run_round(announcement(bundle, 1, name), None))
        assert all_sent.body.classes.tolist() == [0, 3, 8], name
    withheld = contribution(device(bundle, thin).run_round(announcement(bundle, 1, "ffc", min_samples=3), None))
    rest = LocalData(data.x[keep], data.y[keep])
    alone = contribution(device(bundle, rest).run_round(announcement(bundle, 1, "ffc"), None))
    _assert_near(withheld.triangle, alone.triangle)  # in batches of other images: see above


def test_nothing_to_share_is_an_empty_contribution(bundle: Bundle, data: LocalData) -> None:
    result = device(bundle, data).run_round(announcement(bundle, min_samples=1000), None)
    assert contribution(result).body.rows.shape == (0, bundle.manifest.features)
    assert encode(contribution(result), "f32")


def test_evaluation_equals_naive_answers(bundle: Bundle, data: LocalData, test: LocalData) -> None:
    pi = device(bundle, data, test=test)
    pi.run_round(announcement(bundle), None)
    rng = np.random.default_rng(3)
    width = bundle.manifest.features
    weights = {**bundle.params, **pi.state()}
    features = Extractor(bundle, weights).features(data.x).astype(np.float64)
    own = {label: features[data.y == label].mean(axis=0) for label in OWN}
    shared = {0: own[0] + 0.1, 5: rng.random(width)}  # of OWN, classes 3 and 8 fall back to the device's own means
    head = rng.standard_normal((10, width))
    state = GlobalState(
        RUN,
        1,
        1,
        {
            "prototypes": ClassRows(np.array([0, 5], np.uint16), np.stack([shared[0], shared[5]])),
            "head": ClassRows(np.arange(10, dtype=np.uint16), head),
        },
    )
    evaluation = pi.evaluate(state)
    assert evaluation is not None
    centres = {**own, **shared}
    z_local = Extractor(bundle, weights).features(test.x).astype(np.float64)
    z_shared = Extractor(bundle, bundle.params).features(test.x).astype(np.float64)
    answers = {
        "prototype": [min(centres, key=lambda j: float(np.linalg.norm(z - centres[j]))) for z in z_local],
        "prototype_among_own": [min(OWN, key=lambda j: float(np.linalg.norm(z - centres[j]))) for z in z_local],
        "head": [int((weights["head.weight"] @ z + weights["head.bias"]).argmax()) for z in z_local],
        "own_prototype": [min(own, key=lambda j: float(np.linalg.norm(z - own[j]))) for z in z_local],
        "linear": [int((head @ (z / np.linalg.norm(z))).argmax()) for z in z_shared],
    }
    assert set(evaluation.all_classes) == set(answers)
    for name, said in answers.items():
        confusion = np.zeros((10, 10), int)
        for true, guess in zip(test.y, said, strict=True):
            confusion[true, guess] += 1
        np.testing.assert_array_equal(evaluation.confusion[name], confusion, err_msg=name)
        right = [true == guess for true, guess in zip(test.y, said, strict=True)]
        mine = [hit for hit, true in zip(right, test.y, strict=True) if true in OWN]
        assert evaluation.all_classes[name] == pytest.approx(np.mean(right))
        assert evaluation.own_classes[name] == pytest.approx(np.mean(mine))
    assert evaluation.samples == len(test)


def test_without_test_samples_nothing_is_evaluated(bundle: Bundle, data: LocalData) -> None:
    assert device(bundle, data).evaluate(None) is None


def test_a_fresh_device_evaluates_its_own_means(bundle: Bundle, data: LocalData, test: LocalData) -> None:
    evaluation = device(bundle, data, test=test).evaluate(None)
    assert evaluation is not None
    assert evaluation.own_classes["prototype"] > 1 / 3


def test_a_shared_workbench_changes_nothing(bundle: Bundle, data: LocalData, test: LocalData) -> None:
    """The lab's many devices over one trainer, turn by turn, against devices of their own."""
    bench, other = CompiledGraphs(bundle, keep=True), fashion(bundle, 40, (1, 2), seed=5)
    shared = [device(bundle, d, n, test=test, graphs=bench) for n, d in (("a", data), ("b", other))]
    alone = [device(bundle, d, n, test=test) for n, d in (("a", data), ("b", other))]
    for number, name in ((1, "fedproto"), (2, "fedproto"), (3, "ffc")):
        for one, two in zip(shared, alone, strict=True):
            asked = announcement(bundle, number, name)
            results = [contribution(pi.run_round(asked, None)) for pi in (one, two)]
            assert encode(results[0], "f64") == encode(results[1], "f64")
    assert bench.trainer() is bench.trainer()


def test_what_is_wrong_is_refused(bundle: Bundle, data: LocalData) -> None:
    pi = device(bundle, data)
    with pytest.raises(MethodError, match=r"expected fedproto or .*ffc.*, got spherefed"):
        pi.run_round(announcement(bundle, method="spherefed"), None)
    with pytest.raises(BundleError, match="device state"):
        pi.restore({"head.weight": np.zeros((1, 1), np.float32)})
    with pytest.raises(WireError, match="width"):
        pi.run_round(announcement(bundle), state_of(np.zeros((1, 3)), (0,)))
    with pytest.raises(ProtofleetError, match="device id"):
        device(bundle, data, "not/an/id")
    assert pi.state() == {}


def test_a_failed_round_leaves_the_weights_alone(bundle: Bundle, data: LocalData) -> None:
    manifest = msgspec.structs.replace(bundle.manifest, hyper={**bundle.manifest.hyper, "lr": 1e12, "epochs": 5})
    pi = device(dataclasses.replace(bundle, manifest=manifest), data)
    pi.restore({name: bundle.params[name] for name in bundle.manifest.names("param", "buffer")})
    before = pi.state()
    with pytest.raises(MethodError, match="diverged"):
        pi.run_round(announcement(bundle), None)
    assert set(pi.state()) == set(before)
    assert all(pi.state()[name] is before[name] for name in before)
