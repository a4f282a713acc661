"""Store and journal are files of one kind: private, locked, versioned, synced; and never another's, nor nobody's."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from permissions import as_somebody_else, open_the_way

from protofleet.aggregator.store import durable_store as store_module
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.records import Accepted
from protofleet.contract.errors import ProtofleetError, StoreError, UsageError
from protofleet.contract.files.sqlite import FIRST_VERSION, Database, Kind, Watch, as_written, is_taken, read_only
from protofleet.edge_client.data.learned import Example, Learned, LearnedFile
from protofleet.edge_client.journal import journal as journal_module
from protofleet.edge_client.journal.journal import Journal

ROOT = Path(__file__).parents[3]
BUNDLE = bytes(range(32))


def open_store(folder: Path) -> DurableStore:
    return DurableStore(folder / "file.sqlite", BUNDLE, "fleet")


def write_store(store: DurableStore, number: int, payload: bytes = b"payload") -> None:
    store.commit([Accepted(number, "fedproto", "pi-1", payload, len(payload))], {(number, "late"): 1})


def open_journal(folder: Path) -> Journal:
    return Journal(folder, fleet="fleet", device="pi-1", bundle=BUNDLE)


def write_journal(journal: Journal, number: int, payload: bytes = b"payload") -> None:
    weights = {"w": np.zeros(3, np.float32)}
    journal.commit_round((b"run1", number, "m"), weights=weights, payload=payload, limit_bytes=1, metrics={})


@dataclass(frozen=True)
class Subject:
    """One of the two, and what is the same to do with both."""

    name: str
    file: str
    kind: Kind
    open: Callable[[Path], Any]
    write: Callable[..., None]

    def count(self, folder: Path) -> int:
        """Payloads that another SQLite connection finds."""
        table = "contribution" if self.name == "store" else "contributions"
        db = sqlite3.connect(folder / self.file)
        (found,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
        db.close()
        return int(found)


SUBJECTS = [
    Subject("store", "file.sqlite", store_module.KIND, open_store, write_store),
    Subject("journal", "journal.sqlite", journal_module.KIND, open_journal, write_journal),
]
both = pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)


# ── durable ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_the_connection_that_writes_waits_for_the_disk(subject: Subject, tmp_path: Path) -> None:
    for _ in range(2):  # a new file, and one that is there
        with subject.open(tmp_path) as opened:
            assert opened._db.execute("PRAGMA synchronous").fetchone() == (2,)
            assert opened._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


@both
def test_every_commit_is_forced_to_the_disk_before_it_returns(subject: Subject, tmp_path: Path) -> None:
    """Counted by strace between marks that the process writes: what the kernel was asked, and not what SQLite says."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        sys.path.insert(0, "tests/support")
        from tests.contract.files.test_sqlite import SUBJECTS
        subject = next(s for s in SUBJECTS if s.name == sys.argv[1])
        with subject.open(Path(sys.argv[2])) as opened:
            for number in range(1, 6):
                os.write(2, b"begin")
                subject.write(opened, number)
                os.write(2, b"end")
        """
    )
    trace = tmp_path / "trace"
    (tmp_path / "d").mkdir()
    asked = ["strace", "-f", "-e", "trace=write,fsync,fdatasync", "-o", str(trace), sys.executable, "-c", script]
    done = subprocess.run([*asked, subject.name, str(tmp_path / "d")], cwd=ROOT, capture_output=True, timeout=120)
    if done.returncode and b"ptrace" in done.stderr:
        pytest.skip("no process may be traced here")
    assert not done.returncode, done.stderr.decode()[-2000:]
    within = re.findall(r'write\(2, "begin"(.*?)write\(2, "end"', trace.read_text(), re.DOTALL)
    assert len(within) == 5
    assert all(re.search(r"f(data)?sync\(\d+\)\s+= 0", calls) for calls in within)


# ── private ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
def test_nobody_else_can_read_what_is_in_it_whatever_the_umask(subject: Subject, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with subject.open(tmp_path / "made" if subject.name == "journal" else tmp_path) as opened:
            subject.write(opened, 1)
            modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.rglob(f"{subject.file}*")}
    finally:
        os.umask(before)
    assert modes == {subject.file + end: 0o600 for end in ("", "-wal", "-shm")}
    if subject.name == "journal":
        assert (tmp_path / "made").stat().st_mode & 0o777 == 0o700


# ── locked ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize("link", ["none", "soft", "hard", "folder"])
def test_one_process_at_a_time_under_whatever_name(subject: Subject, tmp_path: Path, link: str) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    with subject.open(there) as opened:
        if link in ("soft", "hard"):
            here.mkdir()
            (os.symlink if link == "soft" else os.link)(there / subject.file, here / subject.file)
        elif link == "folder":
            here.symlink_to(there)
        with pytest.raises(StoreError, match="expected to be its only user, got another process"):
            subject.open(there if link == "none" else here)
        subject.write(opened, 1)
    subject.open(there).close()


@both
@pytest.mark.parametrize("way", ["soft link", "relative"])
def test_a_file_is_the_same_one_by_a_link_and_from_another_folder(
    subject: Subject, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    subject.open(there).close()
    if way == "soft link":
        (here / subject.file).symlink_to(there / subject.file)
        opened = subject.open(here)
    else:
        monkeypatch.chdir(there)
        opened = subject.open(Path())
        monkeypatch.chdir(here)
    subject.write(opened, 1)
    opened.close()
    assert subject.count(there) == 1


# ── deleted, full, read-only ────────────────────────────────────────────────────────────────────────────────────────


@both
@pytest.mark.parametrize("how", ["deleted", "deleted with its log", "replaced", "moved", "log deleted"])
def test_a_file_that_is_gone_takes_no_further_commit(subject: Subject, tmp_path: Path, how: str) -> None:
    path = tmp_path / subject.file
    opened = subject.open(tmp_path)
    subject.write(opened, 1)
    if how == "moved":
        path.rename(tmp_path / "elsewhere")
    elif how != "log deleted":
        path.unlink()
    if "log" in how:
        Path(f"{path}-wal").unlink()
    if how == "replaced":
        path.write_bytes(b"")
    for number in (2, 3):
        with pytest.raises(StoreError, match="expected the file that was opened, got a name without it"):
            subject.write(opened, number)
    opened.close()


@both
def test_a_file_that_goes_while_a_transaction_runs_is_noticed_before_anyone_is_told(
    subject: Subject, tmp_path: Path
) -> None:
    deleted = pytest.raises(StoreError, match="deleted or replaced")
    with subject.open(tmp_path) as opened, deleted, opened._file.transaction():
        (tmp_path / subject.file).unlink()


@both
def test_a_full_disk_is_one_line_and_what_was_written_stays(subject: Subject, tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from pathlib import Path
        sys.path.insert(0, "tests/support")
        from protofleet.contract.errors import StoreError
        from tests.contract.files.test_sqlite import SUBJECTS
        subject = next(s for s in SUBJECTS if s.name == sys.argv[1])
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
        written = 0
        try:
            opened = subject.open(Path(sys.argv[2]))
            for number in range(1, 1000):
                subject.write(opened, number, bytes(20_000))
                written += 1
        except StoreError as error:
            print(written, error)
        """
    )
    for limit in (2_000_000, 1_000):  # and one that is full from the beginning
        folder = tmp_path / str(limit)
        folder.mkdir()
        asked = [sys.executable, "-c", script, subject.name, str(folder), str(limit)]
        done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=120)
        written, line = done.stdout.split(" ", 1)
        assert "expected a disk that takes it, got disk I/O error, try freeing space, or another --s" in line
        assert line.count("\n") == 1
        assert (int(written) > 10) is (limit > 10_000)
        with subject.open(folder) as opened:  # with room again
            subject.write(opened, 1000)
        assert subject.count(folder) == int(written) + 1


