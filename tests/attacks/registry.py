"""What is fuzzed: a target is a module of this folder with `run(data)` and `seeds()`.

`run` gives any bytes to a part of Protofleet as whoever is hostile could, and raises where a promise is broken: another
error than those of `contract/errors.py`, a value that does not come back as it was, more memory than was allowed.
`seeds` are inputs that reach deep, made of the frozen messages and files, so that a message type which is new in the
codec is attacked without anybody thinking of it. What a fuzzer found beside them lies in `corpus/TARGET/`, crashes as
`crash-…`, each mended; `tests/attacks/test_targets.py` replays all of it, `benchmarks/attacks/fuzz.py` goes on from
there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CORPUS", "TARGETS", "Target", "load"]

CORPUS = Path(__file__).parent / "corpus"
TARGETS = (
    "wire", "chunks", "state", "connection", "signed", "ingest", "inbox", "helper", "pieces", "settings", "bundle",
    "journal", "rollout", "store", "standing", "ledgers", "data", "camera",
)  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A part that is attacked.

    Attributes:
        longest_bytes: of an input; longer ones reach nothing new.
    """

    name: str
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterable[bytes]]
    longest_bytes: int

    def corpus(self) -> list[Path]:
        """What was found and is kept, in the order of the names."""
        return sorted(path for path in (CORPUS / self.name).glob("*") if path.is_file())


def load(name: str) -> Target:
    """A target, its module and what that attacks imported now."""
    found = importlib.import_module(f"tests.attacks.targets.{name}")
    return Target(name, found.run, found.seeds, found.LONGEST_BYTES)
