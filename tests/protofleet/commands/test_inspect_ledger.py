"""`protofleet inspect STATE`: what is said of a ledger's rows is what they are."""

from __future__ import annotations

from pathlib import Path

from commands import run

from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import FILE, Cost, Entry, Ledger, What, digest_of


def test_what_was_shown_and_answered_is_counted_as_it_is_said(tmp_path: Path) -> None:
    rows: tuple[tuple[What, str, int], ...] = (
        ("shown", "24 photos to 10.0.0.2", 100),
        ("shown", "3 photos to 10.0.0.3", 200),
        ("shown", "1 photo to 10.0.0.2", 90_000),
        ("answer", "answers to 10.0.0.9", 300),
        ("answer", "answers and photos to 10.0.0.9", 400),
        ("answer", "answers to 10.0.0.9", 90_000),
    )
    with Ledger(tmp_path / FILE) as ledger:
        for number, (what, words, at) in enumerate(rows):
            entry = Entry(what, "pets", b"", 0, "", words, "json", 1, 0, digest_of(bytes([number])), Cost())
            assert ledger.record(entry, Moment("boot", float(at), float(at)))
    done = run("inspect", tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    rows_of = "3 rows, one for each browser, address and hour"
    assert f"photos were shown on this device's page: {rows_of}; no ε is stated of them" in said
    assert "answers were published for Home Assistant on 2 days, which no ε is stated of" in said
