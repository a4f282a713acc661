"""The tables of the aggregator's store, version by version, and how its file is opened.

No step is ever changed once it is released (docs/decisions/084); `tests/files` holds a store of each version.
"""

from __future__ import annotations

import os

from protofleet.aggregator.database import Connection, upsert
from protofleet.contract.files.sqlite import Kind

__all__ = ["COUNT", "KIND", "MADE_AT", "PAGE_BYTES", "PUT_GLOBAL", "draw_run"]

MADE_AT = "backup made"  # in `meta` of a backup, seconds since the epoch; an aggregator's own store has none
PAGE_BYTES = 16_384  # of a new store; see docs/decisions/030, and benchmarks/server/ingest.py --page-bytes

_VERSION_2 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE round (
    number INTEGER PRIMARY KEY, method TEXT NOT NULL, seed INTEGER NOT NULL, opened_at REAL NOT NULL,
    closed INTEGER NOT NULL DEFAULT 0, seconds REAL, classes_merged INTEGER,
    kept_bytes INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE contribution (
    round INTEGER NOT NULL, method TEXT NOT NULL, device TEXT NOT NULL, received_bytes INTEGER NOT NULL,
    payload INTEGER NOT NULL, PRIMARY KEY (round, method, device)
) WITHOUT ROWID;
CREATE TABLE payload (id INTEGER PRIMARY KEY, round INTEGER NOT NULL, bytes BLOB NOT NULL);
CREATE INDEX payload_of_round ON payload (round);
CREATE TABLE refusal (round INTEGER NOT NULL, device TEXT NOT NULL, PRIMARY KEY (round, device)) WITHOUT ROWID;
CREATE TABLE tally (round INTEGER NOT NULL, outcome TEXT NOT NULL, messages INTEGER NOT NULL,
    PRIMARY KEY (round, outcome)) WITHOUT ROWID;
CREATE TABLE accuracy (
    id INTEGER PRIMARY KEY, round INTEGER NOT NULL, device TEXT NOT NULL, samples INTEGER NOT NULL,
    all_classes REAL NOT NULL, own_classes REAL, shipped REAL, alone REAL, UNIQUE (round, device)
);
CREATE TABLE global (version INTEGER NOT NULL, part INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (version, part))
"""
_VERSION_3 = """
CREATE TABLE standing (
    device TEXT PRIMARY KEY, generation INTEGER NOT NULL, received_bytes INTEGER NOT NULL, received_at REAL NOT NULL,
    payload BLOB
);
CREATE TABLE refused (device TEXT PRIMARY KEY, since REAL NOT NULL, reason TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE fleet_order (
    id INTEGER PRIMARY KEY, what TEXT NOT NULL, device TEXT NOT NULL, who TEXT NOT NULL, given_at REAL NOT NULL,
    detail TEXT NOT NULL DEFAULT '', done_at REAL, outcome TEXT, version_before INTEGER, version_after INTEGER
);
CREATE TABLE drift (
    device TEXT NOT NULL, number INTEGER NOT NULL, told_at REAL NOT NULL, samples INTEGER NOT NULL,
    unlike REAL NOT NULL, distance REAL NOT NULL, PRIMARY KEY (device, number)
) WITHOUT ROWID;
CREATE TABLE class_drift (
    class TEXT NOT NULL, number INTEGER NOT NULL, device TEXT NOT NULL, told_at REAL NOT NULL,
    samples INTEGER NOT NULL, distance REAL NOT NULL, PRIMARY KEY (class, number)
) WITHOUT ROWID;
CREATE INDEX fleet_order_open ON fleet_order (id) WHERE done_at IS NULL;
CREATE TABLE rollout (
    id INTEGER PRIMARY KEY, given_by INTEGER, sha256 BLOB NOT NULL, version INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL, fleet TEXT NOT NULL, soak_s REAL NOT NULL, healthy REAL NOT NULL,
    fraction REAL NOT NULL, stages TEXT NOT NULL, since REAL NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
    forgiven INTEGER NOT NULL
);
CREATE TABLE rollout_piece (sha256 BLOB NOT NULL, number INTEGER NOT NULL, bytes BLOB NOT NULL,
    PRIMARY KEY (sha256, number));
CREATE TABLE rollout_device (device TEXT PRIMARY KEY, told TEXT NOT NULL, told_at REAL NOT NULL) WITHOUT ROWID
"""
_VERSION_4 = """
CREATE TABLE IF NOT EXISTS finding (
    round INTEGER NOT NULL, device TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL,
    PRIMARY KEY (round, device, verdict)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS former (round INTEGER NOT NULL, part INTEGER NOT NULL, payload BLOB NOT NULL,
    PRIMARY KEY (round, part));
CREATE TABLE IF NOT EXISTS taken_back (round INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS device_key (device TEXT PRIMARY KEY, key BLOB, since REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS invitation (device TEXT PRIMARY KEY, key BLOB NOT NULL, expires REAL NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS intruder (
    device TEXT NOT NULL, cause TEXT NOT NULL, reason TEXT NOT NULL, messages INTEGER NOT NULL,
    first_at REAL NOT NULL, last_at REAL NOT NULL, PRIMARY KEY (device, cause)
);
CREATE TABLE IF NOT EXISTS blinded_seed (round INTEGER NOT NULL, device TEXT NOT NULL, seed BLOB NOT NULL,
    PRIMARY KEY (round, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS blinded_set (round INTEGER PRIMARY KEY, method TEXT NOT NULL, digest BLOB NOT NULL,
    devices TEXT NOT NULL, since REAL NOT NULL);
CREATE TABLE IF NOT EXISTS blinded_sum (round INTEGER NOT NULL, method TEXT PRIMARY KEY, devices INTEGER NOT NULL,
    payload BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS policy_word (device TEXT PRIMARY KEY, word TEXT NOT NULL,
    told_at REAL NOT NULL) WITHOUT ROWID
"""  # IF NOT EXISTS: some of version 3 had some of them before it was released
_VERSION_5 = """
ALTER TABLE accuracy ADD COLUMN among_own REAL;
ALTER TABLE accuracy ADD COLUMN shipped_among_own REAL;
ALTER TABLE accuracy ADD COLUMN alone_among_own REAL;
ALTER TABLE accuracy ADD COLUMN own_samples INTEGER;
ALTER TABLE accuracy ADD COLUMN classes INTEGER;
ALTER TABLE accuracy ADD COLUMN own INTEGER
"""
_VERSION_6 = """
CREATE TABLE calibration (device TEXT PRIMARY KEY, told_at REAL NOT NULL, report BLOB NOT NULL) WITHOUT ROWID;
ALTER TABLE drift ADD COLUMN moved REAL;
CREATE TABLE device (
    device TEXT PRIMARY KEY, first_seen REAL NOT NULL, online INTEGER NOT NULL, confirmed INTEGER NOT NULL,
    since REAL NOT NULL, boot INTEGER NOT NULL, board TEXT NOT NULL, bundle TEXT NOT NULL, apart TEXT NOT NULL,
    software TEXT NOT NULL, figures TEXT NOT NULL, proposed TEXT NOT NULL, refused INTEGER NOT NULL,
    refusal TEXT NOT NULL, refused_at REAL, members INTEGER NOT NULL
) WITHOUT ROWID;
CREATE TABLE device_count (device TEXT PRIMARY KEY, heard_at REAL, up_bytes INTEGER NOT NULL,
    down_bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE device_event (
    id INTEGER PRIMARY KEY, at REAL NOT NULL, device TEXT NOT NULL, what TEXT NOT NULL, detail TEXT NOT NULL
);
CREATE INDEX device_event_of ON device_event (device, id);
CREATE TABLE device_letter (id INTEGER PRIMARY KEY, letter TEXT NOT NULL)
"""
KIND = Kind(
    "store",
    "--store",
    application_id=0x50464147,  # "PFAG"
    steps=(_VERSION_2, _VERSION_3, _VERSION_4, _VERSION_5, _VERSION_6),
    pragmas={"page_size": PAGE_BYTES, "journal_size_limit": 64 << 20, "secure_delete": 1},  # see docs/decisions/118
    writer="an aggregator",
)
COUNT = (
    "INSERT INTO tally (round, outcome, messages) VALUES (?, ?, ?)"
    " ON CONFLICT (round, outcome) DO UPDATE SET messages = tally.messages + excluded.messages"
)
PUT_GLOBAL = upsert("global", "version, part", "payload")


def draw_run(db: Connection) -> bytes:
    """Make another run of a store, within a transaction; returns its id, 4 bytes.

    A device begins a run with its generation 1. Stored sums are from before, so they are numbered above 1. The
    device then hears that its first contribution is late, and sends again. With the same number it would hear that
    its contribution is already held.

    The shares of an open round are deleted: they were made for the old run. Their devices make new ones for this
    run.
    """
    run = os.urandom(4)
    for table in ("contribution", "payload"):  # a blinded round's shares are of the run that they were made for
        db.execute(f"DELETE FROM {table} WHERE round IN (SELECT round FROM blinded_seed)")
    db.execute("DELETE FROM blinded_seed")
    db.execute("DELETE FROM blinded_set")
    db.execute("UPDATE standing SET generation = generation + 1")
    db.execute("UPDATE meta SET value = ? WHERE name = 'run'", (run,))
    return run
