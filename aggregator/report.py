"""The run as JSON, schema `protofleet.aggregate/1`, from the store alone: the same after any number of restarts."""

from __future__ import annotations

from typing import Any

from aggregator.store import OUTCOMES, RoundRecord, Store

__all__ = ["SCHEMA", "summary"]

SCHEMA = "protofleet.aggregate/1"


def summary(store: Store, *, fleet: str, bundle: bytes, finished: bool, global_version: int) -> dict[str, Any]:
    """Every closed round and the totals over all rounds, the open one included. Bytes are payload bytes."""
    records, unassigned = store.rounds(), store.unassigned()
    outcomes = {name: unassigned.get(name, 0) + sum(r.tally.get(name, 0) for r in records) for name in OUTCOMES}
    return {
        "schema": SCHEMA,
        "fleet": fleet,
        "run": store.run.hex(),
        "bundle": bundle.hex(),
        "finished": finished,
        "global_version": global_version,
        "rounds": [_round(record) for record in records if record.closed],
        "totals": {
            "committed": sum(len(r.uplink_bytes) for r in records),
            "duplicates": outcomes["duplicate"],
            "late": outcomes["late"],
            "rejected": outcomes["rejected"],
            "malformed": outcomes["malformed"],
            "uplink_bytes": sum(sum(r.uplink_bytes.values()) for r in records),
        },
    }


def _round(record: RoundRecord) -> dict[str, Any]:
    return {
        "round": record.number,
        "method": record.method,
        "participants": len(record.uplink_bytes),
        "committed": len(record.uplink_bytes),
        "duplicates": record.tally.get("duplicate", 0),
        "late": record.tally.get("late", 0),
        "rejected": record.tally.get("rejected", 0),
        "uplink_bytes": dict(record.uplink_bytes),
        "classes_merged": record.classes_merged,
        "seconds": record.seconds,
    }
