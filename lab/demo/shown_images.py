"""A few real images for a page, as text in a summary: test images with the answers about them, and what devices hold.

A photo is its own file, JPEG; an array becomes PNG.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.edge_client.data import LocalData
from protofleet.lab.demo.baselines import Shown
from protofleet.lab.demo.photos import PhotoFiles
from protofleet.lab.demo.story import Images

__all__ = ["held_images", "png", "shown_images"]

_MOST = 20  # images on a page
_DEVICES, _EACH = 10, 4  # whose images are shown, and how many of each
_SIDE = 96  # larger ones are made smaller


def shown_images(images: Images, shown: Shown, new: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """For each image: a data URL, its true class, whether that class is new, and the answers by who gives them.

    Args:
        new: (C,) the classes that are new.
    """
    lines, files = [], None if images.files is None else images.files[1]
    for place, row in enumerate(shown.rows[:_MOST]):
        true = int(images.test.y[row])
        said = {"public_alone": shown.public, "local_only": shown.alone, "fleet": shown.fleet}
        answers = {who: None if of is None else images.labels[int(of[place])] for who, of in said.items()}
        picture = _picture(images.test, files, int(row))
        lines.append({"image": picture, "label": images.labels[true], "new": bool(new[true]), **answers})
    return lines


def held_images(images: Images, rows: Sequence[NDArray[np.int64]]) -> list[list[dict[str, Any]]]:
    """For the first devices: the first image of each of their first classes, as a data URL, and its class.

    Args:
        rows: of the dealt images, for each device.
    """
    files = None if images.files is None else images.files[0]
    devices = []
    for part in rows[:_DEVICES]:
        _, first = np.unique(images.dealt.y[part], return_index=True)
        chosen = part[first[:_EACH]]
        devices.append(
            [
                {"image": _picture(images.dealt, files, int(row)), "label": images.labels[int(images.dealt.y[row])]}
                for row in chosen
            ]
        )
    return devices


def _picture(data: LocalData, files: PhotoFiles | None, row: int) -> str:
    """The image as a data URL."""
    if files is None:
        return f"data:image/png;base64,{png(data.x[row])}"
    return f"data:image/jpeg;base64,{base64.b64encode(files.contents[row]).decode('ascii')}"


def png(pixels: NDArray[np.uint8]) -> str:
    """An image (H, W, c) as a PNG file in base64. If PNG cannot hold its channels, the first one alone."""
    known = pixels if pixels.shape[2] in (3, 4) else pixels[:, :, 0]
    picture = Image.fromarray(np.ascontiguousarray(known))
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
