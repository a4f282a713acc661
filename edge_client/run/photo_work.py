"""What the client does about the photos that its camera took: which may leave, and which have to.

- A contribution that the fleet has committed has every label that was on the disk before it was made. From then on the
  photos with these labels may leave the ring, as others do.
- Photos of a class that the fleet has forgotten are erased: those that were learned as it, and those answered as it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from protofleet.contract.printable import counted
from protofleet.contract.wire.messages import Receipt
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.photo_ring import PhotoRing

__all__ = ["PhotoWork"]

logger = logging.getLogger(__name__)

_Key = tuple[bytes, int, str]
_MOST = 64  # contributions without a receipt that are remembered


class PhotoWork:
    """Of one client.

    Args:
        learned: what the device was taught.
        labels: of the bundle's classes.

    Attributes:
        cost: what all releases have cost, in words, as the client said it last.
    """

    def __init__(self, ring: PhotoRing, learned: Learned, labels: tuple[str, ...]) -> None:
        self.cost = ""
        self._ring, self._learned, self._labels = ring, learned, labels
        self._namings: dict[_Key, int] = {}
        self._forgotten: tuple[int, ...] = ()

    def before(self) -> int:
        """The number of the last naming, before a contribution is made."""
        return self._ring.namings

    def made(self, key: _Key, naming: int) -> None:
        """A contribution has all that was named up to `naming`."""
        self._namings[key] = naming
        while len(self._namings) > _MOST:
            self._namings.pop(next(iter(self._namings)))

    def settled(self, receipt: Receipt) -> None:
        """A receipt ended a contribution."""
        naming = self._namings.pop((receipt.run, receipt.round, receipt.method), 0)
        if naming and receipt.status == "committed":
            self._ring.committed(naming)

    def let_old_ones_go(self) -> None:
        """Remove photos that were kept for as long as the policy allows."""
        self._ring.let_old_ones_go(time.time())

    def withheld(self, numbers: Iterable[int]) -> None:
        """The fleet has forgotten these classes."""
        forgotten = tuple(numbers)
        if forgotten == self._forgotten:
            return
        self._forgotten = forgotten
        labels = [self._labels[number] for number in forgotten if number < len(self._labels)]
        self._learned.look()
        named = zip(self._learned.hashes, self._learned.labels, strict=True)
        gone = self._ring.forget(labels, [pixels for pixels, label in named if label in labels])
        if gone:
            logger.info(f"{counted(gone, 'kept photo')} of classes that the fleet has forgotten erased")
