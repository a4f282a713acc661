"""A run between two rounds in one file, so that an interrupted run goes on where it was and gives the same numbers.

Everything random in the lab comes from (seed, device, round), so weights, global state and past records are all of it.
The file is written beside its place and renamed, so that there is always a whole one. Writing takes at most about a
twentieth of the time; a run loses what it did since the last write.

What is kept is plain: numbers, strings, lists, dictionaries and tensors, read back without running anything from the
file.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from contract.errors import StoreError, UsageError
from contract.files import whole_file

__all__ = ["Checkpoint", "Resumed", "after_round", "past_rounds"]

SCHEMA = "protofleet.checkpoint/1"
_EVERY_S = 10.0  # between two writes, at least
_SHARE = 20  # and so many times what a write takes


class _Record(Protocol):
    def as_json(self) -> dict[str, Any]: ...


_Round = TypeVar("_Round", bound=_Record)


@dataclass(frozen=True)
class Resumed:
    """What a run goes on from.

    Attributes:
        records: fields of each past round's record.
        state: what the engine gave to `keep`.
    """

    records: list[dict[str, Any]]
    state: dict[str, Any]


@dataclass
class Checkpoint:
    """One run's file.

    Attributes:
        key: stands for the run's settings; a file with another key is refused.
        seconds: wall time of the run before this process.
        elapsed: and until now.
    """

    path: Path
    key: str
    seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _next: float = 0.0

    @classmethod
    def of(cls, path: Path, settings: object) -> Checkpoint:
        """The file of a run that `settings`, which must have a full `repr`, describe."""
        return cls(path, hashlib.sha256(repr(settings).encode()).hexdigest()[:16])

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._began

    def read(self) -> Resumed | None:
        """What the file holds; None when there is none.

        Raises:
            UsageError: when it is no checkpoint, or one of other settings.
        """
        import torch  # as late as can be: `lab/engine/deployed.py` also runs where there is none

        try:
            kept = torch.load(self.path, weights_only=True)
        except FileNotFoundError:
            return None
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            raise self._refused(f"{type(error).__name__}") from None
        if not isinstance(kept, dict) or kept.get("schema") != SCHEMA:
            raise self._refused("another file")
        if kept["key"] != self.key:
            raise self._refused("one of other settings")
        self.seconds = kept["seconds"]
        return Resumed(kept["records"], kept["state"])

    def keep(self, records: Sequence[_Record], state: Callable[[], dict[str, Any]]) -> None:
        """After a round: write, when it is time.

        Args:
            state: gives what the engine needs to go on; called only when it is time.

        Raises:
            StoreError: when the disk refuses; the file before is then still there.
        """
        import torch

        began = time.monotonic()
        if began < max(self._next, self._began + _EVERY_S):
            return
        plain = [{name: value for name, value in each.as_json().items() if name != "schema"} for each in records]
        kept = {"schema": SCHEMA, "key": self.key, "seconds": self.elapsed, "records": plain, "state": state()}
        try:
            with whole_file(self.path) as file:
                torch.save(kept, file)
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{self.path}", expected="a file that can be written", got=_reason(error)) from None
        now = time.monotonic()
        self._next = now + max(_EVERY_S, _SHARE * (now - began))

    def remove(self) -> None:
        """The run is over."""
        self.path.unlink(missing_ok=True)

    def _refused(self, got: str) -> UsageError:
        return UsageError(
            f"{self.path}", expected="a checkpoint of this very run", got=got, hint="another path, or remove the file"
        )


def past_rounds(
    checkpoint: Checkpoint | None, record: Callable[..., _Round], on_round: Callable[[_Round], None] | None
) -> tuple[list[_Round], dict[str, Any] | None]:
    """The rounds of before an interruption, handed out again, and the engine's state after them; no round and None for
    a run that begins.

    Args:
        record: makes a record of its fields.

    Raises:
        UsageError: as `Checkpoint.read`.
    """
    if checkpoint is None or (resumed := checkpoint.read()) is None:
        return [], None
    records = [record(**fields) for fields in resumed.records]
    for each in records:
        if on_round is not None:
            on_round(each)
    return records, resumed.state


def after_round(
    records: Sequence[_Round],
    checkpoint: Checkpoint | None,
    state: Callable[[], dict[str, Any]],
    on_round: Callable[[_Round], None] | None,
) -> None:
    """Keep the run when it is time, then hand out its last record, so that what is handed out is kept first."""
    if checkpoint is not None:
        checkpoint.keep(records, state)
    if on_round is not None:
        on_round(records[-1])


def _reason(error: OSError | RuntimeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
