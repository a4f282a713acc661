"""Normal noise from a secret. Without the secret nobody can tell it from chance; with it the same noise comes again.

**Why not a usual generator.** A guarantee by noise is void where somebody can compute the noise. PCG64's state
follows from some hundred of its numbers (Bouillaguet, Martinez, Sauvage, ToSC 2020), and whoever knows all samples
but one knows that many.

**The numbers.** The bits are SHAKE-256's (FIPS 202), of a 32-byte key and a counter. Box and Muller's formula turns
pairs of 53-bit uniform numbers into pairs of normal ones:

    √(−2 ln u) cos 2πv,  √(−2 ln u) sin 2πv.

**The key** (`key_of`) is HMAC-SHA256 of the device's secret over all that the noise is for, including the exact sums
that it hides. This has two effects:

- Sums that differ in anything get independent noise. So no two releases share noise that a subtraction would remove.
- A release that is repeated after a crash gives the same bytes.

**Range.** Normal numbers reach 8.6 deviations and no further; whole ones reach 10. True normal numbers exceed these
once in 10¹⁷, and once in 10²³.
"""

from __future__ import annotations

import hashlib
import hmac
import math
from decimal import Decimal
from functools import cache

import numpy as np
from numpy.typing import NDArray

__all__ = ["SecretNoise", "key_of"]

_PAIRS = 1 << 14  # at once, at most: 256 KiB of bits
_UNIT = 2.0**-53
_MOST = 10  # deviations that a whole number stays below
_FINE = 14  # bits of a deviation that are told apart; the rest is rounded up
_TRIES = 1.45  # for each whole number: 0.715 of them are kept
_LOW = np.uint64(2**32 - 1)


def key_of(secret: bytes, *parts: bytes | NDArray[np.generic]) -> bytes:
    """A key of 32 bytes from the secret and all parts. Each part counts with its length and its bytes."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        raw = part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes()
        mac.update(len(raw).to_bytes(8, "big") + raw)
    return mac.digest()


class SecretNoise:
    """Independent normal numbers of mean 0 and deviation 1, one after another.

    Args:
        key: 32 bytes, for this use alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._block = key, 0

    def standard_normal(self, shape: tuple[int, ...], /) -> NDArray[np.float64]:
        """The next numbers, in this shape."""
        out = np.empty(math.prod(shape))
        for start in range(0, len(out), 2 * _PAIRS):
            block = out[start : start + 2 * _PAIRS]
            block[:] = self._next((len(block) + 1) // 2)[: len(block)]
        return out.reshape(shape)

    def whole_normal(self, shape: tuple[int, ...], deviation: float, /) -> NDArray[np.int64]:
        """The next whole numbers, in this shape.

        Args:
            deviation: s, 2¹⁴ to 2⁵⁹; rounded up by a share of 2⁻¹⁴ at most.
        """
        out, done = np.empty(math.prod(shape), np.int64), 0
        while done < len(out):
            numbers = self._whole(min(len(out) - done, _PAIRS), deviation)[: len(out) - done]
            out[done : done + len(numbers)] = numbers
            done += len(numbers)
        return out.reshape(shape)

    def _whole(self, count: int, deviation: float) -> NDArray[np.int64]:
        """About `count` whole numbers; some more or fewer."""
        below = math.frexp(deviation)[1] - 1 - _FINE  # bits of s that are zero
        coarse = math.ceil(math.ldexp(deviation, -below))
        class_words, position_words, low_words, test_words = self._words(math.ceil(count * _TRIES) + 8, 4)
        j = np.searchsorted(_thresholds(), class_words, side="right").astype(np.int64)
        c, half = np.uint64(coarse), np.uint64(32)
        i = ((position_words >> half) * c + ((position_words & _LOW) * c >> half)) >> half  # ⌊c · position/2⁶⁴⌋
        i = (i << np.uint64(below)) | ((low_words >> np.uint64(1)) & np.uint64((1 << below) - 1))
        s, minus = coarse << below, (low_words & np.uint64(1)).astype(bool)
        x = i.astype(np.float64) / s
        keep = (test_words >> np.uint64(11)).astype(np.float64) * _UNIT < np.exp(-0.5 * x * (2.0 * j + x))
        size = s * j + i.astype(np.int64)
        keep &= ~(minus & (size == 0))  # of two zeros one
        return np.asarray(np.where(minus, -size, size)[keep])

    def _words(self, count: int, rows: int) -> NDArray[np.uint64]:
        """(each, count) further words."""
        bits = hashlib.shake_256(self._key + self._block.to_bytes(8, "big")).digest(8 * count * rows)
        self._block += 1
        return np.frombuffer(bits, "<u8").astype(np.uint64).reshape(rows, count)

    def _next(self, pairs: int) -> NDArray[np.float64]:
        first, second = (self._words(pairs, 2) >> np.uint64(11)).astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((first + 1.0) * _UNIT))
        angle = (2.0 * np.pi * _UNIT) * second
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


@cache
def _thresholds() -> NDArray[np.uint64]:
    """(9,) below which of 2⁶⁴ words j is 0, 1, …: the shares of exp(−j²/2), added up exactly."""
    weights = [Decimal(-(j * j) / 2).exp() for j in range(_MOST)]
    zero = Decimal(0)
    shares = [sum(weights[: j + 1], zero) / sum(weights, zero) for j in range(_MOST - 1)]
    return np.array([int((share * 2**64).to_integral_value()) for share in shares], np.uint64)
