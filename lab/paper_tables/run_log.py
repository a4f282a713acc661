"""What a table's runs have given so far: an append-only file of one JSON line for each finished run.

A run is known by its key, a hash of its settings with every default, its seed and its data, so an interrupted table
goes on with the first run that has no line, a changed setting or default is a new run, and two processes may share the
file: a line is one write to a file opened for appending, followed by fsync. A last line that a power cut left half is
not read. A line also names the code that gave it, `code_mark`, and a run of other code is no run unless it is asked
for; nor is one of a ledger that named neither.

While a run is under way its rounds are written, one JSON line each, to a file of their own, and beside it lies its
checkpoint (`lab/engine/checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from contract.errors import StoreError

__all__ = ["Finished", "Ledger", "code_mark", "data_mark", "run_key"]

_FILES_BY_NAME = 20
_CODE = ("contract", "edge_client", "aggregator", "export", "lab/algorithms", "lab/data", "lab/engine")


@dataclass(frozen=True)
class Finished:
    """A run that came to its end.

    Attributes:
        key: see `run_key`.
        seconds: wall time.
        records: the rounds that were measured, and every round's loss and bytes.
        failure: one line when training diverged; there are no records then.
        code: what `code_mark` gave; empty in a line of before 0.2.
    """

    key: str
    seed: int
    settings: dict[str, Any]
    seconds: float
    records: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    code: str = ""


def run_key(resolved: Mapping[str, Any], seed: int, data: str) -> str:
    """16 hex digits that stand for a run.

    Args:
        resolved: what `Experiment.resolved` gives.
        data: what `data_mark` gives.
    """
    canonical = json.dumps([resolved, seed, data], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


@cache
def code_mark() -> str:
    """The version, and 8 hex digits of the source files that a run's numbers come from: `0.2.0 (1a2b3c4d)`."""
    try:
        number = version("protofleet")
    except PackageNotFoundError:
        number = "not installed"
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for path in sorted(path for room in _CODE for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{number} ({digest.hexdigest()[:8]})"


def data_mark(name: str) -> str:
    """A data set in a few words: the name, and for a path its files' names and sizes, not where it lies."""
    place = Path(name)
    if "+" in name and not place.exists():
        return " + ".join(data_mark(each) for each in name.split("+"))
    if not place.exists():
        return name
    files = sorted(path for path in place.rglob("*") if path.is_file()) if place.is_dir() else [place]
    above = place if place.is_dir() else place.parent
    sizes = [f"{path.relative_to(above)}:{path.stat().st_size}" for path in files]
    if len(files) > _FILES_BY_NAME:
        sizes = [f"{len(files)} files", hashlib.sha256("\n".join(sizes).encode(errors="replace")).hexdigest()[:16]]
    return " ".join([place.resolve().name, *sizes])


class Ledger:
    """The file `OUT/runs.jsonl` of one table, and `OUT/rounds/`.

    Raises:
        StoreError: when the directory cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._rounds = folder / "runs.jsonl", folder / "rounds"
        try:
            self._rounds.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}", expected="a directory to write to", got=error.strerror) from None

    def read(self, code: str | None = None) -> dict[str, Finished]:
        """Every finished run of this code, or of any, by key; the later line counts where there are two."""
        if not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                run = Finished(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            if code in (None, run.code):
                found[run.key] = run
        return found

    def append(self, run: Finished) -> None:
        """Write one line, durably.

        Raises:
            StoreError: when the disk refuses.
        """
        line = json.dumps(run.__dict__) + "\n"
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
                os.write(descriptor, (("\n" if torn else "") + line).encode())
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise StoreError(f"{self.path}", expected="a file that can be written", got=error.strerror) from None

    def rounds_of(self, *words: str) -> Path:
        """Where a run's rounds are written."""
        return self._rounds / (re.sub(r"[^a-z0-9.+-]+", "-", "_".join(words).lower()).strip("-") + ".jsonl")
