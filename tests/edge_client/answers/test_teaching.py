"""A device is taught while its client takes part: both on one state directory, in one process, or as two, killed.

The network is the shipped one, which trains nothing: class means say how many photos of each class a device has.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from commands import one_error_line, run
from edge_peer import Peer
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

import protofleet
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.journal.journal import read_kept

OWN = (0, 3, 8)
TESTS = Path(__file__).parents[2]
BUNDLE = TESTS.parent / "lab" / "demo" / "shipped" / "fleet.bundle"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def photos(bundle: Bundle, tmp_path: Path) -> Path:
    """60 photos of three classes, of which a client holds a tenth out."""
    data = fashion(bundle, 60, OWN)
    np.savez(tmp_path / "train.npz", x=data.x, y=data.y)
    return tmp_path / "train.npz"


class Client:
    """A device in a thread of this process, until `stop`."""

    def __init__(self, broker: TestBroker, photos: Path) -> None:
        given = {"broker": broker.url, "id": "pi-1", "data": photos, "state": photos.parent / "state"}
        self._device = protofleet.Device(BUNDLE, **given)
        self._thread = threading.Thread(target=self._device.run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._device.stop()
        self._thread.join(30)
        assert not self._thread.is_alive()


Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(broker: TestBroker, photos: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts the client as a process."""
    running: list[subprocess.Popen[bytes]] = []

    def go() -> subprocess.Popen[bytes]:
        words = ["--bundle", BUNDLE, "--broker", broker.url, "--id", "pi-1", "--data", photos]
        command = [sys.executable, "-m", "protofleet", "client", *words, "--state", tmp_path / "state"]
        with (tmp_path / "client.log").open("ab") as log:
            running.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log))
        return running[-1]

    yield go
    for process in running:
        process.kill()
        process.wait()


def sent_in(peer: Peer, number: int) -> dict[str, int]:
    """A round of class means: how many samples of each class the contribution holds."""
    peer.announce(number, "ncm")
    sent: Contribution = peer.contribution(number)
    peer.answer(number, "ncm")
    peer.give(number, sent, head=True)
    counts = {FASHION_LABELS[c]: int(n) for c, n in zip(sent.body.classes, sent.counts, strict=True)}
    peer.announce(number, "ncm", phase="closed")
    return counts


