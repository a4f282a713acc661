"""Every error that Protofleet raises on purpose, in one tree.

    ProtofleetError
    ├── UsageError      an option or a configuration file is wrong
    ├── DataError       a data set cannot be used: missing, malformed, not of the bundle's classes or shape
    ├── BundleError     a bundle cannot be trusted or read: hash, schema, signature, member
    ├── ExportError     a backbone cannot be turned into a bundle
    │   └── DownloadError   pretrained weights cannot be fetched
    ├── MethodError     unknown method, hyper-parameter out of range
    │   └── DivergedError   local training gave numbers that are not finite
    ├── WorkerError     processes or machines that the lab computes on are lost, or do not answer
    ├── StatisticError  the arrays of a statistic are not valid
    ├── WireError       a received message is not one of ours
    │   └── SignatureError  the message has no valid signature of the right key
    ├── PrivacyError    something has left a device that the ε of its owner's policy does not cover
    ├── LinkError       the broker cannot be reached, refused us, or took the session away
    │   └── SecondProcessError  another process already runs under this device's id
    └── StoreError      the disk refused: full, read-only, locked, written by another run
        ├── InUseError      another process runs on the file
        └── StoreLostError  the server of the store cannot be reached, or not any more
            ├── StoreAwayError  no server answers, or it accepts no connection yet
            └── LedError        another process leads now on the same store

Each error says what was expected, what came instead, and what to do next. The command line prints that as one line.
Library code never prints and never exits.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from protofleet.contract.printable import printable, without_password

__all__ = [
    "BundleError",
    "DataError",
    "DivergedError",
    "DownloadError",
    "ExportError",
    "InUseError",
    "LedError",
    "LinkError",
    "MethodError",
    "PrivacyError",
    "ProtofleetError",
    "SecondProcessError",
    "SignatureError",
    "StatisticError",
    "StoreAwayError",
    "StoreError",
    "StoreLostError",
    "UsageError",
    "WireError",
    "WorkerError",
    "near_names",
]


class ProtofleetError(Exception):
    """What went wrong in one line: `message, expected …, got …, try …`.

    Args:
        message: what was being done, and to which file, device or option.
        expected: what would have been right.
        got: what was found instead.
        hint: the next step a person can take.
    """

    exit_code = 1

    def __init__(self, message: str, *, expected: object = None, got: object = None, hint: str | None = None) -> None:
        parts = [message]
        parts += [f"expected {expected}"] if expected is not None else []
        parts += [f"got {got}"] if got is not None else []
        parts += [f"try {hint}"] if hint else []
        super().__init__(", ".join(_one_line(part) for part in parts))
        self.message, self.expected, self.got, self.hint = message, expected, got, hint


class UsageError(ProtofleetError):
    """An option or a configuration file is wrong."""

    exit_code = 2


class DataError(ProtofleetError):
    """A data set is missing, malformed, or not of the bundle's classes or shape."""

    exit_code = 2


class BundleError(ProtofleetError):
    """A bundle cannot be trusted or read: hash, schema, signature, member."""

    exit_code = 2


class ExportError(ProtofleetError):
    """A backbone cannot be turned into a bundle, or its graph disagrees with torch."""

    exit_code = 2


class DownloadError(ExportError):
    """Pretrained weights are not in the cache, and cannot be fetched."""

    exit_code = 1


class MethodError(ProtofleetError):
    """A method or a hyper-parameter is unknown or out of range."""

    exit_code = 2


class DivergedError(MethodError):
    """Local training gave numbers that are not finite: the round has no result."""

    exit_code = 1


class WorkerError(ProtofleetError):
    """Processes or machines that the lab computes on are lost again and again, or do not answer."""


class StatisticError(ProtofleetError, ValueError):
    """A statistic's arrays break its invariants (shape, finiteness, counts)."""


class WireError(ProtofleetError, ValueError):
    """Bytes from the wire are not a valid message. The only error that decoding raises."""

    @classmethod
    def unless(cls, holds: bool, what: str, expected: str, got: object) -> None:
        """Raise it, unless the condition holds."""
        if not holds:
            raise cls(what, expected=expected, got=got)


class SignatureError(WireError):
    """A message has no valid signature of the right key: it has none, or one of another key or for another topic.

    Attributes:
        known: whether the message names a key that is trusted here.
    """

    def __init__(self, message: str, *, expected: object, got: object, known: bool = False) -> None:
        super().__init__(message, expected=expected, got=got)
        self.known = known


class PrivacyError(ProtofleetError):
    """Something has left a device that the ε of its owner's policy does not cover."""


class LinkError(ProtofleetError):
    """The broker cannot be reached, refused us, or took the session away."""


class SecondProcessError(LinkError):
    """Another process already runs under this device's id. Starting again does not help."""

    exit_code = 2


class StoreError(ProtofleetError):
    """The disk refused: full, read-only, locked, or written by another run."""


class InUseError(StoreError):
    """Another process runs on the file."""


class StoreLostError(StoreError):
    """The server of a store cannot be reached, or not any more. It may be back in a minute."""


class StoreAwayError(StoreLostError):
    """No server answers where a store should be, or it starts, stops or recovers and accepts no connection yet."""


class LedError(StoreLostError):
    """Another process leads now on the same store: this process may write and publish nothing of its own state."""


def near_names(name: str, known: Iterable[str]) -> str:
    """The known names, nearest first, as a hint: `one of a, b, c`."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
    return "one of " + ", ".join(near or sorted(names))


def _one_line(text: object, limit: int = 300) -> str:
    line = without_password(printable(" ".join(str(text).split())))
    return line if len(line) <= limit else line[: limit - 1] + "…"
