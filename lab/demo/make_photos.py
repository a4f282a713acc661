"""Make the demo's archive of colour photos from the Sign Language Digits Dataset.

    python -m protofleet.lab.demo.make_photos --from DIR --out DIR

`--from` holds the data set: a folder for each digit, 2,062 photos of 100 x 100 pixels, three of them larger. Of each
class 90 are drawn without replacement by `numpy.random.default_rng`, class by class. Each keeps its name, is made
100 x 100 where it is larger, and is encoded anew as JPEG without what a camera notes beside: a sixth of the bytes. What
it prints belongs into `lab/demo/shipped/README.md`.
"""

from __future__ import annotations

import hashlib
import io
import sys
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image

from protofleet.contract.errors import ProtofleetError
from protofleet.edge_client.data.sources import list_source
from protofleet.lab.data.make_subset import draw_balanced
from protofleet.lab.demo.photos import ARCHIVE, PhotoFiles, write_archive

__all__ = ["encoded", "make_photos"]

SEED = 2_017  # the year of the data set
PER_CLASS = 90
SIDE = 100
_QUALITY = 75


def make_photos(source: Path, out: Path, *, quality: int = _QUALITY) -> Path:
    """Write the archive into `out`, an existing directory; returns its path.

    Args:
        source: a folder with a subfolder of photos for each class.
        quality: of the JPEG files, 1 to 95.

    Raises:
        DataError: when the source is missing, or a class has too few photos.
    """
    listing = list_source(source)
    rows = draw_balanced(listing.labels, PER_CLASS, np.random.default_rng(SEED))
    names = [listing.name(int(row)) for row in rows]
    contents = [encoded(source / name, quality) for name in names]
    path = out / ARCHIVE.name
    write_archive(PhotoFiles(names, contents), path)
    return path


def encoded(path: Path, quality: int) -> bytes:
    """The photo as it is shipped: a JPEG file of SIDE x SIDE pixels and nothing beside them."""
    file = io.BytesIO()
    with Image.open(path) as photo:
        small = photo.convert("RGB").resize((SIDE, SIDE), Image.Resampling.LANCZOS)  # the same where it has that size
        small.save(file, "JPEG", quality=quality, optimize=True)
    return file.getvalue()


def main(
    source: Annotated[Path, typer.Option("--from", help="the data set, a folder for each digit")],
    out: Annotated[Path, typer.Option("--out", help="an existing directory")],
) -> None:
    """Make the demo's photos."""
    try:
        path = make_photos(source, out)
    except ProtofleetError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    content = path.read_bytes()
    print(f"| `{path.name}` | {len(content):,} | `{hashlib.sha256(content).hexdigest()}` |")


if __name__ == "__main__":
    typer.run(main)
