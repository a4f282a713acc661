"""What was tried on a machine, remembered: a file in the state directory that holds for what it was tried with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from protofleet.contract.files.atomic_files import whole_file

__all__ = ["TrialsFile"]

T = TypeVar("T")


@dataclass(frozen=True)
class TrialsFile(Generic[T]):
    """Trials by number of threads, in one file.

    Attributes:
        schema: of the file.
        key: what the trials hold for: a runtime, a bundle; of another one nothing is remembered.
        kind: the class of a trial.
    """

    path: Path
    schema: str
    key: Mapping[str, Any]
    kind: type[T]

    def read(self, threads: int) -> list[T]:
        """What is remembered; nothing where the file is not there, or not whole."""
        return self._table().get(str(threads), [])

    def write(self, threads: int, trials: Sequence[T]) -> None:
        """Remember these. A disk that refuses costs no more than another trial at the next start."""
        known = self._table() | {str(threads): list(trials)}
        table = {"schema": self.schema, "key": self.key, "threads": msgspec.to_builtins(known)}
        try:
            with whole_file(self.path) as file:
                file.write((json.dumps(table, indent=1) + "\n").encode())
        except OSError:
            return

    def _table(self) -> dict[str, list[T]]:
        try:
            table = json.loads(self.path.read_text(encoding="utf-8"))
            if (table["schema"], table["key"]) != (self.schema, self.key):
                return {}
            return msgspec.convert(table["threads"], dict[str, list[self.kind]])  # type: ignore[name-defined]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return {}
