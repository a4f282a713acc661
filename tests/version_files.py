"""Sample files of the present version, as `tests/files/v5` holds them: `python tests/version_files.py FOLDER`.

Run it only for a version that is not released yet; a released version's files are never written again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from unittest import mock

import cbor2
import numpy as np
from contract_samples import readable_messages, small_parts

from aggregator.class_drift import Moved
from aggregator.rollout import Plan
from aggregator.rollout_store import give_rollout
from aggregator.standing_store import Stands
from aggregator.store import Accepted, DurableStore
from contract.bundle import read_bundle, write_bundle
from contract.drift import Drift
from contract.messages import ClassRows, Receipt
from contract.state import GlobalState
from contract.wire import encode
from edge_client import rollout
from edge_client.elapsed import Moment
from edge_client.journal import Journal
from edge_client.ledger import Cost, Entry, Ledger, Terms
from edge_client.rollout import Seat
from edge_client.rollout_file import RolloutFile

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
        store.drift.settle(109.5)
        store.class_drift.hear("a", [Moved(1, 20, 1.5)], ("cat", "dog"))
        store.class_drift.settle(109.5)
        store.standing.done(store.standing.next_order(), 110.0, "done", 4, 5)
        order = give_rollout(path, b"a bundle", Plan(BUNDLE, 7, 8), (0.5, 1.0), "somebody")
        rollout = store.rollouts.given(order)
        rollout.hear("a", "6 00000000", "7 failed: self-test")
        store.rollouts.begin(order, rollout, 111.0)


def _journal(state: Path) -> None:
    with Journal(state, fleet="fleet", device="pi-1", bundle=BUNDLE) as journal:
        journal.begin(b"instance")
        journal.secret()
        for number in (1, 2):
            weights = {"backbone.weight": np.full((2, 3), number, np.float32)}
            key, payload = (RUN, number, "fedproto"), b"payload %d" % number
            journal.commit_round(key, weights=weights, payload=payload, limit_bytes=1024, metrics={"loss": 0.5})
        journal.settle(Receipt(RUN, 1, "fedproto", "committed"), 9)
        journal.standing.commit((STOOD, 3, "ncm"), samples=b"k" * 36, payload=b"sums", limit_bytes=1024, metrics={})


def _rollouts(state: Path) -> None:
    """Version 3 gave up on a fleet's bundle 2, and runs bundle 3 on probation."""
    first, failed, second = (Seat(f"{n:064x}", n, "fleet") for n in (1, 2, 3))
    with RolloutFile(state, make=True) as file:
        file.change(rollout.proved, first)
        file.change(rollout.with_accuracy, 0.75)
        file.change(rollout.activated, failed, first)
        file.change(rollout.rolled_back, "rejected: rows")
        file.change(rollout.activated, second, first)


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
