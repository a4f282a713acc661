"""What a device holds out by itself, what it measures on it, and when that stays at home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from edge_samples import announcement, fashion

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.bundle.bundle_file import Activation, Bundle, Manifest, read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.heads.answers import nearest_answer
from protofleet.contract.methods import method
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import hold_back
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.evaluation import in_words, score, summary
from protofleet.edge_client.device.own_samples import LEAST, OwnSamples, Samples
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.run.service import _tells
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.training.extractor import Extractor

CLASSES = (0, 3, 8)


@pytest.fixture(scope="module", params=["fedproto", "spherefed", "ffc", "ncm", "fedcof"])
def bundle(request: pytest.FixtureRequest, mnist_like_bundle: Callable[..., Path]) -> Bundle:
    # FedCOF's groups are drawn at random, anew for each summing: with one of each class every draw is the same
    options = {"hyper": {"groups": 1}} if request.param == "fedcof" else {}
    return read_bundle(mnist_like_bundle(request.param, **options))


def _right(answers: np.ndarray, test: LocalData) -> float:
    return float((answers == test.y).mean())


def _nearest(bundle: Bundle, data: LocalData, test: LocalData) -> float:
    """Nearest class mean over the bundle's initial weights, sample by sample."""
    extractor = Extractor(bundle, bundle.params)
    z, tested = (extractor.features(each.x).astype(np.float64) for each in (data, test))
    means = {j: z[data.y == j].mean(axis=0) for j in np.unique(data.y)}
    return _right(np.array([min(means, key=lambda j: float(np.linalg.norm(f - means[j]))) for f in tested]), test)


def test_the_figures_of_each_method_before_and_after_a_state_is_there(bundle: Bundle) -> None:
    data, found = fashion(bundle, 90, CLASSES), method(bundle.manifest.method)
    test = fashion(bundle, 60, CLASSES, purpose="test")
    pi = Device(bundle, data, "pi-1", test=test)
    untrained = Device(bundle, data, "pi-2", test=test)
    before = untrained.evaluate(None)
    assert before is not None
    told = untrained.accuracy(before, found.name)
    assert (told is None) == (not found.trains)  # what answers by shared state alone has no answer yet
    assert untrained.accuracy(before, "ffc") is None
    result = pi.run_round(announcement(bundle), None)
    hyper = found.resolved_in(bundle.manifest.hyper)
    kind = result.contribution.statistic(found.statistic, 10, found.row_width(hyper, bundle.manifest.features))
    merged = found.merge(lambda: iter([kind]), "mean", hyper)
    state = GlobalState(b"run1", 1, 1, found.next_rows({}, merged, hyper))
    after = pi.evaluate(state)
    assert after is not None
    told = pi.accuracy(after, found.name)
    assert told is not None
    assert (told.samples, told.all_classes) == (60, after.all_classes[found.way])
    assert told.own_classes == told.all_classes  # nothing else was held out
    assert told.shipped == pytest.approx(_nearest(bundle, data, test))
    own = found.alone_way(bundle.manifest.head)
    if found.trains and own == found.way:  # the device's own head is the round's own way
        assert told.alone is None
    elif found.trains:
        assert told.alone == after.all_classes[found.alone_way(bundle.manifest.head)]
    else:  # the fleet is this one device
        # its contribution went through float32, and a ridge may be chosen that is next to the other
        assert told.alone == pytest.approx(told.all_classes, abs=3.5 / 60)


@pytest.mark.parametrize("bundle", ["fedproto"], indirect=True)
def test_own_classes_are_the_photos_of_classes_that_are_trained_on(bundle: Bundle) -> None:
    data, test = fashion(bundle, 60, (0, 3)), fashion(bundle, 80, (0, 1, 3, 5), purpose="test")
    pi = Device(bundle, data, "pi-1", test=test)
    evaluation = pi.evaluate(None)
    assert evaluation is not None
    found = pi.accuracy(evaluation, "fedproto")  # by the nearest of its own prototypes: it knows no other class
    assert found is not None
    assert found.own_classes == pytest.approx(found.all_classes * 80 / np.isin(test.y, (0, 3)).sum())
    assert found.own_classes > found.all_classes > 0


