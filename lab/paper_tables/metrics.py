"""Metrics of a run beside its accuracy: of its clients, its classes, its confidence, and its way to a target.

All are of the last measured round, except those about the target:

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

from protofleet.contract.methods import closing_method

__all__ = ["METRICS", "metrics_of", "per_class_of"]

METRICS = ("worst client", "10th percentile", "std over clients", "Jain", "worst class", "calibration error")
METRICS += ("rounds to target", "bytes to target")


def metrics_of(
    records: Sequence[Mapping[str, Any]], name: str, curve: Mapping[int, float], clients: int, target: float | None
) -> dict[str, float]:
    """The metrics of one run by name. Those that were not measured are left out.

    Args:
        records: as a run's ledger line has them.
        name: part/way as records have it: `all_classes/head`.
        curve: round → accuracy.
        clients: of the federation, those that are not sampled among them.
        target: an accuracy, as a fraction.
    """
    accuracies = np.array(_last(records, "clients", name) or [], np.float64)
    metrics = _over_clients(accuracies) if len(accuracies) else {}
    shares = [share for share in per_class_of(records, name) if share is not None]
    if shares:
        metrics["worst class"] = min(shares)
    if (error := _last(records, "calibration", name)) is not None:
        metrics["calibration error"] = float(error)
    reached = [number for number, value in sorted(curve.items()) if target is not None and value >= target]
    if reached:
        metrics |= {"rounds to target": float(reached[0]), "bytes to target": _sent(records, reached[0], clients)}
    return metrics


def per_class_of(records: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """The share of right answers for each class in the last measured round; empty where unknown."""
    return list(_last(records, "per_class", name) or [])


def _over_clients(accuracies: np.ndarray) -> dict[str, float]:
    squares = float((accuracies**2).sum())
    return {
        "worst client": float(accuracies.min()),
        "10th percentile": float(np.percentile(accuracies, 10)),
        "std over clients": float(accuracies.std()),
        "Jain": float(accuracies.sum()) ** 2 / (len(accuracies) * squares) if squares else 1.0,
    }


def _last(records: Sequence[Mapping[str, Any]], part: str, name: str) -> Any:
    for record in reversed(records):
        if name in record.get(part, {}):
            return record[part][name]
    return None


def _sent(records: Sequence[Mapping[str, Any]], until: int, clients: int) -> float:
    """Mean bytes that one client has sent up to a round."""
    method = closing_method().name
    rounds = [record for record in records if record["round"] <= until and record["method"] != method]
    return float(sum(record["uplink_bytes"] * record["participants"] for record in rounds)) / clients
