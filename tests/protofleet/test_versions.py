"""What 0.2 and every later version wrote is opened by this one; what 0.1 wrote is refused in one line."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import msgspec
import numpy as np
import pytest
import version_files
from contract_samples import readable_messages, small_parts
from version_files import BUNDLE, PRIVATE, ROWS, RUN, STOOD

from protofleet.aggregator.monitoring.drift import drift_of
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.errors import BundleError, UsageError, WireError
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.rollout_messages import RolloutReport
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import Ledger, Terms, read_ledger
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from tests.contract.bundle.test_bundle_file import forge, keys

FILES = Path(__file__).parents[1] / "files"
VERSIONS = sorted(path.name for path in FILES.iterdir())
versions = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture
def files(version: str, tmp_path: Path) -> Path:
    """A copy: opening a store or a journal may bring it forward."""
    return Path(shutil.copytree(FILES / version, tmp_path / "files"))


def journal_of(folder: Path) -> Journal:
    (folder / "state").mkdir(exist_ok=True)
    if (folder / "journal.sqlite").exists():
        (folder / "journal.sqlite").rename(folder / "state" / "journal.sqlite")
    return Journal(folder / "state", fleet="fleet", device="pi-1", bundle=BUNDLE)


def test_there_are_files_of_every_version_since_0_2_and_no_others() -> None:
    assert VERSIONS == ["v2", "v3", "v4", "v5", "v6"]
    for version in VERSIONS:
        names = {path.name for path in (FILES / version).iterdir()}
        later = set() if version == "v2" else {"rollout.sqlite", "ledger.sqlite"}
        assert names == {"small.bundle", "store.sqlite", "journal.sqlite", "messages.json"} | later


@versions
def test_a_bundle_of_that_version_is_read_with_its_signature(version: str) -> None:
    bundle = read_bundle(FILES / version / "small.bundle", public_key=keys(PRIVATE)[1])
    assert bundle.manifest.method == "fedproto"
    assert bundle.manifest.labels == ("cat", "dog", "bird")
    for name, value in small_parts()["params"].items():
        np.testing.assert_array_equal(bundle.params[name], value)


@versions
def test_a_store_of_that_version_goes_on(files: Path) -> None:
    for reopened in (False, True):
        with DurableStore(files / "store.sqlite", BUNDLE, "fleet") as store:
            first, second = store.rounds()
            assert (first.method, first.closed, dict(first.uplink_bytes)) == ("fedproto", True, {"a": 9, "b": 9})
            assert list(store.contributions(1, "fedproto")) == [b"of a", b"of b"]
            np.testing.assert_array_equal(store.state().prototypes.rows, ROWS.rows)
            assert (second.method, second.closed) == ("ffc", reopened)
            if not reopened:
                store.close_round(2, 110.0, 3, store.state())


@versions
def test_a_journal_of_that_version_goes_on(files: Path) -> None:
    for number in (3, 4):
        with journal_of(files) as journal:
            assert journal.secret() == bytes(range(32))
            assert journal.outcome((RUN, 1, "fedproto")) == ("committed", 9)
            assert journal.pending()[0].payload == b"payload 2"
            assert journal.is_own_instance(b"instance")
            assert journal.weights()["backbone.weight"][0, 0] == number - 1
            weights = {"backbone.weight": np.full((2, 3), number, np.float32)}
            key = (RUN, number, "fedproto")
            journal.commit_round(key, weights=weights, payload=b"more", limit_bytes=1024, metrics={})


@versions
def test_what_stands_goes_on_from_every_version(files: Path, version: str) -> None:
    """Version 2 had none of it: its store and journal have the tables now, and they are empty."""
    none = version == "v2"
    with DurableStore(files / "store.sqlite", BUNDLE, "fleet") as store, journal_of(files) as journal:
        assert store.standing.generations() == ({} if none else {"a": 3, "b": 2})
        assert store.standing.payload("a") == (None if none else b"sums of a")
        assert store.standing.payload("b") is None
        assert [r["distance"] for r in drift_of(store.drift._db).values()] == ([] if none else [1.25])
        assert set(store.refused_devices.reasons()) == (set() if none else {"b"})
        assert journal.standing.newest(STOOD) == ((0, False) if none else (3, True))
        assert journal.standing.samples(STOOD) == (None if none else b"k" * 36)


@versions
def test_a_device_on_probation_goes_on_from_every_version(files: Path, version: str) -> None:
    """Version 2 had none: nothing is known."""
    with RolloutFile(files, make=True) as file:
        known = file.change(rollout_decisions.started)
        if version == "v2":
            assert known == rollout_decisions.Rollouts()
            return
        assert known.probation == rollout_decisions.Probation(1, 0.75)
        assert [(each.version, each.reason) for each in known.failed.values()] == [(2, "rejected: rows")]
        back = file.change(rollout_decisions.rolled_back, "x").active
        assert (back, known.floor) == (known.previous, 1)


@versions
def test_a_ledger_goes_on_from_every_version(files: Path, version: str) -> None:
    with Ledger(files / "ledger.sqlite") as ledger:
        spent = ledger.spent()
        if version == "v2":
            assert spent.releases == 0
            return
        found = ledger.newest("fleet", RUN, 2, "ncm-dp")
        assert found is not None
        assert found.cost == version_files.LEDGER_COST
        assert (spent.releases, spent.replace) == (1, 0.5)
        assert ledger.free_in_s(1, 86_400.0, Moment("another", 1.0, 1100.0)) == 86_300.0
    assert read_ledger(files / "ledger.sqlite")[2] == Terms(4.0, 1e-6, "replace")


@versions
def test_a_roll_out_goes_on_from_every_version(files: Path, version: str) -> None:
    """Version 2 had none."""
    with DurableStore(files / "store.sqlite", BUNDLE, "fleet") as store:
        found = store.rollouts.load()
        if version == "v2":
            assert found is None
        else:
            assert (found.plan.version, found.fraction, found.stages, found.state) == (7, 0.5, (1.0,), "running")
            assert found.told == {"a": RolloutReport(7, "failed", "self-test")}
            assert store.rollouts.read(BUNDLE, 2, 100) == b"bundle"


@versions
def test_messages_of_that_version_are_read_also_with_later_fields(version: str) -> None:
    found = json.loads((FILES / version / "messages.json").read_text())
    for name, payloads in found.items():
        for payload in payloads.values():
            message = decode(bytes.fromhex(payload))
            assert encode(message, "f64").hex() == payloads["plain"]
            assert type(message) is type(readable_messages()[name])


def test_the_newest_files_are_what_this_version_writes(tmp_path: Path) -> None:
    """A changed table or field needs files, and after a release a version, of its own:
    `tests/support/version_files.py`."""
    version_files.make(tmp_path)
    assert (tmp_path / "messages.json").read_bytes() == (FILES / VERSIONS[-1] / "messages.json").read_bytes()
    for name in ("store.sqlite", "journal.sqlite", "rollout.sqlite", "ledger.sqlite"):
        made, kept = (_tables(folder / name) for folder in (tmp_path, FILES / VERSIONS[-1]))
        assert made == kept


def _tables(path: Path) -> list[tuple[object, ...]]:
    db = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    found = db.execute("SELECT name, sql FROM sqlite_master ORDER BY name").fetchall()
    found += [db.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")]
    db.close()
    return found


# ── 0.1 ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_0_1_wrote_is_refused_in_one_line_each(tmp_path: Path) -> None:
    write_bundle(tmp_path / "old.bundle", **small_parts())
    with pytest.raises(
        BundleError, match="expected schema 2, got schema 1, try exporting it anew: it is of Protofleet"
    ):
        read_bundle(forge(tmp_path / "old.bundle", schema=1))
    for name, application in (("store.sqlite", 0x50464147), ("journal.sqlite", 0)):
        db = sqlite3.connect(tmp_path / name)
        db.executescript("CREATE TABLE meta (name TEXT PRIMARY KEY, value); INSERT INTO meta VALUES ('schema', '1')")
        db.execute(f"PRAGMA application_id = {application}")
        db.execute("PRAGMA journal_mode = WAL")
        db.close()
    with pytest.raises(
        UsageError, match=r"expected a store of versions 2 to 6, got one of Protofleet 0.1, try another --store"
    ):
        DurableStore(tmp_path / "store.sqlite", BUNDLE, "fleet")
    with pytest.raises(
        UsageError, match=r"expected a journal of versions 2 to 3, got another file, or one of Protofleet 0.1"
    ):
        journal_of(tmp_path)
    with pytest.raises(WireError, match="expected wire version 2, got 1, try the same release on both ends"):
        decode(bytes.fromhex("a200030101"))
    with pytest.raises(WireError, match="topic, expected pf/v2/FLEET/up/DEVICE, got 'pf/v1/fleet/up/pi-1'"):
        topics.device_of("pf/v1/fleet/up/pi-1")


def test_a_manifest_of_later_keeps_what_it_says_in_its_hash(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b.bundle", **small_parts())
    before = read_bundle(tmp_path / "b.bundle")
    after = read_bundle(forge(tmp_path / "b.bundle", energy_mj=3))
    assert msgspec.structs.asdict(after.manifest) == msgspec.structs.asdict(before.manifest)
    assert after.sha256 != before.sha256


@versions
def test_the_calibration_of_answers_goes_on_from_version_6(files: Path, version: str) -> None:
    """Versions before had none: nothing is known."""
    has_none = version in ("v2", "v3", "v4", "v5")
    for _ in range(2):
        with DurableStore(files / "store.sqlite", BUNDLE, "fleet") as store, journal_of(files) as journal:
            assert (store.calibration.announced.way, store.calibration.announced.photos) == (
                ("", 0) if has_none else ("linear", 30)
            )
            known = journal.calibration()
            assert (known.counts, known.fleet.strength) == (((), 0.0) if has_none else ((3, 0, 2), 0.75))


@versions
def test_what_is_known_of_devices_begins_with_version_6(files: Path, version: str) -> None:
    """A store of a version before knows none: its devices are first seen when they are heard again."""
    for _ in range(2):
        with DurableStore(files / "store.sqlite", BUNDLE, "fleet") as store:
            row = store.devices.get("a")
            if version in ("v2", "v3", "v4", "v5"):
                assert row is None
                continue
            assert row is not None
            assert (row.first_seen, row.heard_at, row.online, row.confirmed) == (109.25, 109.5, True, False)
            assert (row.board, row.bundle, row.proposed) == ("a board", "1 00010203", {"barn owl": 7})
            assert row.figures == {"rss_bytes": 5e7, "unknown_share": 0.25}
            assert (row.up_bytes, row.refused, row.refusal) == (1_150, 1, "round 1 is over")
