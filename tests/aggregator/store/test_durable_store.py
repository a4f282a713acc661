"""The durable store: what it keeps, what it refuses, and what survives kill -9 and a full disk."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aggregator_samples import BUNDLE, unassigned
from postgres_server import Places

from protofleet.aggregator.monitoring.accuracy import AccuracyReport
from protofleet.aggregator.server.run_report import Summary
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.records import Accepted
from protofleet.contract.accuracy import Accuracy
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows


def _accepted(device: str, round: int = 1, payload: bytes = b"payload") -> Accepted:
    return Accepted(round, "fedproto", device, payload, len(payload) + 3)


def _state(store: DurableStore, version: int) -> GlobalState:
    rows = ClassRows(np.array([0, 2], np.uint16), np.array([[0.1, 1e-17], [3.0, 4.0]]))
    return GlobalState(
        store.run,
        version,
        version,
        {"prototypes": rows, "head": ClassRows(np.array([1], np.uint16), np.ones((1, 5)))},
    )


def test_who_was_refused_is_forgotten_once_a_later_round_has_closed(places: Places) -> None:
    with DurableStore(places("s.sqlite"), BUNDLE, "fleet") as store:
        for number in (1, 2, 3):
            store.open_round(number, "fedproto", 0, opened_at=1.0)
            store.commit([], {}, [(number, "z")])
            store.close_round(number, 2.0, 0, _state(store, number))
        assert [store.refusals(number) for number in (1, 2, 3)] == [[], [], ["z"]]


def test_a_clock_that_was_set_back_makes_no_negative_duration(places: Places) -> None:
    with DurableStore(places("s.sqlite"), BUNDLE, "fleet") as store:
        store.open_round(1, "fedproto", 0, opened_at=100.0)
        store.close_round(1, 40.0, 0, _state(store, 1))
        assert store.record(1).seconds == 0.0


def test_everything_is_there_after_reopening(places: Places) -> None:
    with DurableStore(places("s.sqlite"), BUNDLE, "fleet") as store:
        run = store.run
        store.open_round(1, "fedproto", 42, opened_at=100.0)
        store.commit(
            [_accepted("b"), _accepted("a", payload=b"first")], {(1, "late"): 2, (0, "malformed"): 1}, [(1, "z")]
        )
        store.commit([_accepted("c")], {(1, "late"): 1})
        store.close_round(1, 107.5, 2, _state(store, 1))
        store.open_round(2, "ffc", 43, opened_at=108.0)
    with DurableStore(places("s.sqlite"), BUNDLE, "fleet") as store:
        assert store.run == run
        assert len(run) == 4
        first, second = store.rounds()
        assert (first.number, first.method, first.seed, first.closed) == (1, "fedproto", 42, True)
        assert (first.seconds, first.classes_merged) == (7.5, 2)
        assert dict(first.uplink_bytes) == {"a": 8, "b": 10, "c": 10}
        assert dict(first.tally) == {"late": 3}
        assert (second.number, second.method, second.closed, second.seconds) == (2, "ffc", False, None)
        assert store.refusals(1) == ["z"]
        assert unassigned(store) == {"malformed": 1}
        assert list(store.contributions(1, "fedproto")) == [b"first", b"payload", b"payload"]  # ordered by device
        assert store.holds(1, "fedproto", "a")
        assert not store.holds(1, "ffc", "a")
        state = store.state()
        assert (state.run, state.version, state.round) == (run, 1, 1)
        np.testing.assert_array_equal(state.prototypes.rows, _state(store, 1).prototypes.rows)
        np.testing.assert_array_equal(state.head.rows, np.ones((1, 5)))


def test_a_new_store_has_an_empty_state_and_a_run_of_its_own(places: Places) -> None:
    with DurableStore(places("a"), BUNDLE, "fleet") as one, DurableStore(places("b"), BUNDLE, "fleet") as other:
        assert one.run != other.run
        assert (one.state().version, one.state().prototypes, one.rounds()) == (0, None, [])


def test_a_batch_is_committed_whole_or_not_at_all(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        store.commit([_accepted("a")], {})
        with pytest.raises(sqlite3.IntegrityError):
            store.commit([_accepted("b"), _accepted("a")], {(1, "late"): 1})
        assert not store.holds(1, "fedproto", "b")
        store.commit([_accepted("b")], {})
        assert store.holds(1, "fedproto", "b")


def test_a_store_of_another_bundle_or_fleet_is_refused_in_one_line(places: Places) -> None:
    DurableStore(places("s"), BUNDLE, "fleet").close()
    with pytest.raises(
        UsageError, match=r"another bundle, expected sha256 00010203.*, got sha256 0000.*another --store"
    ):
        DurableStore(places("s"), bytes(32), "fleet")
    with pytest.raises(UsageError, match="expected fleet fleet, got fleet other"):
        DurableStore(places("s"), BUNDLE, "other")
    DurableStore(places("s"), BUNDLE, "fleet").close()  # and the refusals left no lock behind


def test_a_second_aggregator_is_kept_out(places: Places) -> None:
    with (
        DurableStore(places("s"), BUNDLE, "fleet"),
        pytest.raises(StoreError, match="another process that runs on it"),
    ):
        DurableStore(places("s"), BUNDLE, "fleet")


def test_files_that_are_no_store_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"hello, this is no database" * 100)
    with pytest.raises(UsageError, match="got another file"):
        DurableStore(tmp_path / "text", BUNDLE, "fleet")
    with sqlite3.connect(tmp_path / "other") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    with pytest.raises(UsageError, match="a store of versions 2 to 6, got another file"):
        DurableStore(tmp_path / "other", BUNDLE, "fleet")
    with pytest.raises(StoreError, match="got No such file or directory"):
        DurableStore(tmp_path / "missing" / "s", BUNDLE, "fleet")


def test_a_full_disk_is_one_error_and_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    """A real limit on file size in a process of its own: SQLite meets it as it would meet a full disk."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        from protofleet.aggregator.store.durable_store import Accepted, DurableStore
        from protofleet.contract.errors import StoreError
        store = DurableStore(sys.argv[1], bytes(range(32)), "fleet")
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
        committed = 0
        try:
            for batch in range(100):
                store.commit([Accepted(1, "fedproto", f"{batch}-{i}", bytes(20_000), 1) for i in range(5)], {})
                committed += 5
        except StoreError as error:
            print(committed, error)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "s")], capture_output=True, text=True, check=True, timeout=60
    )
    committed, line = done.stdout.split(" ", 1)
    assert 0 < int(committed) < 500
    assert "expected a disk that takes it" in line
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        assert len(list(store.contributions(1, "fedproto"))) == int(committed)


