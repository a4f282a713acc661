"""Feature shift: each client's images look as from another camera. The classes stay the same.

Client n gets corruption n of the list, which is repeated after its end. The first corruption is none. The kinds and the
five severities follow Hendrycks and Dietterich, ICLR 2019. They are made with Pillow and numpy. Their constants are for
large photos; the constants here fit any size. A client's own test is shifted like its training images. The test set is
not.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known
from protofleet.edge_client.data import LocalData

__all__ = ["CORRUPTIONS", "SHIFTS", "check_shift", "shifted"]

Images = NDArray[np.uint8]
Change = Callable[[Image.Image, int, np.random.Generator], Image.Image]
SHIFTS = ("none", "corruption")


def _noise(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    values = np.asarray(image, np.float64)
    noisy = values + rng.normal(0.0, 255.0 * 0.04 * severity, values.shape)
    return Image.fromarray(np.clip(np.rint(noisy), 0, 255).astype(np.uint8))


def _blur(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(0.35 * severity))


def _brightness(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    values = np.asarray(image, np.int64) + 25 * severity
    return Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def _contrast(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(1.0 - 0.15 * severity)


def _pixelate(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    width, height = image.size
    small = (max(round(width / (1 + 0.4 * severity)), 1), max(round(height / (1 + 0.4 * severity)), 1))
    return image.resize(small, Image.Resampling.BOX).resize((width, height), Image.Resampling.NEAREST)


def _jpeg(image: Image.Image, severity: int, rng: np.random.Generator) -> Image.Image:
    image.save(kept := io.BytesIO(), "JPEG", quality=60 - 10 * severity)
    return Image.open(kept)


CORRUPTIONS: dict[str, Change | None] = {
    "none": None,
    "gaussian_noise": _noise,
    "gaussian_blur": _blur,
    "brightness": _brightness,
    "contrast": _contrast,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg,
}


def check_shift(shift: str, severity: int) -> None:
    """Raises:
    UsageError: unknown shift, or a severity that is not 1 to 5.
    """
    known(SHIFTS, shift, "--shift")
    if not 1 <= severity <= 5:
        raise UsageError("--severity", expected="1 to 5", got=severity)


def shifted(data: LocalData, client: int, severity: int, seed: int) -> LocalData:
    """A client's images (N, H, W, c), uint8, by its own corruption; labels as they are.

    Args:
        client: its number, from 0.
        severity: 1 to 5.
        seed: of the noise, with the client's number.
    """
    change = list(CORRUPTIONS.values())[client % len(CORRUPTIONS)]
    if change is None or not len(data):
        return data
    rng = np.random.default_rng([seed, client])
    return LocalData(np.stack([_changed(image, change, severity, rng) for image in data.x]), data.y)


def _changed(image: Images, change: Change, severity: int, rng: np.random.Generator) -> Images:
    """One image; Pillow's grey ones have no channel axis."""
    grey = image.shape[2] == 1
    changed = change(Image.fromarray(image[:, :, 0] if grey else image), severity, rng)
    return np.asarray(changed, np.uint8).reshape(image.shape)
