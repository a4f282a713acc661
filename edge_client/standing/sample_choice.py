"""Where sums stand: which samples the device's next sums are of, and when they go out. No disk, no clock.

There are no rounds. The device sends the sums of what it now holds when enough has changed. They are numbered with a
generation that rises (docs/decisions/117). Two successive sums of one device differ by exactly the samples between
them. So with the announced `min_samples` as k:

    a class of fewer than k samples        is not in the sums
    a class of which ≥ k samples changed   (new and removed ones count) is brought up to date
    a class of which fewer are new         stays as it was sent, until there are k; the new ones wait
    a class of which fewer are gone        holds everything back: nothing is sent until k of it have changed

So between one sum and the next, every class differs by no sample or by k or more. With k = 1 nothing waits.

A sample is known by a digest of its pixels and its class. So what was sent can be compared with what is there after a
restart, and a renamed photo is not a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.edge_client.data.samples import CLASS_BYTES, DIGEST_BYTES

__all__ = ["Choice", "choose", "joined", "left_in", "separated"]

KEY_BYTES = DIGEST_BYTES + CLASS_BYTES


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


def choose(
    keys: Sequence[bytes],
    sent: Sequence[bytes] | None,
    least: int,
    *,
    withheld: Collection[int] = (),
    again: bool = False,
) -> Choice:
    """Which samples to send.

    Args:
        keys: of the samples that are here, in their order.
        sent: keys of the samples in the sums that were sent last; None where none were sent.
        least: k, 1 or more.
        withheld: classes that the fleet has forgotten: it has none of their samples any more, and is sent none.
        again: send also where nothing has changed. If a class would hold everything back, all that is here goes then.
    """
    least = max(least, 1)
    before, after = (_by_class(Counter(left_in(given, withheld))) for given in (sent or (), keys))
    wanted: Counter[bytes] = Counter()
    waiting, blocked, changed = 0, False, again or sent is None
    for name in after.keys() | before.keys():
        previous, current = before.get(name, Counter()), after.get(name, Counter())
        target = current if current.total() >= least else Counter()
        added, removed = (target - previous).total(), (previous - target).total()
        waiting += current.total() - target.total()
        if not added + removed:
            wanted += previous
        elif added + removed >= least:
            wanted += target
            changed = True
        else:
            waiting += added + removed
            wanted += previous
            blocked |= removed > 0
    if blocked and again:
        return choose(keys, None, least, withheld=withheld)
    if blocked or not changed:
        return Choice(None, (), waiting)
    rows = _rows(keys, wanted)
    return Choice(rows, tuple(key for key, chosen in zip(keys, rows, strict=True) if chosen), waiting)


def left_in(keys: Sequence[bytes], withheld: Collection[int]) -> list[bytes]:
    """Those of other classes than these."""
    names = {number.to_bytes(CLASS_BYTES, "big") for number in withheld}
    return [key for key in keys if key[DIGEST_BYTES:] not in names]


def joined(keys: Sequence[bytes]) -> bytes:
    """Keys as the journal keeps them."""
    return b"".join(keys)


def separated(kept: bytes) -> list[bytes]:
    """Keys as `joined` has put them together."""
    return [kept[start : start + KEY_BYTES] for start in range(0, len(kept), KEY_BYTES)]


def _by_class(keys: Counter[bytes]) -> dict[bytes, Counter[bytes]]:
    by_class: dict[bytes, Counter[bytes]] = {}
    for key, times in keys.items():
        by_class.setdefault(key[DIGEST_BYTES:], Counter())[key] = times
    return by_class


def _rows(keys: Sequence[bytes], wanted: Counter[bytes]) -> NDArray[np.bool_]:
    left, rows = Counter(wanted), np.zeros(len(keys), dtype=bool)
    for index, key in enumerate(keys):
        if left[key] > 0:
            left[key] -= 1
            rows[index] = True
    return rows
