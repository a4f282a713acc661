"""What the client does about the photos that its camera took: which may leave, and which have to.

- A contribution that the fleet has committed has every label that was on the disk before it was made. From then on the
  photos with these labels may leave the ring, as others do.
- Photos of a class that the fleet has forgotten are erased: those that were learned as it, and those answered as it.
- Where the announcement asks, and the owner's policy allows it, the fleet is told which classes were proposed for how
  many photos, and which share of the photos was unknown: no photo, and no share of fewer than `LEAST`. A share is told
  anew once it has changed by `STEP`, so that a status is no record of single photos.
- A fleet that takes nothing more of this device (it was forgotten or removed, or withdrew) has no say in its photos:
  they are its owner's. What stays here is said in one line, and kept beside the photos for page and commands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path

from protofleet.contract.errors import ProtofleetError
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.messages import Announcement, Receipt
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.naming import proposed_classes
from protofleet.edge_client.photos.photo_ring import PhotoRing, PhotosBeside

__all__ = ["LEAST", "STEP", "PhotoWork", "say_what_stays"]

logger = logging.getLogger(__name__)

LEAST = 20  # photos
STEP = 0.05
_Key = tuple[bytes, int, str]
_MOST = 64  # contributions without a receipt that are remembered


class PhotoWork:
    """Of one client.

    Args:
        learned: what the device was taught.
        labels: of the bundle's classes.
        tells_proposed, tells_unknown: whether proposed classes, and the share of unknown photos, may be told.

    Attributes:
        cost: what all releases have cost, in words, as the client said it last.
        proposed: the classes that the fleet is told of, and for how many photos; None for none.
        unknown_share: that it is told, 0 to 1; None for none.
    """

    def __init__(
        self,
        ring: PhotoRing,
        learned: Learned,
        labels: tuple[str, ...],
        *,
        tells_proposed: bool = False,
        tells_unknown: bool = False,
    ) -> None:
        self.cost = ""
        self.proposed: dict[str, int] | None = None
        self.unknown_share: float | None = None
        self._tells_proposed, self._tells_unknown = tells_proposed, tells_unknown
        self._is_asked, self._is_due = False, True
        self._told: float | None = None  # of the share, even if nobody asks in between
        self._ring, self._learned, self._labels = ring, learned, labels
        self._refused = ring.refused
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
        self.heard(receipt)
        naming = self._namings.pop((receipt.run, receipt.round, receipt.method), 0)
        if naming and receipt.status == "committed":
            self._ring.committed(naming)

    def heard(self, receipt: Receipt) -> None:
        """A receipt says whether the fleet takes anything of this device."""
        why = receipt.reason if receipt.refuses_the_device else ""
        if why == self._refused or not (why or receipt.status in ("committed", "duplicate")):
            return
        self._refused = self._ring.refused = why
        if why:
            _say(self._ring, f"the fleet takes nothing more of this device ({printable(why)})")

    def look(self) -> None:
        """Remove photos that were kept for as long as the policy allows; the next `turn` looks at the others."""
        self._ring.let_old_ones_go(time.time())
        self._is_due = True

    def turn(self, announced: Announcement, *, is_private: bool = False) -> bool:
        """Do what is announced; whether something else is told from now on.

        Args:
            is_private: whether nothing may be told that follows from photos, not even when it changes.

        Raises:
            StoreError: the disk refuses.
        """
        self._withheld(announced.withheld)
        is_asked = announced.proposals and not is_private
        if not self._is_due and is_asked == self._is_asked:
            return False
        self._is_asked, self._is_due = is_asked, False
        before = self.proposed, self.unknown_share
        proposed = proposed_classes(self._ring, self._labels) if self._is_asked and self._tells_proposed else {}
        self.proposed = proposed or None
        self.unknown_share = self._share() if self._is_asked and self._tells_unknown else None
        return before != (self.proposed, self.unknown_share)

    def _share(self) -> float | None:
        unknown, answered = self._ring.unknown()
        if answered < LEAST:
            return None
        share = round(unknown / answered, 2)
        if self._told is None or abs(share - self._told) >= STEP:
            self._told = share
        return self._told

    def _withheld(self, numbers: Iterable[int]) -> None:
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


def say_what_stays(state: Path, why: str) -> None:
    """The device of this state directory has left its fleet: say which photos stay, where any are kept."""
    photos = PhotosBeside(state)
    if not photos.is_there:
        return
    try:
        photos.refused = why
        if photos.photos(1):
            _say(photos, why)
    except ProtofleetError as error:  # it has left all the same
        logger.warning(f"whether photos stay here is not known: {error}")


def _say(photos: PhotoRing | PhotosBeside, why: str) -> None:
    count, erases = len(photos.photos()), f"protofleet photos --erase --state {photos.path.parent}"
    logger.warning(f"{why}; the photos of its camera, {count:,} now, stay here until {erases}")
