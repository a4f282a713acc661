"""The messages of a roll-out: the offer of a bundle, a device's request for bytes, and the pieces that it gets.

1. The offer stands in the announcement.
2. A device whose stage has come (`protofleet.contract.wire.sampling.in_stage`) asks for the bundle's bytes from its
   present offset on.
3. The aggregator answers with consecutive pieces.

Neither end keeps anything about a download, except the device its file. See docs/wire.md.

Every value is validated when it is built, so a value that exists can be trusted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Final, Literal, get_args

from protofleet.contract.errors import WireError
from protofleet.contract.wire import topics
from protofleet.contract.wire.fields import Fraction, Key, Limits, Message, Part, Positive, Run, Sha256

__all__ = [
    "APART",
    "DIGEST_BYTES",
    "MAX_BUNDLE_BYTES",
    "MAX_PIECES",
    "WORDS",
    "Offer",
    "Piece",
    "Request",
    "RolloutReport",
    "Word",
    "bundle_tag",
]

Word = Literal["fetching", "testing", "probation", "healthy", "refused", "failed"]
WORDS: Final[tuple[Word, ...]] = get_args(Word)

MAX_BUNDLE_BYTES: Final = 1 << 31
MAX_PIECES: Final = 16  # that one request is answered with
DIGEST_BYTES: Final = 8  # of the bundle's sha256, in a request and in a piece
_MAX_TOLD = 64  # characters of an entry among the versions of a status
_TOLD = re.compile(r"([1-9][0-9]{0,9}) ([a-z]+)(?:: (.*))?", re.DOTALL)


_require = WireError.unless


@dataclass(frozen=True)
class Offer(Part, grows=True):
    """A bundle that devices are to go over to, and how many of them.

    Attributes:
        sha256: of the bundle, 32 bytes.
        version: the bundle's own, 1 or more; a device takes none that is not above what it has.
        size_bytes: of the bundle's file.
        fraction: of the devices, above 0 up to 1: which, `protofleet.contract.wire.sampling.in_stage` says.
        fleet: where they go over to another fleet, its id; empty in this one.
    """

    sha256: Annotated[Sha256, Key(0)]
    version: Annotated[Positive, Key(1)]
    size_bytes: Annotated[int, Limits(1, MAX_BUNDLE_BYTES), Key(2)]
    fraction: Annotated[Fraction, Key(3)] = 1.0
    fleet: Annotated[str, Limits(0, 64), Key(4)] = ""

    def check_together(self) -> None:
        _require(not self.fleet or topics.is_id(self.fleet), "offer fleet", "an id, or none", repr(self.fleet)[:80])

    @property
    def digest(self) -> bytes:
        """The 8 bytes that stand for the bundle in requests and pieces."""
        return self.sha256[:DIGEST_BYTES]


@dataclass(frozen=True)
class Request(Message, number=7):
    """A device asks for `wanted_bytes` bytes of an offered bundle from `offset` on.

    Attributes:
        bundle: the first 8 bytes of its sha256.
    """

    run: Annotated[Run, Key(2)]
    bundle: Annotated[bytes, Limits(DIGEST_BYTES, DIGEST_BYTES), Key(3)]
    offset: Annotated[int, Key(4)]
    wanted_bytes: Annotated[Positive, Key(5)]


@dataclass(frozen=True)
class Piece(Message, number=8, grows=True):
    """The bytes of an offered bundle from `offset` on: as many as fit one message, 1 or more.

    Attributes:
        bundle: the first 8 bytes of its sha256.
    """

    run: Annotated[Run, Key(2)]
    bundle: Annotated[bytes, Limits(DIGEST_BYTES, DIGEST_BYTES), Key(3)]
    offset: Annotated[int, Key(4)]
    data: Annotated[bytes, Limits(1), Key(5)]

    def check_together(self) -> None:
        end = self.offset + len(self.data)
        _require(end <= MAX_BUNDLE_BYTES, "piece", f"an end of at most {MAX_BUNDLE_BYTES}", end)


APART: Final = "apart"  # among the versions of a status: why the device takes no part in what is announced


def bundle_tag(version: int, sha256: bytes) -> str:
    """The bundle that is in use, as a status says it under `bundle`: `7 3fa94b12`."""
    return f"{version} {sha256[:4].hex()}"


@dataclass(frozen=True)
class RolloutReport:
    """The state of an offered bundle on a device, as its status says it under `rollout`: `8 failed: self-test`.

    Attributes:
        version: of the offer.
        reason: of `refused` and `failed`, in words.
    """

    version: int
    word: Word
    reason: str = ""

    @property
    def text(self) -> str:
        """At most 64 characters; a longer reason is cut."""
        return f"{self.version} {self.word}{f': {self.reason}' if self.reason else ''}"[:_MAX_TOLD]

    @classmethod
    def read(cls, text: str) -> RolloutReport | None:
        """The report in a status; None where the text is no report."""
        match = _TOLD.fullmatch(text)
        word = next((word for word in WORDS if match is not None and word == match[2]), None)
        return None if match is None or word is None else cls(int(match[1]), word, match[3] or "")
