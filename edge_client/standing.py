"""Where sums stand: which samples the device's next sums are of, and when they go out. No disk, no clock.

There are no rounds. The device sends the sums of what it now holds when enough has changed, numbered with a generation
that rises (docs/decisions/117). Two successive sums of one device differ by exactly the samples between them, so with
the announced `min_samples` as k:

    a class of fewer than k samples        is not in the sums
    a class of which ≥ k samples changed   (new and removed ones count) is brought up to date
    a class of which fewer are new         stays as it was sent, until there are k; the new ones wait
    a class of which fewer are gone        holds everything back: nothing is sent until k of it have changed

So between one sum and the next, every class differs by no sample or by k or more. With k = 1 nothing waits.

A sample is known by a digest of its pixels and its class, so that what was sent can be compared with what is there
after a restart, and a photo that was renamed is not a new one.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edge_client.data import LocalData
from edge_client.data.samples import release_pages

__all__ = ["Choice", "choose", "joined", "left_in", "sample_keys", "separated"]

_DIGEST_BYTES, _CLASS_BYTES = 16, 2
KEY_BYTES = _DIGEST_BYTES + _CLASS_BYTES


@dataclass(frozen=True, eq=False)
class Choice:
    """What the next sums are of.

    Attributes:
        rows: (N,) which samples; None when nothing is to be sent.
        keys: of these samples.
        waiting: how many samples that are here, or are gone, are not in what is sent, or was.
    """

    rows: NDArray[np.bool_] | None
    keys: tuple[bytes, ...]
    waiting: int


def sample_keys(data: LocalData) -> list[bytes]:
    """A key for each labelled sample: 16 bytes of the SHA-256 of its pixels, and its class."""
    found = []
    for image, label in zip(data.x, data.y, strict=True):
        digest = hashlib.sha256(np.ascontiguousarray(image).data).digest()[:_DIGEST_BYTES]
        found.append(digest + int(label).to_bytes(_CLASS_BYTES, "big"))
    release_pages(data.x)
    return found


def choose(
    keys: Sequence[bytes],
    sent: Sequence[bytes] | None,
    least: int,
    *,
    withheld: Collection[int] = (),
    again: bool = False,
) -> Choice:
    """What to send.

    Args:
        keys: of the samples that are here, in their order.
        sent: of those that the sums which were sent last are of, or would be; None where none were.
        least: k, 1 or more.
        withheld: classes that the fleet has forgotten: it has none of their samples any more, and is sent none.
        again: send also where nothing has changed. What holds everything back cannot then: all that is here goes.
    """
    least = max(least, 1)
    before, here = (_by_class(Counter(left_in(given, withheld))) for given in (sent or (), keys))
    wanted: Counter[bytes] = Counter()
    waiting, blocked, changed = 0, False, again or sent is None
    for name in here.keys() | before.keys():
        held, now = before.get(name, Counter()), here.get(name, Counter())
        target = now if now.total() >= least else Counter()
        new, gone = (target - held).total(), (held - target).total()
        waiting += now.total() - target.total()
        if not new + gone:
            wanted += held
        elif new + gone >= least:
            wanted += target
            changed = True
        else:
            waiting += new + gone
            wanted += held
            blocked |= gone > 0
    if blocked and again:
        return choose(keys, None, least, withheld=withheld)
    if blocked or not changed:
        return Choice(None, (), waiting)
    rows = _rows(keys, wanted)
    return Choice(rows, tuple(key for key, chosen in zip(keys, rows, strict=True) if chosen), waiting)


def left_in(keys: Sequence[bytes], withheld: Collection[int]) -> list[bytes]:
    """Those of other classes than these."""
    names = {number.to_bytes(_CLASS_BYTES, "big") for number in withheld}
    return [key for key in keys if key[_DIGEST_BYTES:] not in names]


def joined(keys: Sequence[bytes]) -> bytes:
    """Keys as the journal keeps them."""
    return b"".join(keys)


def separated(kept: bytes) -> list[bytes]:
    """Keys as `joined` has put them together."""
    return [kept[at : at + KEY_BYTES] for at in range(0, len(kept), KEY_BYTES)]


def _by_class(keys: Counter[bytes]) -> dict[bytes, Counter[bytes]]:
    found: dict[bytes, Counter[bytes]] = {}
    for key, times in keys.items():
        found.setdefault(key[_DIGEST_BYTES:], Counter())[key] = times
    return found


def _rows(keys: Sequence[bytes], wanted: Counter[bytes]) -> NDArray[np.bool_]:
    left, rows = Counter(wanted), np.zeros(len(keys), dtype=bool)
    for index, key in enumerate(keys):
        if left[key] > 0:
            left[key] -= 1
            rows[index] = True
    return rows
