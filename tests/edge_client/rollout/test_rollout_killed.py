"""A device as a process that is killed again and again while a bundle is rolled out to it, and rolled back."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import BROKERS, TestBroker, make_broker
from edge_peer import FLEET
from edge_samples import fashion
from rollout_peer import SEED, RolloutPeer, trusted

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.rollout.rollout_file import read_rollouts
from protofleet.export.bundles.extend import extend_bundle

pytestmark = pytest.mark.slow


@pytest.fixture(params=BROKERS)
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker(request.param, tmp_path)
    found.start()
    yield found
    found.stop()


class Process:
    """The device; `kill` takes its power, `start` gives it back."""

    def __init__(self, broker: TestBroker, bundle: Path, folder: Path) -> None:
        data = fashion(read_bundle(bundle), 60, (0, 1, 2))
        np.savez(folder / "data.npz", x=data.x, y=data.y)
        self.state = folder / "state"
        named = {"bundle": bundle, "broker": broker.url, "id": "pi-1", "fleet": FLEET, "data": folder / "data.npz"}
        named |= {"state": self.state, "trust": trusted(folder), "hold-out": 0.2}
        words = [str(word) for name, value in named.items() for word in (f"--{name}", value)]
        self._command = [sys.executable, "-m", "protofleet", "client", *words]
        self._log = (folder / "log").open("ab")
        self.start()

    def start(self) -> None:
        self.running = subprocess.Popen(self._command, stdout=self._log, stderr=self._log)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.running.send_signal(how)
        self.running.wait()


class Kills:
    """Kills a device some time after each of its births; in the self-test and on probation once each, since three that
    do not get through are the end of it, and a word may be told a moment after what it says."""

    def __init__(self, device: Process, rng: random.Random) -> None:
        self._device, self._rng, self._boot, self._at_s = device, rng, 0, float("inf")
        self.done, self._left = 0, {"testing": 1, "probation": 1}  # kills that are left
        self.newest_s = time.monotonic()

    def look(self, peer: RolloutPeer) -> None:
        """Kill it now, if it is time."""
        born = [status.boot for status in peer.statuses if status.online]
        if born and born[-1] != self._boot:
            self._boot, self._at_s = born[-1], time.monotonic() + self._rng.uniform(0.0, 1.5)
        if time.monotonic() < self._at_s or self.done == 15:
            return
        word = peer.told("rollout").rpartition(" ")[2]
        if self._left.get(word, 1) > 0:
            self._device.kill()
            self._device.start()
            self.done, self.newest_s = self.done + 1, time.monotonic()
            if word in self._left:
                self._left[word] -= 1
        self._at_s = float("inf")


@pytest.fixture
def paths(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    old, new = mnist_like_bundle("ffc", private_key=SEED), tmp_path / "new.bundle"
    extend_bundle(old, ["hamster"], new, private_key=SEED)
    return old, new


@pytest.mark.parametrize("ends", ["committed", "rejected"])
def test_killed_at_any_moment_it_comes_to_the_same_end(
    broker: TestBroker, paths: tuple[Path, Path], tmp_path: Path, ends: str
) -> None:
    """From the offer to the verdict, and after it; of every round the same bytes are sent, however often."""
    (old, new), rng = paths, random.Random(ends)
    first, second = read_bundle(old), read_bundle(new)
    device, others = Process(broker, old, tmp_path), {"others": (second.sha256,)}
    try:
        with RolloutPeer(broker.url, first, piece_bytes=3_000) as peer:
            peer.announce(1, **others)
            sent = peer.contribution(1)
            peer.answer(1, "ffc")
            peer.give(1, sent, head=True)
            peer.wait_for(lambda: read_kept(device.state).state is not None)
            peer.offer(new)
            peer.announce(2, **others)
            ended, kills = ("2 healthy", "2 failed"), Kills(device, rng)
            opened = 2
            while not peer.told("rollout").startswith(ended):
                assert time.monotonic() < kills.newest_s + 240, (tmp_path / "log").read_text()
                message = peer.receive()
                if isinstance(message, Contribution):
                    by_new = message.bundle == second.sha256[:4]
                    assert not by_new or read_rollouts(device.state).active is not None
                    how = ends if by_new else "committed"
                    peer.answer(message.round, "ffc", how, reason="rows" if how == "rejected" else "")
                    if message.round == opened:
                        opened += 1
                        peer.announce(opened, **others)
                kills.look(peer)
            assert kills.done >= 2  # how many depends on the machine
            device.kill()
            device.start()
            peer.statuses.clear()
            peer.wait_for(lambda: peer.told("rollout").startswith(ended))
    finally:
        device.kill(signal.SIGTERM)
    known, kept = read_rollouts(device.state), read_kept(device.state)
    now = second if ends == "committed" else first
    assert (kept.bundle, known.probation, known.active is not None) == (now.sha256, None, True)
    assert (second.sha256.hex() in known.failed) == (ends == "rejected")
    sent = [message for payload in peer.uplink if isinstance(message := decode(payload), Contribution)]
    assert len({encode(message) for message in sent}) == len({message.round for message in sent})
