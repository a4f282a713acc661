"""The numbers of signed announcements: each above every earlier one, so that a recorded one is known as such."""

from __future__ import annotations

from collections.abc import Iterable

from protofleet.aggregator.store.meta_table import MetaTable
from protofleet.contract.wire.envelopes import Mark

__all__ = ["AnnouncementNumbers"]

_LATEST_MS = 1 << 47  # since the epoch: the year 6429


class AnnouncementNumbers:
    """Of one store, and those that devices have heard."""

    def __init__(self, meta: MetaTable) -> None:
        self._meta = meta
        self._heard: list[Mark] = []

    def issue(self, wall: float) -> int:
        """A number for a signed announcement: above every earlier one of this store, and durable.

        It is the milliseconds since the epoch, or the last number and one. A clock ahead of `_LATEST_MS` counts no
        further than that, so the numbers that a wire can carry are never used up.

        Args:
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refuses.
        """
        number = max(min(int(wall * 1000), _LATEST_MS), self.issued + 1)
        self._meta.put("issued", str(number))
        return number

    @property
    def issued(self) -> int:
        """The highest number of an announcement that this store knows; 0 before the first."""
        return int(self._meta.get("issued") or 0)

    def issued_elsewhere(self, number: int) -> None:
        """Our key has signed that number, which this store does not know. The next number is above it.

        Raises:
            StoreError: the disk refuses.
        """
        self._meta.put("issued", str(max(number, self.issued)))

    def note(self, heard: Iterable[Mark]) -> None:
        """Note that devices have heard announcements with these numbers."""
        self._heard.extend(heard)

    def take_heard(self) -> list[Mark]:
        """The numbers of announcements that devices have heard, since the last call."""
        heard, self._heard = self._heard, []
        return heard
