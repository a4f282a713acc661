"""What a device tells of its newest photos: of enough of them, compared with its own earlier ones, and not where noise
protects what it sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from edge_peer import FLEET, Peer
from edge_samples import fashion

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.drift import FARTHEST, LEAST, MOST_MOVED, read_drift
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.drift_watch import DriftWatch, Reference
from protofleet.edge_client.messages.status_message import Health
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings


@pytest.fixture(scope="module")
def bundle(mnist_like_bundle: Callable[..., Path]) -> Bundle:
    return read_bundle(mnist_like_bundle("ncm"))


@pytest.fixture
def url() -> Iterator[str]:
    broker = Embedded()
    broker.start()
    yield broker.url
    broker.stop()


def joined(*parts: LocalData) -> LocalData:
    return LocalData(np.concatenate([p.x for p in parts]), np.concatenate([p.y for p in parts]))


def test_new_photos_are_compared_with_the_earlier_ones(bundle: Bundle, tmp_path: Path) -> None:
    whole = fashion(bundle, 130, (0, 1, 2))
    part = lambda start, stop: LocalData(whole.x[start:stop], whole.y[start:stop])  # noqa: E731
    device = Device(bundle, part(0, 60), "d")
    watch = DriftWatch(device, tmp_path)
    assert watch.measure() is None  # nothing was there before
    device.hold(part(0, 60 + LEAST - 1))
    assert watch.measure() is None  # too few
    device.hold(part(0, 100))
    usual = watch.measure()
    assert usual is not None
    assert (usual.samples, watch.measure()) == (40, None)
    assert 0.5 < usual.distance < 1.6
    assert usual.unlike < 0.2

    def of(start: int, stop: int) -> Reference:
        made = Reference(device.classes, device.width)
        for features, labels in device.frozen_features(np.arange(start, stop)):
            made.add(np.asarray(unit_rows(features.astype(np.float64))), labels)
        return made

    assert usual.moved == pytest.approx(of(0, 60).moved(of(60, 100)))  # with the new ones not yet among the earlier
    again = DriftWatch(device, tmp_path)  # after a restart
    assert again.measure() is None
    odd = fashion(bundle, 30, (8, 9))  # bags and boots, where there were shirts and trousers
    dark = LocalData(255 - part(100, 130).x, part(100, 130).y)
    for strange in (LocalData(odd.x, np.zeros(30, np.int64)), dark):
        device.hold(joined(part(0, 100), strange))
        found = DriftWatch(device, _copy(tmp_path)).measure()
        assert found is not None
        assert found.samples == 30
        assert found.distance > 1.5 * usual.distance
        assert found.unlike > usual.unlike + 0.2


def _copy(folder: Path) -> Path:
    into = folder / "copy"
    into.mkdir(exist_ok=True)
    (into / "drift-told").write_bytes((folder / "drift-told").read_bytes())
    return into


def test_photos_that_are_gone_are_in_no_reference(bundle: Bundle, tmp_path: Path) -> None:
    whole = fashion(bundle, 90, (0, 1))
    device = Device(bundle, LocalData(whole.x[:60], whole.y[:60]), "d")
    watch = DriftWatch(device, tmp_path)
    watch.measure()
    assert (tmp_path / "drift-told").stat().st_size == 8 * 60
    device.hold(LocalData(whole.x[30:60], whole.y[30:60]))
    assert watch.measure() is None
    assert (tmp_path / "drift-told").stat().st_size == 8 * 30  # and no mark of those that went stays
    kept = LocalData(whole.x[30:90], whole.y[30:90])
    device.hold(kept)
    after = watch.measure()
    fresh = Device(bundle, LocalData(whole.x[30:60], whole.y[30:60]), "d")
    other = DriftWatch(fresh, tmp_path / "other")
    (tmp_path / "other").mkdir()
    other.measure()
    fresh.hold(kept)
    assert after == other.measure()
    assert (tmp_path / "drift-told").stat().st_size == 8 * 60


def test_a_reference_of_few_photos_says_nothing(bundle: Bundle, tmp_path: Path) -> None:
    """Of `LEAST` photos of two classes the means take two: too few are left to say what is usual."""
    whole = fashion(bundle, 3 * LEAST, (0, 1))
    device = Device(bundle, LocalData(whole.x[:LEAST], whole.y[:LEAST]), "d")
    watch, told = DriftWatch(device, tmp_path), list[bool]()
    for count in (1, 2, 3):
        device.hold(LocalData(whole.x[: count * LEAST], whole.y[: count * LEAST]))
        told.append(watch.measure() is not None)
    assert told == [False, False, True]


def test_distances_are_those_of_a_loop() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((60, 5))
    features /= np.linalg.norm(features, axis=1)[:, None]
    labels = np.repeat([0, 2], 30)
    reference = Reference(3, 5)
    reference.add(features, labels)
    means = [features[labels == c].mean(axis=0) for c in (0, 2)]
    usual = sum(((z - means[y // 2]) ** 2).sum() for z, y in zip(features, labels, strict=True)) / 58
    nearest = [min(((z - mean) ** 2).sum() for mean in means) / usual for z in features]
    np.testing.assert_allclose(reference.distances(features), np.minimum(nearest, 10.0), rtol=1e-9)
    alike = Reference(1, 5)
    alike.add(np.tile(np.eye(5)[0], (30, 1)), np.zeros(30, np.int64))
    assert alike.distances(np.eye(5)[:2]).tolist() == [0.0, FARTHEST]  # a number that an aggregator takes


def test_the_status_carries_it_where_the_device_may_say_it(bundle: Bundle, tmp_path: Path) -> None:
    whole = fashion(bundle, 150, (0, 1))
    device = Device(bundle, LocalData(whole.x[:100], whole.y[:100]), "d")
    watch, health = DriftWatch(device, tmp_path), Health(b"instance", 1, {f"profile_{n}": 1.0 for n in range(16)})
    assert not health.measure(None)
    assert not health.measure(watch)
    assert not {name for name in health.birth().metrics if "drift" in name}
    device.hold(whole)
    assert health.measure(watch)
    health.accuracy, health.step_ms, health.samples_new = {f"accuracy_{n}": 0.5 for n in range(7)}, 1.0, 3
    told = health.birth().metrics
    assert {name for name in told if "drift" in name} == {
        "drift_samples",
        "drift_unlike",
        "drift_distance",
        "drift_moved",
    }
    assert len(told) <= 32


def test_a_running_client_says_it_after_the_contribution_that_holds_new_photos(
    bundle: Bundle, mnist_like_bundle: Callable[..., Path], url: str, tmp_path: Path
) -> None:
    whole = fashion(bundle, 90, (0, 1))
    file = tmp_path / "photos.npz"
    np.savez(file, x=whole.x[:50], y=whole.y[:50])
    options = {"id": "pi-1", "data": str(file), "state": str(tmp_path / "state"), "hold_out": 0.0}
    settings = read_settings(
        ClientSettings, {"bundle": str(mnist_like_bundle("ncm")), "broker": url, "fleet": FLEET, **options}
    )
    service = Service(settings)
    running = threading.Thread(target=lambda: service.run(lambda content, ended: None), daemon=True)
    with Peer(url, bundle) as peer:
        running.start()
        peer.status(online=True)
        peer.announce(1, "ncm", extractor=bytes(32))
        peer.contribution(1)
        peer.answer(1, "ncm")
        np.savez(tmp_path / "more.npz", x=whole.x, y=whole.y)
        (tmp_path / "more.npz").rename(file)
        peer.announce(2, "ncm", extractor=bytes(32))
        peer.contribution(2)
        deadline = time.monotonic() + 60
        while "drift_samples" not in peer.statuses[-1].metrics:
            assert time.monotonic() < deadline, peer.statuses[-1]
            peer.receive()
        assert not any("drift_samples" in status.metrics for status in peer.statuses[:-1])
        found = read_drift(peer.statuses[-1].metrics, max_samples=1000)
        assert found is not None
        assert (found.samples, 0.3 < found.distance < 2.0) == (40, True)
        service.stop()
        running.join(20)
    assert not running.is_alive()


def test_how_far_class_means_moved_is_that_of_a_loop_and_one_where_nothing_changed() -> None:
    rng = np.random.default_rng(0)
    middles = rng.standard_normal((3, 40))

    def drawn(count: int, shift: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        labels = rng.integers(0, 3, count)
        z = middles[labels] + rng.standard_normal((count, 40)) + shift
        return z / np.linalg.norm(z, axis=1)[:, None], labels

    def of(features: np.ndarray, labels: np.ndarray) -> Reference:
        made = Reference(4, 40)
        made.add(features, labels)
        return made

    (first, names), (second, others) = drawn(60), drawn(30)
    means = {c: first[names == c].mean(axis=0) for c in range(3)}
    usual = sum(((z - means[y]) ** 2).sum() for z, y in zip(first, names, strict=True)) / (60 - 3)
    parts = []
    for c in range(3):
        n, m = int((names == c).sum()), int((others == c).sum())
        parts.append(n * m / (n + m) * ((means[c] - second[others == c].mean(axis=0)) ** 2).sum())
    assert of(first, names).moved(of(second, others)) == pytest.approx(np.mean(parts) / usual)
    same = [of(*drawn(60)).moved(of(*drawn(30))) for _ in range(200)]
    assert np.mean(same) == pytest.approx(1.0, abs=0.05)
    assert of(*drawn(60)).moved(of(*drawn(30, shift=1.0))) > 3.0
    assert of(first[names < 2], names[names < 2]).moved(of(second[others == 2], others[others == 2])) is None


def test_copies_of_one_class_say_no_more_than_may_be_said() -> None:
    """Their usual distance is 0: whatever is otherwise is as far as can be told, and a copy more is not."""
    photo, other = np.eye(8)[:1], np.eye(8)[1:2]
    had, same, came = Reference(3, 8), Reference(3, 8), Reference(3, 8)
    had.add(np.repeat(photo, LEAST, axis=0), np.zeros(LEAST, np.int64))
    assert not had.is_usable  # of so many photos one is what the mean cost
    had.add(photo, np.zeros(1, np.int64))
    assert had.is_usable
    same.add(np.repeat(photo, LEAST, axis=0), np.zeros(LEAST, np.int64))
    came.add(np.repeat(other, LEAST, axis=0), np.zeros(LEAST, np.int64))
    assert (had.moved(same), had.moved(came)) == (0.0, MOST_MOVED)
    np.testing.assert_array_equal(had.distances(np.concatenate([photo, other])), [0.0, FARTHEST])
