"""The journal: all of a round or nothing of it, whatever the disk, the power and other processes do."""

from __future__ import annotations

import random
import re
import sqlite3
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from permissions import as_somebody_else, open_the_way

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Receipt
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.journal import journal as journal_module
from protofleet.edge_client.journal.journal import Journal, Key, read_kept
from protofleet.edge_client.training.local_samples import OwnMeans

BUNDLE = bytes(range(32))
RUN = b"run1"


def opened(directory: Path, **changes: object) -> Journal:
    owner = {"fleet": "fleet", "device": "pi-1", "bundle": BUNDLE, **changes}
    return Journal(directory, **owner)  # type: ignore[arg-type]


def key(number: int, method: str = "fedproto") -> Key:
    return (RUN, number, method)


def commit(journal: Journal, number: int, payload: bytes | None = b"payload", *, scale: float = 1.0) -> None:
    weights = {"head.weight": np.full((2, 3), number * scale, np.float32)}
    journal.commit_round(key(number), weights=weights, payload=payload, limit_bytes=1000, metrics={"loss": 0.5})


def receipt(number: int, status: str = "committed") -> Receipt:
    return Receipt(*key(number), status)  # type: ignore[arg-type]


def test_a_round_survives_reopening(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert (journal.weights(), journal.pending(), journal.unreported()) == ({}, [], [])
        commit(journal, 1, b"one")
        commit(journal, 2, None)
    with opened(tmp_path) as journal:
        np.testing.assert_array_equal(journal.weights()["head.weight"], np.full((2, 3), 2.0))
        assert [(p.key, p.payload, p.limit_bytes) for p in journal.pending()] == [(key(1), b"one", 1000)]
        assert journal.is_done(key(1))
        assert journal.is_done(key(2))
        assert not journal.is_done(key(1, "ffc"))
        assert journal.took_part(RUN)
        assert not journal.took_part(b"run2")
        assert [(r.key, r.metrics) for r in journal.unreported()] == [(key(1), {"loss": 0.5}), (key(2), {"loss": 0.5})]


def test_nobody_else_can_look_into_the_directory(tmp_path: Path) -> None:
    """It holds the secret that noise is drawn from."""
    with opened(tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700


def test_a_round_is_never_done_twice(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit(journal, 1, b"first")
        with pytest.raises(StoreError, match="a round that is not done"):
            commit(journal, 1, b"second")
        assert journal.pending()[0].payload == b"first"


def test_the_first_receipt_settles(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit(journal, 1)
        commit(journal, 2)
        assert journal.outcome(key(1)) is None
        assert journal.record_receipt(receipt(1, "late"), 70)
        assert not journal.record_receipt(receipt(1), 99)
        assert not journal.record_receipt(receipt(7), 1)
        assert journal.outcome(key(1)) == ("late", 70)
        expected = {"sent": 2, "committed": 0, "duplicate": 0, "late": 1, "rejected": 0, "pending": 1}
        assert journal.outcomes() == expected
    with opened(tmp_path) as journal:
        assert [p.key for p in journal.pending()] == [key(2)]


def test_a_round_is_reported_once(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit(journal, 1)
        journal.mark_reported(key(1))
        assert journal.unreported() == []


def test_old_payloads_make_room_but_pending_ones_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEEP_BYTES", 250)
    with opened(tmp_path) as journal:
        for number in range(1, 7):
            commit(journal, number, bytes(100))
        for number in (2, 3, 4, 5, 6):
            journal.record_receipt(receipt(number), 100)
        assert [p.key for p in journal.pending()] == [key(1)]
        assert journal.pending()[0].payload == bytes(100)
    rows = sqlite3.connect(tmp_path / "journal.sqlite").execute(
        "SELECT round FROM contributions WHERE payload IS NOT NULL ORDER BY round"
    )
    assert [row[0] for row in rows] == [1, 5, 6]


def test_boots_are_counted_and_instances_known(tmp_path: Path) -> None:
    boots = []
    for instance in (b"aaaaaaaa", b"bbbbbbbb"):
        with opened(tmp_path) as journal:
            boots.append(journal.begin(instance))
    assert boots == [1, 2]
    with opened(tmp_path) as journal:
        assert journal.is_own_instance(b"aaaaaaaa")
        assert not journal.is_own_instance(b"cccccccc")


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(StoreError, match=r"expected to be its only user"):
        opened(tmp_path)
    opened(tmp_path).close()


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"bundle": bytes(32)},
            r"another bundle, expected bundle 000000000000, got 000102030405, "
            r"try --bundle with that one, or another --state",
        ),
        ({"device": "pi-2"}, r"another device, expected device pi-2, got pi-1"),
        ({"fleet": "north"}, r"another fleet, expected fleet north, got fleet"),
    ],
)
def test_a_directory_of_another_owner_is_refused(tmp_path: Path, change: dict[str, object], line: str) -> None:
    with opened(tmp_path) as journal:
        commit(journal, 1)
    with pytest.raises(StoreError, match=line):
        opened(tmp_path, **change)
    with opened(tmp_path) as journal:  # and it was not harmed, nor left locked
        assert journal.is_done(key(1))


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.sqlite").write_bytes(b"not a database, " * 100)
    with pytest.raises(UsageError, match=r"expected a journal of versions 2 to 3, got another file"):
        opened(tmp_path)


def test_a_full_disk_writes_nothing_of_the_round(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        commit(journal, 1, b"one")
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages + 3}")  # SQLite itself now says the disk is full
        with pytest.raises(
            StoreError, match=r"expected a disk that takes it, got database or disk is full, try freeing space"
        ):
            commit(journal, 2, bytes(100_000))
        assert not journal.is_done(key(2))
        np.testing.assert_array_equal(journal.weights()["head.weight"], np.full((2, 3), 1.0))
        assert [p.payload for p in journal.pending()] == [b"one"]
        journal._db.execute("PRAGMA max_page_count = 100000")
        commit(journal, 2, bytes(100_000))
        assert journal.is_done(key(2))


def test_a_read_only_disk_is_one_line(tmp_path: Path) -> None:
    open_the_way(tmp_path)
    state = tmp_path / "state"
    with opened(state) as journal:
        commit(journal, 1)
    for path, mode in ((state / "journal.sqlite", 0o444), (state, 0o555), (tmp_path, 0o555)):
        path.chmod(mode)
    said = as_somebody_else(lambda: opened(state))
    assert re.search(r"journal .*journal\.sqlite, expected a file that can be written, got Permission denied", said), (
        said
    )
    said = as_somebody_else(lambda: opened(tmp_path / "new"))
    assert re.search(r"cannot use .*, expected a writable directory, got Permission denied", said), said
    tmp_path.chmod(0o755)


WRITER = textwrap.dedent(
    """
    import sys
    import numpy as np
    from pathlib import Path
    from protofleet.contract.wire.messages import Receipt
    from protofleet.edge_client.journal.journal import Journal

    journal = Journal(Path(sys.argv[1]), fleet="fleet", device="pi-1", bundle=bytes(range(32)))
    first = 1
    while journal.is_done((b"run1", first, "fedproto")):
        first += 1
    for number in range(first, 100_000):
        key = (b"run1", number, "fedproto")
        weights = {"w": np.full(2000, number, np.float32)}
        journal.commit_round(
            key, weights=weights, payload=b"%d" % number * 500, limit_bytes=1000, metrics={"number": number}
        )
        print("done", number, flush=True)
        if number % 3 == 0:
            journal.record_receipt(Receipt(*key, "committed"), 1)
            print("settled", number, flush=True)
    """
)


def test_kill_9_at_random_moments_loses_nothing(tmp_path: Path) -> None:
    """What was printed after a commit is there after the kill, and whole; the weights are those of the last round."""
    rng, done, settled = random.Random(0), 0, set[int]()
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(rng.randint(1, 6))]  # it has started, and written something
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        lines += process.stdout.read().splitlines()
        process.wait()
        for word, number in (line.split() for line in lines if len(line.split()) == 2):
            done = max(done, int(number))
            settled |= {int(number)} if word == "settled" else set()
        with opened(tmp_path) as journal:
            numbers = [report.metrics["number"] for report in journal.unreported()]
            assert numbers == list(range(1, len(numbers) + 1))
            assert len(numbers) >= done
            np.testing.assert_array_equal(journal.weights()["w"], np.full(2000, len(numbers), np.float32))
            waiting = {pending.key[1]: pending.payload for pending in journal.pending()}
            assert all(payload == b"%d" % number * 500 for number, payload in waiting.items())
            assert not settled & set(waiting)
            unsettled = {number for number in numbers if number % 3}
            assert unsettled <= set(waiting)
    assert done > 12


