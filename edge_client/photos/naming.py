"""A kept photo is named: it stays until the fleet has it, and is an example of its class from the next round on.

A photo may also be proposed for a class that the fleet has not got. `proposed_classes` are what the fleet's operator
may be told of; once a bundle has one, `name_proposed` names its photos.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.class_names import can_be_proposed
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.messages import MAX_PROPOSED
from protofleet.edge_client.data.learned import LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import KeptPhoto
from protofleet.edge_client.photos.photo_ring import PhotoRing

__all__ = ["name_photos", "name_proposed", "proposed_classes"]

logger = logging.getLogger(__name__)


def name_photos(
    ring: PhotoRing, learned: LearnedFile, manifest: Manifest, photos: Sequence[KeptPhoto], label: str
) -> Iterator[KeptPhoto]:
    """Name photos, one by one; each that is given is on the disk.

    Raises:
        DataError: there is no such class, or one of the photos has left.
        StoreError: the disk refuses.
    """
    ring.naming(photos, label)
    for photo in photos:
        learned.learn(example_of(ring.image(photo, "png"), manifest), label, answered=photo.answer_before)
        yield photo
    if any(photo.proposed == label for photo in photos):
        ring.named(photos)  # not before: what is killed on the way is done again


def proposed_classes(ring: PhotoRing, labels: Sequence[str]) -> dict[str, int]:
    """The classes that were proposed and are none of `labels`, and for how many photos: of most photos first, and as
    many as a status has room for.

    Raises:
        StoreError: the disk refuses.
    """
    found = ring.proposed().items()
    new = {name: photos for name, photos in found if name not in labels and can_be_proposed(name)}
    return dict(list(new.items())[:MAX_PROPOSED])


def name_proposed(ring: PhotoRing, learned: LearnedFile, manifest: Manifest) -> int:
    """Name the photos for which a class was proposed that the fleet has by now; gives how many.

    Raises:
        StoreError: the disk refuses.
    """
    proposed: dict[str, list[KeptPhoto]] = {}
    for photo in ring.photos():
        if photo.proposed in manifest.labels:
            proposed.setdefault(photo.proposed, []).append(photo)
    for label, photos in proposed.items():
        for _ in name_photos(ring, learned, manifest, photos, label):
            pass
        what = counted(len(photos), "photo")
        logger.info(f"{printable(label)} is a class now: the {what} that it was proposed for count as named")
    return sum(map(len, proposed.values()))