def added(now: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    found = {label: now.get(label, 0) - before.get(label, 0) for label in {*now, *before}}
    return {label: number for label, number in found.items() if number}


def test_the_next_contribution_holds_what_was_learned_and_answers_follow(
    broker: TestBroker, bundle: Bundle, photos: Path, tmp_path: Path, said: list[str]
) -> None:
    state, new = tmp_path / "state", fashion(bundle, 6, (5, 7), seed=3)
    for row in range(2):
        Image.fromarray(new.x[row][..., 0]).save(tmp_path / f"{row}.png")
    with Peer(broker.url, bundle) as peer:
        client = Client(broker, photos)
        plain = sent_in(peer, 1)
        assert sum(plain.values()) == 54
        wait_for_version(state, 1)
        predictor = protofleet.Predictor(state)
        assert predictor(new.x).version == 1
        done = run("learn", tmp_path / "0.png", "Sandal", "--state", state, "--json", "-")
        assert (done.returncode, '"outcome": "learned"' in done.stdout) == (0, True)
        assert (
            "1 example learned on this device, the first that you taught it of Sandal; answers change once"
            in done.stderr
        )
        assert added(sent_in(peer, 2), plain) == {"Sandal": 1}
        wait_for_version(state, 2)
        assert predictor(new.x).version == 2
        assert run("learn", tmp_path / "0.png", "Sneaker", "--state", state).returncode == 0
        client.stop()  # a new start comes to the same
        assert [predictor.learn(tmp_path / "1.png", "Sneaker"), predictor.learn(new.x[1], "Sneaker")] == [
            "learned", "known",
        ]  # fmt: skip
        client = Client(broker, photos)
        assert added(sent_in(peer, 3), plain) == {"Sneaker": 2}
        (state / "images").mkdir()  # as where --data is a folder
        done = run("unlearn", tmp_path / "0.png", "--state", state)
        assert done.returncode == 0, done.stderr
        assert "what its client decoded of the photo goes when it looks at its samples next" in done.stdout
        assert predictor.unlearn(new.x[1]) == "Sneaker"
        assert sent_in(peer, 4) == plain
        wait_for_version(state, 4)
        assert predictor(new.x).version == 4
        client.stop()
    assert any(line.startswith("54 samples of 3 classes, 6 held-out photos, bundle") for line in said)
    assert said.count("the photos have changed: 54 samples now") == 1
    assert any(line.startswith("56 samples of 4 classes, 2 of them learned, 6 held-out photos,") for line in said)


@pytest.mark.slow
def test_predict_follows_the_client_that_runs_and_outlives_it(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    """A watched folder: each photo is answered from the newest global state, and nothing is started again."""
    folder, out = tmp_path / "new", tmp_path / "answers.jsonl"
    folder.mkdir()

    def answered(name: str) -> int:
        Image.fromarray(fashion(bundle, 1, (5,)).x[0][..., 0]).save(folder / name)
        deadline = time.monotonic() + 60
        while not out.exists() or name not in out.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (line,) = [json.loads(line) for line in out.read_text().splitlines() if name in line]
        return int(line["global_version"])

    with Peer(broker.url, bundle) as peer:
        client = start()
        sent_in(peer, 1)
        wait_for_version(tmp_path / "state", 1)
        words = ["predict", folder, "--follow", "--every", "0.05", "--state", tmp_path / "state", "--json", out]
        with (tmp_path / "said").open("w") as said:
            command = [sys.executable, "-m", "protofleet", *map(str, words)]
            follower = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said)
        try:
            assert answered("first.png") == 1
            sent_in(peer, 2)
            wait_for_version(tmp_path / "state", 2)
            assert answered("second.png") == 2
            client.kill()
            client.wait()
            assert answered("third.png") == 2
            start()
            sent_in(peer, 3)
            wait_for_version(tmp_path / "state", 3)
            assert answered("fourth.png") == 3
        finally:
            follower.kill()
            follower.wait()
    taken_up = [line for line in (tmp_path / "said").read_text().splitlines() if line.startswith("taken up")]
    assert [line.split("global version ")[1][0] for line in taken_up] == ["2", "3"]


def wait_for_version(state: Path, version: int) -> None:
    """Until the client has written it."""
    deadline = time.monotonic() + 60
    while (kept := read_kept(state).state) is None or kept.version < version:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_cannot_be_taught_is_one_line(tmp_path: Path) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    done = run("learn", tmp_path / "a.png", "Dress", "--state", tmp_path)
    assert (done.returncode, "expected a journal, got no such file" in one_error_line(done)) == (1, True)
    done = run("learn", tmp_path / "a.png", "Dress")
    assert (done.returncode, "--state, expected a value, got none" in one_error_line(done)) == (2, True)


TEACH = """
import sys
import numpy as np
import protofleet
predictor = protofleet.Predictor(sys.argv[1])
rng = np.random.default_rng(int(sys.argv[2]))
while True:
    predictor.learn(rng.integers(0, 256, (28, 28, 1), np.uint8), "Bag")
    print("taught", flush=True)
"""


@pytest.mark.slow
def test_while_a_client_takes_part_a_predictor_teaches_and_both_are_killed(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    """Each contribution holds all that was taught before its round opened, and at the end all that was confirmed."""
    env = {**os.environ, "PYTHONPATH": f"{TESTS / 'support'}{os.pathsep}{TESTS.parent}"}
    with Peer(broker.url, bundle) as peer:
        client = start()
        bags = sent_in(peer, 1).get("Bag", 0)
        confirmed = 0
        for number in range(2, 5):
            command = [sys.executable, "-c", TEACH, str(tmp_path / "state"), str(number)]
            said = (tmp_path / "taught").open("w+")
            teacher = subprocess.Popen(command, stdout=said, env=env)
            while not said.seek(0) and not said.read():
                assert teacher.poll() is None
                time.sleep(0.01)
            if number % 2:
                client.send_signal(signal.SIGKILL)
                client.wait()
                client = start()
            found = sent_in(peer, number)["Bag"] - bags
            assert found >= confirmed + 1
            teacher.send_signal(signal.SIGKILL)
            teacher.wait()
            said.seek(0)
            confirmed += said.read().count("taught\n")
            assert found <= confirmed + 2 * number
            said.close()
        last = sent_in(peer, 5)["Bag"] - bags
    assert confirmed <= last <= confirmed + 3  # what was on the disk when its teacher was killed before it said so
