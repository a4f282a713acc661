"""edge_client/data/learned.py: what a device was taught: kept whole, counted once, trained on, never tested with."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from protofleet.contract.errors import DataError, ProtofleetError
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.learned import FILE, KIND, Example, ExampleGoneError, Learned, LearnedFile, example_of
from protofleet.edge_client.data.load import from_arrays, hold_back, load_data, load_held_out
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.settings import ClientSettings
from tests.edge_client.data.test_load import manifest, png, samples, sorted_rows, write_folder

LABELS = manifest().labels
X, Y = samples(60)
MORE = np.random.default_rng(9).integers(0, 256, (6, *X.shape[1:]), np.uint8)


def example(x: np.ndarray) -> Example:
    return example_of(x, manifest())


@pytest.fixture
def taught(tmp_path: Path) -> LearnedFile:
    (tmp_path / "state").mkdir()
    return LearnedFile(tmp_path / "state", LABELS)


def seen(tmp_path: Path) -> Learned:
    """The examples as a client that starts now sees them."""
    found = Learned(tmp_path / "state")
    found.look()
    return found


def held(learned: Learned) -> list[tuple[int, bytes]]:
    data = learned.decoded(manifest())
    return sorted_rows(data.x, data.y)


# ── what is kept ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_photo_learned_twice_counts_once_and_a_corrected_label_takes_the_place_of_the_former(
    taught: LearnedFile, tmp_path: Path
) -> None:
    learned = Learned(tmp_path / "state")
    assert not learned.look()
    assert [taught.learn(example(MORE[0]), "ant"), taught.learn(example(MORE[0].copy()), "ant")] == ["learned", "known"]
    assert [learned.look(), learned.look(), len(learned)] == [True, False, 1]
    assert held(learned) == [(0, MORE[0].tobytes())]
    assert taught.learn(example(MORE[0]), "cat") == "corrected"
    assert learned.look()
    assert held(learned) == [(2, MORE[0].tobytes())]
    assert taught.learn(example(MORE[1]), "ant") == "learned"
    assert taught.unlearn(example(MORE[0])) == "cat"
    assert learned.look()
    assert held(learned) == held(seen(tmp_path)) == [(0, MORE[1].tobytes())]
    with pytest.raises(DataError, match="nothing to unlearn, expected a photo that this device was taught"):
        taught.unlearn(example(MORE[0]))
    (tmp_path / "state" / FILE).unlink()
    assert (learned.look(), len(learned)) == (True, 0)


def test_the_first_answer_stays_with_a_photo_and_all_come_in_the_order_in_which_they_were_learned(
    taught: LearnedFile, tmp_path: Path
) -> None:
    assert seen(tmp_path).asked_before() == []
    for number, answered in ((3, "cat"), (0, "ant"), (1, ""), (4, "bee")):
        taught.learn(example(MORE[number]), "ant", answered=answered)
    learned = seen(tmp_path)
    assert learned.asked_before() == [("ant", "cat"), ("ant", "ant"), ("ant", ""), ("ant", "bee")]
    for number in (3, 1):  # corrected: what is answered by now follows from a head that has learned them
        assert taught.learn(example(MORE[number]), "cat", answered="ant") == "corrected"
    assert learned.asked_before() == [("ant", "ant"), ("ant", "bee"), ("cat", "cat"), ("cat", "")]


def test_a_file_is_found_again_by_its_bytes_and_by_its_pixels(taught: LearnedFile, tmp_path: Path) -> None:
    """By its bytes, since another Pillow may make other pixels of a JPEG; by its pixels, since files are saved anew."""
    big = Image.fromarray(np.random.default_rng(3).integers(0, 256, (90, 80, 3), np.uint8))
    big.save(tmp_path / "a.jpg")
    one = example_of(tmp_path / "a.jpg", manifest())
    assert one.x.shape == manifest().input_shape
    taught.learn(one, "bee")
    of_bytes = example_of((tmp_path / "a.jpg").read_bytes(), manifest())
    assert (of_bytes.source, taught.learn(of_bytes, "bee")) == (one.source, "known")
    other_decoder = Example((one.x ^ 1).astype(np.uint8), one.source)
    assert taught.learn(other_decoder, "cat") == "corrected"
    assert len(seen(tmp_path)) == 1
    assert taught.unlearn(one) == "cat"
    Image.fromarray(one.x).save(tmp_path / "b.png")
    taught.learn(one, "bee")
    assert taught.unlearn(example_of(str(tmp_path / "b.png"), manifest())) == "bee"


def test_a_photo_that_is_two_known_ones_takes_the_place_of_both(taught: LearnedFile, tmp_path: Path) -> None:
    """It has the pixels of one and the bytes of the other, which another decoder had read."""
    one, other = (Example(x, bytes([number]) * 16) for number, x in enumerate(MORE[:2]))
    both = Example(one.x, other.source)
    for relearned in (True, False):
        assert [taught.learn(one, "ant"), taught.learn(other, "bee")] == ["learned"] * 2
        if relearned:
            assert taught.learn(both, "ant") == "corrected"
            assert held(seen(tmp_path)) == [(0, MORE[0].tobytes())]
        taught.unlearn(both)
        assert len(seen(tmp_path)) == 0


def test_a_label_that_the_bundle_has_not_is_one_line(taught: LearnedFile, tmp_path: Path) -> None:
    taught.learn(example(MORE[0]), "cat")
    with pytest.raises(DataError, match="expected labels of the bundle's, got 'cat'"):
        seen(tmp_path).numbers(msgspec.structs.replace(manifest(), labels=LABELS[:2]))


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_pixels_stay_what_they_are(channels: int, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    made = manifest(shape=(5, 7, channels))
    x = np.random.default_rng(0).integers(0, 256, (5, 7, channels), np.uint8)
    LearnedFile(tmp_path / "state", made.labels).learn(example_of(x, made), "ant")
    np.testing.assert_array_equal(seen(tmp_path).decoded(made).x[0], x)


def test_what_cannot_be_learned_is_one_line_and_leaves_nothing(taught: LearnedFile, tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(png(MORE[0])[:60])
    wrong: list[tuple[Callable[[], object], str]] = [
        (
            lambda: taught.learn(example(MORE[0]), "bat"),
            "the label, expected a class of the bundle's 3, got 'bat', try",
        ),
        (lambda: taught.learn(example(MORE[0]), "unlabelled"), "the label, expected"),
        (lambda: example_of(tmp_path / "torn.png", manifest()), "cannot read .*torn.png, expected a whole image file"),
        (lambda: example_of(tmp_path / "none.png", manifest()), "cannot read .*none.png, .* No such file"),
        (lambda: example_of(tmp_path, manifest()), "cannot read .*, expected a whole image file, got no regular file"),
        (lambda: example_of(MORE[0][:2], manifest()), "the image, expected"),
        (lambda: example_of(MORE[0].astype(float), manifest()), "the image"),
        (lambda: example_of(MORE[0], manifest(shape=(4, 4, 2))), "expected a bundle of 1, 3 or 4 channels"),
        (lambda: LearnedFile(tmp_path / "no", LABELS).learn(example(MORE[0]), "ant"), "expected a device's state"),
    ]
    for call, words in wrong:
        with pytest.raises(ProtofleetError, match=words):
            call()
    assert not (tmp_path / "state" / "learned.sqlite").exists()


def test_a_photo_of_two_hundred_megapixels_is_one_line(taught: LearnedFile, tmp_path: Path) -> None:
    Image.new("1", (20_000, 10_000)).save(tmp_path / "huge.png")
    with pytest.raises(DataError, match=r"cannot read .*huge.png, .*200000000 pixels"):
        example_of(tmp_path / "huge.png", manifest())


def test_it_is_its_owners_alone_and_what_is_unlearned_is_overwritten(taught: LearnedFile, tmp_path: Path) -> None:
    file = tmp_path / "state" / "learned.sqlite"
    taught.learn(example(MORE[0]), "ant")
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    with sqlite3.connect(file) as db:
        (stored,) = db.execute("SELECT png FROM examples").fetchone()
    db.close()
    learned = Learned(tmp_path / "state")
    learned.look()  # a client that runs keeps the file open, and its log in place
    assert _lies_in(tmp_path / "state", stored)
    taught.unlearn(example(MORE[0]))
    assert not _lies_in(tmp_path / "state", stored)


def _lies_in(folder: Path, what: bytes) -> bool:
    return any(what[40:-20] in path.read_bytes() for path in folder.iterdir())


def test_what_is_no_file_of_ours_is_left_alone(taught: LearnedFile, tmp_path: Path) -> None:
    (tmp_path / "state" / "learned.sqlite").write_bytes(b"something else" * 20)
    with pytest.raises(
        ProtofleetError, match="expected a file of learned examples of versions 2 to 3, got another file"
    ):
        taught.learn(example(MORE[0]), "ant")
    with pytest.raises(DataError, match=r"file of learned examples|--state .*learned.sqlite, expected"):
        seen(tmp_path).look()


@pytest.mark.parametrize("begun", ["empty", "hot journal"])
def test_what_a_killed_writer_began_stops_nobody(begun: str, taught: LearnedFile, tmp_path: Path) -> None:
    """Killed as soon as it had made the file, or in the middle of the transaction that fills it."""
    file = tmp_path / "state" / "learned.sqlite"
    if begun == "empty":
        file.touch()
    else:
        db = sqlite3.connect(tmp_path / "other.sqlite", isolation_level=None)
        db.executescript(
            f"PRAGMA cache_size = 1; BEGIN; PRAGMA application_id = {KIND.application_id}; {KIND.steps[0]}"
        )
        rows = [
            (bytes([row]), b"", "ant", bytes(9000)) for row in range(20)
        ]  # more than the cache holds: it is written
        db.executemany("INSERT INTO examples VALUES (?, ?, ?, ?)", rows)
        file.write_bytes((tmp_path / "other.sqlite").read_bytes())
        (tmp_path / "state" / "learned.sqlite-journal").write_bytes((tmp_path / "other.sqlite-journal").read_bytes())
        db.close()
        assert file.stat().st_size > 9000
    learned = Learned(tmp_path / "state")
    assert not learned.look()
    assert taught.learn(example(MORE[0]), "ant") == "learned"
    assert learned.look()
    assert len(learned) == 1


# ── who writes, and who dies ────────────────────────────────────────────────────────────────────────────────────────

LEARN = """
import sys
from pathlib import Path
import numpy as np
from tests.edge_client.data.test_load import manifest
from protofleet.edge_client.data.learned import LearnedFile, example_of
file = LearnedFile(Path(sys.argv[1]), manifest().labels)
rng = np.random.default_rng(int(sys.argv[2]))
for number in range(10_000):
    x = rng.integers(0, 256, manifest().input_shape, np.uint8)
    file.learn(example_of(x, manifest()), "bee")
    print(x.tobytes().hex(), flush=True)