@both
def test_a_file_that_may_only_be_read_is_one_line(subject: Subject, tmp_path: Path) -> None:
    subject.open(tmp_path).close()
    (tmp_path / subject.file).chmod(0o444)
    open_the_way(tmp_path)
    tmp_path.chmod(0o755)
    said = as_somebody_else(lambda: subject.open(tmp_path))
    assert "expected a file that can be written, got Permission denied" in said
    assert "\n" not in said


# ── another's ───────────────────────────────────────────────────────────────────────────────────────────────────────


def other_file(path: Path, what: str) -> str:
    """Make a file that is not to be opened; the words that say why."""
    if what == "text":
        path.write_text("this is no database " * 40)
        return "got another file"
    if what == "short":
        path.write_bytes(b"SQLite format 3\x00")
        return "got another file"
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE t (x)")
    application, version, words = {
        "another program's": (0, 0, "got another file, or one of Protofleet 0.1"),
        "another program's by its number": (0x0F055111, 2, "got another file"),
        "of 0.1": (None, 0, "got one of Protofleet 0.1"),
        "of a newer version": (None, 99, "got version 99, of a newer Protofleet"),
        "the other of the two": ("other", 2, "got another file"),
    }[what]
    own = next(s.kind.application_id for s in SUBJECTS if s.file == path.name)
    other = next(s.kind.application_id for s in SUBJECTS if s.file != path.name)
    number = {None: own, "other": other}.get(application, application)
    db.execute(f"PRAGMA application_id = {number}")
    db.execute(f"PRAGMA user_version = {version}")
    db.commit()
    db.close()
    return words


