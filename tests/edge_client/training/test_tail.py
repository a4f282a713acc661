"""A device that trains only the tail of its network: what is kept, what it begins with, and what it falls back to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from edge_samples import RUN, announcement, fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import BundleError
from protofleet.contract.methods import method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.data.load import hold_back
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.frozen_trunk import TrunkGraph, _identity
from protofleet.edge_client.training.local_samples import own_means
from protofleet.edge_client.training.tail_check import Check
from protofleet.edge_client.training.trainer import Trainer
from protofleet.edge_client.training.warm_start import class_mean_head

TAIL = {"norm": "batch", "trainable_blocks": 2}
ROW_BYTES = 4 * 32 * 14 * 14


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle(**TAIL, hyper={"epochs": 2}))


@pytest.fixture(scope="module")
def data(bundle: Bundle) -> LocalData:
    return fashion(bundle, 50, (0, 1, 2))


@pytest.fixture
def trunk_runs(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """A photo for each run of the trunk."""
    runs: list[bytes] = []
    run = TrunkGraph.run
    monkeypatch.setattr(TrunkGraph, "run", lambda self, photo: runs.append(photo.tobytes()) or run(self, photo))
    return runs


def _rounds(device: Device, bundle: Bundle, count: int = 2) -> list[bytes]:
    """What the device sends in some rounds, each of which starts from nothing global."""
    results = [device.run_round(announcement(bundle, number), None) for number in range(1, count + 1)]
    return [encode(result.contribution, "f32") for result in results]


def test_kept_activations_change_nothing(bundle: Bundle, data: LocalData, tmp_path: Path) -> None:
    """Bit by bit: with all kept, with some kept, with none kept, and in memory."""
    half = ActivationStore(tmp_path / "half", 20 * ROW_BYTES)
    stores = [None, ActivationStore(tmp_path / "all", 1 << 30), half, ActivationStore(None, 1 << 30)]
    devices = [Device(bundle, data, "pi-1", activations=store) for store in stores]
    sent = [_rounds(device, bundle) for device in devices]
    assert all(each == sent[0] for each in sent)
    for device in devices[1:]:
        assert device.state().keys() == devices[0].state().keys()
        assert all((value == devices[0].state()[name]).all() for name, value in device.state().items())
    assert sent[0][0] != sent[0][1]  # it did train


def test_the_trunk_runs_once_for_each_photo(
    bundle: Bundle, data: LocalData, tmp_path: Path, trunk_runs: list[bytes], said: list[str]
) -> None:
    """Whatever the epochs, rounds, evaluations and restarts are, and though both parts are views of one array."""
    train, held = LocalData(data.x[:40], data.y[:40]), LocalData(data.x[40:], data.y[40:])
    test = fashion(bundle, 10, (0, 1), purpose="test")
    for _ in range(2):  # and another process
        store = ActivationStore(tmp_path, 1 << 30)
        device = Device(bundle, train, "pi-1", test=test, held=held, activations=store)
        _rounds(device, bundle)
        device.evaluate(None)
        assert device._trunk is not None
        assert device._trunk._graph is None  # its memory is given back between rounds
    photos = [each.tobytes() for each in (*train.x, *held.x, *test.x)]
    assert sorted(trunk_runs) == sorted(photos)
    assert [line.partition(" photos")[0] for line in said if line.startswith("running")] == [
        f"running the trunk once over {len(each):,}" for each in (train, held, test)
    ]


def test_beyond_the_budget_the_trunk_runs_again(
    bundle: Bundle, data: LocalData, tmp_path: Path, trunk_runs: list[bytes], said: list[str]
) -> None:
    device = Device(bundle, data, "pi-1", activations=ActivationStore(tmp_path, 30 * ROW_BYTES + 5))
    _rounds(device, bundle, 1)
    passes = 2 + 3  # epochs; means of the frozen features, the head's scale, means of the trained ones
    assert len(trunk_runs) == 30 + passes * 20
    (over,) = [line for line in said if "again" in line]
    assert over.startswith("activations of 30 of 50 photos are kept (1 MB): the trunk runs again for the other 20")
    (file,) = tmp_path.glob("*.activations")
    assert file.stat().st_size == 30 * ROW_BYTES + 32
    assert file.stat().st_mode & 0o777 == 0o600


def test_what_is_kept_is_of_this_trunk_and_of_these_photos(
    bundle: Bundle, data: LocalData, tmp_path: Path, trunk_runs: list[bytes]
) -> None:
    def first_rounds(which: Bundle, samples: LocalData) -> int:
        before = len(trunk_runs)
        _rounds(Device(which, samples, "pi-1", activations=ActivationStore(tmp_path, 1 << 30)), which, 1)
        assert len(list(tmp_path.iterdir())) == 1
        return len(trunk_runs) - before

    other = replace(bundle, params={**bundle.params, "backbone.0.bias": bundle.params["backbone.0.bias"] + 1})
    changed = data.x.copy()
    changed[7, 3, 3] ^= 1
    runs = [first_rounds(bundle, data), first_rounds(bundle, data), first_rounds(other, data)]
    runs += [first_rounds(other, LocalData(changed, data.y)), first_rounds(other, LocalData(changed, data.y))]
    assert runs == [50, 0, 50, 50, 0]
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-40])  # what a power cut on a bad disk leaves
    assert first_rounds(other, LocalData(changed, data.y)) == 50


def test_a_repeated_round_gives_the_identical_contribution(bundle: Bundle, data: LocalData, tmp_path: Path) -> None:
    """A process that was killed before its commit does the round again, from the weights of the round before."""
    train, held = hold_back(data, share=0.2)

    def device() -> Device:
        return Device(bundle, train, "pi-1", held=held, activations=ActivationStore(tmp_path, 1 << 30))

    first = device()
    sent = _rounds(first, bundle)
    killed = device()
    _rounds(killed, bundle, 1)
    again = device()
    again.restore(killed.state())
    assert encode(again.run_round(announcement(bundle, 2), None).contribution, "f32") == sent[1]
    assert all((value == first.state()[name]).all() for name, value in again.state().items())


def test_only_the_tail_moves(bundle: Bundle, data: LocalData) -> None:
    device = Device(bundle, data, "pi-1")
    _rounds(device, bundle, 1)
    trained = {t.name for t in bundle.manifest.state if t.role == "param"}
    assert (
        set(device.state())
        == trained
        == {
            *("backbone.4.weight", "backbone.4.bias", "backbone.5.weight", "backbone.5.bias"),
            *("backbone.9.weight", "backbone.9.bias", "head.weight", "head.bias"),
        }
    )
    assert all((value != bundle.params[name]).any() for name, value in device.state().items())


def test_the_first_round_begins_with_the_nearest_class_mean(bundle: Bundle, data: LocalData) -> None:
    """The head answers like class means do, and is as sure of it as left-out samples allow: compared with a search."""
    extractor = CompiledGraphs(bundle).extractor(bundle.params)
    means = own_means(extractor, data, classes=10)
    head = class_mean_head(extractor, data, means)
    z = extractor.features(data.x).astype(np.float64)
    mu, here = means.classes.means, means.classes.present
    nearest = np.flatnonzero(here)[((z[:, None] - mu[here]) ** 2).sum(axis=2).argmin(axis=1)]
    weight, bias = head["head.weight"].astype(np.float64), head["head.bias"].astype(np.float64)
    logits = z @ weight.T + bias
    assert (logits[:, here].argmax(axis=1) == nearest - nearest.min()).all()
    lost = [_left_out_loss(z, data.y, weight * factor, bias * factor, factor) for factor in (0.5, 1.0, 2.0)]
    assert lost[1] == min(lost)


def test_a_later_round_goes_on_from_what_was_trained(bundle: Bundle, data: LocalData) -> None:
    slow = _with_rate(bundle, 1e-12)
    device = Device(slow, data, "pi-1")
    before = {name: bundle.params[name] + np.float32(0.1) for name in bundle.manifest.names("param", "buffer")}
    device.restore(before)
    device.run_round(announcement(slow, 2), None)
    assert all(np.allclose(device.state()[name], value, atol=1e-5) for name, value in before.items())


def test_a_class_without_samples_is_as_unlikely_as_the_least_likely_and_one_of_a_single_photo_sets_no_scale(
    bundle: Bundle, data: LocalData
) -> None:
    extractor = CompiledGraphs(bundle).extractor(bundle.params)
    few = LocalData(data.x[:16], np.append(np.arange(10) % 2, np.arange(3, 9)))
    means = own_means(extractor, few, classes=10)
    head = class_mean_head(extractor, few, means)
    absent = ~means.classes.present
    assert np.flatnonzero(absent).tolist() == [2, 9]
    assert not head["head.weight"][absent].any()
    assert np.unique(head["head.bias"][absent]).tolist() == [head["head.bias"].min()]
    pair = class_mean_head(extractor, LocalData(few.x[:10], few.y[:10]), own_means(extractor, few, classes=10))
    assert all((head[name] == pair[name]).all() for name in head)
    # the nearest mean's scores but for what is the same of all classes: s/2 times the squared distance to the middle
    mu = means.classes.means[~absent]
    middle = mu.mean(axis=0)
    z = extractor.features(few.x).astype(np.float64)
    logits = (z @ head["head.weight"].T + head["head.bias"])[:, ~absent]
    nearer = ((z - middle) ** 2).sum(axis=1)[:, None] - ((z[:, None] - mu) ** 2).sum(axis=2)
    assert np.corrcoef(logits.ravel(), nearer.ravel())[0, 1] > 0.999999
    assert np.allclose(logits, nearer * (logits / nearer).mean(), rtol=1e-3, atol=1e-3 * np.abs(logits).max())


def test_prototypes_that_no_fleet_has_sent_begin_at_the_own_class_means(
    bundle: Bundle, data: LocalData, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    fit = Trainer.fit
    monkeypatch.setattr(Trainer, "fit", lambda *args, **named: asked.append(named) or fit(*args, **named))
    device, width = Device(bundle, data, "pi-1"), bundle.manifest.features
    means = own_means(CompiledGraphs(bundle).extractor(bundle.params), data, classes=10).classes.means
    rows = ClassRows(np.array([1, 5], np.uint16), np.full((2, width), 0.5))
    device.run_round(announcement(bundle), GlobalState(RUN, 1, 1, {"prototypes": rows}))
    found = asked[0]["given"]
    assert (asked[0]["lr"], asked[0]["epochs"]) == (bundle.manifest.hyper["lr"], 2)
    assert np.flatnonzero(found["prototype_mask"]).tolist() == [0, 1, 2, 5]
    assert (found["prototypes"][[1, 5]] == 0.5).all()
    np.testing.assert_allclose(found["prototypes"][[0, 2]], means[[0, 2]], atol=1e-4)


def _left_out_loss(z: np.ndarray, y: np.ndarray, weight: np.ndarray, bias: np.ndarray, factor: float) -> float:
    """Naive: each sample's class mean is computed without it, and its logit with that."""
    middle = np.stack([z[y == c].mean(axis=0) for c in np.unique(y)]).mean(axis=0)
    own = np.stack([z[y == c].mean(axis=0) for c in np.unique(y)])
    scale = np.linalg.norm(weight[y[0]]) / np.linalg.norm(own[np.unique(y).tolist().index(y[0])] - middle)
    total = 0.0
    for row in range(len(z)):
        logits = weight @ z[row] + bias
        rest = (y == y[row]) & (np.arange(len(y)) != row)
        left = z[rest].mean(axis=0)
        logits[y[row]] = 0.5 * scale * (((z[row] - middle) ** 2).sum() - ((z[row] - left) ** 2).sum())
        logits[y[row]] -= 0.5 * scale * ((z[row] ** 2).sum() - 2 * middle @ z[row] + (middle**2).sum())
        logits[y[row]] += 0.5 * scale * ((z[row] ** 2).sum() - 2 * middle @ z[row] + (middle**2).sum())
        total += float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[y[row]])
    return total


