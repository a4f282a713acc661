"""Blinded sums: a device's numbers in two shares, and the sums of the shares back to numbers.

**Numbers.** A number x is held as the whole number round(x · 2³⁶), half to even, in one word modulo 2⁶⁴, two's
complement.

**Shares.** A device draws a fresh seed of 32 bytes. ChaCha20 makes the pad p of the seed. Of its words (W,) the device
makes

    share = words − p  (mod 2⁶⁴)        for the aggregator
    pad   = p                           for the helper, who is sent the sealed seed (contract/privacy/sealing.py)

Guarantees:

- Either share alone is uniform, whatever the words are, as far as ChaCha20 is a stream of random bits (RFC 8439; the
  key is the seed; nonce and counter are zero, because no seed is used twice; words are little-endian).
- Added up over the same devices, both give the sum of the words, exactly. The only rounding is a device's own, of at
  most 2⁻³⁷ of each number.
- A share tells neither the counts nor which classes a device has. Its words are the whole statistic for all classes,
  whether the device has them or not: each field in the order that the method declares, as sums, then the count of each
  class.

**Random words.** A share has as many words as the method declares numbers, and four more. These are random, and are not
part of the sum. The helper has the pad and is shown the share's digest. Without the random words, the helper could
guess what a device may have, one guess after the other, until the digest fits.

**Bounds.** A sum must stay below 2²⁷, so that it differs from a negative one. `LARGEST` bounds the numbers of one
device so that the sum of `MOST_DEVICES` stays below that. A device with larger numbers refuses to be summed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import StatisticError, UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.sums.statistics import Rows, Statistic

__all__ = [
    "LARGEST",
    "MOST_DEVICES",
    "RANDOM_WORDS",
    "SCALE_BITS",
    "SEED_BYTES",
    "add_pad",
    "blind",
    "share_digest",
    "share_words",
    "statistic_of",
    "words_of",
]

SCALE_BITS = 36
MOST_DEVICES = 1_024
LARGEST = 2.0 ** (63 - SCALE_BITS) / MOST_DEVICES
"""2¹⁷: each number of one device is below it."""
SEED_BYTES = 32
RANDOM_WORDS = 4
"""At the end of a share: 256 random bits, so that the digest of the share tells nothing of its other words."""

Words = NDArray[np.uint64]

_BLOCK = 1 << 13  # words that are worked on at a time
_LITTLE = np.dtype("<u8")


def share_words(kind: type[Statistic], classes: int, width: int) -> int:
    """W: how many words a share of this kind of statistic has, for a fleet of C classes and width D."""
    return kind.numbers(classes, width) + classes * kind.GROUPS + RANDOM_WORDS


def words_of(statistic: Statistic) -> Words:
    """(W,) the words of a statistic, the last of them random.

    Raises:
        StatisticError: on a number of `LARGEST` or more.
    """
    arrays = [*statistic.arrays(), statistic.counts]
    words, position = np.empty(sum(array.size for array in arrays) + RANDOM_WORDS, np.uint64), 0
    for array in arrays:
        flat = array.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            values = flat[start : start + _BLOCK].astype(np.float64)
            largest = float(np.abs(values).max(initial=0.0))
            if not largest < LARGEST:  # NaN is not
                raise StatisticError(
                    "blinded sums",
                    expected=f"numbers below {LARGEST:,.0f}, and so fewer samples than that on one device",
                    got=f"{largest:,.0f}",
                )
            integers = np.rint(np.ldexp(values, SCALE_BITS)).astype(np.int64)
            words[position : position + len(values)] = integers.view(np.uint64)
            position += len(values)
    words[position:] = np.frombuffer(os.urandom(8 * RANDOM_WORDS), _LITTLE)
    return words


def blind(words: Words, seed: bytes) -> Words:
    """Turn words (W,) into the aggregator's share, in place, by subtracting the pad of `seed`."""
    for start, pad in _pad(seed, len(words)):
        words[start : start + len(pad)] -= pad
    return words


def share_digest(share: Words) -> bytes:
    """SHA-256 of a share's words (W,), little-endian."""
    return hashlib.sha256(np.ascontiguousarray(share, _LITTLE).data).digest()


def add_pad(total: Words, seed: bytes) -> None:
    """Add the helper's share of a device, which is the pad of its seed, to a sum (W,), in place."""
    for start, pad in _pad(seed, len(total)):
        total[start : start + len(pad)] += pad


def statistic_of(kind: type[Statistic], classes: int, width: int, words: Words) -> Statistic:
    """The statistic whose words (W,) these are: a device's, or the sum of many.

    Raises:
        StatisticError: when no sum of statistics can have these words: some device has sent invalid numbers.
    """
    expected = share_words(kind, classes, width)
    if len(words) != expected:
        raise StatisticError("blinded sums", expected=f"{expected} words", got=len(words))
    rows, arrays, position = classes * kind.GROUPS, [], 0
    for field in kind.FIELDS:
        shape = (rows, field.columns(classes, width)) if isinstance(field, Rows) else (width * (width + 1) // 2,)
        size = int(np.prod(shape))
        integers = words[position : position + size].view(np.int64)
        arrays.append(np.ldexp(integers.astype(np.float64), -SCALE_BITS).reshape(shape))
        position += size
    counts = words[position : position + rows].view(np.int64)
    if (counts & ((1 << SCALE_BITS) - 1)).any():
        raise StatisticError("the sum of the blinded counts", expected="whole numbers", got="others: some device lied")
    return kind.build(arrays, counts >> SCALE_BITS)


def _pad(seed: bytes, count: int) -> Iterator[tuple[int, Words]]:
    """The start and the words of each block of the pad. Each block overwrites the one before."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
    except ModuleNotFoundError:
        hint = install_command("security")
        raise UsageError("blinded sums", expected="cryptography", got="nothing", hint=hint) from None
    if len(seed) != SEED_BYTES:
        raise StatisticError("blinded sums", expected=f"a seed of {SEED_BYTES} bytes", got=len(seed))
    stream = Cipher(ChaCha20(seed, bytes(16)), mode=None).encryptor()
    zeros, block = memoryview(bytes(8 * _BLOCK)), bytearray(8 * _BLOCK)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        stream.update_into(zeros[: 8 * size], block)
        yield start, np.frombuffer(block, _LITTLE, size)
