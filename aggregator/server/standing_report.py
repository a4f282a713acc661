"""The content of a store where sums stand, as JSON, schema `protofleet.standing/1`, from the store alone."""

from __future__ import annotations

from typing import Any

from protofleet.aggregator.monitoring.calibration import calibration_facts
from protofleet.aggregator.store.durable_store import OUTCOMES, DurableStore

__all__ = ["SCHEMA", "StandingSummary"]

SCHEMA = "protofleet.standing/1"


class StandingSummary:
    """What stands, again and again.

    Args:
        fleet: the fleet's id.
        bundle: sha256 of the fleet's bundle.
    """

    def __init__(self, store: DurableStore, fleet: str, bundle: bytes) -> None:
        self._store, self._head = store, {"fleet": fleet, "run": store.run.hex(), "bundle": bundle.hex()}

    def content(self, *, finished: bool, global_version: int) -> dict[str, Any]:
        """The devices by what stands of them, and messages by outcome."""
        tallies = self._store.tallies()
        return {
            "schema": SCHEMA,
            **self._head,
            "finished": finished,
            "method": self._store.meta.get("standing"),
            "global_version": global_version,
            "devices": {
                record.device: {
                    "generation": record.generation,
                    "present": record.present,
                    "received_bytes": record.received_bytes,
                    "refused": record.refused or None,
                }
                for record in self._store.standing.records().values()
                if record.generation or record.refused
            },
            "totals": {name: sum(n for (_, outcome), n in tallies.items() if outcome == name) for name in OUTCOMES},
            "drifting": self._store.drift.suspected.facts(),
            "calibration": calibration_facts(self._store.calibration.announced),
            "classes_drifting": self._store.class_drift.suspected.facts(),
        }
