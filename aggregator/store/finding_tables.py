"""The findings against devices when rounds closed, in the store: for people who look at the fleet days later.

They are written in the transaction that closes a round and kept for as many rounds as accuracy reports. When a device
is forgotten, its findings are removed with all its other data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protofleet.aggregator.database import Connection, upsert
from protofleet.aggregator.screening.outliers import Finding
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.messages import MAX_TEXT, Receipt

__all__ = ["findings_of", "found_in_short", "found_in_words", "newest_findings", "put_findings", "verdicts"]


def put_findings(db: Connection, round: int, findings: Sequence[Finding], keep_rounds: int) -> None:
    """Part of the transaction that closes a round."""
    rows = [(round, finding.device, finding.verdict, finding.reason) for finding in findings]
    db.executemany(upsert("finding", "round, device, verdict", "reason"), rows)
    db.execute("DELETE FROM finding WHERE round <= ?", (round - keep_rounds,))


def findings_of(db: Connection, *, after: int) -> dict[int, list[dict[str, str]]]:
    """What spoke against devices in each of the rounds with a number above `after`, by device, for JSON; nothing of
    rounds in which nothing did."""
    by_round: dict[int, list[dict[str, str]]] = {}
    for round, *row in db.execute(
        "SELECT round, device, verdict, reason FROM finding WHERE round > ? ORDER BY round, device, verdict", (after,)
    ).fetchall():
        by_round.setdefault(round, []).append(dict(zip(("device", "verdict", "reason"), map(str, row), strict=True)))
    return by_round


def newest_findings(db: Connection) -> dict[str, dict[str, Any]]:
    """The newest finding against each device, and in how many rounds there was one, by name, for JSON."""
    rows = db.execute(
        "SELECT device, round, verdict, reason, (SELECT count(DISTINCT round) FROM finding o WHERE o.device = f.device)"
        " FROM finding f ORDER BY device, round, verdict"
    ).fetchall()
    return {
        str(device): {"round": int(round), "verdict": str(verdict), "reason": str(reason), "rounds": int(rounds)}
        for device, round, verdict, reason, rounds in rows
    }


def verdicts(db: Connection, run: bytes) -> dict[str, Receipt]:
    """The receipts for devices that were ever left out, by name.

    A receipt says of the newest closed round that the device took part in: it was left out, or it counts again. For
    blinded rounds there are none: nothing speaks against a device that is not in their sums.
    """
    if db.execute("SELECT 1 FROM blinded_sum UNION SELECT 1 FROM blinded_set").fetchone() is not None:
        return {}
    rows = db.execute(
        "SELECT f.device, r.number, r.method, g.reason FROM"
        " (SELECT f.device, max(r.number) AS newest FROM"
        "  (SELECT DISTINCT device FROM finding WHERE verdict = 'left out') f"
        "  JOIN contribution c ON c.device = f.device"
        "  JOIN round r ON r.number = c.round AND r.method = c.method AND r.closed = 1 GROUP BY f.device) f"
        " JOIN round r ON r.number = f.newest"
        " LEFT JOIN finding g ON g.round = r.number AND g.device = f.device AND g.verdict = 'left out'"
    ).fetchall()
    return {
        str(device): Receipt(
            run, int(number), str(method), "duplicate", counts=reason is None, why=printable(reason or "")[:MAX_TEXT]
        )
        for device, number, method, reason in rows
    }


def found_in_short(newest: Mapping[str, Any] | None) -> str:
    """The newest finding against a device, for a table; empty for none."""
    return "" if newest is None else printable(f"{newest['verdict']}, round {newest['round']}")


def found_in_words(newest: Mapping[str, Any], *, told: bool = False) -> str:
    """The same for a person, with the reason.

    Args:
        told: whether the device is told of its newest round.
    """
    rounds = counted(newest["rounds"], "round")
    line = f"{newest['verdict']} in round {newest['round']}: {newest['reason']}; {rounds} in all"
    if told and newest["verdict"] == "left out":
        line += "; the device is told, and answers by its own head where that is better on its held-out photos"
    return printable(line)
