"""Backups of a store that is in use, and what is restored of them: another run, without what was forgotten since."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from unittest.mock import patch

import pytest
from aggregator_samples import BUNDLE
from aggregator_server_samples import wait
from commands import one_error_line, run
from postgres_server import ON_FILES, Places, PostgresServer, need_postgres

from protofleet.aggregator.database import read_only
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import give
from protofleet.aggregator.store.schema import KIND, PAGE_BYTES
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.contract.files.atomic_files import lock
from tests.aggregator.merging.test_exact_sums import core_of, expect_head_of, message, outcomes, steps


@pytest.fixture
def store(places: Places) -> Iterator[DurableStore]:
    with DurableStore(places("s"), BUNDLE, "fleet") as made:
        yield made


def test_what_is_restored_is_another_run_without_what_was_forgotten_since(tmp_path: Path, places: Places) -> None:
    path, kept = places("s"), tmp_path / "kept"
    store = DurableStore(path, BUNDLE, "fleet")
    core = core_of(store)
    said = outcomes(core, *(message(core, device, 1, seed) for seed, device in enumerate("abcd")))
    assert said == ["committed"] * 4
    for what in ("forget", "admit"):  # known to the backup: of what was done before it, nothing is done again
        give(path, what, "b", "me")
    steps(core, 0.0)
    assert outcomes(core, message(core, "b", 2, 1)) == ["committed"]
    steps(core, 60.0)
    old, before = message(core, "b", 3, 7), core.parts.run.hex()
    done = run("fleet", "backup", kept, "--store", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"backup of {path}: {kept}, {kept.stat().st_size:,} bytes")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in tmp_path.iterdir() if "kept" in p.name) == ["kept"]
    assert kept.read_bytes()[18:20] == b"\1\1"  # SQLite's mark of a file without a log
    for what, device in (("forget", "a"), ("remove", "c"), ("remove", "e"), ("admit", "e")):
        give(path, what, device, "me")
    assert outcomes(core, message(core, "d", 2, None)) == ["committed"]  # it withdraws
    steps(core, 61.0)
    refused = one_error_line(run("fleet", "restore", kept, "--store", path, "--force"))
    assert "got one that does" in refused or "another process that runs on it" in refused
    store.close()
    assert "try --force" in one_error_line(run("fleet", "restore", kept, "--store", path))
    done = run("fleet", "restore", kept, "--store", path, "--force", "--json", tmp_path / "told.json")
    assert done.returncode == 0, done.stderr
    assert "5 orders of the store before to be done again" in done.stdout
    assert "start the aggregator as before, without --new-run" in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())["restored"]
    assert (told["replaced"], told["again"]) == (True, 5)
    with DurableStore(path, BUNDLE, "fleet") as again:
        core = core_of(again)
        assert again.run.hex() == told["run"] != before
        assert again.orders.is_restored_as(again.run)
        assert not again.orders.is_restored_as(bytes.fromhex(before))
        assert core.standing.present == {"a", "b", "c", "d"}
        steps(core, 2.0)
        assert core.standing.present == {"b", "c"}
        expect_head_of(core, 1, 2)
        assert outcomes(core, old) == ["rejected"]  # of the run before
        (told_b,) = core.take([message(core, "b", 1, 8)], 3.0)  # what it has now: for the device, the run is new
        assert told_b.receipt is not None
        assert (told_b.outcome, told_b.receipt.held) == ("late", 3)  # no duplicate of what came before the backup
        assert outcomes(core, message(core, "b", 4, 8)) == ["committed"]
        steps(core, 99.0)
        expect_head_of(core, 2, 8)
        refused = [outcomes(core, message(core, device, 9, 5)) for device in "acde"]
        assert refused == [["rejected"], ["rejected"], ["rejected"], ["committed"]]
        log = [(o["what"], o["outcome"]) for o in _log(path)]
    assert log[-1] == ("restore", f"of {kept}, as run {told['run']}")
    again = ["forget", "remove", "remove", "admit", "withdraw"]
    assert [what for what, _ in log] == ["forget", "admit", *again, "restore"]


def _log(path: Path | str) -> list[dict[str, object]]:
    return list(json.loads(run("fleet", "log", "--store", path, "--json", "-").stdout)["orders"])


@ON_FILES
def test_a_restored_store_is_new_where_the_one_before_is_gone(store: DurableStore, tmp_path: Path) -> None:
    assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
    done = run("fleet", "restore", tmp_path / "kept", "--store", tmp_path / "other")
    assert "what was forgotten since is not known here" in done.stdout
    assert (tmp_path / "other").stat().st_mode & 0o777 == 0o600
    (tmp_path / "other-wal").write_bytes(b"of the store before")
    (tmp_path / "other").write_bytes((tmp_path / "other").read_bytes()[:50_000].ljust(90_000, b"x"))
    done = run("fleet", "restore", tmp_path / "kept", "--store", tmp_path / "other", "--force")
    assert "what was forgotten since is not known here" in done.stdout
    assert not (tmp_path / "other-wal").exists()
    refused = one_error_line(run("fleet", "backup", tmp_path / "other", "--store", tmp_path / "s"))
    assert "expected a new file, or an earlier backup" in refused  # it is a store now, though made of a backup
    with DurableStore(tmp_path / "other", BUNDLE, "fleet") as again:
        assert again.run != store.run
    assert [o["what"] for o in _log(tmp_path / "s")] == ["backup"]


def test_a_backup_is_of_one_moment_while_the_store_is_written(
    store: DurableStore, tmp_path: Path, places: Places
) -> None:
    """Every state has each device at the same generation; a backup that mixed two would not."""
    payload, stop = os.urandom(200_000), threading.Event()

    def stands(generation: int) -> None:
        rows = [Stands(f"device-{i}", generation, payload[i:], 9) for i in range(20)]
        store.standing.commit(rows, {}, 1.0)

    def write() -> None:
        generation = 1
        while not stop.is_set():
            generation += 1
            stands(generation)

    stands(1)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = set()
        for _ in range(3):
            assert run("fleet", "backup", tmp_path / "kept", "--store", places("s")).returncode == 0
            done = run("fleet", "list", "--store", tmp_path / "kept", "--json", "-")
            generations = {device["generation"] for device in json.loads(done.stdout)["devices"]}
            assert len(generations) == 1
            seen |= generations
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 1  # the writer wrote meanwhile


def test_a_reader_does_not_hold_up_what_is_to_be_erased(store: DurableStore, places: Places) -> None:
    core = core_of(store)
    outcomes(core, message(core, "a", 1, 0))
    with read_only(places("s"), KIND) as db:
        db.execute("SELECT count(*) FROM standing").fetchone()
        give(places("s"), "forget", "a", "me")
        began = os.times().elapsed
        steps(core, 1.0)
        assert not store.standing.erase()
        assert os.times().elapsed - began < 4.0  # SQLite itself would wait for five seconds
    wait(store.standing.erase)  # a server's process takes a moment to go
    if places("s").startswith("/"):  # an operator's order is waited for again
        assert store._db.execute("PRAGMA busy_timeout").fetchone() == (5000,)


@ON_FILES
def test_what_is_no_backup_or_no_place_for_one_is_one_line(store: DurableStore, tmp_path: Path) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    (tmp_path / "letter").write_text("dear")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert run("fleet", "backup", kept, "--store", path).returncode == 0
    wrong = {
        ("backup", path, "--store", path): "expected a file of its own",
        ("backup", tmp_path / "letter", "--store", path): "expected a new file, or an earlier backup",
        ("backup", "/dev/null", "--store", path): "expected a new file, or an earlier backup",
        ("backup", tmp_path / "no" / "kept", "--store", path): "No such file or directory",
        ("backup", kept, "--store", tmp_path / "none"): "got no such file",
        ("backup", kept, "--store", kept): "expected a store, got a backup",
        ("backup", tmp_path / "link", "--store", path): "expected a new file, or an earlier backup",
        ("restore", kept, "--store", kept): "expected another file than the backup",
        ("restore", tmp_path / "letter", "--store", tmp_path / "new"): "got file is not a database",
        ("restore", tmp_path / "none", "--store", tmp_path / "new"): "got no such file",
        ("restore", kept, "--store", tmp_path / "letter", "--force"): "got another file",
    }
    for words, expected in wrong.items():
        assert expected in one_error_line(run("fleet", *words))
    assert (tmp_path / "letter").read_text() == "dear"
    whole = kept.read_bytes()
    with read_only(kept, KIND) as db:
        (page,) = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'accuracy'").fetchone()
    start, stop = (page - 1) * PAGE_BYTES, page * PAGE_BYTES  # what restoring has no reason to read
    unread = whole[:start] + b"\xff" * PAGE_BYTES + whole[stop:]
    for damaged in (whole[:20_000], whole[:40_000] + b"\xff" * (len(whole) - 40_000), unread):
        kept.write_bytes(damaged)
        assert run("fleet", "restore", kept, "--store", tmp_path / "new").returncode == 1
    assert not {"new", "nowhere"} & set(os.listdir(tmp_path))


@ON_FILES
def test_a_backup_that_somebody_copied_to_be_a_store_is_no_backup_any_more(store: DurableStore, tmp_path: Path) -> None:
    assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
    DurableStore(tmp_path / "kept", BUNDLE, "fleet").close()
    done = run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s")
    assert "got something else" in one_error_line(done)


def test_a_backup_is_there_where_the_store_has_no_room_for_a_line_about_it(tmp_path: Path) -> None:
    """A store of the version before has no such line at all, and is copied before it is brought to this one."""
    shutil.copy(Path(__file__).parents[2] / "files" / "v2" / "store.sqlite", tmp_path / "s")
    done = run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s")
    assert done.returncode == 0
    assert "; not in the store's record: store" in done.stdout
    assert "try starting what runs on it" in one_error_line(run("fleet", "list", "--store", tmp_path / "s"))
    done = run("fleet", "restore", tmp_path / "kept", "--store", tmp_path / "s", "--force")
    assert "0 orders of the store before to be done again" in done.stdout  # it knew none
    assert run("fleet", "list", "--store", tmp_path / "s").returncode == 0


@ON_FILES
def test_a_disk_that_is_full_is_named_and_nothing_is_left_on_it(store: DurableStore, tmp_path: Path) -> None:
    store.standing.commit([Stands("a", 1, os.urandom(300_000), 9)], {}, 1.0)
    kept, other, limits = tmp_path / "kept", tmp_path / "other", resource.getrlimit(resource.RLIMIT_FSIZE)
    assert run("fleet", "backup", kept, "--store", tmp_path / "s").returncode == 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
    try:
        refused = [run("fleet", "backup", other, "--store", tmp_path / "s")]
        refused += [run("fleet", "restore", kept, "--store", other)]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    for done, what in zip(refused, ("backup", "store"), strict=True):
        assert one_error_line(done).startswith(f"error: {what} {other}, expected a disk that takes it")
    assert sorted(p.name for p in tmp_path.iterdir() if p.name[0] != "s") == ["kept"]


def test_what_a_killed_restoration_left_is_not_read_and_whose_the_store_was_it_is(tmp_path: Path) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    DurableStore(path, BUNDLE, "fleet").close()
    assert run("fleet", "backup", kept, "--store", path).returncode == 0
    for left in ("", "-journal", "-wal", "-shm"):
        (tmp_path / f"s.partial{left}").write_bytes(b"left")
    if os.getuid() == 0:
        os.chown(path, 1234, 1234)
    owner = path.stat().st_uid
    assert run("fleet", "restore", kept, "--store", path, "--force").returncode == 0
    assert path.stat().st_uid == owner
    assert sorted(os.listdir(tmp_path)) == ["kept", "s"]


def test_a_store_that_is_read_or_of_another_fleet_is_not_replaced(tmp_path: Path) -> None:
    path, kept, other = tmp_path / "s", tmp_path / "kept", tmp_path / "other"
    DurableStore(other, BUNDLE, "cats").close()
    with DurableStore(path, BUNDLE, "fleet") as store:
        assert run("fleet", "backup", kept, "--store", path).returncode == 0
        reader = sqlite3.connect(path, isolation_level=None)
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM standing").fetchone()
        store.standing.commit([Stands("a", 1, b"newer", 9)], {}, 1.0)  # in the log, which the reader keeps there
    with closing(reader), patch("protofleet.aggregator.store.backup._READERS_S", 0.0):
        done = run("fleet", "restore", kept, "--store", path, "--force")
        assert "got one that a process reads in" in one_error_line(done)
    done = run("fleet", "restore", kept, "--store", other, "--force")
    assert "expected one of the backup's fleet, 'fleet', got 'cats'" in one_error_line(done)
    with DurableStore(path, BUNDLE, "fleet") as store:
        assert dict(store.standing.payloads()) == {"a": b"newer"}


@ON_FILES
def test_a_backup_that_says_nonsense_of_when_it_was_made_is_restored(store: DurableStore, tmp_path: Path) -> None:
    assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
    with closing(sqlite3.connect(tmp_path / "kept")) as db:
        db.execute("UPDATE meta SET value = ? WHERE name = 'backup made'", (b"monday",))
        db.commit()
    done = run("fleet", "restore", tmp_path / "kept", "--store", tmp_path / "new")
    assert "as of an unknown time" in done.stdout


def test_a_command_does_not_keep_an_aggregator_from_starting(tmp_path: Path) -> None:
    """Whoever brings an order looks whether somebody runs on the store: that takes it, for a moment."""
    DurableStore(tmp_path / "s", BUNDLE, "fleet").close()
    descriptor = lock(tmp_path / "s")
    done = threading.Timer(0.1, os.close, [descriptor])
    done.start()
    DurableStore(tmp_path / "s", BUNDLE, "fleet").close()
    done.join()


def test_a_store_moves_from_a_file_to_a_server_and_back(tmp_path: Path) -> None:
    """Every table with something in it, also of a backup of the version before; and ids go on above those that came."""
    server = need_postgres()
    for version in ("v2", "v3"):
        there, back = server.new_place(), tmp_path / f"{version} back"
        shutil.copy(Path(__file__).parents[2] / "files" / version / "store.sqlite", tmp_path / "s")
        assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
        assert run("fleet", "restore", tmp_path / "kept", "--store", there).returncode == 0
        assert "try --force" in one_error_line(run("fleet", "restore", tmp_path / "kept", "--store", there))
        give(there, "pause", "", "me")
        assert run("fleet", "backup", tmp_path / "kept", "--store", there).returncode == 0
        assert run("fleet", "restore", tmp_path / "kept", "--store", back).returncode == 0
        run("fleet", "restore", tmp_path / "s", "--store", tmp_path / f"{version} straight")
        moved, straight = (_rows(path) for path in (back, tmp_path / f"{version} straight"))
        assert {name for name, rows in moved.items() if rows} == {name for name, rows in straight.items() if rows}
        of_the_way = ("meta", "fleet_order", "standing", "drift")  # another run each time
        assert {n: r for n, r in moved.items() if n not in of_the_way} == {
            n: r for n, r in straight.items() if n not in of_the_way
        }
        os.unlink(tmp_path / "s")


def test_a_restore_that_fails_in_the_middle_leaves_a_server_as_it_was(tmp_path: Path) -> None:
    """By a text that a file holds and no server takes, in a table that is neither the first nor the last."""
    server = need_postgres()
    there, old = server.new_place(), server.new_place()
    shutil.copy(Path(__file__).parents[2] / "files" / "v3" / "store.sqlite", tmp_path / "s")
    assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
    shutil.copy(tmp_path / "kept", tmp_path / "broken")
    with closing(sqlite3.connect(tmp_path / "broken", isolation_level=None)) as db:
        assert db.execute("UPDATE fleet_order SET detail = 'a' || char(0) || 'b'").rowcount
    assert run("fleet", "restore", tmp_path / "kept", "--store", old).returncode == 0
    before = _all_of(server, old)
    one_error_line(run("fleet", "restore", tmp_path / "broken", "--store", there))
    one_error_line(run("fleet", "restore", tmp_path / "broken", "--store", old, "--force"))
    assert _all_of(server, there) == {}
    assert _all_of(server, old) == before
    assert run("fleet", "restore", tmp_path / "kept", "--store", there).returncode == 0  # no --force: nothing is there


def _all_of(server: PostgresServer, place: str) -> dict[str, list[tuple[str]]]:
    """Every table of a schema, with its rows."""
    with server.connect() as db:
        db.execute(f"SET search_path = {place.rsplit('%3D', 1)[1]}")
        names = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
        return {
            name: sorted(db.execute(f"SELECT row::text FROM {name} AS row").fetchall())
            for (name,) in db.execute(names).fetchall()
        }


def _rows(path: Path) -> dict[str, list[tuple[object, ...]]]:
    with read_only(path, KIND) as db:
        names = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()]
        return {name: sorted(db.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in names}