def _with_rate(bundle: Bundle, lr: float, **hyper: object) -> Bundle:
    manifest = msgspec.structs.replace(bundle.manifest, hyper={**bundle.manifest.hyper, "lr": lr, **hyper})
    return replace(bundle, manifest=manifest)


def test_a_bad_rate_is_found_out(bundle: Bundle, tmp_path: Path) -> None:
    """What was trained is dropped: the device sends and answers what the frozen features give, and says so."""
    bad = _with_rate(bundle, 0.02)
    train, held = hold_back(fashion(bad, 120, (0, 1, 2, 5)), share=0.3)
    device = Device(bad, train, "pi-1", held=held, test=held, activations=ActivationStore(tmp_path, 1 << 30))
    result = device.run_round(announcement(bad), None)
    check = result.check
    assert check is not None
    assert check.is_worse
    assert check.in_words() == (
        f"trained {check.trained / len(held):.1%} right on {len(held)} held-out photos, "
        f"frozen {check.frozen / len(held):.1%}: weights as before the round"
    )
    untrained = {name: value for name, value in device.state().items() if name.startswith("backbone.")}
    assert all((value == bad.params[name]).all() for name, value in untrained.items())
    evaluation = device.evaluate(None)
    assert evaluation is not None
    assert evaluation.all_classes["own_prototype"] == check.frozen / check.photos
    assert evaluation.all_classes["head"] >= evaluation.all_classes["own_prototype"] - 1e-9  # the warm start stays
    means = own_means(CompiledGraphs(bad).extractor(bad.params), train, classes=10).classes
    rows = result.contribution.body
    assert np.allclose(rows.dense(10, 128)[0], means.means, atol=1e-4)


