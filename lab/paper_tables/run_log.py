"""The ledger of a table's runs: an append-only file with one JSON line for each finished run.

The key of a run is a hash of its settings with every default, its seed and its data. So:

- An interrupted table continues with the first run that has no line.
- A changed setting or default makes a new run.
- Two processes may share the file. A line is one write to a file opened for appending, followed by fsync.
- An incomplete last line, after a power cut, is not read.
- A line names its code (`code_mark`). Runs of other code, or of a ledger that names none, count only on request.

While a run is under way, its rounds are written to a file of its own, one JSON line each. Its checkpoint lies beside it
(`lab/engine/checkpoint.py`).
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

from protofleet.contract.errors import StoreError

__all__ = ["Finished", "Ledger", "code_mark", "data_mark", "run_key"]

_FILES_BY_NAME = 20
_CODE = ("contract", "edge_client", "aggregator", "export", "lab/algorithms", "lab/data", "lab/engine", "lab/training")


@dataclass(frozen=True)
class Finished:
    """A finished run.

    Attributes:
        key: see `run_key`.
        seconds: wall time.
        records: the rounds that were measured, and every round's loss and bytes.
        failure: one line if training diverged. There are no records then.
        code: result of `code_mark`; empty in a line from before 0.2.
    """

    key: str
    seed: int
    settings: dict[str, Any]
    seconds: float
    records: list[dict[str, Any]] = field(default_factory=list)
    failure: str | None = None
    code: str = ""


def run_key(resolved: Mapping[str, Any], seed: int, data: str) -> str:
    """16 hex digits that identify a run.

    Args:
        resolved: result of `Experiment.resolved`.
        data: result of `data_mark`.
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
    """A data set in a few words: its name, or for a path the names and sizes of its files, without their place."""
    place = Path(name)
    if "+" in name and not place.exists():
        return " + ".join(data_mark(part) for part in name.split("+"))
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
        StoreError: the directory cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self._rounds = folder / "runs.jsonl", folder / "rounds"
        try:
            self._rounds.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}", expected="a directory to write to", got=error.strerror) from None

    def read(self, code: str | None = None) -> dict[str, Finished]:
        """Every finished run of this code, or of any code, by key. Of two lines with one key the later counts."""
        if not self.path.exists():
            return {}
        runs = {}
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                run = Finished(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            if code in (None, run.code):
                runs[run.key] = run
        return runs

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

    def rounds_of(self, *parts: str) -> Path:
        """The file for a run's rounds."""
        return self._rounds / (re.sub(r"[^a-z0-9.+-]+", "-", "_".join(parts).lower()).strip("-") + ".jsonl")
