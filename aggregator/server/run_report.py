"""The run as JSON, schema `protofleet.aggregate/1`, from the store alone: the same after any number of restarts.

It is written after every round of a run that may last for months. So it reads only what may have changed:

- a closed round's contributions no longer change: they are read from the store and encoded once;
- the counters of late and repeated messages are read each time;
- accuracy is read for the rounds with new reports.

Of a run of years the newest `KEEP_ROUNDS` are listed. The others are in the totals, and `rounds_before` says how many
they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from protofleet.aggregator.monitoring.accuracy import fleet_accuracy
from protofleet.aggregator.monitoring.calibration import calibration_facts
from protofleet.aggregator.store.durable_store import KEEP_ROUNDS, OUTCOMES, Store
from protofleet.aggregator.store.records import RoundRecord

__all__ = ["SCHEMA", "Summary"]

SCHEMA = "protofleet.aggregate/1"


class Summary:
    """The summary of a run, made again and again.

    Args:
        fleet: the fleet's id.
        bundle: sha256 of the fleet's first bundle.
    """

    def __init__(self, store: Store, fleet: str, bundle: bytes) -> None:
        self._store, self._head = store, {"fleet": fleet, "run": store.run.hex(), "bundle": bundle.hex()}
        self._begin()

    def _begin(self) -> None:
        self._taken_out = self._store.standing.taken_out
        self._before = max(0, self._store.last_round() - KEEP_ROUNDS - 1)  # rounds up to this number are not listed
        self._closed: list[dict[str, Any]] = []  # without what may still change
        committed, uplink_bytes = self._store.totals(self._before)
        self._totals = {"committed": committed, "uplink_bytes": uplink_bytes}  # of those, and of the ones before
        self._accuracy: dict[int, msgspec.Raw] = {}  # by round, encoded
        self._accuracy_read = 0  # up to which of what devices said

    def content(self, *, finished: bool, global_version: int) -> dict[str, Any]:
        """Every closed round and the totals over all rounds, the open one included. Bytes are payload bytes."""
        if self._taken_out != self._store.standing.taken_out:
            self._begin()  # a device was forgotten: it is in no closed round any more
        totals = dict(self._totals)
        after = self._closed[-1]["round"] if self._closed else self._before
        findings = self._store.findings(after=after)
        for record in self._store.rounds(after=after):
            for counted in (totals, self._totals) if record.closed else (totals,):
                counted["committed"] += len(record.uplink_bytes)
                counted["uplink_bytes"] += sum(record.uplink_bytes.values())
            if record.closed:
                self._closed.append(_round(record) | {"findings": findings.get(record.number, [])})
        self._let_go()
        self._read_accuracy()
        tallies = self._store.tallies()
        outcomes = {name: sum(n for (_, outcome), n in tallies.items() if outcome == name) for name in OUTCOMES}
        return {
            "schema": SCHEMA,
            **self._head,
            "finished": finished,
            "global_version": global_version,
            "rounds_before": self._before,
            "rounds": [
                _with_outcomes(entry, tallies) | {"accuracy": self._accuracy.get(entry["round"])}
                for entry in self._closed
            ],
            "totals": {
                "committed": totals["committed"],
                "duplicates": outcomes["duplicate"],
                "late": outcomes["late"],
                "rejected": outcomes["rejected"],
                "malformed": outcomes["malformed"],
                "uplink_bytes": totals["uplink_bytes"],
            },
            "drifting": self._store.drift.suspected.facts(),
            "calibration": calibration_facts(self._store.calibration.announced),
        }

    def _let_go(self) -> None:
        """Drop what is no longer listed."""
        dropped = self._closed[:-KEEP_ROUNDS]
        if dropped:
            self._before, self._closed = dropped[-1]["round"], self._closed[-KEEP_ROUNDS:]
            for entry in dropped:
                self._accuracy.pop(entry["round"], None)

    def _read_accuracy(self) -> None:
        self._accuracy_read, rounds = self._store.accuracy_since(self._accuracy_read)
        for number in rounds:
            accuracy = fleet_accuracy(self._store.accuracy(number))
            if accuracy is not None and number > self._before:
                self._accuracy[number] = msgspec.Raw(msgspec.json.encode(accuracy.facts()))


def _round(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.number,
        "taken_back": record.taken_back,
        "method": record.method,
        "participants": len(record.uplink_bytes),
        "committed": len(record.uplink_bytes),
        "uplink_bytes": msgspec.Raw(msgspec.json.encode(record.uplink_bytes)),
        "classes_merged": record.classes_merged,
        "seconds": record.seconds,
    }


def _with_outcomes(row: dict[str, Any], tallies: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    counts = {"duplicates": "duplicate", "late": "late", "rejected": "rejected"}
    return row | {name: tallies.get((row["round"], outcome), 0) for name, outcome in counts.items()}
