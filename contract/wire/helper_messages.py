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
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import WireError

__all__ = ["MAX_REFUSED", "HelperTerms", "Opened", "Opening", "OpeningStatus", "SealedSeed", "set_digest"]

OpeningStatus = Literal["opened", "refused"]

MAX_PARTS = 65_535
MAX_REFUSED = 64  # named in one answer; once they are left out the next are named
MAX_TEXT = 200
_MAX = 2**32 - 1

_require = WireError.unless


@dataclass(frozen=True)
class HelperTerms:
    """What makes a round a blinded one.

    Attributes:
        key: the helper's X25519 public key, 32 bytes.
        least: k. No sum over fewer devices is opened.
        scale_bits: a number x is the word round(x · 2^scale_bits).
    """

    key: bytes
    least: int
    scale_bits: int

    def __post_init__(self) -> None:
        _require(len(self.key) == 32, "helper's key", "32 bytes", len(self.key))
        _require(2 <= self.least <= _MAX, "least", "2 devices or more", self.least)
        _require(1 <= self.scale_bits <= 62, "scale", "1 to 62 bits", self.scale_bits)


@dataclass(frozen=True)
class SealedSeed:
    """The seed of one device's pad, sealed to the helper; the device signs it.

    Attributes:
        words: how many words the share has.
        share: SHA-256 of the share's words, little-endian: 32 bytes.
        least: k, as announced to the device.
        terms: digest of what the device was told to sum (`protofleet.contract.privacy.sealing.round_terms`), 32 bytes.
        sealed: the seed, as `protofleet.contract.privacy.sealing.seal` gives it.
    """

    run: bytes
    round: int
    method: str
    words: int
    share: bytes
    least: int
    terms: bytes
    sealed: bytes

    def __post_init__(self) -> None:
        _key(self.run, self.round, self.method)
        _require(1 <= self.words <= _MAX, "words", "1 or more", self.words)
        _require(len(self.share) == 32, "share", "32 bytes", len(self.share))
        _require(2 <= self.least <= _MAX, "least", "2 devices or more", self.least)
        _require(len(self.terms) == 32, "terms", "32 bytes", len(self.terms))
        _require(len(self.sealed) == 80, "sealed seed", "80 bytes", len(self.sealed))


@dataclass(frozen=True)
class Opening:
    """Part `part` of `parts` of the signed seeds of a set, by device.

    Attributes:
        digest: of the whole set, as `set_digest`: 32 bytes.
        seeds: signed messages, each with a `SealedSeed`.
    """

    run: bytes
    round: int
    method: str
    digest: bytes
    part: int
    parts: int
    seeds: Mapping[str, bytes]

    def __post_init__(self) -> None:
        _key(self.run, self.round, self.method)
        _part(self.digest, self.part, self.parts)
        _require(1 <= len(self.seeds) <= 1_024, "seeds", "1 to 1024", len(self.seeds))
        for device in self.seeds:
            _require(1 <= len(device) <= 64, "device", "1 to 64 characters", len(device))


@dataclass(frozen=True, eq=False)
class Opened:
    """Part `part` of `parts` of the answer about a set.

    Attributes:
        digest: of the set.
        words: (n,) uint64: its part of the sum; none where the set is refused. Every part but the last has as many.
        reason: why the set is refused; empty where it is open.
        refused: why, by device: without these it may be asked for again. At most `MAX_REFUSED` are named.
    """

    run: bytes
    round: int
    method: str
    digest: bytes
    part: int
    parts: int
    status: OpeningStatus
    words: NDArray[np.uint64]
    reason: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _key(self.run, self.round, self.method)
        _part(self.digest, self.part, self.parts)
        _require(self.status in ("opened", "refused"), "status", "opened or refused", self.status)
        plain = self.words.ndim == 1 and self.words.dtype == np.uint64
        _require(plain, "words", "64-bit words", f"{self.words.dtype} {self.words.shape}")
        opened = self.status == "opened"
        _require(opened == bool(len(self.words)), "words", "some of a sum that is open", len(self.words))
        _require(len(self.reason) <= MAX_TEXT, "reason", f"at most {MAX_TEXT} characters", len(self.reason))
        _require(len(self.refused) <= (0 if opened else MAX_REFUSED), "refused", f"{MAX_REFUSED}", len(self.refused))
        for device, reason in self.refused.items():
            fits = 1 <= len(device) <= 64 and len(reason) <= MAX_TEXT
            _require(fits, "refused", "devices and short reasons", f"{device[:64]}")


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


def _key(run: bytes, round_number: int, method: str) -> None:
    _require(len(run) == 4, "run", "4 bytes", len(run))
    _require(1 <= round_number <= _MAX, "round", f"1 to {_MAX}", round_number)
    _require(1 <= len(method) <= 32, "method", "1 to 32 characters", len(method))


def _part(digest: bytes, part: int, parts: int) -> None:
    _require(len(digest) == 32, "digest", "32 bytes", len(digest))
    _require(1 <= parts <= MAX_PARTS and 0 <= part < parts, "part", f"below {parts}", part)
