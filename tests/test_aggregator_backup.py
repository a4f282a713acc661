"""Backups of a store that is in use, and what is restored of them: another run, without what was forgotten since."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aggregator_samples import BUNDLE
from commands import one_error_line, run
from test_aggregator_standing import core_of, expect_head_of, message, outcomes, steps

from aggregator.orders import give
from aggregator.standing_store import Stands
from aggregator.store import SqliteStore
from aggregator.store_schema import KIND, PAGE_BYTES
from contract.sqlite import read_only


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    with SqliteStore(tmp_path / "s", BUNDLE, "fleet") as made:
        yield made


def test_what_is_restored_is_another_run_without_what_was_forgotten_since(tmp_path: Path) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    store = SqliteStore(path, BUNDLE, "fleet")
    core = core_of(store)
    said = outcomes(core, *(message(core, device, 1, seed) for seed, device in enumerate("abcd")))
    assert said == ["committed"] * 4
    for what in ("forget", "admit"):  # known to the backup: of what was done before it, nothing is done again
        give(path, what, "b", "me")
    steps(core, 0.0)
    assert outcomes(core, message(core, "b", 2, 1)) == ["committed"]
    steps(core, 60.0)
    old, before = message(core, "b", 3, 7), core.run.hex()
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
    assert "expected one that no aggregator runs on" in refused
    store.close()
    assert "try --force" in one_error_line(run("fleet", "restore", kept, "--store", path))
    done = run("fleet", "restore", kept, "--store", path, "--force", "--json", tmp_path / "told.json")
    assert done.returncode == 0, done.stderr
    assert "5 orders of the store before to be done again" in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())["restored"]
    assert (told["replaced"], told["again"]) == (True, 5)
    with SqliteStore(path, BUNDLE, "fleet") as again:
        core = core_of(again)
        assert again.run.hex() == told["run"] != before
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


def _log(path: Path) -> list[dict[str, object]]:
    return list(json.loads(run("fleet", "log", "--store", path, "--json", "-").stdout)["orders"])


def test_a_restored_store_is_new_where_the_one_before_is_gone(store: SqliteStore, tmp_path: Path) -> None:
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
    with SqliteStore(tmp_path / "other", BUNDLE, "fleet") as again:
        assert again.run != store.run
    assert [o["what"] for o in _log(tmp_path / "s")] == ["backup"]


def test_a_backup_is_of_one_moment_while_the_store_is_written(store: SqliteStore, tmp_path: Path) -> None:
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
            assert run("fleet", "backup", tmp_path / "kept", "--store", tmp_path / "s").returncode == 0
            done = run("fleet", "list", "--store", tmp_path / "kept", "--json", "-")
            generations = {device["generation"] for device in json.loads(done.stdout)["devices"]}
            assert len(generations) == 1
            seen |= generations
    finally:
        stop.set()
        writer.join()
    assert len(seen) > 1  # the writer wrote meanwhile


def test_a_reader_does_not_hold_up_what_is_to_be_erased(store: SqliteStore, tmp_path: Path) -> None:
    core = core_of(store)
    outcomes(core, message(core, "a", 1, 0))
    with read_only(tmp_path / "s", KIND) as db:
        db.execute("SELECT count(*) FROM standing").fetchone()
        give(tmp_path / "s", "forget", "a", "me")
        began = os.times().elapsed
        steps(core, 1.0)
        assert not store.standing.erase()
        assert os.times().elapsed - began < 4.0  # SQLite itself would wait for five seconds
    assert store.standing.erase()
    assert store._db.execute("PRAGMA busy_timeout").fetchone() == (5000,)  # an operator's order is waited for again


def test_what_is_no_backup_or_no_place_for_one_is_one_line(store: SqliteStore, tmp_path: Path) -> None:
    path, kept = tmp_path / "s", tmp_path / "kept"
    (tmp_path / "letter").write_text("dear")
    assert run("fleet", "backup", kept, "--store", path).returncode == 0
    wrong = {
        ("backup", path, "--store", path): "expected a file of its own",
        ("backup", tmp_path / "letter", "--store", path): "expected a new file, or an earlier backup",
        ("backup", "/dev/null", "--store", path): "expected a new file, or an earlier backup",
        ("backup", tmp_path / "no" / "kept", "--store", path): "No such file or directory",
        ("backup", kept, "--store", tmp_path / "none"): "got no such file",
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
    assert not (tmp_path / "new").exists()
