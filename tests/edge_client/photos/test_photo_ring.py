"""edge_client/photos: a ring of photos with a limit, whole after every kill, and what may not leave it."""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protofleet.contract.errors import InUseError, UsageError
from protofleet.contract.wire.messages import Announcement, Receipt, Status
from protofleet.edge_client.data.learned import Example, Learned, LearnedFile
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.photos.kept_photo import NewPhoto, id_in
from protofleet.edge_client.photos.photo_ring import FILE, KIND, PhotoRing, PhotosBeside
from protofleet.edge_client.run.photo_work import LEAST, PhotoWork

MIB = 1 << 20


def photo(number: int, side: int = 64, answer: str = "open", taken_s: float | None = None) -> NewPhoto:
    """A photo of noise, which no code makes smaller."""
    rng = np.random.default_rng(number)
    x = rng.integers(0, 256, (side, side, 3), np.uint8)
    features = rng.normal(size=32).astype(np.float32)
    taken_s = 1000.0 + number if taken_s is None else taken_s
    features /= np.linalg.norm(features)
    return NewPhoto(x, x, f"photo-{number}", taken_s, features, answer, 0.75, 0.5, False, 0.25, 3)


def size(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.glob(f"{FILE}*") if not file.name.endswith("-shm"))


def test_a_photo_comes_back_as_it_was_kept_and_is_found_by_its_id(tmp_path: Path) -> None:
    ring, given = PhotoRing(tmp_path, "net"), photo(1)
    assert ring.keep(given)
    assert ring.keep(photo(1, taken_s=2000.0))  # the same pixels
    (kept,) = ring.photos()
    facts = (kept.name, kept.answer, kept.probability, kept.novelty, kept.uncertainty, kept.version, kept.times)
    assert facts == ("photo-1", "open", 0.75, 0.5, 0.25, 3, 2)
    assert (kept.taken_s, kept.last_s, kept.pixels) == (1001.0, 2000.0, pixel_hash(given.x))
    from PIL import Image

    ring.image(kept, "png")
    import io

    assert np.array_equal(np.asarray(Image.open(io.BytesIO(ring.image(kept, "png")))), given.x)
    assert ring.image(kept).startswith(b"\xff\xd8")
    assert ring.find(kept.id) == kept == PhotosBeside(tmp_path).find(kept.id)
    assert ring.find("0" * 12) is None is ring.find("'; DROP")
    (same,), features = ring.features()
    assert same == kept
    assert np.allclose(features[0], given.features, atol=1e-3)
    assert os.stat(tmp_path / FILE).st_mode & 0o777 == 0o600
    ring.close()


