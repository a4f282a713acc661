"""Sums that nobody sees but as a whole: a device's numbers in two shares, and the shares' sums back to numbers.

A number x is held as the whole number round(x · 2³⁶), half to even, in one word modulo 2⁶⁴, two's complement. A device
draws a fresh seed of 32 bytes and makes of its words (W,), with the pad p that ChaCha20 makes of the seed,

    share = words − p  (mod 2⁶⁴)        for the aggregator
    pad   = p                           for the helper, who is sent the sealed seed (contract/sealing.py)

Either alone is uniform, whatever the words are, as far as ChaCha20 is a stream of random bits (RFC 8439; key: the seed,
nonce and counter: zero, since no seed is used twice; little-endian words). Added up over the same devices, the two give
the sum of the words, exactly: nothing rounds after a device's own rounding of at most 2⁻³⁷ of each number.

The words of a statistic are all of it, for all classes whether the device has them or not: each field in the order that
the method declares, as sums, and then the count of each class. So neither counts nor which classes a device has can be
read in a share, and a share has exactly as many words as the method declares numbers, and four more: these are random,
and of no use to a sum. The helper has the pad and is shown the share's digest, so that without them it could try what a
device may have, one guess after the other, until a digest fits.

A sum must stay below 2²⁷ to be told from a negative one. `LARGEST` bounds one device's numbers so that those of
`MOST_DEVICES` stay below it: a device with larger ones refuses to be summed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from contract.errors import StatisticError, UsageError
from contract.extras import install_command
from contract.statistics import Rows, Statistic

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
"""2¹⁷: below that is each number of one device."""
SEED_BYTES = 32
RANDOM_WORDS = 4
"""At the end of a share: 256 bits that make its digest say nothing of the others."""

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
    words, at = np.empty(sum(array.size for array in arrays) + RANDOM_WORDS, np.uint64), 0
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
            whole = np.rint(np.ldexp(values, SCALE_BITS)).astype(np.int64)
            words[at : at + len(values)] = whole.view(np.uint64)
            at += len(values)
    words[at:] = np.frombuffer(os.urandom(8 * RANDOM_WORDS), _LITTLE)
    return words


def blind(words: Words, seed: bytes) -> Words:
    """Turn words (W,) into the aggregator's share, in place: the pad of `seed` taken off."""
    for at, pad in _pad(seed, len(words)):
        words[at : at + len(pad)] -= pad
    return words


def share_digest(share: Words) -> bytes:
    """SHA-256 of a share's words (W,), little-endian."""
    return hashlib.sha256(np.ascontiguousarray(share, _LITTLE).data).digest()


def add_pad(total: Words, seed: bytes) -> None:
    """Add the helper's share of a device, which is the pad of its seed, to a sum (W,), in place."""
    for at, pad in _pad(seed, len(total)):
        total[at : at + len(pad)] += pad


def statistic_of(kind: type[Statistic], classes: int, width: int, words: Words) -> Statistic:
    """The statistic whose words (W,) these are: a device's, or the sum of many.

    Raises:
        StatisticError: when no sum of statistics can have them; some device has sent numbers that are none.
    """
    expected = share_words(kind, classes, width)
    if len(words) != expected:
        raise StatisticError("blinded sums", expected=f"{expected} words", got=len(words))
    rows, arrays, at = classes * kind.GROUPS, [], 0
    for field in kind.FIELDS:
        shape = (rows, field.columns(classes, width)) if isinstance(field, Rows) else (width * (width + 1) // 2,)
        size = int(np.prod(shape))
        whole = words[at : at + size].view(np.int64)
        arrays.append(np.ldexp(whole.astype(np.float64), -SCALE_BITS).reshape(shape))
        at += size
    counts = words[at : at + rows].view(np.int64)
    if (counts & ((1 << SCALE_BITS) - 1)).any():
        raise StatisticError("the sum of the blinded counts", expected="whole numbers", got="others: some device lied")
    return kind.build(arrays, counts >> SCALE_BITS)


def _pad(seed: bytes, count: int) -> Iterator[tuple[int, Words]]:
    """Where each block of the pad begins, and its words; each block takes the place of the one before."""
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
