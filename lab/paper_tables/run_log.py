"""What a table's runs have given so far: an append-only file of one JSON line for each finished run.

A run is known by its key, a hash of its settings, its seed and its data, so an interrupted table goes on with the
first run that has no line, a changed setting is a new run, and two processes may share the file: a line is one write
to a file opened for appending, followed by fsync. A last line that a power cut left half is not read.

While a run is under way its rounds are written, one JSON line each, to a file of their own, and beside it lies its
checkpoint (`lab/engine/checkpoint.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from contract.errors import StoreError
from lab.paper_tables.config import Settings

__all__ = ["Finished", "Ledger", "data_mark", "run_key"]

_FILES_BY_NAME = 20


@dataclass(frozen=True)
class Finished:
    """A run that came to its end.

    Attributes:
        key: see `run_key`.
        seconds: wall time.
        records: the rounds that were measured, and every round's loss and bytes.
        failure: one line when training diverged; there are no records then.
    """

    key: str
    seed: int
    settings: dict[str, Any]
    seconds: float
    records: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None


def run_key(settings: Settings, seed: int, data: str) -> str:
    """16 hex digits that stand for a run.

    Args:
        data: what `data_mark` gives.
    """
    canonical = json.dumps([msgspec.to_builtins(settings), seed, data], sort_keys=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def data_mark(name: str) -> str:
    """A data set in a few words: the name, and for a path its files' names and sizes, not where it lies."""
    place = Path(name)
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

    def read(self) -> dict[str, Finished]:
        """Every finished run by key; the later line counts where there are two."""
        if not self.path.exists():
            return {}
        found = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                run = Finished(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
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
