"""The ladder from bytes to accuracy over frozen features: real messages, and heads equal to those that are deployed."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from pooled_head import solve_head

from protofleet.contract.bundle.uplink_bytes import sent_bytes
from protofleet.contract.errors import MethodError
from protofleet.contract.heads.covariance import within_gram
from protofleet.contract.heads.discriminant import discriminant_head, without_bias
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.edge_client.data import LocalData
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.engine.frozen_heads import RUNGS, Features, Measured, Rung, ladder, measure

CLASSES, WIDTH = 6, 40


def _draw(samples: int, seed: int, shares: np.ndarray | None = None) -> Features:
    """Features as a network gives them: a common mean, few directions that vary much. Classes as often as `shares`."""
    common, rng = np.random.default_rng(7), np.random.default_rng(seed)
    decay = np.arange(1, WIDTH + 1) ** -0.5
    centres = np.abs(common.normal(size=WIDTH)) * 0.5 + common.normal(size=(CLASSES, WIDTH)) * decay * 0.5
    y = rng.choice(CLASSES, samples, p=shares)
    return Features((centres[y] + rng.normal(size=(samples, WIDTH)) * decay).astype(np.float32), y)


def _dealt(all_of_it: Features, devices: int) -> list[Features]:
    return [Features(all_of_it.z[i::devices], all_of_it.y[i::devices]) for i in range(devices)]


FLEET, ASKED = _draw(1200, 1), _draw(3000, 2)


@pytest.fixture(scope="module")
def steps() -> dict[str, Measured]:
    return {each.rung.title: each for each in ladder(_dealt(FLEET, 20), ASKED, CLASSES)}


def test_more_bytes_answer_better_and_what_is_too_wide_is_left_out(steps: dict[str, Measured]) -> None:
    assert set(steps) == {rung.title for rung in RUNGS if not rung.hyper.get("project")}  # 256 of 40 columns are none
    mean, one, four, ffc = (
        steps[name]
        for name in ("nearest class mean", "FedCOF, 1 group a class", "FedCOF, 4 groups a class", "FFC, ridge")
    )
    assert mean.accuracy + 0.01 < one.accuracy
    assert one.accuracy - 0.005 <= four.accuracy <= ffc.accuracy + 0.01
    assert abs(steps["FFC in half precision, ridge"].accuracy - ffc.accuracy) <= 0.005
    assert "by cross-validation on the sums" in ffc.told
    assert all(not each.doubt for each in steps.values())
    np.testing.assert_allclose(ffc.accuracy, (ffc.of_class * np.bincount(ASKED.y) / len(ASKED.y)).sum())


def test_bytes_are_those_of_the_messages(steps: dict[str, Measured]) -> None:
    for title, name, groups in (
        ("FFC, ridge", "ffc", 1),
        ("nearest class mean", "ncm", 1),
        ("FedCOF, 4 groups a class", "fedcof", 4),
    ):
        assert abs(steps[title].uplink_bytes - sent_bytes(method(name), CLASSES, WIDTH, groups)) <= 80  # counts' digits
    assert steps["FFC in half precision, ridge"].uplink_bytes < 0.3 * steps["FFC, ridge"].uplink_bytes


def test_the_heads_are_those_of_the_pooled_data(steps: dict[str, Measured]) -> None:
    z, asked = unit_rows(FLEET.z.astype(np.float64)), unit_rows(ASKED.z.astype(np.float64))
    gram = FeatureGram.of(z, FLEET.y, CLASSES)
    within = within_gram(gram.matrix, gram.cross, gram.counts)
    for title, rows in (
        ("FFC, ridge", solve_head(gram, "auto")),
        ("FFC, discriminant", without_bias(discriminant_head(within), within)),
    ):
        right = ((asked @ rows.T).argmax(1) == ASKED.y).mean()
        assert steps[title].accuracy == pytest.approx(right, abs=1.5 / len(ASKED.y))  # float32 may turn one over


def test_where_classes_are_unequal_the_discriminant_is_fair_to_the_rare_ones() -> None:
    often = np.sqrt(0.3) ** np.arange(CLASSES)
    fleet = _dealt(_draw(1200, 3, often / often.sum()), 5)
    ridge, other = (
        measure(Rung("", "ffc", {"form": form}), fleet, ASKED, CLASSES) for form in ("ridge", "discriminant")
    )
    assert other.balanced > ridge.balanced + 0.03
    assert other.of_class[-1] > ridge.of_class[-1] + 0.2
    assert "try --form discriminant" in ridge.doubt
    assert not other.doubt


RELU = 256  # columns


@pytest.fixture(scope="module")
def shipped() -> tuple[Features, Features]:
    """128 shipped photos, and 1,000 others: random features of their pixels, which tell the classes apart."""
    data = load_dataset("fashion_mnist_subset")
    weights = np.random.default_rng(0).normal(size=(784, RELU)) / 28
    rows = np.random.default_rng(1).permutation(len(data.train))[:128]

    def features(part: LocalData) -> Features:
        return Features(np.maximum((part.x.reshape(len(part), -1) / 255.0 - 0.286) / 0.353 @ weights, 0), part.y)

    return features(take(data.train, rows)), features(data.test)


@pytest.mark.parametrize("copies", [6, 26])
@pytest.mark.parametrize(("name", "hyper"), [("ffc", {}), ("ffc", {"form": "discriminant"}), ("fedcof", {"groups": 8})])
def test_photos_that_two_devices_have_cost_no_accuracy_and_are_worth_a_word(
    shipped: tuple[Features, Features], name: str, hyper: dict, copies: int
) -> None:
    (photos, asked), rung = shipped, Rung("", name, hyper)
    devices = np.arange(len(photos.y)) % 5
    again = np.r_[np.arange(len(photos.y)), np.arange(copies)]
    holder = np.r_[devices, (devices[:copies] + 1) % 5]

    def found(rows: np.ndarray, device: np.ndarray) -> Measured:
        dealt = [Features(photos.z[rows[device == one]], photos.y[rows[device == one]]) for one in range(5)]
        return measure(rung, dealt, asked, 10)

    clean, twice = found(again[: len(devices)], devices), found(again, holder)
    assert clean.accuracy > 0.7
    assert twice.accuracy > clean.accuracy - 0.01
    assert "photos are there twice" in twice.doubt
    assert not clean.doubt


def test_small_classes_stay_at_home_and_a_method_that_trains_is_none() -> None:
    fleet = [*_dealt(FLEET, 3), Features(FLEET.z[:1], FLEET.y[:1])]
    few, all_of_it = (measure(RUNGS[0], fleet, ASKED, CLASSES, min_samples=least) for least in (2, 1))
    assert few.uplink_bytes == all_of_it.uplink_bytes
    lonely = measure(RUNGS[0], [Features(FLEET.z[:30], FLEET.y[:30] % 2), *fleet[-1:]], ASKED, CLASSES, min_samples=2)
    assert not np.nansum(lonely.of_class[2:])
    with pytest.raises(MethodError, match="over frozen features"):
        measure(Rung("", "fedproto"), fleet, ASKED, CLASSES)


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import protofleet.lab.engine.frozen_heads"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
