"""The device's own record of its rounds: one JSON line each in `STATE/history.jsonl`.

A line is written when the round's outcome and the global state that came out of it are here. It has the accuracy that
the device then has. The line is on disk before the journal marks the round as reported. So a power cut can repeat a
line but never lose one. Readers take the last line of a (run, round, method).

A file that has grown to 16 MiB is renamed to `history.1.jsonl`, and replaces the older one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofleet.contract.accuracy import Accuracy
from protofleet.contract.errors import StoreError
from protofleet.edge_client.device.evaluation import Evaluation
from protofleet.edge_client.journal.journal import Key

__all__ = ["HISTORY_BYTES", "SCHEMA", "append_line", "history_line", "last_tested"]

SCHEMA = "protofleet.history/1"
HISTORY_BYTES = 16 << 20
_TAIL_BYTES = 1 << 22  # of the file that are looked through for the last line: confusions of many classes are long


def history_line(
    key: Key,
    metrics: Mapping[str, Any],
    *,
    outcome: str | None,
    uplink_bytes: int,
    global_version: int,
    evaluation: Evaluation | None,
    accuracy: Accuracy | None = None,
    peak_rss_bytes: int,
) -> dict[str, Any]:
    """One line: what the round did (`metrics`), how it ended, and how good the device is now (None without tests).

    Args:
        accuracy: of the evaluation, what a person is told.
    """
    run, number, method = key
    scores = (
        None if evaluation is None else {"own_classes": evaluation.own_classes, "all_classes": evaluation.all_classes}
    )
    confusion = None if evaluation is None else {n: counts.tolist() for n, counts in evaluation.confusion.items()}
    return {
        "schema": SCHEMA,
        "run": run.hex(),
        "round": number,
        "method": method,
        **metrics,
        "outcome": outcome,
        "uplink_bytes": uplink_bytes,
        "global_version": global_version,
        "test_samples": 0 if evaluation is None else evaluation.samples,
        "right": None if accuracy is None else accuracy.facts(),
        "accuracy": scores,
        "confusion": confusion,
        "peak_rss_bytes": peak_rss_bytes,
    }


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one line and force it to disk; in a new file, where this one is large enough.

    Raises:
        StoreError: the disk refused.
    """
    try:
        if path.exists() and path.stat().st_size >= HISTORY_BYTES:
            os.replace(path, path.with_name(f"{path.stem}.1{path.suffix}"))
        with path.open("a+b") as file:
            if file.tell() and not _ends_whole(file.fileno(), file.tell()):
                file.write(b"\n")  # a power cut tore the last line: keep it apart from ours
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(
            f"cannot write {path}", expected="a writable disk with room", got=error.strerror, hint="freeing space"
        ) from None


def last_tested(path: Path) -> dict[str, Any] | None:
    """The last line with accuracy; None where there is none, or the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):  # torn by a power cut, or by where we began to read
            continue
        if isinstance(entry, dict) and entry.get("schema") == SCHEMA and entry.get("accuracy"):
            return entry
    return None


def _ends_whole(descriptor: int, size: int) -> bool:
    return os.pread(descriptor, 1, size - 1) == b"\n"
