"""`protofleet photos`: what is kept of a camera, and what is left of it after `--erase`."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from aggregator_samples import manifest
from commands import one_error_line, run

from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.photos.kept_photo import NewPhoto, png_of
from protofleet.edge_client.photos.naming import name_photos
from protofleet.edge_client.photos.photo_ring import PhotoRing, PhotosBeside


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Six photos of a camera, two of them named, and one more that was learned from a file."""
    (tmp_path / "state").mkdir()
    rng, m = np.random.default_rng(0), manifest()
    ring, learned = PhotoRing(tmp_path / "state", "net"), LearnedFile(tmp_path / "state", m.labels)
    for number in range(6):
        x = rng.integers(0, 256, m.input_shape, np.uint8)
        view = rng.integers(0, 256, (64, 64, 3), np.uint8)
        features = np.ones(8, np.float32) / np.sqrt(np.float32(8))
        ring.keep(NewPhoto(x, view, f"photo-{number}", 1_764_000_000.0 + 60 * number, features, m.labels[0]))
    list(name_photos(ring, learned, m, ring.photos()[:2], m.labels[1]))
    ring.set_aside(ring.photos()[5:], "none", "something else")
    ring.close()
    learned.learn(example_of(rng.integers(0, 256, m.input_shape, np.uint8), m), m.labels[0])
    return tmp_path / "state"


def count(state: Path) -> int:
    learned = Learned(state)
    learned.look()
    learned.close()
    return len(learned)


def test_it_says_what_is_kept_and_changes_nothing(state: Path) -> None:
    before = {file: file.read_bytes() for file in state.iterdir() if file.suffix == ".sqlite"}
    done = run("photos", "--state", state)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("6 photos of the camera kept here, 0.")
    assert said[1] == "2 of them named, on the way to the fleet: they do not leave before"
    assert said[2] == "1 of them proposed for a class that the fleet has not got"
    assert said[3] == "3 photos learned, which train: --erase --learned deletes them, too"
    assert len(said) == 4
    found = json.loads(run("photos", "--state", state, "--json", "-").stdout)
    assert (found["kept"], found["waiting"], found["learned"], found["refused"]) == (6, 2, 3, "")
    assert found["newest_s"] - found["oldest_s"] == 300
    assert {file: file.read_bytes() for file in before} == before


def test_all_photos_go_and_labels_stay_until_they_are_asked_for_too(state: Path) -> None:
    views = [state / "photos.sqlite"]
    ring = PhotoRing(state, "net")
    traces = [ring.image(kept)[-200:-136] for kept in ring.photos()]
    trained = [ring.image(kept, "png")[-60:-20] for kept in ring.photos()[:2]]
    ring.close()
    done = run("photos", "--erase", "--state", state)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].startswith("6 photos of the camera erased")
    assert "3 learned photos stay, since they train" in done.stdout
    held = b"".join(file.read_bytes() for file in state.iterdir())
    assert [trace for trace in traces if trace in held] == []
    assert all(view.is_file() for view in views)
    assert count(state) == 3
    PhotosBeside(state).refused = "it was forgotten"  # of no photos there is nothing to say
    said = run("photos", "--state", state).stdout.splitlines()
    assert said[0] == "no photo of a camera is kept here"
    assert [line for line in said if "its photos stay" in line] == []
    done = run("photos", "--erase", "--learned", "--state", state, "--json", "-")
    found = json.loads(done.stdout)
    assert (found["erased"], found["unlearned"]) == (0, 3)
    assert "3 learned photos erased" in done.stderr
    assert count(state) == 0
    held = b"".join(file.read_bytes() for file in state.iterdir())
    assert [trace for trace in trained if trace in held] == []
    assert run("photos", "--erase", "--learned", "--state", state).returncode == 0  # there is nothing more


def test_a_device_without_a_camera_keeps_none_and_mistakes_are_one_line(tmp_path: Path) -> None:
    assert run("photos", "--state", tmp_path).stdout == "no photo of a camera is kept here\n"
    assert run("photos", "--erase", "--state", tmp_path).stdout.startswith("0 photos of the camera erased")
    assert list(tmp_path.iterdir()) == []
    done = run("photos", "--learned", "--state", tmp_path)
    assert (done.returncode, one_error_line(done)) == (2, "error: --learned, expected --erase beside it, got none")
    done = run("photos", "--state", tmp_path / "none")
    assert (done.returncode, "expected a device's state directory" in one_error_line(done)) == (2, True)


def test_photos_go_even_where_what_was_learned_cannot_be_read(state: Path) -> None:
    (state / "learned.sqlite").write_bytes(b"no database" * 500)
    done = run("photos", "--erase", "--state", state)
    assert (done.returncode, "learned.sqlite" in one_error_line(done)) == (2, True)
    assert PhotosBeside(state).photos() == []
    assert "try protofleet photos --erase --learned, which removes the file" in one_error_line(done)
    done = run("photos", "--erase", "--learned", "--state", state, "--json", "-")
    assert done.returncode == 0, done.stderr
    assert "the file of learned photos could not be read: it is removed, and all photos in it" in done.stderr
    assert (json.loads(done.stdout)["learned"], json.loads(done.stdout)["unlearned"]) == (None, None)
    assert not (state / "learned.sqlite").exists()
    assert run("photos", "--state", state).stdout == "no photo of a camera is kept here\n"