@both
@pytest.mark.parametrize(
    "what",
    [
        "text",
        "short",
        "another program's",
        "another program's by its number",
        "of 0.1",
        "of a newer version",
        "the other of the two",
    ],
)
def test_a_file_that_is_not_ours_is_refused_in_one_line_and_not_touched(
    subject: Subject, tmp_path: Path, what: str
) -> None:
    words = other_file(tmp_path / subject.file, what)
    before = (tmp_path / subject.file).read_bytes()
    with pytest.raises(UsageError, match=f"{subject.kind.option} .*expected a {subject.name} of version.*{words}"):
        subject.open(tmp_path)
    assert (tmp_path / subject.file).read_bytes() == before
    assert os.listdir(tmp_path) == [subject.file]


# ── of another version ──────────────────────────────────────────────────────────────────────────────────────────────

FIRST = Kind("notes", "--notes", 0x7E57, ("CREATE TABLE note (words TEXT NOT NULL)",))
SECOND = replace(FIRST, steps=(*FIRST.steps, "ALTER TABLE note ADD COLUMN stars INTEGER NOT NULL DEFAULT 3"))
THIRD = replace(SECOND, steps=(*SECOND.steps, "CREATE TABLE a (x); INSERT INTO a SELECT stars FROM note"))


def test_a_file_is_brought_forward_step_by_step_and_never_back(tmp_path: Path) -> None:
    first = Database(tmp_path / "f", FIRST)
    with first.transaction() as db:
        db.execute("INSERT INTO note VALUES ('kept')")
    first.close()
    third = Database(tmp_path / "f", THIRD)
    assert third.connection.execute("SELECT words, stars, x FROM note, a").fetchall() == [("kept", 3, 3)]
    assert third.connection.execute("PRAGMA user_version").fetchone() == (FIRST_VERSION + 2,)
    third.close()
    for older in (FIRST, SECOND):
        with pytest.raises(UsageError, match="got version 4, of a newer Protofleet, try another --notes"):
            Database(tmp_path / "f", older)
    fresh = Database(tmp_path / "new", THIRD)
    assert fresh.connection.execute("SELECT count(*) FROM note, a").fetchone() == (0,)
    fresh.close()


def test_a_newer_version_that_is_only_in_the_log_is_refused_too(tmp_path: Path) -> None:
    """After a power cut the file's header may still say the version before."""
    Database(tmp_path / "f", FIRST).close()
    db = sqlite3.connect(tmp_path / "f", isolation_level=None)
    db.execute("PRAGMA user_version = 9")
    for name in ("f", "f-wal"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("f", "cut", 1))
    db.close()
    assert int.from_bytes((tmp_path / "cut").read_bytes()[60:64], "big") == FIRST_VERSION
    with pytest.raises(UsageError, match="got version 9, of a newer Protofleet"):
        Database(tmp_path / "cut", FIRST)


