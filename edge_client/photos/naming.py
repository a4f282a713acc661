"""A kept photo is named: it stays until the fleet has it, and is an example of its class from the next round on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.data.learned import LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import KeptPhoto
from protofleet.edge_client.photos.photo_ring import PhotoRing

__all__ = ["name_photos", "name_proposed"]

logger = logging.getLogger(__name__)


def name_photos(
    ring: PhotoRing, learned: LearnedFile, manifest: Manifest, photos: Sequence[KeptPhoto], label: str
) -> Iterator[KeptPhoto]:
    """Name photos, one by one; each that is given is on the disk.

    Raises:
        DataError: there is no such class, or one of the photos has left.
        StoreError: the disk refuses.
    """
    ring.naming(photos)
    for photo in photos:
        learned.learn(example_of(ring.image(photo, "png"), manifest), label, answered=photo.answer_before)
        yield photo


def name_proposed(ring: PhotoRing, learned: LearnedFile, manifest: Manifest) -> int:
    """Name the photos for which a class was proposed that the fleet has by now; gives how many.

    Raises:
        StoreError: the disk refuses.
    """
    named = 0
    for label in manifest.labels:
        photos = [photo for photo in ring.photos() if photo.proposed == label]
        if photos:
            named += sum(1 for _ in name_photos(ring, learned, manifest, photos, label))
            what = counted(len(photos), "photo")
            logger.info(f"{printable(label)} is a class now: the {what} that it was proposed for count as named")
    return named
