"""Encoded images to pixels: upright, of the wanted channels and size, uint8, in parallel.

Steps for an image:

1. A JPEG is decoded at the smallest of its scales (1, 1/2, 1/4, 1/8) that still has twice the wanted size, because a
   photo of twelve megapixels is seldom needed whole.
2. An image that would still take too much memory is refused. Images that take much are decoded one at a time.
3. Sixteen bits become eight. A palette becomes its colours. Transparent pixels become white.
4. The image is resized to exactly the wanted height and width, whatever its own proportions. It is converted to grey,
   RGB or RGBA, and turned as its EXIF orientation says.

A camera that lost power leaves half a file. A file that cannot be read is skipped, counted and named (`Decoded`), and
the rest is used. A file that is no camera picture is skipped, too, whatever its name is: Pillow would hand PostScript
to another program, and wait for a pipe.

Pillow works outside Python's lock, so threads decode in parallel. Only a limited number of images is under way, so a
hundred thousand images take no more memory than a hundred.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import stat
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from protofleet.contract.console.logs import Private
from protofleet.contract.errors import DataError
from protofleet.edge_client.data.samples import LeavesOut, pixel_hash

__all__ = [
    "FEW",
    "MAX_PIXELS",
    "Broken",
    "Crop",
    "Decoded",
    "check_channels",
    "decode_all",
    "decode_image",
    "fit_pixels",
    "gather",
    "image_shape",
]

logger = logging.getLogger(__name__)

Shape = tuple[int, int, int]
Crop = tuple[int, int, int, int]
"""The part of a picture that counts: x and y of its upper left corner, width and height, in pixels of the picture as it
is shown."""
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
MAX_PIXELS = 25_000_000  # of what is decoded: 100 MB, since Pillow holds RGB in four bytes
_LARGE_PIXELS = 2_000_000  # above, one at a time
_BAND_PIXELS = 1 << 16  # of a camera's picture, averaged together
_PROGRESSIVE_LARGE = 8_000_000  # a progressive JPEG holds all its coefficients, at whatever scale it is decoded
_REDUCING_GAP = 3.0  # Pillow first averages whole blocks of pixels, as far as three times the wanted size
FEW = 5  # broken images that are named
_TASK_IMAGES, _TASK_BYTES = 32, 2 << 20
_THREADS = 8
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ORIENTATION = 0x0112
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # of Pillow's forty; a phone's MPO is a JPEG to it
_HEIC_BRANDS = (b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1")
_one_large = threading.Lock()


@dataclass(frozen=True)
class Broken:
    """An image that could not be read: what it is called, and why."""

    name: str
    why: str


@dataclass(frozen=True, eq=False)
class Decoded:
    """What came of the images of a source.

    Attributes:
        x: (K, H, W, c) uint8: those that could be read, in their order.
        kept: (N,) bool: which of all these are.
        broken: the first few of those that could not be read.
        left_out: how many were not wanted, once they had been seen.
    """

    x: NDArray[np.uint8]
    kept: NDArray[np.bool_]
    broken: tuple[Broken, ...]
    left_out: int = 0

    def tell(self, where: str) -> None:
        """Say in one line how many were skipped, and which first.

        Raises:
            DataError: when none is left.
        """
        skipped = len(self.kept) - len(self.x) - self.left_out
        if not skipped:
            return
        named = "; ".join(f"{one.name} ({one.why})" for one in self.broken)
        if not len(self.x):
            raise DataError(f"{where}: no image of {skipped} can be read", expected="whole image files", got=named)
        further = f"; and {skipped - len(self.broken)} more" if skipped > len(self.broken) else ""
        of_all, names = f"{skipped} of {len(self.kept)} images", Private(named + further)
        logger.warning("skipped %s of %s, which cannot be read: %s", of_all, where, names)


def check_channels(shape: Shape, name: object) -> None:
    """Refuse a bundle whose channels no image file has.

    Raises:
        DataError: c is not 1, 3 or 4.
    """
    if shape[2] not in _MODES:
        raise DataError(
            f"{name}", expected="a bundle of 1, 3 or 4 channels to decode images for", got=shape[2], hint="a .npz"
        )


def gather(
    results: Iterable[NDArray[np.uint8] | Broken], count: int, shape: Shape, leaves_out: LeavesOut | None = None
) -> Decoded:
    """Images in memory: what `decode_all` gives for `count` of them.

    Args:
        leaves_out: says of an image by its place and its `pixel_hash` that it is not wanted.
    """
    x, kept = np.empty((count, *shape), np.uint8), np.zeros(count, dtype=bool)
    broken: list[Broken] = []
    rows = left_out = 0
    for index, result in enumerate(results):
        if isinstance(result, Broken):
            broken += [result] if len(broken) < FEW else []
        elif leaves_out is not None and leaves_out(index, pixel_hash(result)):
            left_out += 1
        else:
            x[rows], kept[index] = result, True
            rows += 1
    return Decoded(x[:rows], kept, tuple(broken), left_out)


def decode_all(
    items: Iterable[tuple[str, str | bytes]], shape: Shape, *, threads: int | None = None
) -> Iterator[NDArray[np.uint8] | Broken]:
    """Decode images side by side, in bounded memory; each comes out in its turn.

    Args:
        items: (name, path or bytes of the file).
        shape: (H, W, c); c is 1, 3 or 4.
        threads: None for one on each core, at most eight.

    Yields:
        (H, W, c) uint8, or why there is none.
    """
    threads = threads or min(_THREADS, len(os.sched_getaffinity(0)))
    tasks = _tasks(items, shape)
    with _silent_pillow():
        if threads == 1:
            for task in tasks:
                yield from _decode_task(task, shape)
            return
        pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        waiting: deque[Future[list[NDArray[np.uint8] | Broken]]] = deque()
        try:
            for task in tasks:
                waiting.append(pool.submit(_decode_task, task, shape))
                if len(waiting) > 2 * threads:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def decode_image(source: str | bytes, shape: Shape, crop: Crop | None = None) -> NDArray[np.uint8]:
    """One image as (H, W, c) uint8.

    Args:
        source: a path, or the bytes of an image file.
        shape: (H, W, c); c is 1, 3 or 4.
        crop: the part of it that counts; None for all of it.

    Raises:
        DataError: when it is not an image that Pillow reads whole, has too many pixels, or does not hold the crop.
    """
    with _silent_pillow():
        (result,) = _decode_task([("the image", source)], shape, crop)
    if isinstance(result, Broken):
        raise DataError(f"{result.name} is not a readable image", expected="a whole image file", got=result.why)
    return result


def fit_pixels(pixels: NDArray[np.uint8], shape: Shape, crop: Crop | None = None) -> NDArray[np.uint8]:
    """A camera's picture (H, W) grey or (H, W, 3) RGB, brought to (H, W, c) as a file of the same pixels would be.

    No second copy of a large picture is made: its blocks are averaged band by band.

    Raises:
        DataError: it has too many pixels, or does not hold the crop.
    """
    height, width, channels = shape
    try:
        _check_pixels(pixels.shape[1], pixels.shape[0])
        if crop is not None:
            x, y, across, down = _checked_crop(crop, pixels.shape[1], pixels.shape[0])
            pixels = pixels[y : y + down, x : x + across]
        down, across = pixels.shape[:2]
        blocks = _blocks(across, width), _blocks(down, height)
        if blocks == (1, 1):
            return _decoded(Image.fromarray(np.ascontiguousarray(pixels)), shape)
        image = _averaged(pixels, blocks)
        box = (0.0, 0.0, across / blocks[0], down / blocks[1])
        image = image.resize((width, height), Image.Resampling.BILINEAR, box)
        return np.asarray(image.convert(_MODES[channels]), dtype=np.uint8).reshape(shape)
    except ValueError as error:
        raise DataError("the picture", expected="one that can be used", got=error) from None


def _blocks(pixels: int, wanted: int) -> int:
    """How many pixels one after another Pillow averages first, for so many of them (`Image.resize`, reducing_gap)."""
    return max(int(pixels / wanted / _REDUCING_GAP), 1)


def _averaged(pixels: NDArray[np.uint8], blocks: tuple[int, int]) -> Image.Image:
    """As `Image.fromarray(pixels).reduce(blocks)`."""
    down, across = pixels.shape[:2]
    rows = blocks[1] * max(_BAND_PIXELS // (blocks[1] * across), 1)
    bands = (Image.fromarray(np.ascontiguousarray(pixels[y : y + rows])) for y in range(0, down, rows))
    reduced = [band.reduce(blocks) for band in bands]
    whole = Image.new(reduced[0].mode, (reduced[0].width, sum(band.height for band in reduced)))
    for place, band in enumerate(reduced):
        whole.paste(band, (0, place * rows // blocks[1]))
    return whole


def image_shape(source: str | bytes) -> Shape | None:
    """(H, W, c) of an image as it would be shown, from its first bytes alone; None when it cannot be read."""
    try:
        with _opened(source) as image:
            grey = image.mode in ("1", "L", "I") or image.mode.startswith("I;16")
            turned = image.format == "JPEG" and _orientation(image) >= 5
            height, width = (image.width, image.height) if turned else (image.height, image.width)
            return height, width, 1 if grey else 3
    except Exception:  # whatever it is, decoding will say so
        return None


def _tasks(items: Iterable[tuple[str, str | bytes]], shape: Shape) -> Iterator[list[tuple[str, str | bytes]]]:
    """Images for one thread at a time: few enough that their bytes and pixels are small."""
    task: list[tuple[str, str | bytes]] = []
    task_bytes = 0
    for name, source in items:
        task.append((name, source))
        task_bytes += math.prod(shape) + (len(source) if isinstance(source, bytes) else 0)
        if len(task) == _TASK_IMAGES or task_bytes > _TASK_BYTES:
            yield task
            task, task_bytes = [], 0
    if task:
        yield task


def _decode_task(
    task: list[tuple[str, str | bytes]], shape: Shape, crop: Crop | None = None
) -> list[NDArray[np.uint8] | Broken]:
    images: list[NDArray[np.uint8] | Broken] = []
    for name, source in task:
        try:
            with _opened(source) as image:
                _check_size(image, shape)
                images.append(_decoded(image, shape, crop))
        except Exception as error:  # Pillow's readers raise nearly anything on a broken file
            images.append(Broken(name, _why(error, source)))
    return images


def _opened(source: str | bytes) -> Image.Image:
    """An image whose first bytes are read.

    Raises:
        ValueError: a path of something else than a regular file.
        Exception: whatever Pillow raises.
    """
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source), formats=_FORMATS)
    if not stat.S_ISREG(os.stat(source).st_mode):
        raise ValueError("no regular file")
    return Image.open(source, formats=_FORMATS)


def _check_size(image: Image.Image, shape: Shape) -> None:
    """One pixel, made larger, is a plane of one colour: a camera that failed, and nothing to learn from."""
    if image.width * image.height == 1 < shape[0] * shape[1]:
        raise ValueError("a picture of one pixel")


def _why(error: Exception, source: str | bytes) -> str:
    """Why an image cannot be read, in words that name no memory address and repeat no path."""
    if isinstance(error, UnidentifiedImageError):
        with contextlib.suppress(OSError):
            start = source[:12] if isinstance(source, bytes) else _first_bytes(source)
            if start[4:8] == b"ftyp" and start[8:12] in _HEIC_BRANDS:
                return "HEIC is not supported, save it as JPEG"
            if not start:
                return "an empty file"
        return "no image of a known format"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split())[:100] or type(error).__name__


def _first_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(12)


def _decoded(image: Image.Image, shape: Shape, crop: Crop | None = None) -> NDArray[np.uint8]:
    height, width, channels = shape
    image = image if crop is None else _cropped(image, crop)
    whole = image.width * image.height
    side = 2 * max(width, height)  # of both, since it is not known yet whether the image lies on its side
    image.draft("L" if channels == 1 else None, (side, side))  # JPEG only: others stay as they are
    pixels = whole if "progressive" in image.info else image.width * image.height
    if pixels > MAX_PIXELS:
        raise ValueError(f"{image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
    large = pixels > (_PROGRESSIVE_LARGE if "progressive" in image.info else _LARGE_PIXELS)
    with _one_large if large else contextlib.nullcontext():
        image.load()
        turn = _orientation(image) if crop is None else 1
        lying = turn >= 5
        image = _plain_mode(image, _MODES[channels])
        size = (height, width) if lying else (width, height)
        if image.size != size:
            image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=_REDUCING_GAP)
    image = _over_white(image) if channels != 4 and "A" in image.mode else image
    if image.mode != _MODES[channels]:
        image = image.convert(_MODES[channels])
    if turn in _TURNS:
        image = image.transpose(_TURNS[turn])
    return np.asarray(image, dtype=np.uint8).reshape(shape)


def _cropped(image: Image.Image, crop: Crop) -> Image.Image:
    """A part of an image, upright.

    Raises:
        ValueError: it has too many pixels, or not all of that part.
    """
    _check_pixels(image.width, image.height)
    with _one_large if image.width * image.height > _LARGE_PIXELS else contextlib.nullcontext():
        image.load()
        turn = _orientation(image)
        image = image.transpose(_TURNS[turn]) if turn in _TURNS else image
    x, y, width, height = _checked_crop(crop, image.width, image.height)
    return image.crop((x, y, x + width, y + height))


def _check_pixels(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise ValueError(f"{width} x {height} pixels, more than {MAX_PIXELS:,}")


def _checked_crop(crop: Crop, width: int, height: int) -> Crop:
    if crop[0] + crop[2] > width or crop[1] + crop[3] > height:
        part = ",".join(map(str, crop))
        raise ValueError(f"{width} x {height} pixels, which do not hold the crop {part}")
    return crop


def _plain_mode(image: Image.Image, wanted: str) -> Image.Image:
    """An image of eight-bit samples that can be resized: no palette, no bits, transparency as a channel."""
    if image.mode.startswith("I"):  # Pillow would clip sixteen bits to eight instead of scaling them
        return Image.fromarray((np.asarray(image).clip(0, 0xFFFF) >> 8).astype(np.uint8))
    if image.mode == "F":
        raise ValueError("floating-point pixels, save it with 8 or 16 bits")
    if "transparency" in image.info or image.mode == "PA":
        return image.convert("RGBA")
    if image.mode == "P":
        return image.convert("RGB")
    return image.convert("L") if image.mode == "1" else image


def _over_white(image: Image.Image) -> Image.Image:
    """What a viewer shows of a transparent image; without this, whatever colour lies hidden below would be seen."""
    image = image.convert("RGBA")
    canvas = Image.new("RGBA", image.size, (255, 255, 255, 255))
    canvas.alpha_composite(image)
    return canvas


def _orientation(image: Image.Image) -> int:
    """1 to 8 as EXIF counts; 1 where there is none, or none that can be read."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # a picture is not refused for what is written beside it
        return 1
    return value if isinstance(value, int) else 1


@contextlib.contextmanager
def _silent_pillow() -> Iterator[None]:
    """Without the warnings about odd metadata and many pixels: the ones do no harm, the others are refused here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        yield