@pytest.mark.parametrize("bundle", ["fedproto"], indirect=True)
def test_among_own_classes_is_what_a_loop_over_photos_finds(bundle: Bundle) -> None:
    """The best score among the own classes, photo by photo; a class that is never answered is not named."""
    test = fashion(bundle, 90, (0, 1, 3, 5), purpose="test")
    own = np.isin(np.arange(10), (0, 3, 7))
    extractor = Extractor(bundle, bundle.params)
    some = fashion(bundle, 200, tuple(range(10)))  # of the means of these some photos of 0 lie nearest to other classes
    centres = np.stack([extractor.features(some.x[some.y == label]).mean(axis=0) for label in range(10)])
    answer = nearest_answer(centres, ~np.isin(np.arange(10), (3, 9)))  # it cannot name 3, of which there are photos
    (scored,) = score(extractor.blocks(test.x), {"it": answer}, test.y, own).values()
    right = 0
    for z, label in zip(extractor.features(test.x), test.y, strict=True):
        nearest = min((0, 7), key=lambda j: float(np.linalg.norm(z - centres[j])))
        right += int(own[label] and nearest == label)
    assert (scored.among_own, scored.classes) == (right, 8)
    found = summary({"it": scored}, own).tested["it"]
    assert (found.own_samples, found.own) == (int(np.isin(test.y, (0, 3)).sum()), 3)
    assert found.among_own == pytest.approx(right / found.own_samples)
    assert found.own_classes is not None
    assert found.among_own > found.own_classes > 0.0  # fewer classes to choose among
    for mine in ((3, 9), (0,)):  # of these it can name none
        unable = nearest_answer(centres, ~np.isin(np.arange(10), mine))
        (unnamed,) = score(extractor.blocks(test.x), {"it": unable}, test.y, np.isin(np.arange(10), mine)).values()
        assert unnamed.among_own == 0


def test_in_words_only_one_task_stands_beside_another() -> None:
    held = Accuracy(16, 0.5, 0.5, 0.5625, 0.5625, 0.8125, 0.5625, own_samples=16, classes=10, own=5)
    assert in_words(held, "held-out photos") == (
        "it can name 10 classes now (alone 5); on 16 held-out photos of its own 5 classes: 81.2% right choosing among "
        "these 5 (alone 56.2%, no clear difference on 16 photos), 50.0% choosing among all 10, which is harder "
        "(chance: 10.0%, not 20.0%)"
    )
    test = Accuracy(1000, 0.645, 0.7, 0.23, 0.24, 0.9, 0.8, own_samples=300, classes=10, own=3)
    assert in_words(test, "test photos", 0.85) == (
        "it can name 10 classes now (alone 3); on 1,000 test photos: 64.5% right (alone 24.0%, bundle as shipped "
        "23.0%); on the 300 of its own 3 classes: 90.0% right choosing among these 3 (alone 80.0%, bundle as shipped "
        "76.7%, personal head 85.0%), 70.0% choosing among all 10, which is harder (chance: 10.0%, not 33.3%)"
    )
    every = Accuracy(40, 0.75, 0.75, 0.5, None, 0.75, None, own_samples=40, classes=4, own=4)
    assert in_words(every, "photos") == "on 40 photos of its own 4 classes: 75.0% right (bundle as shipped 50.0%)"
    assert in_words(Accuracy(40, 0.5), "photos") == "50.0% right on 40 photos"
    one = Accuracy(1, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, own_samples=1, classes=2, own=2)
    assert "100.0% right (alone 0.0%, no clear difference on 1 photo)" in in_words(one, "photos")


# ── what is held out ────────────────────────────────────────────────────────────────────────────────────────────────


def _given(counts: dict[int, int]) -> LocalData:
    y = np.concatenate([np.full(count, label) for label, count in counts.items()])
    return LocalData(np.arange(len(y), dtype=np.uint8).reshape(-1, 1, 1, 1), np.random.default_rng(0).permutation(y))


def test_a_class_of_few_has_none_held_out_and_rows_that_come_later_move_few() -> None:
    data = _given({0: 50, 1: LEAST, 2: LEAST - 1, -1: 30})
    train, held = hold_back(data, share=0.4, least=LEAST)
    assert np.unique(held.y).tolist() == [0, 1]
    assert (len(held), len(train) + len(held)) == (22, len(data))
    more = LocalData(np.arange(len(data) + 5, dtype=np.uint8).reshape(-1, 1, 1, 1), np.append(data.y, [0] * 5))
    _, later = hold_back(more, share=0.4, least=LEAST)
    assert len(set(held.x.ravel().tolist()) - set(later.x.ravel().tolist())) <= 3


def test_too_few_are_all_trained_on() -> None:
    data = _given({0: LEAST - 1, 1: LEAST - 1})
    train, held = hold_back(data, share=0.1, least=LEAST)
    assert train is data
    assert len(held) == 0


def _settings(tmp_path: Path, **options: object) -> ClientSettings:
    named = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": str(tmp_path / "d.npz"), "state": str(tmp_path)}
    return read_settings(ClientSettings, {**named, **options})