def test_kill_9_keeps_every_batch_that_commit_returned_from(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import sys
        from protofleet.aggregator.store.durable_store import Accepted, DurableStore
        store = DurableStore(sys.argv[1], bytes(range(32)), "fleet")
        n = sum(1 for _ in store.contributions(1, "fedproto"))
        while True:
            store.commit([Accepted(1, "fedproto", f"{n + i:09d}", bytes(5_000), 1) for i in range(7)], {})
            n += 7
            print(n, flush=True)
        """
    )
    promised = 0
    for lines in (3, 11, 6):
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "s")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(lines):
            promised = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        for line in process.stdout:
            promised = int(line) if line.endswith("\n") else promised
        process.wait()
        process.stdout.close()
        with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
            held = sum(1 for _ in store.contributions(1, "fedproto"))
            assert held % 7 == 0
            assert promised <= held <= promised + 7


def test_payloads_of_old_rounds_make_room_but_keys_counters_and_the_last_of_each_method_stay(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet", keep_bytes=25_000) as store:
        for number, name in enumerate(("fedproto", "ffc", "fedproto", "fedproto", "fedproto", "fedproto"), 1):
            store.open_round(number, name, 0, 0.0)
            store.commit([Accepted(number, name, d, d.encode() * 5_000, 5_003) for d in "ab"], {(number, "late"): 1})
            store.close_round(number, 1.0, 2, _state(store, number))
        store.open_round(7, "fedproto", 0, 0.0)
        store.commit([Accepted(7, "fedproto", "a", b"open", 4)], {})

        def kept(number: int) -> int:
            method = "ffc" if number == 2 else "fedproto"
            return len(list(store.contributions(number, method)))

        assert [kept(number) for number in range(1, 8)] == [0, 2, 0, 0, 2, 2, 1]
        assert all(store.holds(number, "fedproto", "a") for number in (1, 3, 4, 5, 6, 7))
        assert [sum(r.uplink_bytes.values()) for r in store.rounds()] == [10_006] * 6 + [4]
        assert store.tallies() == {(number, "late"): 1 for number in range(1, 7)}
        assert store.state().version == 6
        with pytest.raises(sqlite3.IntegrityError):  # a key counts once, whether its payload is there or not
            store.commit([Accepted(1, "fedproto", "a", b"again", 5)], {})


def test_the_last_calibration_stays_however_many_rounds_follow(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet", keep_bytes=0) as store:
        for number in range(1, 12):
            name = "ffc" if number in (2, 4) else "fedproto"
            store.open_round(number, name, 0, 0.0)
            store.commit([Accepted(number, name, "a", b"%d" % number, 2)], {})
            store.close_round(number, 1.0, 2, _state(store, number))
        assert [list(store.contributions(number, "ffc")) for number in (2, 4)] == [[], [b"4"]]
        assert list(store.contributions(11, "fedproto")) == [b"11"]


def test_the_file_stops_growing_with_the_payloads(tmp_path: Path) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet", keep_bytes=200_000) as store:
        sizes = []
        for number in range(1, 31):
            store.open_round(number, "fedproto", 0, 0.0)
            store.commit([Accepted(number, "fedproto", f"d{i}", bytes(20_000), 20_000) for i in range(5)], {})
            store.close_round(number, 1.0, 2, _state(store, number))
            (pages,) = store._db.execute("PRAGMA page_count").fetchone()
            sizes.append(pages)
    assert sizes[-1] <= sizes[5] + 2


def test_a_summary_reads_only_what_is_new(tmp_path: Path) -> None:
    """Rounds that were told before are not asked for again, and the file says the same as a summary from the start."""
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        told, asked = Summary(store, "fleet", BUNDLE), []
        store._db.set_trace_callback(asked.append)
        for number in range(1, 6):
            store.open_round(number, "fedproto", 0, 0.0)
            store.commit([_accepted(f"d{i}", number) for i in range(3)], {(number, "duplicate"): 1, (1, "late"): 1})
            store.close_round(number, 2.0, 2, _state(store, number))
            asked.clear()
            content = told.content(finished=False, global_version=number)
            assert sum("FROM contribution" in query for query in asked) == 1
            fresh = Summary(store, "fleet", BUNDLE).content(finished=False, global_version=number)
            assert msgspec.json.encode(content) == msgspec.json.encode(fresh)
        store._db.set_trace_callback(None)
        assert (content["rounds"][0]["late"], content["totals"]["committed"], content["totals"]["late"]) == (5, 15, 5)
        store.open_round(6, "fedproto", 0, 0.0)
        store.commit([_accepted("d0", 6)], {})
        for _ in range(2):  # the open round counts, and only once
            content = told.content(finished=False, global_version=5)
            assert (len(content["rounds"]), content["totals"]["committed"]) == (5, 16)


def test_of_a_run_of_years_the_newest_rounds_are_listed_and_all_are_counted(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("protofleet.aggregator.store.durable_store.KEEP_ROUNDS", 3)
    monkeypatch.setattr("protofleet.aggregator.server.run_report.KEEP_ROUNDS", 3)
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        told = Summary(store, "fleet", BUNDLE)
        for number in range(1, 8):
            store.open_round(number, "fedproto", 0, 0.0)
            store.commit([_accepted(f"d{i}", number) for i in range(2)], {(number, "late"): 1})
            if number == 7:
                break  # it is open
            store.close_round(number, 2.0, 2, _state(store, number))
            store.keep_accuracy([AccuracyReport(number, "d0", Accuracy(10, 0.5))])
        content = told.content(finished=False, global_version=6)
        fresh = Summary(store, "fleet", BUNDLE).content(finished=False, global_version=6)
        assert msgspec.json.encode(content) == msgspec.json.encode(fresh)
        assert ([each["round"] for each in content["rounds"]], content["rounds_before"]) == ([4, 5, 6], 3)
        assert (content["totals"]["committed"], content["totals"]["late"]) == (14, 7)
        assert content["totals"]["uplink_bytes"] == sum(sum(r.uplink_bytes.values()) for r in store.rounds())
        assert [bool(store.accuracy(number)) for number in range(1, 7)] == [False] * 3 + [True] * 3
        assert store.holds(1, "fedproto", "d0")  # keys stay: a repetition is a duplicate for ever


def test_a_new_run_goes_on_from_what_is_held(places: Places) -> None:
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        store.open_round(1, "fedproto", 0, 0.0)
        store.close_round(1, 1.0, 2, _state(store, 1))
        before = store.run
        store.begin_new_run()
        assert store.run != before
    with DurableStore(places("s"), BUNDLE, "fleet") as store:
        assert (store.run != before, store.state().run, store.state().version) == (True, store.run, 1)


@pytest.mark.parametrize(
    "sql",
    ["UPDATE contribution SET received_bytes = 'many'", "UPDATE meta SET value = 'text' WHERE name = 'bundle'"],
)
def test_what_no_aggregator_wrote_is_one_line(tmp_path: Path, sql: str) -> None:
    with DurableStore(tmp_path / "s", BUNDLE, "fleet") as store:
        store.open_round(1, "fedproto", 0, 0.0)
        store.commit([_accepted("a")], {})
    with sqlite3.connect(tmp_path / "s") as db:
        db.execute(sql)
    db.close()
    with (
        pytest.raises(StoreError, match="expected what an aggregator writes"),
        DurableStore(tmp_path / "s", BUNDLE, "fleet") as store,
    ):
        store.record(1)
