"""What a device forgets of its own past, so that its state directory keeps its size for years.

Kept are:

- the newest 4,096 rounds, with what became of their contributions; of older rounds only their numbers, by method and by
  outcome;
- payloads that were sent, newest first, up to 16 MiB (`journal.py`);
- two history files of 16 MiB each (`history.py`).

Never dropped are a round whose contribution waits for a receipt, and a round that the history does not have yet. What
has left the device stays in the ledger (`ledger.py`).
"""

from __future__ import annotations

import json
import sqlite3

__all__ = ["ROUNDS_KEPT", "drop_old_rounds", "dropped"]

ROUNDS_KEPT = 4_096
_NAME = "dropped"  # in the table `meta`
_OLD = """
SELECT r.rowid, r.run, r.round, r.method, c.outcome FROM rounds r LEFT JOIN contributions c USING (run, round, method)
WHERE r.rowid <= (SELECT max(rowid) FROM rounds) - ? AND r.reported
    AND NOT EXISTS (SELECT 1 FROM contributions w WHERE w.run = r.run AND w.round = r.round AND w.method = r.method
        AND w.outcome IS NULL)
"""


def drop_old_rounds(db: sqlite3.Connection, keep: int = ROUNDS_KEPT) -> None:
    """Part of a transaction that adds a round: forget all but the newest `keep`, and count what was forgotten."""
    old = db.execute(_OLD, (keep,)).fetchall()
    if not old:
        return
    rounds, outcomes = dropped(db)
    for rowid, run, number, method, outcome in old:
        rounds[method] = rounds.get(method, 0) + 1
        if outcome is not None:
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
        db.execute("DELETE FROM rounds WHERE rowid = ?", (rowid,))
        db.execute("DELETE FROM contributions WHERE run = ? AND round = ? AND method = ?", (run, number, method))
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (_NAME, json.dumps([rounds, outcomes])))


def dropped(db: sqlite3.Connection) -> tuple[dict[str, int], dict[str, int]]:
    """How many rounds were forgotten, by method, and how their contributions had ended, by outcome."""
    row = db.execute("SELECT value FROM meta WHERE name = ?", (_NAME,)).fetchone()
    rounds, outcomes = ({}, {}) if row is None else json.loads(row[0])
    return dict(rounds), dict(outcomes)
