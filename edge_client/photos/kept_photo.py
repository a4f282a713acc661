"""One kept photo: what was answered about it when it was taken, and its id.

The id is 12 hexadecimal digits of the hash of its pixels, as a camera's pictures are named
(`20261126T160503.120Z-5f1c0a9be2d4`, `edge_client/cameras/camera.py`). So the id, that name and the pixels find it.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["ID", "KeptPhoto", "NewPhoto", "id_in", "id_of", "jpeg_of", "png_of"]

ID = re.compile(r"[0-9a-f]{12}")
_NAMED = re.compile(r"(?:\d{8}T\d{6}\.\d{3}Z-)?([0-9a-f]{12})")


@dataclass(frozen=True, eq=False)
class NewPhoto:
    """A photo that was taken and answered about.

    Attributes:
        x: (H, W, c) uint8, as the bundle takes it.
        view: (h, w, 3) uint8, as a person looks at it.
        name: of the picture, as the camera names it.
        taken_s: seconds of Unix time.
        features: (D,) float32, of length 1.
        answer: the label of the best class; empty where there is no answer yet.
        probability: of that class; None where no held-out photos have said how sure an answer is.
        novelty: how unlike all known classes it is; None without an answer.
        is_unknown: whether that is above the limit.
        uncertainty: the entropy of the answer, 0 (sure) to 1.
        version: of the global state that was asked; 0 for none.
    """

    x: NDArray[np.uint8]
    view: NDArray[np.uint8]
    name: str
    taken_s: float
    features: NDArray[np.float32] = field(repr=False)
    answer: str = ""
    probability: float | None = None
    novelty: float | None = None
    is_unknown: bool = False
    uncertainty: float = 1.0
    version: int = 0


@dataclass(frozen=True)
class KeptPhoto:
    """A photo of the ring, without its pixels. What is not said here is as of `NewPhoto`.

    Attributes:
        number: counts up, and is never given again.
        pixels: 16 bytes, the hash by which the file of learned examples knows it.
        times: how often the camera gave just these pixels; last_s: when it last did.
        waits: above 0 while its label has not been committed by the fleet.
        aside: why its owner does not name it: `unsure`, or `none` of the classes; empty where nothing was said.
        proposed: the class that it should belong to, in its owner's words.
        first_answer: what was answered about it when it was first named; None where it never was.
    """

    number: int
    pixels: bytes
    name: str
    taken_s: float
    last_s: float
    times: int
    answer: str
    probability: float | None
    novelty: float | None
    is_unknown: bool
    uncertainty: float
    version: int
    waits: int
    aside: str
    proposed: str
    first_answer: str | None = None

    @property
    def id(self) -> str:
        """By which a person names it."""
        return id_of(self.pixels)

    @property
    def answer_before(self) -> str:
        """What was answered before it could be learned: also where a label was taken back, and another one is given."""
        return self.answer if self.first_answer is None else self.first_answer


def id_of(pixels: bytes) -> str:
    """The id of the photo whose pixels have this hash."""
    return pixels.hex()[:12]


def id_in(name: str) -> str | None:
    """The id of a photo in what a person typed: the id alone, or the name of a camera's picture."""
    found = _NAMED.fullmatch(name)
    return None if found is None else found[1]


def png_of(x: NDArray[np.uint8]) -> bytes:
    """An image (H, W, c) without loss."""
    return _encoded(x, "PNG")


def jpeg_of(view: NDArray[np.uint8]) -> bytes:
    """An image (H, W, 3) to look at."""
    return _encoded(view, "JPEG", quality=80)


def _encoded(x: NDArray[np.uint8], form: str, **options: object) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(x[..., 0] if x.shape[2] == 1 else x).save(out, form, **options)
    return out.getvalue()
