"""Sample files of the present version, as `tests/files/v6` holds them: `python tests/support/version_files.py FOLDER`.

Run it only for a version that is not released yet; a released version's files are never written again.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import cbor2
import numpy as np
from contract_samples import readable_messages, small_parts

from protofleet.aggregator.monitoring.class_drift import Moved
from protofleet.aggregator.rollout.rollout_stages import Plan
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.records import Accepted
from protofleet.aggregator.store.rollout_tables import give_rollout
from protofleet.aggregator.store.standing_tables import Stands
from protofleet.contract.bundle.bundle_file import read_bundle, write_bundle
from protofleet.contract.drift import Drift
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows, Receipt, Status
from protofleet.edge_client.device.calibration import Known
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.privacy.elapsed_time import Moment
from protofleet.edge_client.privacy.ledger import Cost, Entry, Ledger, Terms
from protofleet.edge_client.rollout import rollout_decisions
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle
from protofleet.edge_client.rollout.rollout_file import RolloutFile

BUNDLE, RUN, STOOD, PRIVATE = bytes(range(32)), b"run1", b"run2", b"k" * 32
ROWS = ClassRows(np.array([0, 2], np.uint16), np.array([[0.5, -1.0], [3.0, 4.0]]))
LEDGER_COST = Cost(0.25, 0.5)
LATER = {40: "a field of later", 41: [1.5, {"a": b"b"}]}


def make(folder: Path) -> None:
    """Write a bundle, a store, a journal and messages into `folder`, which must be empty."""
    write_bundle(folder / "small.bundle", **small_parts(), private_key=PRIVATE)
    read_bundle(folder / "small.bundle")
    with mock.patch("os.urandom", lambda count: bytes(range(count))):
        _store(folder / "store.sqlite")
        _journal(folder / "state")
        _rollouts(folder / "state")
        _ledger(folder / "state")
    for name in ("journal.sqlite", "rollout.sqlite", "ledger.sqlite"):
        (folder / "state" / name).rename(folder / name)
    (folder / "state").rmdir()
    (folder / "messages.json").write_text(json.dumps(_messages(), indent=1) + "\n")


def _store(path: Path) -> None:
    with DurableStore(path, BUNDLE, "fleet") as store:
        store.open_round(1, "fedproto", 42, 100.0)
        tally = {(1, "late"): 2, (0, "malformed"): 1}
        store.commit(
            [Accepted(1, "fedproto", device, b"of " + device.encode(), 9) for device in "ab"], tally, [(1, "z")]
        )
        store.close_round(1, 107.5, 2, GlobalState(store.run, 1, 1, {"prototypes": ROWS}))
        store.open_round(2, "ffc", 43, 108.0)
        store.commit([Accepted(2, "ffc", "a", b"sums", 4)], {})
        store.standing.commit([Stands("a", 3, b"sums of a", 9), Stands("b", 2, None, 0)], {}, 109.0)
        store.drift.hear("a", Drift(20, 0.05, 1.25).metrics(), max_samples=100)
        store.drift.commit_heard(109.5)
        told = readable_messages()["status-calibration"].calibration
        store.calibration.hear("a", replace(told, run=store.run), max_samples=100)
        store.calibration.commit_heard(109.5)
        versions = {"protofleet": "0.2.0", "bundle": "1 00010203"}
        metrics, proposed = {"rss_bytes": 5e7, "unknown_share": 0.25}, {"barn owl": 7}
        birth = Status(True, bytes(8), 3, "a board", versions, metrics, proposed=proposed)
        store.devices.status("a", birth, 250, 109.25)
        store.devices.decided("a", 900, 109.5, refusal="round 1 is over")
        store.devices.keep(0.0, 109.5)
        store.class_drift.hear("a", [Moved(1, 20, 1.5)], ("cat", "dog"))
        store.class_drift.commit_heard(109.5)
        store.orders.done(store.orders.next_order(), 110.0, "done", 4, 5)
        order = give_rollout(path, b"a bundle", Plan(BUNDLE, 7, 8), (0.5, 1.0), "somebody")
        rollout_decisions = store.rollouts.given(order)
        rollout_decisions.hear("a", "6 00000000", "7 failed: self-test")
        store.rollouts.begin(order, rollout_decisions, 111.0)


def _journal(state: Path) -> None:
    with Journal(state, fleet="fleet", device="pi-1", bundle=BUNDLE) as journal:
        journal.begin(b"instance")
        journal.secret()
        for number in (1, 2):
            weights = {"backbone.weight": np.full((2, 3), number, np.float32)}
            key, payload = (RUN, number, "fedproto"), b"payload %d" % number
            journal.commit_round(key, weights=weights, payload=payload, limit_bytes=1024, metrics={"loss": 0.5})
        journal.keep_calibration(Known((3, 0, 2), AnnouncedCalibration("prototype", 0.5, 0.75, 30, 2)))
        journal.record_receipt(Receipt(RUN, 1, "fedproto", "committed"), 9)
        journal.standing.commit((STOOD, 3, "ncm"), samples=b"k" * 36, payload=b"sums", limit_bytes=1024, metrics={})


def _rollouts(state: Path) -> None:
    """Version 3 gave up on a fleet's bundle 2, and runs bundle 3 on probation."""
    first, failed, second = (InstalledBundle(f"{n:064x}", n, "fleet") for n in (1, 2, 3))
    with RolloutFile(state, make=True) as file:
        file.change(rollout_decisions.proved, first)
        file.change(rollout_decisions.with_accuracy, 0.75)
        file.change(rollout_decisions.activated, failed, first)
        file.change(rollout_decisions.rolled_back, "rejected: rows")
        file.change(rollout_decisions.activated, second, first)


def _ledger(state: Path) -> None:
    with Ledger(state / "ledger.sqlite") as ledger:
        ledger.put_terms(Terms(4.0, 1e-6, "replace"))
        now, digest = Moment("a start of the system", 100.0, 1000.0), bytes(range(32))
        ledger.record(Entry("round", "fleet", RUN, 2, "ncm-dp", "noised-means", "f32", 1, 9, digest, LEDGER_COST), now)


def _messages() -> dict[str, dict[str, str]]:
    """Each message as it is written, and, of those that come down, with fields that a later release may add."""
    found = {}
    for name, message in readable_messages().items():
        plain = cbor2.loads(encode(message, "f64"))
        found[name] = {"plain": encode(message, "f64").hex()}
        if plain[0] in (1, 2, 5, 8):
            found[name]["later"] = cbor2.dumps(plain | LATER, canonical=True).hex()
    return found


if __name__ == "__main__":
    make(Path(sys.argv[1]))