BLOBS = b"no database" * 500


def test_a_file_that_cannot_be_read_goes_as_a_whole(state: Path) -> None:
    photos = state / "photos.sqlite"
    for content in (BLOBS, photos.read_bytes()[:5000], bytes(68) + photos.read_bytes()[68:]):
        photos.write_bytes(content)
        (state / "photos.sqlite-wal").write_bytes(b"of a picture")
        done = run("photos", "--state", state)
        assert done.returncode != 0
        assert "try the same with --erase, which removes the file" in one_error_line(done)
        assert photos.read_bytes() == content
        done = run("photos", "--erase", "--state", state, "--json", "-")
        assert done.returncode == 0, done.stderr
        assert "the file of kept photos could not be read: it is removed, and all photos in it" in done.stderr
        found = json.loads(done.stdout)
        assert (found["kept"], found["erased"], found["learned"]) == (None, None, 3)
        assert found["unreadable"]
        assert [file for file in state.iterdir() if file.name.startswith("photos")] == []
    assert run("photos", "--erase", "--state", state).stdout.startswith("0 photos of the camera erased")


def test_a_file_that_nobody_made_goes_and_so_does_one_behind_a_link(state: Path, tmp_path: Path) -> None:
    photos = state / "photos.sqlite"
    photos.unlink()
    with contextlib.closing(sqlite3.connect(photos)) as db:
        db.execute("CREATE TABLE photo (png BLOB)")
    assert "it is removed" in run("photos", "--erase", "--state", state).stdout
    assert not photos.exists()
    (tmp_path / "elsewhere").write_bytes(BLOBS)
    photos.symlink_to(tmp_path / "elsewhere")
    assert run("photos", "--erase", "--state", state).returncode == 0
    assert (photos.is_symlink(), (tmp_path / "elsewhere").exists()) == (True, False)


def test_a_page_that_is_damaged_keeps_no_photo_from_being_erased(state: Path) -> None:
    photos = state / "photos.sqlite"
    whole = photos.read_bytes()
    for page in range(2, len(whole) // 4096):
        broken = bytearray(whole)
        broken[page * 4096 : (page + 1) * 4096] = b"\xff" * 4096
        photos.write_bytes(broken)
        done = run("photos", "--erase", "--state", state)
        assert done.returncode == 0, done.stderr
        assert not photos.exists() or PhotosBeside(state).photos() == []
    assert page > 4


def test_a_file_that_a_client_runs_on_is_never_removed(state: Path) -> None:
    ring, photos = PhotoRing(state, "net"), state / "photos.sqlite"
    try:
        with photos.open("r+b") as file:
            file.write(BLOBS)
        done = run("photos", "--erase", "--state", state)
        assert done.returncode != 0
        line = one_error_line(done)
        assert line.endswith("expected to be its only user, got another process that runs on it, try stopping that one,"
                             " or another --state")  # fmt: skip
        assert photos.read_bytes().startswith(BLOBS)
    finally:
        ring.close()
    assert run("photos", "--erase", "--state", state).returncode == 0
    assert not photos.exists()


def in_any_file(folder: Path, traces: list[bytes]) -> list[str]:
    held = [(file.name, file.read_bytes()) for file in folder.rglob("*") if file.is_file()]
    return [name for name, content in held if any(trace in content for trace in traces)]


def test_what_was_decoded_of_learned_photos_goes_with_them_unless_a_client_runs(state: Path, tmp_path: Path) -> None:
    m = manifest()
    rng = np.random.default_rng(1)
    for number in range(8):
        folder = tmp_path / "photos" / m.labels[number % m.classes]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number}.png").write_bytes(png_of(rng.integers(0, 256, m.input_shape, np.uint8)))
    learned = Learned(state)
    learned.look()
    traces = [x.tobytes() for x in learned.decoded(m).x]
    left = state / "fleets" / "other-00000000"  # of a fleet that the device was in
    for directory in (state, left):
        load_data(tmp_path / "photos", m, learned=learned, cache=directory / "images")
    learned.close()
    (state / "activations").mkdir()
    assert in_any_file(state, traces)
    with contextlib.closing(Journal(state, fleet="fleet", device="door", bundle=b"b" * 32)):
        done = run("photos", "--erase", "--learned", "--state", state)
        assert done.returncode == 0, done.stderr
        assert "3 learned photos erased" in done.stdout
        assert "what its client decoded of learned photos goes when it looks at its samples next" in done.stdout
        assert list((state / "images").iterdir())
        assert not (left / "images").exists()
    done = run("photos", "--erase", "--learned", "--state", state)
    assert done.returncode == 0, done.stderr
    assert "decoded" not in done.stdout
    assert in_any_file(state, traces) == []
    assert [(state / name).exists() for name in ("images", "activations")] == [False, False]


def test_without_learned_what_was_decoded_stays(state: Path) -> None:
    (state / "images").mkdir()
    assert run("photos", "--erase", "--state", state).returncode == 0
    assert (state / "images").is_dir()