def test_reading_beside_a_process_takes_one_version_and_looks_once(tmp_path: Path) -> None:
    first = Database(tmp_path / "f", FIRST)
    with pytest.raises(UsageError, match=f"got version {FIRST_VERSION}"), read_only(tmp_path / "f", SECOND):
        pass
    with read_only(tmp_path / "f", FIRST) as seen:
        assert seen.execute("SELECT count(*) FROM note").fetchone() == (0,)
        with first.transaction() as db:
            db.execute("INSERT INTO note VALUES ('later')")
        assert seen.execute("SELECT count(*) FROM note").fetchone() == (0,)
    first.close()


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    Database(tmp_path / "f", FIRST).close()
    broken = replace(THIRD, steps=(*THIRD.steps, "CREATE TABLE b (x); INSERT INTO nowhere VALUES (1)"))
    with pytest.raises(StoreError, match="nowhere"):
        Database(tmp_path / "f", broken)
    again = Database(tmp_path / "f", FIRST)
    assert again.connection.execute("SELECT name FROM sqlite_master").fetchall() == [("note",)]
    again.close()


@both
def test_a_file_whose_making_was_cut_off_is_made_anew(subject: Subject, tmp_path: Path) -> None:
    (tmp_path / subject.file).write_bytes(b"")
    with subject.open(tmp_path) as opened:
        subject.write(opened, 1)
    assert subject.count(tmp_path) == 1


@both
def test_a_file_whose_making_was_cut_off_halfway_is_made_anew(subject: Subject, tmp_path: Path) -> None:
    """Some of the first transaction's pages have reached the file, its beginning has not; the roll-back journal has."""
    made = sqlite3.connect(tmp_path / "made", isolation_level=None)
    made.execute("PRAGMA cache_size = 1")  # pages spill into the file before they are committed
    made.execute("BEGIN IMMEDIATE")
    made.execute("CREATE TABLE meta (name TEXT PRIMARY KEY, value)")
    made.execute("INSERT INTO meta VALUES ('big', zeroblob(1000000))")
    folder = tmp_path / "cut"
    folder.mkdir()
    for end in ("", "-journal"):
        (folder / (subject.file + end)).write_bytes((tmp_path / ("made" + end)).read_bytes())
    made.close()
    assert (folder / subject.file).stat().st_size > 0
    with subject.open(folder) as opened:
        subject.write(opened, 1)
    assert subject.count(folder) == 1


@both
def test_tables_that_nobody_wrote_are_not_blamed_on_the_disk(subject: Subject, tmp_path: Path) -> None:
    """A file of version 2 in which somebody has made a table of version 3."""
    path = tmp_path / subject.file
    shutil.copy(ROOT / "tests" / "files" / "v2" / f"{subject.name}.sqlite", path)
    db = sqlite3.connect(path)
    db.execute("CREATE TABLE standing (device TEXT)")
    db.commit()
    db.close()
    with pytest.raises(StoreError, match="as it was written, got table standing already exists, try another --s"):
        Database(path, subject.kind)
    assert path.read_bytes()[60:64] == (2).to_bytes(4, "big")


_CHANGED_ELSEWHERE = """
import sys
from pathlib import Path
from protofleet.edge_client.data.learned import Learned, LearnedFile
state = Path(sys.argv[1])
learned = Learned(state)
assert learned.look()
LearnedFile(state, ("cat", "dog")).unlearn_hashed(learned.hashes[0])
learned.close()
"""


