"""A device's ledger that somebody has changed: no cost is smaller for it, whoever reads it gets one line."""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from protofleet.contract.errors import StoreError, UsageError
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import FILE, Cost, Entry, Ledger, Terms, digest_of, read_ledger

NOW = Moment("boot", 100.0, 1.8e9)


@pytest.mark.parametrize(
    ("changed", "step"),
    [
        ("UPDATE release SET add_remove = 'little'", lambda ledger: ledger.spent()),
        ("UPDATE release SET replace = -1.0", lambda ledger: ledger.spent()),
        ("UPDATE release SET digest = 'x'", lambda ledger: ledger.newest("fleet", b"run1", 1, "ncm")),
        ("UPDATE release SET counted_s = 'never'", lambda ledger: ledger.free_in_s(1, 60.0, NOW)),
        ("UPDATE clock SET counted_s = -9e99", lambda ledger: ledger.free_in_s(1, 60.0, NOW)),
        ("UPDATE terms SET epsilon = 'all'", lambda ledger: ledger.put_terms(Terms(1.0, 1e-6))),
    ],
)
def test_what_no_device_wrote_is_one_line(changed: str, step, tmp_path: Path) -> None:
    """SQLite counts words as 0: the sum of what was spent would be too small."""
    path = tmp_path / "state" / "ledger.sqlite"
    with Ledger(path) as ledger:
        ledger.put_terms(Terms(4.0, 1e-6))
        key = ("fleet", b"run1", 1, "ncm", "unit-means", "f32", 5, 100)
        assert ledger.record(Entry("round", *key, digest_of(b"sent"), Cost(0.1, 0.2)), NOW)
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(changed)
    with Ledger(path) as ledger, pytest.raises(StoreError, match=r"expected what a device writes, got .*, try another"):
        step(ledger)
    if "SET counted_s" not in changed:  # which only the device itself reads
        with pytest.raises(StoreError, match="expected what a device writes"):
            read_ledger(path)


def test_a_row_that_says_more_keeps_its_time_and_is_one_row(tmp_path: Path) -> None:
    key, later = ("fleet", b"", 0, ""), Moment("boot", 160.0, 1.8e9 + 60.0)
    with Ledger(tmp_path / FILE) as ledger:
        for statistic, now in (("3 photos to 10.0.0.2", NOW), ("5 photos to 10.0.0.2", later)):
            entry = Entry("shown", *key, statistic, "jpeg", 1, 0, digest_of(b"shown"), Cost())
            ledger.record_more(entry, now)
        entries, spent, _ = read_ledger(tmp_path / FILE)
    assert [(entry.statistic, entry.at) for entry in entries] == [("5 photos to 10.0.0.2", 1.8e9)]
    assert spent.releases == 0


def test_another_file_in_its_place_is_named_by_what_it_should_be(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no ledger at all" * 300)
    with pytest.raises(UsageError, match=f"^ledger {re.escape(str(tmp_path / FILE))}, expected a ledger of versions"):
        Ledger(tmp_path / FILE)
