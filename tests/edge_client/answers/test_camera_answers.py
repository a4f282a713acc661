"""A client with a camera, as a process: it answers, keeps photos, and what is named is in its next round."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
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
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.answers.camera_answers import Answered, CameraAnswers, OwnAnswers
from protofleet.edge_client.answers.predictor import Answers
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of
from protofleet.edge_client.journal.journal import Journal, read_kept
from protofleet.edge_client.photos.kept_photo import KeptPhoto, NewPhoto
from protofleet.edge_client.photos.photo_ring import FILE, PhotoRing, PhotosBeside, basis_of
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.run.camera_work import start_camera
from protofleet.edge_client.settings import ClientSettings
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

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
        assert "decoded" not in done.stdout  # where there is no --data
        assert sum(sent_in(peer, 3).values()) == len(before) - 1
        assert {photo.version for photo in photos.photos()[:20]} == {2}
        until(lambda: (known := read_kept(state).state) is not None and known.version == 3)
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


def test_a_device_that_is_forgotten_says_which_photos_stay_and_they_are_erased_while_it_runs(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    state, log, why = tmp_path / "state", tmp_path / "client.log", "it was forgotten; fleet admit pi-1 lets it in again"
    shown(tmp_path, bundle, (5, 8), 4)
    with Peer(broker.url, bundle) as peer:
        client = start()
        first = kept(tmp_path, 8)
        assert run("learn", first[0].id, label_of(first[0]), "--state", state).returncode == 0
        for number in (1, 2):  # said once
            peer.announce(number, "ncm")
            peer.contribution(number)
            peer.answer(number, "ncm", "rejected", reason=why)
            peer.announce(number, "ncm", phase="closed")
            until(lambda number=number: f"round {number} (ncm): rejected" in log.read_text())  # type: ignore[misc]
        until(lambda: PhotosBeside(state).refused == why)
        stay = f"({why}); the photos of its camera, 8 now, stay here until protofleet photos --erase --state {state}"
        assert log.read_text().count(f"the fleet takes nothing more of this device {stay}") == 1
        assert f"takes nothing more of this device ({why}); its photos stay" in run("photos", "--state", state).stdout
        trace = PhotosBeside(state).image(first[3])[-120:-60]
        done = run("photos", "--erase", "--state", state, "--json", "-")
        assert json.loads(done.stdout)["erased"] == 8
        assert PhotosBeside(state).photos() == []
        assert [file for file in state.rglob("*") if file.is_file() and trace in file.read_bytes()] == []
        shown(tmp_path, bundle, (2,), 1, seed=5)  # it goes on
        kept(tmp_path, 1)
        assert sent_in(peer, 3) == {label_of(first[0]): 1}  # the label has its effect once it is admitted
        until(lambda: PhotosBeside(state).refused == "")
        assert client.poll() is None


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
    photos = PhotosBeside(tmp_path / "state")
    kept = photos.photos()
    assert kept
    assert all("door.mp4#t=" in photo.name for photo in kept)
    for photo in kept:  # what lies outside of the crop is shown to nobody
        assert Image.open(io.BytesIO(photos.image(photo))).size == (32, 48)


def test_only_what_moved_is_kept_and_a_still_scene_does_not_delay_the_end(
    broker: TestBroker, bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    from camera_samples import place_in, scene

    for number, place in enumerate([None] * 8 + [0, 0, 2, 2] + [None] * 4):
        picture = scene(number, place=place, gain=1.0 + 0.2 * np.sin(number))
        path = tmp_path / "camera" / f"{number:02}.png"
        Image.fromarray(picture).save(path)
        os.utime(path, (1_000_000 + number, 1_000_000 + number))
    with Peer(broker.url, bundle) as peer:
        client = start("--on-motion")
        names = [Path(photo.name).name for photo in kept(tmp_path, 4)]
        assert names == ["12.png", "10.png", "08.png", "00.png"]
        places = [place_in(np.asarray(Image.open(tmp_path / "camera" / name))) for name in names]
        assert places == [None, 2, 0, None]
        assert sent_in(peer, 1) == {}
        assert len(kept(tmp_path, 4)) == 4
        client.send_signal(signal.SIGTERM)
        assert client.wait(60) == 143


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


def test_a_label_goes_with_what_was_answered_before_anybody_named_the_photo(bundle: Bundle, tmp_path: Path) -> None:
    """Also where it was taken back, and a head that had learned it answered again."""
    Journal(tmp_path, fleet="fleet", device="pi-1", bundle=bundle.sha256).close()
    ring = PhotoRing(tmp_path, basis_of(bundle.manifest))
    for answer in ("Coat", "Shirt"):
        x = np.full(bundle.manifest.input_shape, len(answer), np.uint8)
        new = NewPhoto(x, np.repeat(x, 3, 2), answer, 1.0, np.ones(8, np.float32), answer)
        ring.keep(new)
    plain, again = ring.photos()
    ring.naming([again])
    ring.answered_anew(again, replace(new, answer="Bag"))
    ring.no_longer_named([again])
    ring.close()
    for photo in (plain, again):
        done = run("learn", photo.id, "Bag", "--state", tmp_path, "--bundle", BUNDLE)
        assert done.returncode == 0, done.stderr
    assert Learned(tmp_path).asked_before() == [("Bag", "Shirt"), ("Bag", "Coat")]


def test_a_client_that_looks_lets_go_what_was_kept_for_long_enough(
    bundle: Bundle, start: Start, tmp_path: Path
) -> None:
    (tmp_path / "policy.toml").write_text('keep_photos_for = "1h"\n')
    shown(tmp_path, bundle, (1, 9), 2)
    for path in (tmp_path / "camera").iterdir():
        os.utime(path, (1000.0, 1000.0))
    client = start("--policy", tmp_path / "policy.toml")
    kept(tmp_path, 4)
    client.send_signal(signal.SIGUSR1)  # as every ten minutes
    until(lambda: PhotosBeside(tmp_path / "state").photos() == [])
    assert client.poll() is None


def test_a_clients_photos_have_the_room_and_the_time_that_its_owner_says(bundle: Bundle, tmp_path: Path) -> None:
    """An earlier start let more of them stay."""
    state, folder = tmp_path / "state", tmp_path / "camera"
    for each in (state, folder):
        each.mkdir()
    ring, rng = PhotoRing(state, basis_of(bundle.manifest)), np.random.default_rng(0)
    for number in range(40):
        x, view = np.full(bundle.manifest.input_shape, number, np.uint8), rng.integers(0, 256, (800, 800, 3), np.uint8)
        ring.keep(NewPhoto(x, view, "earlier", 1000.0 + number, np.ones(8, np.float32)))
    assert ring.taken_bytes > 12_000_000
    ring.close()
    given = {"bundle": BUNDLE, "broker": "mqtt://h", "id": "pi-1", "state": state, "camera": f"folder:{folder}"}
    given |= {"every": "0.01", "keep_photos": "10MB"}
    settings = read_settings(ClientSettings, {name: str(value) for name, value in given.items()})

    @contextlib.contextmanager
    def taking(policy: Policy) -> Iterator[PhotosBeside]:
        with contextlib.ExitStack() as parts:
            ledger = parts.enter_context(Ledger(state / "ledger.sqlite"))
            start_camera(
                settings, policy, bundle, CompiledGraphs(bundle), directory=state, learned=Learned(state),
                ledger=(ledger, state / "ledger.sqlite"), look=lambda: None, tells_proposed=False, tells_unknown=False,
                parts=parts,
            )  # fmt: skip
            yield PhotosBeside(state)

    with taking(Policy()) as photos:
        assert 9_000_000 < photos.taken_bytes <= 10_000_000
        assert [photo.taken_s for photo in photos.photos()][:2] == [1039.0, 1038.0]
    Image.fromarray(rng.integers(0, 256, (40, 40, 3), np.uint8)).save(folder / "new.png")
    os.utime(folder / "new.png", (4630.0, 4630.0))
    with taking(Policy(keep_photos_for="1h")) as photos:
        until(lambda: photos.photos(1)[0].taken_s == 4630.0)
        assert {photo.taken_s for photo in photos.photos()} == {4630.0, *range(1030, 1040)}


@pytest.mark.parametrize("is_unknown", [False, True])
def test_a_photo_is_kept_with_the_probability_of_its_answer_and_whether_it_is_unknown(
    is_unknown: bool, bundle: Bundle, tmp_path: Path
) -> None:
    """The class of the best score is another one: class shares are in the probabilities."""

    class Sure(OwnAnswers):
        def about(self, x: np.ndarray) -> tuple[np.ndarray, Answers | None, float]:
            scores, shares = np.array([[9.0, 1.0, 2.0]]), np.array([[0.2, 0.7, 0.1]])
            answers = Answers(("a", "b", "c"), scores, np.array([1.5]), np.array([is_unknown]), 3, shares)
            return np.eye(8, dtype=np.float32)[0], answers, 0.25

    (tmp_path / "camera").mkdir()
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "camera" / "a.png")
    ring, answers = PhotoRing(tmp_path, basis_of(bundle.manifest)), Sure(tmp_path, bundle, CompiledGraphs(bundle))
    camera = CameraAnswers(camera_of(f"folder:{tmp_path / 'camera'}"), answers, ring, every_s=0.01)
    camera.start()
    until(lambda: camera.taken == 1)
    camera.stop()
    (kept,) = ring.photos()
    assert (kept.answer, kept.probability, kept.novelty, kept.uncertainty) == ("b", 0.7, 1.5, 0.25)
    assert (kept.is_unknown, kept.version) == (is_unknown, 3)
    assert camera.newest == Answered(kept.id, "b", 0.7, is_unknown)
    ring.close()


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
