"""A client with a camera, as a process: it answers, keeps photos, and what is named is in its next round."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from camera_samples import scripted
from commands import one_error_line, run
from edge_peer import Peer
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.data.learned import LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import KeptPhoto
from protofleet.edge_client.photos.photo_ring import FILE, PhotosBeside

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"
Start = Callable[..., "subprocess.Popen[bytes]"]


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
def start(broker: TestBroker, tmp_path: Path) -> Iterator[Start]:
    """Starts a client with a camera, which is a folder, and with no labelled photos."""
    running: list[subprocess.Popen[bytes]] = []
    (tmp_path / "camera").mkdir()

    def go(*more: object, camera: str = f"folder:{tmp_path / 'camera'}") -> subprocess.Popen[bytes]:
        words = ["--bundle", BUNDLE, "--broker", broker.url, "--id", "pi-1", "--state", tmp_path / "state"]
        command = [sys.executable, "-m", "protofleet", "client", *words, "--camera", camera, "--every", "0.1", *more]
        with (tmp_path / "client.log").open("ab") as log:
            running.append(subprocess.Popen([str(word) for word in command], stdout=log, stderr=log))
        return running[-1]

    yield go
    for process in running:
        process.kill()
        process.wait()


def shown(tmp_path: Path, bundle: Bundle, classes: tuple[int, ...], each: int, seed: int = 3) -> set[bytes]:
    """Photos of these classes come before the camera; gives each of them once."""
    data = fashion(bundle, each * len(classes), classes, seed=seed)
    for row, image in enumerate(data.x):
        Image.fromarray(image[..., 0]).save(tmp_path / "camera" / f"{FASHION_LABELS[data.y[row]]}-{seed}-{row}.png")
    return {image.tobytes() for image in data.x}


def kept(tmp_path: Path, least: int, timeout_s: float = 60.0) -> list[KeptPhoto]:
    """The kept photos, once there are so many."""
    photos, deadline = PhotosBeside(tmp_path / "state"), time.monotonic() + timeout_s
    while not photos.is_there or len(photos.photos()) < least:
        assert time.monotonic() < deadline, (tmp_path / "client.log").read_text()
        time.sleep(0.05)
    return photos.photos()


def label_of(photo: KeptPhoto) -> str:
    return Path(photo.name).name.split("-")[0]


def sent_in(peer: Peer, number: int) -> dict[str, int]:
    """A round of class means: how many samples of each class the contribution holds."""
    peer.announce(number, "ncm")
    sent: Contribution = peer.contribution(number)
    peer.answer(number, "ncm")
    peer.give(number, sent, head=True)
    peer.announce(number, "ncm", phase="closed")
    return {FASHION_LABELS[c]: int(n) for c, n in zip(sent.body.classes, sent.counts, strict=True)}


def until(true: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_device_with_a_camera_alone_is_taught_its_photos_and_then_answers(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    state, photos = tmp_path / "state", PhotosBeside(tmp_path / "state")
    before = shown(tmp_path, bundle, (5, 8), 6)
    with Peer(broker.url, bundle) as peer:
        client = start()
        first = kept(tmp_path, len(before))
        assert {label_of(photo) for photo in first} == {"Sandal", "Bag"}
        assert sent_in(peer, 1) == {}
        for photo in first:
            done = run("learn", photo.id, label_of(photo), "--state", state)
            assert done.returncode == 0, done.stderr
        assert all(photo.waits for photo in photos.photos())
        assert sent_in(peer, 2) == Counter(map(label_of, first))
        until(lambda: not any(photo.waits for photo in photos.photos()))  # the fleet has them
        after = shown(tmp_path, bundle, (5, 8), 8, seed=4)
        newer = [photo for photo in kept(tmp_path, len(before | after)) if "-4-" in photo.name]
        assert {photo.version for photo in newer} == {2}
        assert {photo.answer for photo in newer} <= {"Sandal", "Bag"}
        assert all(photo.novelty is not None for photo in newer)
        done = run("labels", "--state", state, "--json", "-")
        report = json.loads(done.stdout)
        found = {one["label"]: one["labels"] for one in report["classes"] if one["labels"]}
        assert found == Counter(map(label_of, first))
        assert report["most_helpful"] in FASHION_LABELS
        assert "would help most" in done.stderr
        done = run("suggest", "--state", state, "--json", "-", "--count", "4")
        suggested = [json.loads(line) for line in done.stdout.splitlines()]
        assert {one["photo"] for one in suggested} <= {photo.id for photo in newer}
        assert suggested
        assert all(one["times"] >= one["alike"] >= 1 for one in suggested)
        done = run("unlearn", first[0].id, "--state", state)
        assert (done.returncode, photos.find(first[0].id)) == (0, None)
        assert sum(sent_in(peer, 3).values()) == len(before) - 1
        assert {photo.version for photo in photos.photos()[:20]} == {2}
        shown(tmp_path, bundle, (2,), 1, seed=5)  # with the next picture the last ones are asked about again
        until(lambda: {photo.version for photo in photos.photos()[:20]} == {3})
        client.send_signal(signal.SIGTERM)
        assert client.wait(60) == 143
    assert os.stat(state / FILE).st_mode & 0o777 == 0o600


def test_a_label_that_was_confirmed_is_in_the_next_round_though_the_client_was_killed(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    shown(tmp_path, bundle, (1, 9), 4)
    with Peer(broker.url, bundle) as peer:
        client = start()
        for number, photo in enumerate(kept(tmp_path, 8), 1):
            PhotosBeside(tmp_path / "state").naming([photo])
            example = example_of(PhotosBeside(tmp_path / "state").image(photo, "png"), bundle.manifest)
            LearnedFile(tmp_path / "state", bundle.manifest.labels).learn(example, label_of(photo))
            if number % 4 == 0:
                client.kill()
                client.wait()
                client = start()
                assert sum(sent_in(peer, number).values()) == number
    assert len(kept(tmp_path, 8)) == 8


def test_a_camera_that_is_gone_is_one_line_and_the_client_stays(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    with Peer(broker.url, bundle) as peer, scripted(lambda connection: connection.close()) as port:
        client = start(camera=f"http://me:hunter2@127.0.0.1:{port}/snap?pwd=hunter2")
        log = tmp_path / "client.log"
        until(lambda: "gives no picture" in log.read_text())
        assert sent_in(peer, 1) == {}
        assert client.poll() is None
    assert log.read_text().count("gives no picture") == 1
    assert "hunter2" not in log.read_text()


def test_a_video_that_ends_does_not_end_the_client(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    from camera_samples import video

    path = video(tmp_path / "door.mp4", [40, 90, 200, 250] * 5)
    with Peer(broker.url, bundle) as peer:
        client = start("--crop", "0,0,32,48", camera=f"file:{path}")
        until(lambda: "has ended after" in (tmp_path / "client.log").read_text())
        assert sent_in(peer, 1) == {}
        assert client.poll() is None
    names = [photo.name for photo in PhotosBeside(tmp_path / "state").photos()]
    assert names
    assert all("door.mp4#t=" in name for name in names)


def test_the_policy_says_whether_photos_are_kept_and_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "camera").mkdir()
    (tmp_path / "policy.toml").write_text("keep_photos = false\n")
    words = ["client", "--bundle", BUNDLE, "--broker", "mqtt://127.0.0.1:1", "--id", "pi-1", "--state", tmp_path / "s"]
    camera = ["--camera", f"folder:{tmp_path / 'camera'}"]
    for more, said in (
        ([*camera, "--policy", tmp_path / "policy.toml"], "--camera, expected a --policy that lets photos be kept"),
        ([], "expected --data, or --camera, got none"),
        (["--camera", "folder:nowhere"], "no folder at nowhere"),
        (["--camera", "door"], "--camera, expected v4l2:0"),
        (["--data", "d", "--crop", "0,0,4,4"], "--crop, expected --camera"),
        ([*camera, "--crop", "1,2"], "--crop, expected X,Y,WIDTH,HEIGHT"),
        ([*camera, "--every", "0"], "--every, expected 0.01s to 1d"),
        ([*camera, "--keep-photos", "64"], "--keep-photos, expected a size from 10MB"),
    ):
        done = run(*words, *more)
        assert said in one_error_line(done)
        assert done.returncode != 0
    assert not (tmp_path / "s").exists()


def test_an_id_that_is_not_kept_is_one_line(tmp_path: Path, bundle: Bundle, broker: TestBroker, start: Start) -> None:
    shown(tmp_path, bundle, (1,), 1)
    client = start()
    (photo,) = kept(tmp_path, 1)
    done = run("learn", "0123456789ab", "Bag", "--state", tmp_path / "state", "--json", "-")
    assert "expected an image file, or the id of a kept photo, got neither" in one_error_line(done)
    assert done.returncode != 0
    done = run("learn", photo.id, "Bagg", "--state", tmp_path / "state")
    assert "try one of Bag" in one_error_line(done)
    done = run("learn", f"20261126T160503.120Z-{photo.id}", "Bag", "--state", tmp_path / "state", "--json", "-")
    assert json.loads(done.stdout)["outcome"] == "learned"
    assert np.all([found.waits for found in kept(tmp_path, 1)])
    assert client.poll() is None
