"""A frozen network sees a device's photos once, and says the same as one that sees them each time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from edge_samples import announcement, fashion

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.wire.codec import encode
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training import kept_features
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.kept_features import KEPT_BYTES, KeptFeatures

CLASSES = (0, 3, 8)
FITS, PASSES = 90, 4  # photos; how often a device that keeps nothing looks at them: see `_round`


def _round(device: Device, name: str) -> tuple[object, ...]:
    """All that a device says in a round, and what it compares it with."""
    made = device.run_round(announcement(device._bundle, 1), None)
    evaluation = device.evaluate(None)
    assert evaluation is not None
    told = device.accuracy(evaluation, name)
    drift = [features for features, _ in device.frozen_features(np.arange(FITS))]
    return encode(made.contribution, device._method.encoding), told, np.concatenate(drift).tobytes()


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each run of an extractor, how many images."""
    seen: list[int] = []
    run = Extractor.features

    def counted(self: Extractor, x: np.ndarray) -> np.ndarray:
        seen.append(len(x))
        return run(self, x)

    monkeypatch.setattr(Extractor, "features", counted)
    return seen


@pytest.mark.parametrize("name", ["ncm", "ffc", "fedcof"])
def test_training_photos_of_a_frozen_network_are_seen_once_to_the_same_bits(
    mnist_like_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, looked_at: list[int], name: str
) -> None:
    bundle = read_bundle(mnist_like_bundle(name, **({"hyper": {"groups": 1}} if name == "fedcof" else {})))
    data, test = fashion(bundle, FITS, CLASSES), fashion(bundle, 40, CLASSES, purpose="test")
    said, images = [], []
    for most in (KEPT_BYTES, 0):
        monkeypatch.setattr(kept_features, "KEPT_BYTES", most)
        looked_at.clear()
        device = Device(bundle, data, "pi-1", test=test, secret=bytes(32))
        said.append(_round(device, name))
        images.append(sum(looked_at) - len(bundle.vectors.x if bundle.vectors else ()))
    assert said[0] == said[1]
    assert images[0] == len(data) + len(test)
    assert images[1] >= PASSES * len(data) + 2 * len(test)


def test_other_photos_are_seen_anew_and_none_are_kept_of_a_network_that_is_trained(
    mnist_like_bundle: Callable[..., Path], looked_at: list[int]
) -> None:
    frozen, trained = (read_bundle(mnist_like_bundle(name)) for name in ("ncm", "fedproto"))
    device, data = Device(frozen, fashion(frozen, 60, CLASSES), "pi-1"), fashion(frozen, 50, CLASSES, seed=9)
    device.run_round(announcement(frozen, 1), None)
    device.hold(data)
    looked_at.clear()
    again, _ = [device.run_round(announcement(frozen, 2), None).contribution for _ in range(2)]
    assert looked_at == [len(data)]
    fresh = Device(frozen, data, "pi-1").run_round(announcement(frozen, 2), None).contribution
    assert encode(again, "f32") == encode(fresh, "f32")
    other = Device(trained, fashion(trained, 60, CLASSES), "pi-2")
    looked_at.clear()
    for _ in range(2):
        list(other._extractor("bundle").blocks(other.samples.x))
    assert sum(looked_at) >= 2 * 60


def test_what_is_asked_for_by_blocks_of_a_size_or_not_to_the_end_is_not_kept(looked_at: list[int]) -> None:
    class Doubling(Extractor):
        width = 2

        def __init__(self) -> None:
            pass

        def features(self, x: np.ndarray) -> np.ndarray:
            looked_at.append(len(x))
            return np.asarray(x[:, :2], np.float32) * 2

    x, unknown = np.arange(24, dtype=np.uint8).reshape(8, 3), np.zeros((3, 3), np.uint8)
    kept = KeptFeatures(2, Doubling, x)
    assert [rows for rows, _ in kept.blocks(x, samples=3)] == [slice(0, 3), slice(3, 6), slice(6, 8)]
    next(kept.blocks(x))
    looked_at.clear()
    first, second = ([block for _, block in kept.blocks(x)] for _ in range(2))
    assert looked_at == [8]
    np.testing.assert_array_equal(np.concatenate(first), x[:, :2] * 2.0)
    np.testing.assert_array_equal(np.concatenate(second), x[:, :2] * 2.0)
    for rows in (np.array([5, 0, 7]), np.array([], np.intp)):
        found = [features for _, features in kept.chosen(x, rows, 2)]
        np.testing.assert_array_equal(np.concatenate([np.empty((0, 2)), *found]), x[rows, :2] * 2.0)
    assert looked_at == [8]
    assert [len(block) for _, block in kept.blocks(unknown)] == [3]
    assert looked_at == [8, 3]