@pytest.mark.parametrize(
    "crafted",
    [
        "DELETE FROM meta WHERE name = 'bundle'",
        "UPDATE meta SET value = 5 WHERE name = 'bundle'",
        "UPDATE meta SET value = 'zz' WHERE name = 'bundle'",
        "UPDATE meta SET value = x'00ff' WHERE name = 'bundle-path'",
        "UPDATE meta SET value = 7 WHERE name = 'bundle-path'",
        "INSERT INTO global VALUES (0, x'a0')",
        "INSERT INTO global VALUES (0, 'text')",
        "UPDATE weights SET safetensors = 'text'",
        "UPDATE weights SET safetensors = x'00'",
        "INSERT INTO means SELECT 1, safetensors FROM weights",
    ],
)
def test_what_no_device_wrote_is_one_line(tmp_path: Path, crafted: str) -> None:
    with opened(tmp_path, bundle_path=tmp_path / "fleet.bundle") as journal:
        commit(journal, 1)
    with sqlite3.connect(tmp_path / "journal.sqlite") as db:
        db.execute(crafted)
    db.close()
    with pytest.raises(StoreError, match="what a device wrote"):
        read_kept(tmp_path)
    table = crafted.split()[1 if crafted.startswith("UPDATE") else 2]
    if table in ("global", "weights"):  # which its own client reads, too
        with opened(tmp_path) as journal, pytest.raises(StoreError, match="what a device wrote"):
            (journal.kept_global if table == "global" else journal.weights)()


