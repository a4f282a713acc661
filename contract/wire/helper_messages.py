"""The messages of blinded rounds, where the server sees only sums: types 11 to 13, and a part of the announcement.

HelperTerms   in an announcement   the round is blinded: whose helper opens it, and how many devices a sum has
SealedSeed    device → helper      the seed of a contribution's pad; it travels signed, within the contribution
Opening       aggregator → helper  some of the signed seeds of a set that is to be opened
Opened        helper → aggregator  some words of the set's sum, or why it is not opened
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError
from protofleet.contract.wire.fields import (
    MAX_UINT,
    Key,
    Limits,
    Message,
    MethodName,
    Part,
    PartCount,
    PartIndex,
    Positive,
    Run,
    Sha256,
    ShortText,
)
from protofleet.contract.wire.tensors import WORDS

__all__ = ["MAX_REFUSED", "HelperTerms", "Opened", "Opening", "OpeningStatus", "SealedSeed", "set_digest"]

OpeningStatus = Literal["opened", "refused"]

MAX_REFUSED = 64  # named in one answer; once they are left out the next are named
MAX_SEED_BYTES = 512
SignedSeed = Annotated[bytes, Limits(1, MAX_SEED_BYTES)]
Least = Annotated[int, Limits(2, MAX_UINT, unit="devices")]
DeviceName = Annotated[str, Limits(1, 64)]

_require = WireError.unless


@dataclass(frozen=True)
class HelperTerms(Part, grows=True):
    """What makes a round a blinded one.

    Attributes:
        key: the helper's X25519 public key, 32 bytes.
        least: k. No sum over fewer devices is opened.
        scale_bits: a number x is the word round(x · 2^scale_bits).
    """

    key: Annotated[bytes, Limits(32, 32), Key(0)]
    least: Annotated[Least, Key(1)]
    scale_bits: Annotated[int, Limits(1, 62, unit="bits"), Key(2)]


@dataclass(frozen=True)
class SealedSeed(Message, number=13):
    """The seed of one device's pad, sealed to the helper; the device signs it.

    Attributes:
        words: how many words the share has.
        share: SHA-256 of the share's words, little-endian: 32 bytes.
        least: k, as announced to the device.
        terms: digest of what the device was told to sum (`protofleet.contract.privacy.sealing.round_terms`), 32 bytes.
        sealed: the seed, as `protofleet.contract.privacy.sealing.seal` gives it.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    words: Annotated[Positive, Key(5)]
    share: Annotated[Sha256, Key(6)]
    least: Annotated[Least, Key(7)]
    terms: Annotated[Sha256, Key(8)]
    sealed: Annotated[bytes, Limits(80, 80), Key(9)]


@dataclass(frozen=True)
class Opening(Message, number=11):
    """Part `part` of `parts` of the signed seeds of a set, by device.

    Attributes:
        digest: of the whole set, as `set_digest`: 32 bytes.
        seeds: signed messages, each with a `SealedSeed`.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    digest: Annotated[Sha256, Key(5)]
    part: Annotated[PartIndex, Key(6)]
    parts: Annotated[PartCount, Key(7)]
    seeds: Annotated[Mapping[DeviceName, SignedSeed], Limits(1, 1_024), Key(8)]

    def check_together(self) -> None:
        _require(self.part < self.parts, "part", f"below {self.parts}", self.part)


@dataclass(frozen=True, eq=False)
class Opened(Message, number=12):
    """Part `part` of `parts` of the answer about a set.

    Attributes:
        digest: of the set.
        words: (n,) uint64: its part of the sum; none where the set is refused. Every part but the last has as many.
        reason: why the set is refused; empty where it is open.
        refused: why, by device: without these it may be asked for again. At most `MAX_REFUSED` are named.
    """

    run: Annotated[Run, Key(2)]
    round: Annotated[Positive, Key(3)]
    method: Annotated[MethodName, Key(4)]
    digest: Annotated[Sha256, Key(5)]
    part: Annotated[PartIndex, Key(6)]
    parts: Annotated[PartCount, Key(7)]
    status: Annotated[OpeningStatus, Key(8)]
    words: Annotated[NDArray[np.uint64], WORDS, Key(9)]
    reason: Annotated[ShortText, Key(10)] = ""
    refused: Annotated[Mapping[DeviceName, ShortText], Limits(0, MAX_REFUSED), Key(11)] = field(default_factory=dict)

    def check_together(self) -> None:
        _require(self.part < self.parts, "part", f"below {self.parts}", self.part)
        opened = self.status == "opened"
        _require(opened == bool(len(self.words)), "words", "some of a sum that is open", len(self.words))
        _require(not (opened and self.refused), "refused", "none where the set is open", len(self.refused))


def set_digest(seeds: Mapping[str, bytes]) -> bytes:
    """The digest of a set of devices and their signed seeds, 32 bytes. Their order does not matter."""
    digest = hashlib.sha256()
    for device in sorted(seeds):
        for part in (device.encode(), seeds[device]):
            digest.update(len(part).to_bytes(8, "big") + part)
    return digest.digest()


def parts_of(numbers: int, part_size: int) -> int:
    """How many parts `numbers` numbers need, with `part_size` numbers in a part."""
    return max(1, math.ceil(numbers / part_size))