def test_a_watch_goes_on_while_this_process_and_another_one_change_the_file(tmp_path: Path) -> None:
    """As a client whose page names photos, beside `protofleet unlearn`: nobody's log is removed under a connection."""
    watching, also = Learned(tmp_path), Learned(tmp_path)
    file = LearnedFile(tmp_path, ("cat", "dog"))
    known = 0
    for turn in range(6):
        for number in range(2):
            x = np.full((4, 4, 3), 10 * turn + number, np.uint8)
            assert file.learn(Example(x, blake2b(x.tobytes(), digest_size=16).digest()), "cat") == "learned"
            known += 1
        if turn % 2:
            assert watching.look()
            assert len(watching) == known
        done = subprocess.run(
            [sys.executable, "-c", _CHANGED_ELSEWHERE, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        known -= 1
        assert watching.look()
        assert also.look()
        assert (len(watching), len(also)) == (known, known)
        opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
        assert not [name for name in opened if str(tmp_path) in name and name.endswith("(deleted)")]
    watching.close()
    also.close()
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if str(tmp_path) in name]  # with the last connection all are closed


def test_to_ask_whether_a_file_is_taken_lets_nobody_remove_its_log(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "file.sqlite", BUNDLE, "fleet") as store:
        write_store(store, 1)
    watch = Watch(tmp_path / "file.sqlite")
    assert watch.changed()
    assert not is_taken(tmp_path / "file.sqlite")
    code = (
        "import sys; from pathlib import Path; from protofleet.aggregator.store.durable_store import DurableStore; "
        "DurableStore(Path(sys.argv[1]), bytes(range(32)), 'fleet').__exit__(None, None, None)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file.sqlite")], cwd=ROOT, capture_output=True)
    assert done.returncode == 0, done.stderr
    opened = [os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert not [name for name in opened if str(tmp_path) in name and name.endswith("(deleted)")]
    watch.close()


def test_a_kind_that_knows_a_remedy_names_it_however_its_file_is_broken(tmp_path: Path) -> None:
    path, kind = tmp_path / "f.sqlite", replace(journal_module.KIND, remedy="this, which removes it")
    with contextlib.closing(sqlite3.connect(tmp_path / "other.sqlite")) as other:
        other.execute("CREATE TABLE other (x)")
    Database(path, kind).close()
    good = path.read_bytes()
    for content in (b"no database" * 500, (tmp_path / "other.sqlite").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(ProtofleetError) as read, read_only(path, kind):
            pass
        with pytest.raises(ProtofleetError) as opened:
            Database(path, kind)
        assert [each.value.hint for each in (read, opened)] == [kind.remedy] * 2
    path.write_bytes(good)
    with pytest.raises(StoreError) as written, as_written(path, kind):
        raise ValueError("not of ours")
    assert written.value.hint == kind.remedy
    with pytest.raises(StoreError) as written, as_written(path, journal_module.KIND):
        raise ValueError("not of ours")
    assert written.value.hint == f"another {journal_module.KIND.option}"


@both
def test_another_program_that_writes_is_named_and_no_disk_is_blamed(subject: Subject, tmp_path: Path) -> None:
    with subject.open(tmp_path) as opened:
        opened._file.connection.execute("PRAGMA busy_timeout = 10")
        with contextlib.closing(sqlite3.connect(tmp_path / subject.file, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreError, match="nobody else who writes it, got database is locked, try ending"):
                subject.write(opened, 1)
            other.execute("ROLLBACK")
        subject.write(opened, 1)
    assert subject.count(tmp_path) == 1


def test_who_may_only_read_a_store_sees_that_its_process_runs(tmp_path: Path) -> None:
    open_the_way(tmp_path)
    path = tmp_path / "file.sqlite"

    def look() -> None:
        raise StoreError("taken", expected="", got=is_taken(path))

    with open_store(tmp_path):
        path.chmod(0o444)
        tmp_path.chmod(0o555)
        assert "got True" in as_somebody_else(look)
    assert "got False" in as_somebody_else(look)
    tmp_path.chmod(0o755)


def test_a_store_that_nobody_lets_us_read_is_one_line(tmp_path: Path) -> None:
    open_the_way(tmp_path)
    open_store(tmp_path).close()
    tmp_path.chmod(0o755)

    def look() -> None:
        with read_only(tmp_path / "file.sqlite", store_module.KIND):
            pass

    said = as_somebody_else(look)
    assert said.endswith("a store that can be read, got unable to open database file, try the user that it is of")