def test_features_that_are_no_numbers_name_nothing(bundle: Bundle) -> None:
    """The loss of a single step is still finite, the weights after it are not."""
    wild = _with_rate(bundle, 1e38, epochs=1)
    train, held = fashion(bundle, 12, (0, 1)), fashion(bundle, 12, (0, 1), seed=1)
    device = Device(wild, train, "pi-1", held=held)
    check = device.run_round(announcement(wild), None).check
    assert check is not None
    assert (check.trained, check.is_worse) == (0, True)
    assert all(np.isfinite(value).all() for value in device.state().values())


def test_as_good_is_good_enough() -> None:
    assert [Check(7, trained, 9).is_worse for trained in (6, 7, 8)] == [True, False, False]


def test_where_noise_protects_what_is_sent_nothing_is_told_by_falling_back(bundle: Bundle, data: LocalData) -> None:
    hyper = method("fedhkd").resolve({"noise": 1.0})
    noised = replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, method="fedhkd", hyper=hyper))
    assert Device(noised, data, "pi-1", held=data)._held is None
    assert Device(bundle, data, "pi-1", held=data)._held is data


def test_what_is_trained_is_judged_by_the_answer_that_its_method_gives(bundle: Bundle, data: LocalData) -> None:
    by_head = msgspec.structs.replace(bundle.manifest, method="fedhkd", hyper=method("fedhkd").resolve({}))
    z = np.random.default_rng(0).normal(size=(50, bundle.manifest.features)).astype(np.float32)
    answers = Device(replace(bundle, manifest=by_head), data, "pi-1")._own_answer()(z)
    wanted = (z @ bundle.params["head.weight"].T + bundle.params["head.bias"]).argmax(axis=1)
    assert answers.tolist() == wanted.tolist()


