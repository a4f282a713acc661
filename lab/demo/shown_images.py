"""A few real test images with the answers about them, for a page: PNG as text in a summary."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.lab.demo.baselines import Shown
from protofleet.lab.demo.story import Images

__all__ = ["png", "shown_images"]

_MOST = 20  # images on a page
_SIDE = 96  # larger ones are made smaller


def shown_images(images: Images, shown: Shown) -> list[dict[str, Any]]:
    """For each image: its PNG in base64, its true class, whether that class is new, and the three answers."""
    lines = []
    for row, *answers in list(zip(shown.rows, shown.public, shown.alone, shown.fleet, strict=True))[:_MOST]:
        true = int(images.test.y[row])
        public, alone, fleet = (images.labels[int(number)] for number in answers)
        lines.append(
            {
                "png": png(images.test.x[row]),
                "label": images.labels[true],
                "new": bool(images.new[true]),
                "public_alone": public,
                "local_only": alone,
                "fleet": fleet,
            }
        )
    return lines


def png(pixels: NDArray[np.uint8]) -> str:
    """An image (H, W, c) as a PNG file in base64. If PNG cannot hold its channels, the first one alone."""
    known = pixels if pixels.shape[2] in (3, 4) else pixels[:, :, 0]
    picture = Image.fromarray(np.ascontiguousarray(known))
    picture.thumbnail((_SIDE, _SIDE))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode("ascii")
