"""What a run says beyond one accuracy: of its clients, its classes, its confidence, and how soon it was good.

All of the last round that was measured, but for what it took to the target:

    worst client, 10th percentile   of the clients' accuracies
    std over clients, Jain          their standard deviation, and (Σx)² / (n Σx²), 1 where all are alike (Jain, 1984)
    worst class                     the least share of a class's images that was named right, over all clients
    calibration error               of the head's probabilities, `lab/engine/tally.py`
    rounds to target, bytes …       the first measured round with that accuracy, and what one client had sent by then
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from contract.methods import closing_method

__all__ = ["METRICS", "metrics_of", "per_class_of"]

METRICS = ("worst client", "10th percentile", "std over clients", "Jain", "worst class", "calibration error")
METRICS += ("rounds to target", "bytes to target")


def metrics_of(
    records: Sequence[Mapping[str, Any]], name: str, curve: Mapping[int, float], clients: int, target: float | None
) -> dict[str, float]:
    """Of one run, by name; what was not measured is left out.

    Args:
        records: as a run's ledger line has them.
        name: part/way as records have it: `all_classes/head`.
        curve: round → accuracy.
        clients: of the federation, those that are not sampled among them.
        target: an accuracy, as a fraction.
    """
    each = np.array(_last(records, "clients", name) or [], np.float64)
    found = _over_clients(each) if len(each) else {}
    shares = [share for share in per_class_of(records, name) if share is not None]
    if shares:
        found["worst class"] = min(shares)
    if (error := _last(records, "calibration", name)) is not None:
        found["calibration error"] = float(error)
    reached = [number for number, value in sorted(curve.items()) if target is not None and value >= target]
    if reached:
        found |= {"rounds to target": float(reached[0]), "bytes to target": _sent(records, reached[0], clients)}
    return found


def per_class_of(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """The share of each class's images that was named right in the last measured round; empty where it is not known."""
    return list(_last(records, "per_class", name) or [])


def _over_clients(each: np.ndarray) -> dict[str, float]:
    squares = float((each**2).sum())
    return {
        "worst client": float(each.min()),
        "10th percentile": float(np.percentile(each, 10)),
        "std over clients": float(each.std()),
        "Jain": float(each.sum()) ** 2 / (len(each) * squares) if squares else 1.0,
    }


def _last(records: Sequence[Mapping[str, Any]], part: str, name: str) -> Any:
    for record in reversed(records):
        if name in record.get(part, {}):
            return record[part][name]
    return None


def _sent(records: Sequence[Mapping[str, Any]], until: int, clients: int) -> float:
    """By one client up to a round, by how often it takes part."""
    method = closing_method().name
    rounds = [record for record in records if record["round"] <= until and record["method"] != method]
    return float(sum(record["uplink_bytes"] * record["participants"] for record in rounds)) / clients