def test_another_runtime_runs_the_trunk_again(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    before = _identity(bundle)
    assert _identity(bundle) == before
    assert bundle.trunk is not None
    assert _identity(replace(bundle, trunk=bundle.trunk + b"\x12\x01x")) != before  # of another producer
    monkeypatch.setattr("protofleet.edge_client.training.frozen_trunk.ort", SimpleNamespace(__version__="1.0"))
    assert _identity(bundle) != before


def test_a_fair_rate_is_kept(bundle: Bundle, tmp_path: Path) -> None:
    train, held = hold_back(fashion(bundle, 120, (0, 1, 2, 5)), share=0.3)
    device = Device(bundle, train, "pi-1", held=held)
    check = device.run_round(announcement(bundle), None).check
    assert check is not None
    assert not check.is_worse
    assert (device.state()["backbone.9.weight"] != bundle.params["backbone.9.weight"]).any()


def test_ffc_sums_the_features_of_the_whole_graph(bundle: Bundle, data: LocalData) -> None:
    """The extractor that devices share is the same bytes whether a bundle trains all of it or its tail."""
    trained, fresh = Device(bundle, data, "pi-1"), Device(bundle, data, "pi-1")
    _rounds(trained, bundle, 1)
    state = GlobalState(bytes.fromhex("0badcafe"), 1, 1)
    sums = [each.run_round(announcement(bundle, 2, "ffc"), state).contribution for each in (trained, fresh)]
    assert encode(sums[0], "f64") == encode(sums[1], "f64")


def test_learned_prototypes_that_were_dropped_are_class_means(
    mnist_like_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedHP sends prototypes that it has learned; of a first round that was left out, those that it began with."""
    bundle = read_bundle(mnist_like_bundle("fedhp", trainable_blocks=1, hyper={"epochs": 1}))
    train, held = hold_back(fashion(bundle, 40, (0, 1)), share=0.2)
    device = Device(bundle, train, "pi-1", held=held)
    given = iter([5, 4])
    monkeypatch.setattr(
        "protofleet.edge_client.device.device.right", lambda *_: next(given)
    )  # frozen once, trained at each round
    result = device.run_round(announcement(bundle), None)
    assert result.check is not None
    assert result.check.facts() == {"held_photos": 8, "frozen_right": 5, "trained_right": 4, "left_out": True}
    means = own_means(CompiledGraphs(bundle).extractor(bundle.params), train, classes=10).classes
    assert np.allclose(result.contribution.body.dense(10, 128)[0], means.means, atol=1e-4)
    trunk = [t.name for t in bundle.manifest.state if t.role == "param" and t.name.startswith("backbone.")]
    assert all((device.state()[name] == bundle.params[name]).all() for name in trunk)
    before, given = device.state(), iter([4])
    rows = ClassRows(np.array([0], np.uint16), np.ones((1, 128)))
    again = device.run_round(announcement(bundle, 2), GlobalState(RUN, 1, 1, {"prototypes": rows}))
    assert again.check is not None
    assert again.check.is_worse  # so not even what the fleet has sent stays: the weights are those of before the round
    assert all((device.state()[name] == value).all() for name, value in before.items())


@pytest.mark.parametrize("part", ["shape", "trunk", "tail"])
def test_a_cut_that_is_not_the_graphs_is_found_out(bundle: Bundle, data: LocalData, part: str) -> None:
    """A manifest with another shape of the activations, or graphs that have changed places: one line says which."""
    m = bundle.manifest
    (cut,) = m.cut
    changed = {
        "shape": {"manifest": msgspec.structs.replace(m, cut=(msgspec.structs.replace(cut, shape=cut.shape[::-1]),))},
        "trunk": {"trunk": bundle.tail},
        "tail": {"tail": bundle.features},
    }
    device = Device(replace(bundle, **changed[part]), data, "pi-1")
    with pytest.raises(BundleError, match=r"trunk\.onnx" if part != "tail" else r"tail\.onnx"):
        device.run_round(announcement(bundle, 1), None)