def _samples(tmp_path: Path, m: Manifest, arrays: LocalData | None, **options: object) -> Samples:
    given = None if arrays is None else (arrays.x, arrays.y)
    return OwnSamples(_settings(tmp_path, **options), m, tmp_path, given).read()


@pytest.mark.parametrize("bundle", ["fedproto"], indirect=True)
@pytest.mark.parametrize("in_memory", [False, True])
def test_by_default_a_tenth_is_held_out_and_with_a_test_set_or_zero_nothing(
    bundle: Bundle, tmp_path: Path, in_memory: bool, said: list[str]
) -> None:
    m, data = bundle.manifest, fashion(bundle, 90, CLASSES)
    np.savez(tmp_path / "d.npz", x=data.x, y=data.y)
    np.savez(tmp_path / "t.npz", x=data.x[:7], y=data.y[:7])
    arrays = data if in_memory else None
    sizes = {}
    for name, options in {"default": {}, "none": {"hold_out": 0.0}, "test": {"test": str(tmp_path / "t.npz")}}.items():
        found = _samples(tmp_path, m, arrays, **options)
        train, test, held = found.data, found.test, found.held
        sizes[name] = (len(train), None if test is None else len(test))
        assert held is (test if name == "default" else None)
        if name == "default":
            assert test is not None
            images = {image.tobytes() for image in train.x}
            assert not images & {image.tobytes() for image in test.x}
    assert sizes == {"default": (81, 9), "none": (90, None), "test": (90, 7)}
    tail = msgspec.structs.replace(m, cut=(Activation("a0", (2,)),))  # what it is checked by is never the test set
    options = {"test": str(tmp_path / "t.npz")}
    found = _samples(tmp_path, tail, arrays, **options)
    assert [len(each or ()) for each in (found.data, found.test, found.held)] == [81, 7, 9]
    assert said == []


def test_what_cannot_be_asked_together(tmp_path: Path) -> None:
    for options, words in (
        ({"hold_out": 0.1, "test": "t"}, "--hold-out with --test"),
        ({"hold_out": 0.6}, "--hold-out, expected 0 to 0.5"),
    ):
        with pytest.raises(UsageError, match=words):
            _settings(tmp_path, **options)
    assert _settings(tmp_path, hold_out=0.0, test="t") is not None


def test_where_noise_protects_what_is_sent_or_the_policy_says_so_figures_stay_at_home() -> None:
    """With a budget or without one: no ε would cover them."""
    told = (("accuracy", "--report-accuracy"), ("drift", "--tell-drift"), ("unknown", "--tell-unknown"))
    for figure, option in told:
        free, noised = (SimpleNamespace(policy=Policy(), is_private=private) for private in (False, True))
        kept, budget = Policy(figures=("new-photos",)), Policy(epsilon=1.0, delta=1e-5)
        others = [SimpleNamespace(policy=each, is_private=each.is_private) for each in (kept, budget)]
        assert _tells(free, figure, None, option)  # type: ignore[arg-type]
        assert not _tells(free, figure, False, option)  # type: ignore[arg-type]
        for found, expected in (
            (noised, "a device that has sent nothing with noise"),
            *((o, "a --policy") for o in others),
        ):
            assert not _tells(found, figure, None, option)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match=f"{option}, expected {expected}"):
                _tells(found, figure, True, option)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kept_bytes", "passes"), [(1 << 20, 1), (100, 3)])
def test_test_images_are_extracted_once_where_their_features_fit(
    mnist_like_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, kept_bytes: int, passes: int
) -> None:
    bundle = read_bundle(mnist_like_bundle("ncm"))
    test, further = (fashion(bundle, 40, CLASSES, purpose="test"), fashion(bundle, 30, CLASSES, purpose="test"))
    seen: list[int] = []
    run = Extractor.blocks

    def counted(self: Extractor, x: np.ndarray, samples: int | None = None) -> object:
        seen.append(len(x))
        return run(self, x, samples)

    monkeypatch.setattr(Extractor, "blocks", counted)
    monkeypatch.setattr("protofleet.edge_client.training.kept_features.KEPT_BYTES", kept_bytes)
    data = fashion(bundle, 90, CLASSES)
    pi = Device(bundle, data, "pi-1", test=test)
    first = pi.evaluate(None)
    assert first is not None
    pi.accuracy(first, "ncm")
    again = pi.evaluate(None)
    assert again is not None
    assert again.all_classes == first.all_classes
    assert seen.count(len(test)) == passes
    pi.hold(data, test=further)
    other = pi.evaluate(None)
    assert other is not None
    assert (other.samples, seen[-1]) == (len(further), len(further))
