"""The state of a run between two rounds, in one file. An interrupted run continues from it and gives the same numbers.

The file holds weights, global state and past records. That is everything, since all random numbers in the lab come from
(seed, device, round).

Guarantees:

- There is always a complete file: a new one is written beside it and then renamed.
- Writing takes at most about a twentieth of the time. An interrupted run loses what it did since the last write.
- The content is plain: numbers, strings, lists, dictionaries and tensors. Reading runs no code from the file.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file

__all__ = ["Checkpoint", "Resumed", "after_round", "past_rounds"]

SCHEMA = "protofleet.checkpoint/1"
_EVERY_S = 10.0  # between two writes, at least
_SHARE = 20  # and so many times what a write takes


class _Record(Protocol):
    def as_json(self) -> dict[str, Any]: ...


_Round = TypeVar("_Round", bound=_Record)


@dataclass(frozen=True)
class Resumed:
    """The state that a run continues from.

    Attributes:
        records: fields of each past round's record.
        state: the state that the engine gave to `keep`.
    """

    records: list[dict[str, Any]]
    state: dict[str, Any]


@dataclass
class Checkpoint:
    """The checkpoint file of one run.

    Attributes:
        key: identifies the run's settings. A file with another key is refused.
        seconds: wall time of the run before this process.
        elapsed: wall time of the run until now.
    """

    path: Path
    key: str
    seconds: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _next: float = 0.0

    @classmethod
    def of(cls, path: Path, settings: object) -> Checkpoint:
        """The checkpoint of a run with these settings, whose `repr` must be complete."""
        return cls(path, hashlib.sha256(repr(settings).encode()).hexdigest()[:16])

    @property
    def elapsed(self) -> float:
        return self.seconds + time.monotonic() - self._began

    def read(self) -> Resumed | None:
        """The content of the file; None where there is no file.

        Raises:
            UsageError: the file is no checkpoint, or one of other settings.
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
        """Write the file after a round, if it is time.

        Args:
            state: gives the engine's state; called only if it is time.

        Raises:
            StoreError: the disk refuses. The previous file is then still there.
        """
        import torch

        began = time.monotonic()
        if began < max(self._next, self._began + _EVERY_S):
            return
        plain = [{name: value for name, value in record.as_json().items() if name != "schema"} for record in records]
        kept = {"schema": SCHEMA, "key": self.key, "seconds": self.elapsed, "records": plain, "state": state()}
        try:
            with whole_file(self.path) as file:
                torch.save(kept, file)
        except (OSError, RuntimeError) as error:
            raise StoreError(f"{self.path}", expected="a file that can be written", got=_reason(error)) from None
        now = time.monotonic()
        self._next = now + max(_EVERY_S, _SHARE * (now - began))

    def remove(self) -> None:
        """Remove the file of a run that has ended."""
        self.path.unlink(missing_ok=True)

    def _refused(self, got: str) -> UsageError:
        return UsageError(
            f"{self.path}", expected="a checkpoint of this very run", got=got, hint="another path, or remove the file"
        )


def past_rounds(
    checkpoint: Checkpoint | None, record: Callable[..., _Round], on_round: Callable[[_Round], None] | None
) -> tuple[list[_Round], dict[str, Any] | None]:
    """The rounds before an interruption, passed to `on_round` again, and the engine's state after them.

    For a new run: no rounds, and None.

    Args:
        record: makes a record from its fields.

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
    """Keep the run if it is time, then pass its last record to `on_round`, in this order."""
    if checkpoint is not None:
        checkpoint.keep(records, state)
    if on_round is not None:
        on_round(records[-1])


def _reason(error: OSError | RuntimeError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
