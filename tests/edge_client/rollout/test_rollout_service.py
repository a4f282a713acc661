"""A device goes over to another bundle and back, over a real broker, against an aggregator that a test plays."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from edge_peer import FLEET
from edge_samples import fashion
from rollout_peer import SEED, RolloutPeer, trusted

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.rollout import rollout_work
from protofleet.edge_client.rollout.rollout_file import read_rollouts
from protofleet.edge_client.run import client
from protofleet.edge_client.run.service import Service
from protofleet.edge_client.settings import ClientSettings
from protofleet.export.bundles.extend import extend_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def old(mnist_like_bundle: Callable[..., Path]) -> Path:
    return mnist_like_bundle("ffc", private_key=SEED)


@pytest.fixture(scope="module")
def new(old: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grown") / "new.bundle"
    extend_bundle(old, ["hamster"], path, private_key=SEED)
    return path


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path)
    found.start()
    yield found
    found.stop()


class Running:
    """A device that stays, in a thread."""

    def __init__(self, broker: TestBroker, bundle: Path, folder: Path, **options: object) -> None:
        found = read_bundle(bundle)
        data = fashion(found, 60, (0, 1, 2))
        named = {"bundle": str(bundle), "broker": broker.url, "id": "pi-1", "fleet": FLEET, "state": str(folder / "s")}
        named |= {"data": "", "trust": str(trusted(folder)), "hold_out": 0.2, **options}
        np.savez(folder / "data.npz", x=data.x, y=data.y)
        self._service = Service(read_settings(ClientSettings, {**named, "data": str(folder / "data.npz")}))
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None
        self._thread.start()

    def _run(self) -> None:
        try:
            self._service.run(lambda content, finished: None)
        except BaseException as error:
            self.error = error

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self._service.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self.error is None


def test_an_extension_is_fetched_tried_run_and_proves_itself(
    broker: TestBroker, old: Path, new: Path, tmp_path: Path, said: list[str]
) -> None:
    first, second = read_bundle(old), read_bundle(new)
    with RolloutPeer(broker.url, first) as peer, Running(broker, old, tmp_path):
        peer.announce(1, others=(second.sha256,))
        sent = peer.contribution(1)
        peer.answer(1, "ffc")
        peer.give(1, sent, head=True)
        peer.lost = lambda number: number in (3, 9)
        peer.offer(new)
        peer.announce(1, phase="closed", others=(second.sha256,))
        peer.wait_for(lambda: peer.told("rollout") == "2 probation", 90)
        assert peer.told("bundle") == f"2 {second.sha256.hex()[:8]}"
        peer.announce(2, others=(second.sha256,))
        assert peer.contribution(2).bundle == second.sha256[:4]
        peer.answer(2, "ffc")
        peer.give(2, sent, head=True)
        peer.wait_for(lambda: peer.told("rollout") == "2 healthy")
    known = read_rollouts(tmp_path / "s")
    assert (known.floor, known.probation, read_kept(tmp_path / "s").bundle) == (2, None, second.sha256)
    assert any("healthy" in line for line in said)


def test_a_rejected_contribution_brings_the_old_bundle_back_and_it_is_not_tried_again(
    broker: TestBroker, old: Path, new: Path, tmp_path: Path
) -> None:
    first, second = read_bundle(old), read_bundle(new)
    with RolloutPeer(broker.url, first) as peer:
        with Running(broker, old, tmp_path):
            peer.offer(new)
            peer.announce(1, phase="closed", others=(second.sha256,))
            peer.wait_for(lambda: peer.told("rollout") == "2 probation", 90)
            peer.announce(2, others=(second.sha256,))
            peer.contribution(2)
            peer.answer(2, "ffc", "rejected", reason="class rows")
            peer.wait_for(lambda: peer.told("rollout") == "2 failed: rejected: class rows")
            assert peer.told("bundle") == f"1 {first.sha256.hex()[:8]}"
            asked = len(peer.requests)
            peer.announce(3, others=(second.sha256,))
            assert peer.contribution(3).bundle == first.sha256[:4]
        peer.answer(3, "ffc")
        with Running(broker, old, tmp_path):
            peer.announce(4, others=(second.sha256,))
            assert peer.contribution(4).bundle == first.sha256[:4]
            assert peer.told("rollout") == "2 failed: rejected: class rows"
            peer.answer(4, "ffc")
        assert len(peer.requests) == asked


@pytest.fixture
def other(mnist_like_bundle: Callable[..., Path]) -> Path:
    """Of another backbone."""
    return mnist_like_bundle("ffc", private_key=SEED, seed=3, bundle_version=2)


def test_a_fleet_that_nobody_serves_sends_the_device_back(
    broker: TestBroker, old: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(rollout_work, "_NOBODY_S", 2.0)
    monkeypatch.setattr(client, "_IDLE_S", 1.0)
    first = read_bundle(old)
    with RolloutPeer(broker.url, first) as peer, Running(broker, old, tmp_path):
        peer.offer(other, fleet="nowhere")
        peer.announce(1, phase="closed")
        peer.wait_for(lambda: peer.told("rollout").startswith("2 failed: no aggregator for it in fleet nowhere"), 120)
        assert peer.told("bundle").startswith("1 ")
        peer.announce(2)
        peer.contribution(2)
        peer.answer(2, "ffc")
        peer.wait_for(lambda: any("round 2 (ffc): committed" in line for line in said))
    known = read_rollouts(tmp_path / "s")
    assert not list((tmp_path / "s" / "fleets").iterdir())
    assert (known.active.version if known.active else 0, list(known.failed)) == (1, [read_bundle(other).sha256.hex()])
