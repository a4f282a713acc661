"""What is in a folder of photos, in sentences: classes, sizes, broken and blurred files, few or uneven classes.

Each photo is decoded once, and its size is read from its header. What no fleet can be made of raises a `DataError`, in
one line; what a person should know of is a sentence.

How sharp a photo is, is the variance of its Laplacian (Pech-Pacheco et al., "Diatom autofocusing in brightfield
microscopy", ICPR 2000) over the variance of its grey values, at 64 px. So neither size nor light counts, and blur that
is gone at 64 px does not. Of 600 photos of signs the least is 0.087; of three larger photos, blurred by a Gaussian of
3 % of the shorter side, the largest is 0.022.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.contract.bundle.class_names import check_names
from protofleet.contract.console.logs import told
from protofleet.contract.errors import DataError
from protofleet.contract.printable import counted
from protofleet.edge_client.data.decode import Broken, decode_all
from protofleet.edge_client.data.folder import PathImages, list_folder
from protofleet.edge_client.data.listing import Listing

__all__ = ["Look", "Photo", "look_at"]

LEAST_PX = 16  # along the shorter side, of most photos: below that nothing can be seen
FEW = 4  # photos of a class, from which a head can be chosen (docs/methods.md, "Heads from sums")
SHARP_PX = 64  # at which it is measured; a smaller photo is not judged
BLURRED = 0.03
_NAMED = 5  # of the files that cannot be read
_FLAT = 4.0  # variance of grey values, below which there is nothing to be sharp
UNEVEN = 5.0  # times as many photos in one class as in another
MANY_CLASSES = 100
_VIDEOS = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm", ".wmv"})
_LOOKED_FOR_VIDEOS = 10_000  # files


@dataclass(frozen=True)
class Photo:
    """A photo that can be read: its path, its class, and (width, height) in pixels."""

    path: Path
    label: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Look:
    """What was found.

    Attributes:
        photos: those that can be read, in the order of their names.
        broken: paths of those that cannot, and why.
        blurred: paths of those that can be read, but show no edges.
        labels: the classes, in the order of their names; each has a photo.
        lines: what is to be said, a sentence each.
    """

    photos: tuple[Photo, ...]
    broken: tuple[tuple[Path, str], ...]
    labels: tuple[str, ...]
    lines: tuple[str, ...]
    blurred: tuple[Path, ...] = ()

    @property
    def counts(self) -> dict[str, int]:
        """Photos of each class."""
        found = Counter(photo.label for photo in self.photos)
        return {label: found[label] for label in self.labels}


def look_at(root: Path, on_done: Callable[[int, int], None] = lambda done, whole: None) -> Look:
    """Read all photos of a folder with one subfolder for each class.

    Args:
        on_done: called with how many photos have been read, and how many there are.

    Raises:
        DataError: no folder, no photos, one class, photos too small to see anything, or folders that are no classes.
        UsageError: names of classes that cannot be told from each other.
    """
    lines: list[str] = []
    root = Path(os.path.abspath(root))
    listing = _listed(root, lines.append)
    assert isinstance(listing.images, PathImages)
    assert listing.names is not None
    found: list[Photo] = []
    broken: list[tuple[Path, str]] = []
    blurred: list[Path] = []
    paths = [root / listing.images.name(row) for row in range(len(listing))]
    for row, result in enumerate(decode_all(((str(path), str(path)) for path in paths), (SHARP_PX, SHARP_PX, 3))):
        if isinstance(result, Broken):
            broken.append((paths[row], result.why))
        else:
            with Image.open(paths[row]) as image:
                found.append(Photo(paths[row], listing.names[listing.labels[row]], image.size))
            if min(found[-1].size) >= SHARP_PX and is_blurred(result):
                blurred.append(paths[row])
        on_done(row + 1, len(listing))
    counts = Counter(photo.label for photo in found)
    labels = tuple(label for label in sorted(listing.names) if counts[label])
    _check(root, found, broken, labels)
    check_names(labels, f"folders in {root}")
    look = Look(tuple(found), tuple(broken), labels, (), tuple(blurred))
    return replace(look, lines=(*lines, *_sentences(root, look, set(listing.names) - set(labels))))


def is_blurred(pixels: NDArray[np.uint8]) -> bool:
    """Whether a photo (64, 64, 3) shows no edges. A plain surface is not blurred."""
    grey = pixels.mean(axis=2)
    laplacian = 4 * grey[1:-1, 1:-1] - grey[:-2, 1:-1] - grey[2:, 1:-1] - grey[1:-1, :-2] - grey[1:-1, 2:]
    return bool(grey.var() >= _FLAT and laplacian.var() < BLURRED * grey.var())


def _listed(root: Path, log: Callable[[str], None]) -> Listing:
    if not root.is_dir():
        got = "a file" if root.exists() else "nothing there"
        raise DataError(f"{root}", expected="a folder of photos, one subfolder for each class", got=got)
    try:
        with told(log):
            return list_folder(root)
    except DataError:
        videos = [path for path in islice(root.rglob("*"), _LOOKED_FOR_VIDEOS) if path.suffix.lower() in _VIDEOS]
        if not videos:
            raise
        raise DataError(
            f"{root}",
            expected="photos in its class folders",
            got=f"{counted(len(videos), 'video')} ({videos[0].suffix})",
            hint="photos of them, such as ffmpeg -i VIDEO -vf fps=1 CLASS/%04d.jpg",
        ) from None
    except OSError as error:
        raise DataError(f"{root} cannot be read", got=error.strerror) from None


def _check(root: Path, found: list[Photo], broken: list[tuple[Path, str]], labels: tuple[str, ...]) -> None:
    if not found:
        got = f"{counted(len(broken), 'broken one')}: {broken[0][0].name}, {broken[0][1]}"
        raise DataError(f"{root}", expected="photos that can be read", got=got)
    if len(labels) < 2:
        raise DataError(
            f"{root}",
            expected="photos of two classes or more",
            got=f"one only: {labels[0]}",
            hint=f"a folder beside {labels[0]} for what is none",
        )
    middle = float(np.median([min(photo.size) for photo in found]))
    if middle < LEAST_PX:
        raise DataError(f"{root}", expected=f"photos of {LEAST_PX} px or more", got=f"most of {middle:.0f} px")
    if len(labels) > MANY_CLASSES and len(found) < FEW * len(labels):
        got = f"{len(labels):,} folders with {counted(len(found), 'photo')}"
        raise DataError(
            f"{root}",
            expected=f"classes with {FEW} photos or more",
            got=got,
            hint="one folder for each class, not for each photo",
        )


def _sentences(root: Path, look: Look, empty: set[str]) -> Iterator[str]:
    counts = look.counts
    least, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    some = ", ".join(look.labels[:6]) + (f" and {len(look.labels) - 6:,} more" if len(look.labels) > 6 else "")
    yield f"{counted(len(look.photos), 'photo')} of {len(look.labels):,} classes in {root}: {some}."
    sides = sorted(min(photo.size) for photo in look.photos)
    if sides[0] == sides[-1] and len({photo.size for photo in look.photos}) == 1:
        yield "All are {} × {} px.".format(*look.photos[0].size)
    else:
        yield f"The shorter side has {sides[0]:,} to {sides[-1]:,} px, in the middle {sides[len(sides) // 2]:,}."
    if look.broken:
        reasons = "; ".join(f"{path.relative_to(root)}: {why}" for path, why in look.broken[:_NAMED])
        more = "; …" if len(look.broken) > _NAMED else ""
        yield f"{counted(len(look.broken), 'file')} cannot be read and will be left out ({reasons}{more})."
    if look.blurred:
        are = "looks blurred" if len(look.blurred) == 1 else "look blurred"
        which = look.blurred[0].relative_to(root)
        count = counted(len(look.blurred), "photo")
        yield f"{count} {are} ({which}), and will be learned from all the same: delete what you could not name."
    if empty:
        yield f"Without a photo, and so no class: {', '.join(sorted(empty)[:6])}."
    if counts[least] < FEW:
        few = [label for label in look.labels if counts[label] < FEW]
        names = ", ".join(few[:6]) + (f" and {len(few) - 6} more" if len(few) > 6 else "")
        yield f"Fewer than {FEW} photos: {names}. Nothing is learned well there; {FEW} are the least, 20 are better."
    elif counts[most] > UNEVEN * counts[least]:
        yield f"Uneven: {most} has {counts[most]:,} photos, {least} {counts[least]:,}. The rarer is named less often."
