"""From a finished fleet to answers: `protofleet predict` and `protofleet.Predictor`, on what real processes left.

One FedProto fleet of two devices with a closing FFC round, and one NCM fleet, each of processes over a real broker.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import shared
from brokers import Embedded, free_port
from camera_samples import jpeg, rtsp_server, scene, video, video_of
from fleets import CLASSES, ENVIRONMENT, LABELS, Samples, bundle, error_line, fleet_in, run, share
from PIL import Image
from safetensors.numpy import load, save

import protofleet
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows
from protofleet.edge_client.answers import predictor
from protofleet.edge_client.answers.predictor import Knowledge
from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.training.extractor import Extractor

HELD = ((0, 1, 2), (2, 3, 4))


@dataclass
class Finished:
    """What a fleet left behind."""

    folder: Path
    bundle: Path
    photos: Path
    x: np.ndarray
    y: np.ndarray

    @property
    def store(self) -> Path:
        return self.folder / "store.sqlite"

    def state(self, index: int = 0) -> Path:
        return self.folder / f"state-d{index}"


def _finished(method: str) -> Finished:
    """Once a run: `protofleet/commands/test_model.py` looks at the same two fleets, and neither changes what they
    left."""
    folder = shared.once(f"finished-{method}", lambda folder: _run(folder, method))
    return Finished(folder, folder / "f.bundle", folder / "photos", *_asked())


def _asked() -> Samples:
    return share(5, range(CLASSES), 40)


def _run(folder: Path, method: str) -> None:
    folder.mkdir()
    x, y = _asked()
    np.savez(folder / "test.npz", x=x, y=y)
    with fleet_in(folder) as fleet:
        path = bundle(folder / "f.bundle", method)
        fleet.aggregator([path], "--rounds", 1, "--min-clients", 2)
        for index, held in enumerate(HELD):
            fleet.client(f"d{index}", path, share(index, held, 60), "--test", folder / "test.npz")
        assert set(fleet.finish().values()) == {0}, fleet.log("aggregator")
    photos = folder / "photos"
    for row, image in enumerate(x):
        place = photos / ("in" if row % 2 else "")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[..., 0]).save(place / f"{row:02d}.png")


@pytest.fixture(scope="module")
def trained() -> Finished:
    return _finished("fedproto")


@pytest.fixture(scope="module")
def frozen() -> Finished:
    return _finished("ncm")


def _lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ── what a device keeps ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_device_keeps_the_state_that_the_aggregator_published_last(trained: Finished) -> None:
    from protofleet.aggregator.store.stored_run import read_state

    identity, published = read_state(trained.store)
    assert identity == read_bundle(trained.bundle).sha256
    for index in range(2):
        kept = read_kept(trained.state(index))
        assert (kept.state.run, kept.state.version, kept.rounds) == (published.run, 2, 2)
        assert set(kept.state.rows) == {"prototypes", "head"}
        for kind, rows in published.rows.items():
            np.testing.assert_array_equal(kept.state.rows[kind].classes, rows.classes)
            np.testing.assert_allclose(kept.state.rows[kind].rows, rows.rows, rtol=1e-6)  # it came as f32
        assert kept.bundle_path == trained.bundle.resolve()


def test_own_class_means_and_spreads_are_those_of_the_kept_weights(trained: Finished) -> None:
    kept, found = read_kept(trained.state()), read_bundle(trained.bundle)
    x, y = share(0, HELD[0], 60)
    features = Extractor(found, {**found.params, **kept.weights}).features(x).astype(np.float64)
    for j in range(CLASSES):
        mine = features[y == j]
        assert kept.means.classes.counts[j] == len(mine)
        if len(mine):
            mean = mine.mean(axis=0)
            np.testing.assert_allclose(kept.means.classes.means[j], mean, rtol=1e-5, atol=1e-6)
            spread = np.mean([(z - mean) @ (z - mean) for z in mine])
            np.testing.assert_allclose(kept.means.spread[j], spread, rtol=1e-4)


# ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_devices_own_way_is_the_nearest_global_prototype_of_its_own_features(trained: Finished) -> None:
    answers = protofleet.Predictor(trained.state())(trained.x)
    kept, found = read_kept(trained.state()), read_bundle(trained.bundle)
    features = Extractor(found, {**found.params, **kept.weights}).features(trained.x)
    prototypes, present = kept.state.prototypes.dense(CLASSES, features.shape[1])
    assert present.all()
    wanted = [int(np.argmin(((prototypes - z) ** 2).sum(axis=1))) for z in features.astype(np.float64)]
    assert answers.classes.tolist() == wanted
    assert answers.labels == [LABELS[number] for number in wanted]


@pytest.mark.parametrize("known", ["state", "store"])
def test_the_fleets_head_answers_the_same_on_a_device_and_anywhere_else(trained: Finished, known: str) -> None:
    if known == "state":
        predictor = protofleet.Predictor(trained.state(1), way="linear")
    else:
        predictor = protofleet.Predictor(trained.bundle, store=trained.store)
    assert predictor.way == "linear"
    answers = predictor(trained.x)
    kept, found = read_kept(trained.state(1)), read_bundle(trained.bundle)
    head = kept.state.head.dense(CLASSES, found.manifest.features)[0]
    z = unit_rows(Extractor(found, found.params).features(trained.x).astype(np.float64))
    np.testing.assert_allclose(answers.scores, [[w @ f for w in head] for f in z], rtol=1e-5, atol=1e-6)
    assert np.mean(answers.classes == trained.y) > 0.6  # devices held three classes each


def test_class_means_say_what_is_unknown_by_a_limit_from_held_out_photos(frozen: Finished) -> None:
    predictor = protofleet.Predictor(frozen.state())
    kept, found = read_kept(frozen.state()), read_bundle(frozen.bundle)
    assert (predictor.way, predictor.threshold) == ("class_mean", kept.calibration.limit)
    answers = predictor(frozen.x)  # it was tested on these
    assert answers.unknown.mean() <= 0.05
    means = kept.state.rows["means"].dense(CLASSES, found.manifest.features)[0]
    z = unit_rows(Extractor(found, found.params).features(frozen.x).astype(np.float64))
    apart = np.min([[(f - mu) @ (f - mu) for mu in means] for f in z], axis=1)
    scale = predictor.answering.answer.scale
    np.testing.assert_allclose(answers.novelty, (apart - 1.0) / (2.0 * scale), rtol=1e-4)


def test_class_means_say_what_is_unknown_from_their_own_lengths_where_no_photos_are_held_out(frozen: Finished) -> None:
    predictor = protofleet.Predictor(frozen.bundle, store=frozen.store)
    assert (predictor.way, predictor.threshold) == ("class_mean", 2.0)
    answers = predictor(frozen.x)
    kept, found = read_kept(frozen.state()), read_bundle(frozen.bundle)
    means = kept.state.rows["means"].dense(CLASSES, found.manifest.features)[0]
    z = unit_rows(Extractor(found, found.params).features(frozen.x).astype(np.float64))
    ratio = [[(f - mu) @ (f - mu) / (1 - mu @ mu) for mu in means] for f in z]
    np.testing.assert_allclose(answers.novelty, np.min(ratio, axis=1), rtol=1e-4)
    assert answers.unknown.tolist() == (np.min(ratio, axis=1) > 2.0).tolist()
    noise = np.random.default_rng(0).integers(0, 256, (40, *frozen.x.shape[1:]), dtype=np.uint8)
    assert np.median(predictor(noise).novelty) > np.median(answers.novelty)
    limit = predictor.calibrate(frozen.x, 0.5)
    assert predictor(frozen.x).unknown.sum() == 20
    assert limit == pytest.approx(np.median(answers.novelty))


def test_a_single_image_is_a_batch_of_one_and_top_is_in_order(trained: Finished) -> None:
    predictor = protofleet.Predictor(trained.state())
    one, all_ = predictor(trained.x[3]), predictor(trained.x)
    assert len(one) == 1
    assert one.labels[0] == all_.labels[3]
    best = all_.top(3, 99)
    assert len(best) == CLASSES
    assert [score for _, score in best] == sorted((score for _, score in best), reverse=True)
    assert best[0][0] == all_.labels[3]


def test_what_cannot_answer_says_so_in_one_line(trained: Finished, frozen: Finished, tmp_path: Path) -> None:
    error = protofleet.ProtofleetError
    with pytest.raises(
        error, match="--way, expected a way of answering that is known here, got lineer, try one of lin"
    ):
        protofleet.Predictor(trained.state(), way="lineer")
    with pytest.raises(error, match="is of another bundle"):
        protofleet.Predictor(trained.state(), bundle=frozen.bundle)
    with pytest.raises(error, match="is of another bundle"):
        protofleet.Predictor(frozen.bundle, store=trained.store)
    with pytest.raises(error, match=r"nothing to answer with, expected a device that has done a round"):
        protofleet.Predictor(frozen.bundle)
    with pytest.raises(error, match=r"learning, expected a predictor of a device.s state directory, got one"):
        protofleet.Predictor(trained.bundle, store=trained.store).learn(trained.x[0], LABELS[0])
    with pytest.raises(error, match=r"the images, expected \(N, 14, 14, 1\), got"):
        protofleet.Predictor(frozen.state())(np.zeros((2, 9, 9, 1), np.uint8))
    with pytest.raises(error, match=r"journal .*expected a journal, got no such file"):
        protofleet.Predictor(tmp_path)
    shutil.copytree(trained.state(), tmp_path / "moved")
    with pytest.raises(error, match=r"store .*expected a store of version 6, got another file"):
        protofleet.Predictor(trained.bundle, store=tmp_path / "moved" / "journal.sqlite")


def test_a_state_that_is_not_of_its_bundle_is_one_line(trained: Finished, tmp_path: Path) -> None:
    kept = {"sums": np.zeros((2, 2)), "counts": np.zeros(2, np.int64), "spread": np.zeros(2)}
    own = load(_blob(trained.state(), "weights"))
    one = next(iter(own))
    crafted = {
        "means": save(kept),
        "weights": save({**own, one: own[one][..., None]}),
        "weights ": save({**own, one: own[one] * np.float32("nan")}),
    }
    for name, blob in crafted.items():
        place = tmp_path / name
        shutil.copytree(trained.state(), place)
        with sqlite3.connect(place / "journal.sqlite") as db:
            db.execute(f"UPDATE {name.strip()} SET safetensors = ?", (blob,))
        db.close()
        with pytest.raises(protofleet.ProtofleetError, match=r"device state, expected the bundle.s .*, got others"):
            protofleet.Predictor(place)


def _blob(state: Path, table: str) -> bytes:
    with sqlite3.connect(state / "journal.sqlite") as db:
        (blob,) = db.execute(f"SELECT safetensors FROM {table}").fetchone()
    db.close()
    return blob


# ── the command ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_photos_and_folders_get_a_line_each_and_a_broken_one_stops_nothing(trained: Finished, tmp_path: Path) -> None:
    broken = tmp_path / "cut.png"
    broken.write_bytes((trained.photos / "00.png").read_bytes()[:60])
    out = tmp_path / "answers.jsonl"
    code, said = run("predict", broken, trained.photos, "--state", trained.state(), "--top", 2, "--json", out)
    assert code == 0, said
    found = _lines(out)
    assert len(found) == 41
    assert found[0]["photo"] == str(broken)
    assert "error" in found[0]
    answers = protofleet.Predictor(trained.state())(trained.x)
    by_name = {Path(str(line["photo"])).stem: line for line in found[1:]}
    for row in range(40):
        line = by_name[f"{row:02d}"]
        assert [each["label"] for each in line["top"]] == [label for label, _ in answers.top(row, 2)]
        assert line["top"][0]["score"] == pytest.approx(answers.top(row)[0][1], rel=1e-4)
        assert line["unknown"] == bool(answers.unknown[row])
    assert f"{broken}: cannot be read" in said
    assert "answers by the nearest prototype (prototype), on own weights after 2 rounds, global version 2" in said


def test_answers_come_while_the_client_runs_on_the_same_directory(trained: Finished, tmp_path: Path) -> None:
    with fleet_in(tmp_path) as fleet:
        state = shutil.copytree(trained.state(), tmp_path / "state-d0")
        fleet.client("d0", trained.bundle, share(0, HELD[0], 60))
        fleet.wait_for("d0", "connected")
        code, said = run("predict", trained.photos / "00.png", "--state", state, "--json", "-")
        assert code == 0, said
        assert fleet.processes["d0"].poll() is None


def test_photos_of_known_classes_set_the_threshold(frozen: Finished, tmp_path: Path) -> None:
    np.savez(tmp_path / "known.npz", x=frozen.x, y=frozen.y)
    words = ("predict", frozen.photos, "--state", frozen.state(), "--known", tmp_path / "known.npz")
    code, said = run(*words, "--json", tmp_path / "a.jsonl")
    assert code == 0, said
    assert sum(bool(line["unknown"]) for line in _lines(tmp_path / "a.jsonl")) == 2  # 5 % of 40
    assert said.count("unknown, nearest class-") == 2


def test_published_answers_are_the_lines_of_json(frozen: Finished, tmp_path: Path) -> None:
    broker = Embedded()
    broker.start()
    listener = Link(Address.parse(broker.url), "listener", subscriptions=["kitchen/answers", "pf/#"]).open()
    listener.wait_connected(60)
    url, out = f"{broker.url}/kitchen/answers", tmp_path / "a.jsonl"
    code, said = run("predict", frozen.photos, "--state", frozen.state(), "--publish", url, "--json", out)
    assert code == 0, said
    heard: list[Received] = []
    while len(heard) < 40 and (event := listener.receive(10)) is not None:
        heard += [event] if isinstance(event, Received) else []
        listener.acknowledge(heard[-1])
    assert [json.loads(event.payload) for event in heard] == _lines(out)
    assert {event.topic for event in heard} == {"kitchen/answers"}
    assert {line["global_version"] for line in _lines(out)} == {1}
    listener.close()
    broker.stop()


@pytest.fixture
def watcher(frozen: Finished, tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """A folder, and the file that a `predict --follow` on it writes."""
    folder, out = tmp_path / "new", tmp_path / "a.jsonl"
    folder.mkdir()
    words = ["predict", folder, "--follow", "--every", "0.1", "--state", frozen.state(), "--json", out]
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    yield folder, out
    process.kill()
    process.wait()


def _wait_for(out: Path, count: int) -> list[dict[str, object]]:
    deadline = time.monotonic() + 60
    while not out.exists() or len(_lines(out)) < count:
        assert time.monotonic() < deadline, out.read_text() if out.exists() else "no answers"
        time.sleep(0.05)
    return _lines(out)


def test_a_watched_folder_gets_each_photo_answered_once_when_it_is_whole(
    frozen: Finished, watcher: tuple[Path, Path]
) -> None:
    folder, out = watcher
    source = (frozen.photos / "00.png").read_bytes()
    (folder / "first.png").write_bytes(source)
    assert [line["photo"] for line in _wait_for(out, 1)] == [str(folder / "first.png")]
    with open(folder / "slow.png", "wb") as file:
        for start in range(0, len(source), 40):  # each look finds it longer than the one before
            file.write(source[start : start + 40])
            file.flush()
            time.sleep(0.06)
    (folder / "cut.png").write_bytes(source[:50])
    found = _wait_for(out, 3)
    assert sorted(Path(str(line["photo"])).name for line in found) == ["cut.png", "first.png", "slow.png"]
    assert [line.get("error") is None for line in sorted(found, key=lambda line: str(line["photo"]))] == [
        False,
        True,
        True,
    ]
    os.utime(folder / "first.png", ns=(1, 1))  # written again
    (folder / "cut.png").write_bytes(source)
    found = _wait_for(out, 5)
    time.sleep(0.5)
    assert len(_lines(out)) == 5
    assert sorted(Path(str(line["photo"])).name for line in found[3:]) == ["cut.png", "first.png"]
    assert all("label" in line for line in found[3:])


def test_on_motion_it_answers_about_what_moved(frozen: Finished, tmp_path: Path) -> None:
    """Eleven seconds, a key frame each half second: still in changing light, something at three places, still."""
    places = [None] * 8 + [0, 0, 1, 1, 3, 3] + [None] * 8
    shown = [scene(number, place=place, gain=1.0 + 0.2 * np.sin(number)) for number, place in enumerate(places)]
    film = video_of(tmp_path / "door.mp4", [one for one in shown for _ in range(5)])
    words = ["predict", "--camera", f"file:{film}", "--every", "0.1s", "--state", frozen.state()]
    found = []
    for more in ((), ("--on-motion",)):
        code, said = run(*words, *more, "--json", tmp_path / "a.jsonl")
        assert code == 0, said
        found.append([str(line["photo"]).partition("#t=")[2] for line in _lines(tmp_path / "a.jsonl")])
    assert len(found[0]) == len(places)
    assert found[1] == ["0.000", "4.000", "5.000", "6.000", "7.000"]


def test_a_videos_pictures_are_answered_each_by_its_place_and_what_reads_them_may_be_missing(
    frozen: Finished, tmp_path: Path
) -> None:
    film = video(tmp_path / "a.mp4", [40, 80, 120, 160], rate=2, key_every=1)
    words = ["predict", "--camera", f"file:{film}", "--every", "1s", "--state", frozen.state()]
    code, said = run(*words, "--crop", "0,0,32,48", "--json", tmp_path / "a.jsonl")
    assert code == 0, said
    lines = _lines(tmp_path / "a.jsonl")
    assert [line["photo"] for line in lines] == [f"{film}#t=0.000", f"{film}#t=1.000"]
    assert all("label" in line for line in lines)
    code, said = run(*words, "--crop", "40,0,32,48")
    assert code == 2
    assert "a.mp4#t=0.000: cannot be read (64 x 48 pixels, which do not hold the crop 40,0,32,48)" in said
    (tmp_path / "av.py").write_text("raise ModuleNotFoundError(\"No module named 'av'\", name='av')\n")
    env = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2
    assert f"--camera, expected PyAV (av), got nothing, try {install_command('camera')}" in error_line(done.stderr)


class _Snapshots(BaseHTTPRequestHandler):
    """A camera that gives a picture to who knows its password."""

    def do_GET(self) -> None:
        right = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:hunter/2").decode()
        self.send_response(200 if right else 401)
        body = jpeg() if right else b""
        if not right:
            self.send_header("WWW-Authenticate", 'Basic realm="camera"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def _snapshots(port: int) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", port), _Snapshots) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


def test_a_camera_that_goes_comes_back_ends_nothing_and_its_password_is_nowhere(
    frozen: Finished, tmp_path: Path
) -> None:
    port, out = free_port(), tmp_path / "a.jsonl"
    words = ["predict", "--camera", f"http://me:hunter%2F2@127.0.0.1:{port}/snap?pwd=hunter2", "--every", "0.1s"]
    words += ["--state", frozen.state(), "--json", out]
    command = [sys.executable, "-m", "protofleet", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT)
    with _snapshots(port):
        _wait_for(out, 2)
    assert process.stdout is not None
    before = []
    while not before or "gives no picture" not in before[-1]:
        before.append(process.stdout.readline())
    seen = len(_lines(out))
    with _snapshots(port):  # tried again after a second
        lines = _wait_for(out, seen + 3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = "".join(before) + process.communicate(timeout=60)[0]
    assert process.returncode != 0
    away = rf"camera http://127.0.0.1:{port} gives no picture \([\w ]+\): tried again, at least every 60 s\n"
    assert re.search(away, said)
    assert f"camera http://127.0.0.1:{port} is back" in said
    assert not [word for word in ("hunter", "/snap") if word in said + out.read_text()]
    assert all(re.fullmatch(r"\d{8}T\d{6}\.\d{3}Z-[0-9a-f]{12}", str(line["photo"])) for line in lines)


def test_a_stream_is_answered_about_as_it_comes_and_its_password_is_nowhere(frozen: Finished, tmp_path: Path) -> None:
    out = tmp_path / "a.jsonl"
    with rtsp_server("--key-s", 0.5, "--user", "me:hunter/2") as port:
        words = ["predict", "--camera", f"rtsp://me:hunter%2F2@127.0.0.1:{port}/clock", "--every", "0.5s"]
        words += ["--crop", "0,0,384,32", "--state", frozen.state(), "--json", out]
        command = [sys.executable, "-m", "protofleet", *map(str, words)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )
        lines = _wait_for(out, 3)
        now_s = datetime.now(UTC).timestamp()
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode != 0
    assert "hunter" not in said + out.read_text()
    taken = [datetime.strptime(str(line["photo"])[:20], "%Y%m%dT%H%M%S.%fZ").replace(tzinfo=UTC) for line in lines]
    assert taken == sorted(set(taken))
    assert now_s - taken[-1].timestamp() < 20.0
    assert len({line["photo"] for line in lines}) == len(lines)


def test_a_camera_is_asked_for_by_a_form_that_there_is(frozen: Finished) -> None:
    for words, wanted in (
        (["--camera", "0"], "got 0, try v4l2:0"),
        (["--camera", "http://me:hunter2/x@h/"], "characters that begin with http://"),
        (["--camera", "v4l2:0", "--crop", "1,2,3"], "--crop, expected X,Y,WIDTH,HEIGHT in pixels, got 1,2,3"),
        (["--camera", "v4l2:0", "--every", "0s"], "--every, expected 0.01s to 1d, got 0s"),
        ([frozen.photos, "--crop", "1,2,3,4"], "--crop, expected --camera, whose pictures it is of, got photos"),
    ):
        code, said = run("predict", *words, "--state", frozen.state())
        assert code == 2
        assert wanted in said
        assert "hunter2" not in said


def test_a_name_that_is_no_utf_8_is_a_line_of_json_too(frozen: Finished, tmp_path: Path) -> None:
    odd = tmp_path / os.fsdecode(b"caf\xe9.png")
    shutil.copy(frozen.photos / "00.png", odd)
    code, said = run("predict", odd, "--state", frozen.state(), "--json", tmp_path / "answers.jsonl")
    assert code == 0, said
    (line,) = _lines(tmp_path / "answers.jsonl")
    assert line["photo"] == str(tmp_path / "caf\\udce9.png")


def test_a_state_of_no_class_answers_nothing_and_says_so(frozen: Finished) -> None:
    """What a fleet has whose devices all withheld every class: `--min-samples` larger than what any of them holds."""
    found = read_bundle(frozen.bundle)
    empty = ClassRows(np.zeros(0, np.uint16), np.zeros((0, found.manifest.features), np.float32))
    for rows in ({"means": empty}, {"means": empty, "head": empty}):
        with pytest.raises(UsageError, match=r"nothing to answer with, .* a global state that knows a class"):
            predictor.Predictor(found, Knowledge(state=GlobalState(bytes(4), 1, 1, rows)))
    head = ClassRows(np.arange(5, dtype=np.uint16), np.eye(5, found.manifest.features, dtype=np.float32))
    made = predictor.Predictor(found, Knowledge(state=GlobalState(bytes(4), 1, 1, {"means": empty, "head": head})))
    assert made(frozen.x).scores.shape == (40, 5)
    assert made.calibrated.startswith("no percentages yet, the numbers are scores")
    assert made.calibrated.endswith("(client --hold-out 0.3, or --test FOLDER)")


def test_where_ways_differ_the_devices_own_test_of_each_stands_beside_the_answers(
    trained: Finished, frozen: Finished
) -> None:
    """The last round of FedProto's run is FFC's: what the terminal said then is another way than the method's own."""
    said = run("predict", trained.photos / "00.png", "--state", trained.state())[1]
    tested = json.loads((trained.state() / "history.jsonl").read_text().splitlines()[-1])
    shares = tested["accuracy"]["all_classes"]
    assert {"prototype", "linear"} <= set(shares)
    best = max(shares, key=lambda way: shares[way])
    assert f"right after round {tested['round']}, of the {tested['test_samples']} photos" in said
    assert f": {best} {shares[best]:.1%}, " in said
    assert all(f"{way} {share:.1%}" in said for way, share in shares.items())
    elsewhere = ("--bundle", trained.bundle, "--store", trained.store)
    assert "--way takes one of prototype, head, linear" in run("predict", trained.photos / "00.png", *elsewhere)[1]
    said = run("predict", frozen.photos / "00.png", "--state", frozen.state())[1]
    assert "--way" not in said
    limit = r"minus the largest score, divided by the head's scale, unknown above -[0-9.]+"
    assert re.search(limit + "; --known PHOTOS makes a limit of yours", said)
    said = run("predict", frozen.photos / "00.png", "--bundle", frozen.bundle, "--store", frozen.store)[1]
    assert "unknown above 2; --known PHOTOS makes a limit of yours" in said
    assert "--known" not in run("predict", frozen.photos / "00.png", "--state", frozen.state(), "--unknown-above", 3)[1]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["p.png"], "expected --state or --bundle, got neither"),
        (["p.png", "--state", "nowhere"], "--state nowhere, expected a device's state directory, got nothing there"),
        ([], "expected photos or --camera, got none"),
        (["nowhere.png", "--bundle", "B"], "no photo at nowhere.png"),
        (["x" * 300, "--bundle", "B"], "got File name too long"),
        (["F", "--bundle", "B", "--unknown-above", "nan"], "unknown, expected a number, got nan"),
        (["F", "--follow", "--bundle", "B"], "--follow, expected a folder to watch, got photos only"),
        (["F", "--bundle", "B", "--publish", "mqtt://h/pf/x"], "--publish, expected a topic that is no fleet's"),
        (["F", "--bundle", "B", "--ca", "ca.pem"], "a certificate file, expected --publish mqtts://BROKER/TOPIC"),
    ],
)
def test_wrong_use_is_one_line(trained: Finished, words: list[str], wanted: str) -> None:
    places = {"B": trained.bundle, "F": trained.photos / "00.png"}
    code, said = run("predict", *(places.get(word, word) for word in words))
    assert code == 2
    assert wanted in error_line(said)