"""


def test_killed_at_any_moment_all_that_was_confirmed_is_there_and_no_more_than_one_beside(
    taught: LearnedFile, tmp_path: Path
) -> None:
    """Two processes that learn at once, both killed in the middle, while a third reads."""
    tests = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{tests / 'support'}{os.pathsep}{tests.parent}"}
    writers = [
        subprocess.Popen([sys.executable, "-c", LEARN, tmp_path / "state", str(seed)], stdout=subprocess.PIPE, env=env)
        for seed in (1, 2)
    ]
    learned, sizes = Learned(tmp_path / "state"), [0]
    deadline = time.monotonic() + 60
    while sizes[-1] < 40 and time.monotonic() < deadline:
        if learned.look():
            sizes.append(len(learned))
        time.sleep(0.005)
    for writer in writers:
        writer.send_signal(signal.SIGKILL)
    said = b"".join(writer.communicate()[0] for writer in writers).decode().split("\n")
    confirmed = {bytes.fromhex(line) for line in said if len(line) == 2 * X[0].size}
    assert sizes == sorted(sizes)
    there = {pixels for _, pixels in held(seen(tmp_path))}
    assert confirmed <= there
    assert len(there - confirmed) <= 2
    assert taught.learn(example(MORE[0]), "ant") == "learned"


def test_a_full_disk_is_one_line_and_what_was_confirmed_is_there(taught: LearnedFile, tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{tests / 'support'}{os.pathsep}{tests.parent}"}
    command = ["prlimit", "--fsize=40000", sys.executable, "-c", LEARN, tmp_path / "state", "1"]
    done = subprocess.run(command, capture_output=True, env=env, timeout=60)
    confirmed = done.stdout.decode().split()
    assert b"StoreError: file of learned examples" in done.stderr.splitlines()[-1]
    assert b"expected a disk that takes it" in done.stderr.splitlines()[-1]
    assert len(confirmed) > 3
    assert {pixels.hex() for _, pixels in held(seen(tmp_path))} == set(confirmed)
    assert taught.learn(example(MORE[0]), "ant") == "learned"  # with room again


def test_who_reads_and_writes_in_one_process_still_sees_what_another_writes(
    taught: LearnedFile, tmp_path: Path
) -> None:
    """A file that is closed here takes SQLite's locks along, and who is last elsewhere then removes the log."""
    learned = Learned(tmp_path / "state")
    code = LEARN.replace("range(10_000)", "range(1)")
    tests = Path(__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": f"{tests / 'support'}{os.pathsep}{tests.parent}"}
    for count in (2, 4, 6):
        taught.learn(example(MORE[count - 2]), "ant")
        assert learned.look()
        subprocess.run(
            [sys.executable, "-c", code, tmp_path / "state", str(count)], stdout=subprocess.DEVNULL, env=env, check=True
        )
        assert learned.look()
        assert len(learned) == count
        assert not learned.look()


def test_threads_that_correct_each_other_leave_one_label(taught: LearnedFile, tmp_path: Path) -> None:
    def correct(label: str) -> None:
        for _ in range(8):
            taught.learn(example(MORE[0]), label)

    threads = [threading.Thread(target=correct, args=(label,)) for label in LABELS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen(tmp_path)) == 1


# ── which part it belongs to ────────────────────────────────────────────────────────────────────────────────────────


def as_folder(tmp_path: Path, learned: Learned | None, share: float) -> tuple[LocalData, LocalData]:
    if not (tmp_path / "photos").exists():
        write_folder(tmp_path / "photos", X, Y, LABELS)
    return load_held_out(tmp_path / "photos", manifest(), share=share, learned=learned)


def as_kept_folder(tmp_path: Path, learned: Learned | None, share: float) -> tuple[LocalData, LocalData]:
    if not (tmp_path / "photos").exists():
        write_folder(tmp_path / "photos", X, Y, LABELS)
    return load_held_out(tmp_path / "photos", manifest(), share=share, learned=learned, cache=tmp_path / "images")


def as_npz(tmp_path: Path, learned: Learned | None, share: float) -> tuple[LocalData, LocalData]:
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    return load_held_out(tmp_path / "d.npz", manifest(), share=share, learned=learned)


def as_arrays(tmp_path: Path, learned: Learned | None, share: float) -> tuple[LocalData, LocalData]:
    parts = hold_back(from_arrays(X, Y, manifest()), share=share)
    return parts if learned is None else learned.added(*parts, manifest())


SOURCES = {"folder": as_folder, "kept folder": as_kept_folder, "npz": as_npz, "arrays": as_arrays}


def rows(data: LocalData) -> list[tuple[int, bytes]]:
    return sorted_rows(data.x, data.y)


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_learned_trains_and_nothing_of_it_is_held_out(source: str, taught: LearnedFile, tmp_path: Path) -> None:
    """New photos, one that trains already with another label, and one that is held out; then all unlearned again."""
    load = SOURCES[source]
    train, test = load(tmp_path, None, 0.2)
    trained, tested = train.x[0].copy(), test.x[0].copy()
    wrong = LABELS[(int(train.y[0]) + 1) % 3]
    for x, label in ((MORE[0], "ant"), (MORE[1], "cat"), (trained, wrong), (tested, "bee")):
        taught.learn(example(x), label)
    now, still = load(tmp_path, seen(tmp_path), 0.2)
    own = [
        (0, MORE[0].tobytes()),
        (2, MORE[1].tobytes()),
        (LABELS.index(wrong), trained.tobytes()),
        (1, tested.tobytes()),
    ]
    assert rows(now) == sorted([row for row in rows(train) if row[1] != trained.tobytes()] + own)
    assert rows(still) == [row for row in rows(test) if row[1] != tested.tobytes()]
    assert not {pixels for _, pixels in rows(now)} & {pixels for _, pixels in rows(still)}
    again, same = load(tmp_path, seen(tmp_path), 0.2)
    assert (rows(again), rows(same)) == (rows(now), rows(still))
    np.testing.assert_array_equal(again.x, now.x)  # in the same order, as the same round after a crash needs it
    for x in (MORE[0], MORE[1], trained, tested):
        taught.unlearn(example(x))
    for made, wanted in zip(load(tmp_path, seen(tmp_path), 0.2), (train, test), strict=True):
        assert rows(made) == rows(wanted)


def test_a_test_set_of_its_own_loses_what_was_learned(taught: LearnedFile, tmp_path: Path) -> None:
    write_folder(tmp_path / "test", X[:2], Y[:2], LABELS)
    taught.learn(example(X[0]), "cat")
    for _ in range(2):
        found = load_data(
            tmp_path / "test", manifest(), purpose="test", learned=seen(tmp_path), cache=tmp_path / "images"
        )
        assert rows(found) == sorted_rows(X[1:2], Y[1:2])
    taught.learn(example(X[1]), "cat")
    found = load_data(tmp_path / "test", manifest(), purpose="test", learned=seen(tmp_path), cache=tmp_path / "images")
    assert len(found) == 0


def test_samples_without_a_label_stay_last(taught: LearnedFile, tmp_path: Path) -> None:
    made = msgspec.structs.replace(manifest(), hyper={"pu_weight": 0.5})
    write_folder(tmp_path / "photos", X[:12], Y[:12], LABELS)
    (tmp_path / "photos" / "unlabelled").mkdir()
    (tmp_path / "photos" / "unlabelled" / "u.png").write_bytes(png(X[20]))
    taught.learn(example(MORE[0]), "ant")
    found = load_data(tmp_path / "photos", made, learned=seen(tmp_path))
    assert (found.y[-1], len(found.labelled)) == (-1, 13)
    assert np.shares_memory(found.labelled.x, found.x)


def test_one_more_example_decodes_no_photo_again(
    taught: LearnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from protofleet.edge_client.data import decode

    as_kept_folder(tmp_path, None, 0.2)
    opened: list[object] = []
    real = Image.open
    monkeypatch.setattr(decode.Image, "open", lambda source, **options: opened.append(1) or real(source, **options))
    taught.learn(example(MORE[0]), "ant")
    as_kept_folder(tmp_path, seen(tmp_path), 0.2)
    assert len(opened) == 1
    taught.learn(example(MORE[0]), "bee")  # a label changes no pixel
    train, _ = as_kept_folder(tmp_path, seen(tmp_path), 0.2)
    assert len(opened) == 1
    assert (1, MORE[0].tobytes()) in rows(train)


def test_one_that_is_unlearned_while_it_is_read_is_told_and_looked_at_again(
    taught: LearnedFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path / "photos", X, Y, LABELS)
    for x in MORE[:2]:
        taught.learn(example(x), "ant")
    learned = seen(tmp_path)
    taught.unlearn(example(MORE[0]))
    with pytest.raises(ExampleGoneError):
        load_held_out(tmp_path / "photos", manifest(), learned=learned)
    taught.learn(example(MORE[0]), "ant")
    given = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": str(tmp_path / "photos"), "state": "s"}
    own = OwnSamples(read_settings(ClientSettings, given), manifest(), tmp_path / "state")
    reads = Learned.images

    def meddled(self: Learned, wanted: np.ndarray) -> Iterator[bytes]:
        if len(self) == 2:
            taught.unlearn(example(MORE[0]))
        return reads(self, wanted)

    monkeypatch.setattr(Learned, "images", meddled)
    found = own.read()
    assert {MORE[0].tobytes(), MORE[1].tobytes()} & {pixels for _, pixels in rows(found.data)} == {MORE[1].tobytes()}
    assert own.newer() is None
    taught.learn(example(MORE[1]), "bee")
    own.look()
    assert own.new == 62 - 1  # nothing was sent yet: all photos, one of them learned
    again = own.newer()
    assert again is not None
    assert (1, MORE[1].tobytes()) in rows(again.data)
    own.sent()
    assert own.new == 0
    taught.learn(example(MORE[2]), "bee")
    own.look()
    assert own.new == 1


def test_a_running_client_is_told_of_each_change_and_of_the_file_s_end(tmp_path: Path, taught: LearnedFile) -> None:
    write_folder(tmp_path / "photos", X, Y, LABELS)
    given = {"bundle": "b", "broker": "mqtt://h", "id": "d", "data": str(tmp_path / "photos"), "state": "s"}
    own = OwnSamples(read_settings(ClientSettings, given), manifest(), tmp_path / "state")
    own.read()
    assert not own.was_taught()
    taught.learn(example(MORE[0]), "ant")
    assert [own.was_taught(), own.was_taught()] == [True, False]
    again = OwnSamples(read_settings(ClientSettings, given), manifest(), tmp_path / "state")
    again.read()
    assert not again.was_taught()  # what was there at the start is no news
    taught.unlearn(example(MORE[0]))
    assert [own.was_taught(), again.was_taught(), own.was_taught()] == [True, True, False]
    for path in (tmp_path / "state").glob(f"{FILE}*"):  # `photos --erase --learned` does, where it cannot be read
        path.unlink()
    assert [own.was_taught(), own.was_taught()] == [True, False]
    taught.learn(example(MORE[0]), "ant")
    assert [own.was_taught(), own.was_taught()] == [True, False]