def test_the_newest_are_given_with_their_features_and_all_are_counted(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    for number in range(5):
        ring.keep(photo(number))
    photos, features = ring.features(2)
    assert [kept.name for kept in photos] == ["photo-4", "photo-3"]
    assert np.allclose(features, [photo(number).features for number in (4, 3)], atol=1e-3)
    assert (len(ring.features()[0]), ring.count()) == (5, 5)
    ring.close()


def test_a_photo_that_is_seen_again_has_the_newest_answer_until_it_is_named(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    for answer in ("", "open"):
        ring.keep(photo(1, answer=answer))
    (kept,) = ring.photos()
    assert (kept.answer, kept.times) == ("open", 2)
    ring.naming([kept], "shut")
    ring.keep(photo(1, answer="shut"))
    (kept,) = ring.photos()
    assert (kept.answer, kept.times) == ("open", 3)
    ring.close()


def test_an_id_is_in_the_name_of_a_cameras_picture_and_in_nothing_else() -> None:
    assert id_in("20261126T160503.120Z-5f1c0a9be2d4") == id_in("5f1c0a9be2d4") == "5f1c0a9be2d4"
    assert [id_in(name) for name in ("door.jpg", "5F1C0A9BE2D4", "5f1c0a9be2d", "a/5f1c0a9be2d4", "")] == [None] * 5


def test_the_file_stays_within_its_limit_and_the_oldest_leave(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net", limit_bytes=MIB)
    for number in range(120):
        assert ring.keep(photo(number))
        assert size(tmp_path) <= MIB + 65_536  # the log of one photo, before it is cut off
    assert size(tmp_path) <= MIB
    names = [kept.name for kept in ring.photos()]
    assert names == [f"photo-{number}" for number in range(119, 119 - len(names), -1)]
    assert len(names) > 30
    ring.close()
    ring = PhotoRing(tmp_path, "net", limit_bytes=MIB // 4)  # a smaller one from now on
    assert size(tmp_path) <= MIB // 4
    assert [kept.name for kept in ring.photos()] == names[: len(ring.photos())]
    ring.close()


def test_what_waits_for_the_fleet_never_leaves_and_a_ring_full_of_it_takes_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ring = PhotoRing(tmp_path, "net", limit_bytes=MIB)
    ring.keep(photo(0))
    first = ring.photos()
    PhotosBeside(tmp_path).naming(first)  # as a command does, beside the client
    assert ring.namings == 1
    for number in range(1, 80):
        ring.keep(photo(number))
    assert ring.find(first[0].id) is not None
    others = [kept for kept in ring.photos() if not kept.waits]
    ring.naming(others)
    before = len(ring.photos())
    with caplog.at_level(logging.WARNING):
        assert [ring.keep(photo(number)) for number in range(100, 105)] == [False] * 5
    assert len(ring.photos()) == before
    assert [record.getMessage()[:27] for record in caplog.records] == ["no room for further photos:"]
    ring.committed(1)
    assert ring.keep(photo(200))
    assert ring.find(first[0].id) is None
    assert all(ring.find(kept.id) for kept in others)
    ring.close()
    ring = PhotoRing(tmp_path, "net", limit_bytes=MIB, for_s=10.0)
    ring.let_old_ones_go(10_000.0)
    assert {kept.pixels for kept in ring.photos()} == {kept.pixels for kept in others}
    ring.no_longer_named(others)
    ring.let_old_ones_go(10_000.0)
    assert ring.photos() == []
    ring.close()


def test_after_its_time_a_photo_leaves_though_there_is_room(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net", for_s=60.0)
    for number in (0, 30, 90):
        ring.keep(photo(number))
    assert [kept.name for kept in ring.photos()] == ["photo-90", "photo-30"]
    ring.let_old_ones_go(1000.0 + 151)
    assert ring.photos() == []
    ring.close()


@pytest.mark.parametrize("side", [64, 8])  # a large one has pages of the file to itself, a small one lies beside others
@pytest.mark.parametrize("beside", [False, True])
def test_what_is_removed_is_in_no_byte_of_the_file(tmp_path: Path, beside: bool, side: int) -> None:
    ring, secret = PhotoRing(tmp_path, "net"), photo(7, side)
    ring.keep(secret)
    ring.keep(photo(8, side))
    (found,) = [kept for kept in ring.photos() if kept.name == "photo-7"]
    trace = ring.image(found, "png")[-90:-30]
    held = [file for file in tmp_path.iterdir() if trace in file.read_bytes()]
    assert held
    assert (PhotosBeside(tmp_path) if beside else ring).remove(found.pixels)
    assert not ring.remove(found.pixels)
    assert [file for file in tmp_path.iterdir() if trace in file.read_bytes()] == []
    ring.close()


def test_all_that_is_kept_is_erased_beside_a_client_that_goes_on(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    for number in range(20):
        ring.keep(photo(number))
    ring.naming(ring.photos()[:3])
    traces = [ring.image(kept)[-300:-236] for kept in ring.photos()]
    before, mark = size(tmp_path), ring.commits_of_others
    assert PhotosBeside(tmp_path).erase_all() == 20
    assert ring.photos() == PhotosBeside(tmp_path).photos() == []
    assert ring.commits_of_others != mark
    held = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert [trace for trace in traces if trace in held] == []
    assert size(tmp_path) < before / 10
    assert ring.keep(photo(5))  # which may come again
    assert ring.namings == 1
    assert ring.erase() == 1
    ring.close()


def test_a_kill_while_all_is_erased_leaves_all_or_none_and_the_next_call_ends_it(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    for number in range(60):
        ring.keep(photo(number))
    trace = ring.image(ring.photos()[7])[-300:-236]
    ring.close()
    whole, rng, ends = (tmp_path / FILE).read_bytes(), np.random.default_rng(1), set()
    for _ in range(12):
        for file in tmp_path.iterdir():
            file.unlink()
        (tmp_path / FILE).write_bytes(whole)
        code = f"{ERASES}print('now', flush=True)\nphotos.erase_all()"
        command = [sys.executable, "-c", code, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(float(rng.uniform(0, 0.02)))
            process.send_signal(signal.SIGKILL)
        ends.add(len(PhotosBeside(tmp_path).photos()))
        PhotosBeside(tmp_path).erase_all()
        assert [file for file in tmp_path.iterdir() if trace in file.read_bytes()] == []
    assert ends <= {0, 60}


ERASES = """
import sys
from pathlib import Path
from protofleet.edge_client.photos.photo_ring import PhotosBeside
photos = PhotosBeside(Path(sys.argv[1]))
"""


def test_a_class_that_is_forgotten_takes_its_photos_along(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    for number, answer in enumerate(("face", "open", "closed")):
        ring.keep(photo(number, answer=answer))
    named = next(kept for kept in ring.photos() if kept.answer == "open")
    assert ring.forget(["face"], [named.pixels]) == 2
    assert [kept.answer for kept in ring.photos()] == ["closed"]
    ring.close()


def test_what_is_set_aside_says_why_and_can_be_taken_back(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    ring.keep(photo(1))
    ring.set_aside(ring.photos(), "none", "half open")
    assert [(kept.aside, kept.proposed) for kept in ring.photos()] == [("none", "half open")]
    ring.set_aside(ring.photos(), "")
    assert [(kept.aside, kept.proposed) for kept in ring.photos()] == [("", "")]
    with pytest.raises(UsageError, match="expected unsure or none, got 'perhaps'"):
        ring.set_aside(ring.photos(), "perhaps")
    ring.close()


def test_another_network_begins_with_an_empty_ring_and_a_second_process_is_refused(tmp_path: Path) -> None:
    ring = PhotoRing(tmp_path, "net")
    ring.keep(photo(1))
    with pytest.raises(InUseError):
        PhotoRing(tmp_path, "net")
    ring.close()
    ring = PhotoRing(tmp_path, "net")
    assert len(ring.photos()) == 1
    ring.close()
    ring = PhotoRing(tmp_path, "another net")
    assert ring.photos() == []
    ring.close()


@pytest.mark.parametrize("damage", ["cut", "overwritten", "another file"])
def test_a_file_that_cannot_be_read_is_replaced_by_an_empty_one(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    ring, path = PhotoRing(tmp_path, "net"), tmp_path / FILE
    for number in range(30):
        ring.keep(photo(number))
    ring.close()
    whole = path.read_bytes()
    harm = {
        "cut": lambda: path.write_bytes(whole[: len(whole) // 3]),
        "overwritten": lambda: path.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096)),
        "another file": lambda: path.write_bytes(b"not a database at all" * 99),
    }
    harm[damage]()
    with caplog.at_level(logging.WARNING):
        ring = PhotoRing(tmp_path, "net")
    assert len(caplog.records) == 1
    assert "cannot be read" in caplog.text
    assert ring.photos() == []
    assert ring.keep(photo(1))
    ring.close()


KEEPS = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_photo_ring import photo
from protofleet.edge_client.photos.photo_ring import PhotoRing
ring = PhotoRing(Path(sys.argv[1]), "net", limit_bytes=1 << 20)
number = len(ring.photos()) and int(ring.photos()[0].name[6:]) + 1
while True:
    ring.keep(photo(number))
    print(number, flush=True)
    number += 1
"""


def test_what_was_kept_before_a_kill_is_there_after_it(tmp_path: Path) -> None:
    """Killed twelve times; each time the last photo that was confirmed is the newest, or the one after it is."""
    rng = np.random.default_rng(0)
    for _ in range(12):
        command = [sys.executable, "-c", KEEPS, str(tmp_path), str(Path(__file__).parent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline()
            time.sleep(float(rng.uniform(0, 0.15)))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().split()
        ring = PhotoRing(tmp_path, "net", limit_bytes=MIB)
        newest = [int(kept.name[6:]) for kept in ring.photos()]
        assert newest == list(range(newest[0], newest[0] - len(newest), -1))
        assert not rest or newest[0] - int(rest[-1]) in (0, 1)
        assert size(tmp_path) <= MIB
        ring.close()
    with sqlite3.connect(tmp_path / FILE) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA application_id").fetchone() == (KIND.application_id,)


def test_a_proposal_stands_until_its_photos_are_examples_of_it(tmp_path: Path) -> None:
    """A client that ends between the two makes up for it at its next start; another label ends the proposal at once."""
    ring = PhotoRing(tmp_path, "net")
    for number in (1, 2):
        ring.keep(photo(number))
    both = ring.photos()
    ring.set_aside(both, "none", "boot")
    ring.naming(both[:1], "boot")
    ring.naming(both[1:], "shoe")
    assert [kept.proposed for kept in ring.photos()] == ["boot", ""]
    ring.named(both[:1])
    assert [kept.proposed for kept in ring.photos()] == ["", ""]
    ring.close()


def test_what_is_told_of_kept_photos_is_asked_for_allowed_and_bounded(tmp_path: Path) -> None:
    ring, learned = PhotoRing(tmp_path, "net"), Learned(tmp_path)
    asked = Announcement(bytes(4), 1, "open", "ncm", bytes(32), proposals=True)
    work = PhotoWork(ring, learned, ("open", "shut"), tells_proposed=True, tells_unknown=True)
    for number in range(LEAST - 1):
        ring.keep(replace(photo(number), is_unknown=number % 4 == 0))
    ring.keep(photo(90, answer=""))  # nobody answered about it
    photos = ring.photos()
    ring.set_aside(photos[:3], "none", "ajar")
    ring.set_aside(photos[3:4], "none", "shut")  # the bundle has it by now
    assert not work.turn(replace(asked, proposals=False))
    assert (work.proposed, work.unknown_share) == (None, None)
    assert work.turn(asked)
    assert (work.proposed, work.unknown_share) == ({"ajar": 3}, None)  # a share of so few shows single photos

    ring.keep(replace(photo(99), is_unknown=True))
    assert not work.turn(asked)  # not before it is time
    work.look()
    assert work.turn(asked)
    assert work.unknown_share == 0.3  # 6 of 20
    ring.keep(photo(100))
    work.look()
    assert not work.turn(asked)  # 6 of 21 is nothing new
    assert work.turn(asked, is_private=True)
    assert (work.proposed, work.unknown_share) == (None, None)
    work.look()
    assert not work.turn(asked, is_private=True)
    assert work.turn(asked)
    assert work.unknown_share == 0.3  # and whoever asks again is told no other one
    for row, kept in enumerate(photos):
        ring.set_aside([kept], "none", f"class {row:02}")
    ring.set_aside(photos[-2:], "none", "n" * 64)
    work.look()
    assert work.turn(asked)
    assert work.proposed is not None
    assert list(work.proposed.items())[:2] == [("n" * 64, 2), ("class 00", 1)]
    assert len(work.proposed) == 16
    assert Status(True, bytes(8), 1, proposed=work.proposed).proposed == work.proposed

    silent = PhotoWork(ring, learned, ("open", "shut"))
    assert not silent.turn(asked)
    assert work.turn(replace(asked, proposals=False))  # an older aggregator has taken over
    assert (work.proposed, work.unknown_share) == (None, None)
    ring.close()
    learned.close()


def test_an_answer_after_a_label_is_never_taken_for_one_before_it(tmp_path: Path) -> None:
    """Named, learned, answered anew by a head that knows it, taken back, named again: the first answer counts."""
    ring = PhotoRing(tmp_path, "net")
    ring.keep(photo(1, answer="shut"))
    ring.keep(photo(2, answer=""))  # nobody answered about it
    ring.naming(ring.photos())
    ring.committed(ring.namings)
    for kept in ring.photos():
        ring.answered_anew(kept, photo(1, answer="open"))
    ring.no_longer_named(ring.photos())
    ring.naming(ring.photos())
    second, first = PhotosBeside(tmp_path).photos()
    assert (first.answer, second.answer) == ("open", "open")
    assert (first.answer_before, second.answer_before) == ("shut", "")
    ring.close()


def test_only_what_was_named_before_a_contribution_was_made_may_leave_once_that_is_committed(tmp_path: Path) -> None:
    ring, learned = PhotoRing(tmp_path, "net"), Learned(tmp_path)
    work = PhotoWork(ring, learned, ("open", "shut"))
    for number in (1, 2):
        ring.keep(photo(number))
    second, first = ring.photos()
    ring.naming([first])
    for status in ("rejected", "committed"):
        naming = work.before()
        ring.naming([second])  # while the contribution is made
        work.made((bytes(4), 1, "ncm"), naming)
        work.settled(Receipt(bytes(4), 1, "ncm", status))  # type: ignore[arg-type]
        assert [kept.waits > 0 for kept in ring.photos()] == [True, status == "rejected"]
        ring.committed(0)
        ring.no_longer_named([second])
    ring.close()
    learned.close()


def test_a_class_that_the_fleet_forgets_takes_along_what_was_answered_and_what_was_named_so(tmp_path: Path) -> None:
    ring, learned, labels = PhotoRing(tmp_path, "net"), Learned(tmp_path), ("open", "shut")
    for number, answer in enumerate(("open", "shut", "shut")):
        ring.keep(photo(number, answer=answer))
    x = photo(2).x
    LearnedFile(tmp_path, labels).learn(Example(x, pixel_hash(x)), "open")
    work, asked = PhotoWork(ring, learned, labels), Announcement(bytes(4), 1, "open", "ncm", bytes(32))
    work.turn(asked)
    assert ring.count() == 3
    work.turn(replace(asked, withheld=(0,)))
    assert [kept.name for kept in ring.photos()] == ["photo-1"]
    ring.close()
    learned.close()


def test_at_each_look_what_was_kept_for_long_enough_leaves_though_no_photo_comes(tmp_path: Path) -> None:
    ring, learned = PhotoRing(tmp_path, "net", for_s=3600.0), Learned(tmp_path)
    for number, age_s in ((1, 1800.0), (2, 7200.0)):
        ring.keep(photo(number, taken_s=time.time() - age_s))
    PhotoWork(ring, learned, ("open", "shut")).look()
    assert [kept.name for kept in ring.photos()] == ["photo-1"]
    ring.close()
    learned.close()
