"""The colour photos that the demo ships: hands that sign the digits 0 to 9, as JPEG files in one zip archive.

`shipped/sign_digits.zip` has `CLASS/NAME.JPG`, 90 photos of each class, made by
`python -m protofleet.lab.demo.make_photos`; `shipped/README.md` names their source and licence. The extractor that sees
them is in a package of its own, the extra `photos`.

1. `read_photos` reads the archive; `photo_bundle` makes the fleet's bundle of the extractor, without torch.
2. `draw` draws with the demo's seed which photos are dealt to devices and which ones all devices are asked about. There
   are no public photos: the extractor was trained on other photos, of other things.
3. `PhotoFiles.write` writes photos as a folder of a device has them: `CLASS/NAME.JPG`.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.errors import DataError
from protofleet.contract.methods import method
from protofleet.contract.methods.ffc import NARROW
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.decode import decode_all, gather
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.demo.story import Images, Prepared

__all__ = [
    "ARCHIVE",
    "PHOTO_DATA",
    "PhotoFiles",
    "draw",
    "drawn_rows",
    "photo_bundle",
    "read_photos",
    "write_archive",
]

PHOTO_DATA = "sign_digits_subset"
ARCHIVE = Path(__file__).parent / "shipped" / "sign_digits.zip"
DEALT_PER_CLASS, ASKED_PER_CLASS = 50, 40
HELD_SHARE = 0.4  # four signs of ten on each device
_MADE = (2017, 1, 1, 0, 0, 0)  # in the archive, so that the same photos are the same bytes


@dataclass(frozen=True, eq=False)
class PhotoFiles:
    """Encoded photos.

    Attributes:
        names: `CLASS/NAME.JPG` of each.
        contents: the bytes of each file.
    """

    names: Sequence[str]
    contents: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def classes(self) -> list[str]:
        """The class of each photo."""
        return [name.partition("/")[0] for name in self.names]

    def take(self, rows: NDArray[np.int64]) -> PhotoFiles:
        """The photos at `rows`."""
        return PhotoFiles([self.names[row] for row in rows], [self.contents[row] for row in rows])

    def write(self, folder: Path) -> None:
        """Write each as a file of its own below `folder`."""
        for name, content in zip(self.names, self.contents, strict=True):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    @property
    def labels(self) -> tuple[str, ...]:
        """The classes, each once, in order."""
        return tuple(sorted(set(self.classes)))

    @property
    def numbers(self) -> NDArray[np.int64]:
        """(N,) the class number of each photo."""
        return np.unique(self.classes, return_inverse=True)[1]

    def decoded(self, shape: tuple[int, int, int]) -> NDArray[np.uint8]:
        """Their pixels (N, H, W, c), as a device decodes them.

        Raises:
            DataError: one of them is no whole photo.
        """
        found = gather(decode_all(zip(self.names, self.contents, strict=True), shape), len(self), shape)
        if found.broken:
            raise DataError(found.broken[0].name, expected="a whole photo", got=found.broken[0].why)
        return found.x


def read_photos(path: Path = ARCHIVE) -> PhotoFiles:
    """Read the photos of an archive, in the order of their names.

    Raises:
        DataError: the file is incomplete.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = sorted(archive.namelist())
            return PhotoFiles(names, [archive.read(name) for name in names])
    except (OSError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path}", expected="the demo's photos", got=error, hint="installing Protofleet anew") from None


def write_archive(photos: PhotoFiles, path: Path) -> None:
    """Write photos for `read_photos`; the same photos give the same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in sorted(zip(photos.names, photos.contents, strict=True)):
            archive.writestr(zipfile.ZipInfo(name, _MADE), content)


def photo_bundle(labels: Sequence[str], name: str, out: Path) -> Prepared:
    """Write a bundle of the shipped extractor for these classes. FFC's sums are of 256 columns, a 23rd of the bytes.

    Args:
        name: of a method that trains nothing.

    Raises:
        UsageError: the extractor is not installed, or the method trains.
    """
    row = method(name)
    hyper = dict(row.first_run) | ({"project": NARROW} if "project" in row.hyper else {})
    fleet_bundle(read_bundle(photos_bundle()), labels, out, method_name=name, hyper=hyper)
    return Prepared(read_bundle(out), out)


def draw(photos: PhotoFiles, shape: tuple[int, int, int], seed: int) -> Images:
    """Photos of every class to deal, and others to ask about.

    Args:
        shape: (H, W, c) that the bundle takes.
    """
    y, drawn = photos.numbers, drawn_rows(photos.numbers, seed)
    files = [photos.take(rows) for rows in drawn]
    parts = [LocalData(part.decoded(shape), y[rows]) for part, rows in zip(files, drawn, strict=True)]
    unused = len(photos) - sum(map(len, drawn))
    return Images(PHOTO_DATA, photos.labels, None, *parts, unused, held_share=HELD_SHARE, files=tuple(files))


def drawn_rows(y: NDArray[np.int64], seed: int, asked: int = ASKED_PER_CLASS) -> tuple[NDArray[np.int64], ...]:
    """Which photos are dealt, and which are asked about: two arrays of rows, `asked` of each class in the second.

    Args:
        y: (N,) class numbers.
    """
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(np.flatnonzero(y == number)) for number in np.unique(y)]
    cuts = (slice(DEALT_PER_CLASS), slice(DEALT_PER_CLASS, DEALT_PER_CLASS + asked))
    return tuple(np.concatenate([order[cut] for order in orders]) for cut in cuts)