def test_what_was_made_first_waits_first(tmp_path: Path) -> None:
    with Journal(tmp_path, fleet="fleet", device="pi-1", bundle=bytes(32)) as journal:
        for number in (2, 3, 1):  # a new run may begin at 1 again
            journal.commit_round((b"run1", number, "m"), weights={}, payload=b"p", limit_bytes=1, metrics={})
        assert [waiting.key[1] for waiting in journal.pending()] == [2, 3, 1]


# ── what a device answers with ──────────────────────────────────────────────────────────────────────────────────────


def _state(version: int, value: float) -> GlobalState:
    rows = ClassRows(np.array([0, 2], np.uint16), np.full((2, 3), value))
    return GlobalState(RUN, version, version, {"prototypes": rows, "head": rows})


def test_the_newest_global_state_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        assert journal.kept_global() is None
        journal.keep_global(_state(1, 0.5))
        journal.keep_global(_state(2, 0.25))
    with opened(tmp_path) as journal:
        kept = journal.kept_global()
        assert (kept.run, kept.version, set(kept.rows)) == (RUN, 2, {"prototypes", "head"})
        np.testing.assert_array_equal(kept.prototypes.rows, np.full((2, 3), 0.25))


def test_what_the_disk_does_not_take_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(tmp_path) as journal:
        journal.keep_global(_state(1, 0.5))
        monkeypatch.setattr(journal_module, "encode", lambda part, encoding: object())
        with pytest.raises((StoreError, sqlite3.Error)):
            journal.keep_global(_state(2, 0.25))
    assert read_kept(tmp_path).state.version == 1


def test_all_of_it_is_read_beside_the_process_that_has_the_directory(tmp_path: Path) -> None:
    classes = ClassMeans(np.array([[2.0, 4.0], [0.0, 0.0]]), np.array([2, 0]))
    with opened(tmp_path, bundle_path=Path("/somewhere/f.bundle")) as journal:
        weights = {"head.weight": np.full((2, 3), 7.0, np.float32)}
        means = OwnMeans(classes, np.array([0.5, 0.0]))
        journal.commit_round(key(1), weights=weights, means=means, payload=None, limit_bytes=1, metrics={})
        journal.keep_global(_state(3, 1.0))
        kept = read_kept(tmp_path)
        journal.keep_global(_state(4, 1.0))  # looking changes nothing and holds nothing up
        newer = read_kept(tmp_path)
    assert (kept.bundle, kept.bundle_path, kept.rounds) == (BUNDLE, Path("/somewhere/f.bundle"), 1)
    assert kept.weights["head.weight"][0, 0] == 7.0
    assert kept.means.classes.means.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert kept.means.spread.tolist() == [0.5, 0.0]
    assert (kept.state.version, newer.state.version) == (3, 4)


def test_what_was_sent_does_not_stay_in_memory(tmp_path: Path) -> None:
    """A statement that is kept prepared keeps what it was given: here 32 MB, as FFC's sums of 2,800 features are."""
    size, draw = 32_000_000, np.random.default_rng(0)
    with opened(tmp_path) as journal:
        payload = draw.bytes(size)
        process_metrics.release_memory()
        before = process_metrics.rss_bytes()
        journal.commit_round(key(1), weights={}, payload=payload, limit_bytes=1, metrics={})
        process_metrics.release_memory()
        assert process_metrics.rss_bytes() - before < size / 2
