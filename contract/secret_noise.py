"""Normal noise from a secret: nobody without it can tell the noise from chance, and who has it gets the same again.

A guarantee by noise is void where the noise can be computed again. The usual generators are not made against that: from
some hundred of its numbers PCG64's state follows (Bouillaguet, Martinez, Sauvage, ToSC 2020), and whoever knows all
samples but one knows that many. So the bits are SHAKE-256's (FIPS 202) of a 32-byte key and a counter, and pairs of
53-bit uniform numbers become pairs of normal ones by Box and Muller's

    √(−2 ln u) cos 2πv,  √(−2 ln u) sin 2πv.

The key is HMAC-SHA256 of the device's secret over all that the noise is for, the exact sums that it hides among them
(`key_of`): sums that differ in anything get independent noise, so that no two releases share one that a subtraction
would take out, and a release that is repeated after a crash gives the same bytes.

Numbers reach 8.6 deviations and no further, which a true normal number exceeds once in 10^17.
"""

from __future__ import annotations

import hashlib
import hmac
import math

import numpy as np
from numpy.typing import NDArray

__all__ = ["SecretNoise", "key_of"]

_PAIRS = 1 << 14  # at once, at most: 256 KiB of bits
_UNIT = 2.0**-53


def key_of(secret: bytes, *parts: bytes | NDArray[np.generic]) -> bytes:
    """32 bytes that follow from the secret and every part, each by its length and its bytes."""
    made = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        raw = part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes()
        made.update(len(raw).to_bytes(8, "big") + raw)
    return made.digest()


class SecretNoise:
    """Independent normal numbers of mean 0 and deviation 1, one after another.

    Args:
        key: 32 bytes, for this use alone.
    """

    def __init__(self, key: bytes) -> None:
        self._key, self._block = key, 0

    def standard_normal(self, shape: tuple[int, ...], /) -> NDArray[np.float64]:
        """The next ones, in this shape."""
        out = np.empty(math.prod(shape))
        for start in range(0, len(out), 2 * _PAIRS):
            wanted = out[start : start + 2 * _PAIRS]
            wanted[:] = self._next((len(wanted) + 1) // 2)[: len(wanted)]
        return out.reshape(shape)

    def _next(self, pairs: int) -> NDArray[np.float64]:
        bits = hashlib.shake_256(self._key + self._block.to_bytes(8, "big")).digest(16 * pairs)
        self._block += 1
        numbers = (np.frombuffer(bits, "<u8") >> np.uint64(11)).astype(np.float64)
        radius = np.sqrt(-2.0 * np.log((numbers[:pairs] + 1.0) * _UNIT))
        angle = (2.0 * np.pi * _UNIT) * numbers[pairs:]
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
