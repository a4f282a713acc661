"""edge_client/cameras/camera.py: a picture's name, its crop, its memory, and one that is too large; the room for the
newest."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from camera_samples import jpeg
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from protofleet.contract.errors import UsageError
from protofleet.edge_client.cameras.camera import CameraGoneError, Newest, Picture, read_crop
from protofleet.edge_client.cameras.key_frames import Decode, key_frames
from protofleet.edge_client.cameras.sources import pictures_of
from protofleet.edge_client.data.decode import Broken, decode_image, fit_pixels
from protofleet.edge_client.data.samples import pixel_hash

SHAPE = (8, 8, 3)


def _drawn() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)


def test_a_picture_without_a_file_is_named_by_its_time_and_the_hash_that_learned_examples_have() -> None:
    name, x = Picture(_drawn(), 1_790_000_000.25).fitted(SHAPE)
    assert isinstance(x, np.ndarray)
    assert name == f"20260921T141320.250Z-{pixel_hash(x).hex()[:12]}"
    assert Picture(_drawn(), 0.0, "a/b.png").fitted(SHAPE)[0] == "a/b.png"


@given(st.integers(0, 39), st.integers(0, 29), st.data())
def test_a_crop_is_what_these_pixels_alone_would_be(x: int, y: int, data: st.DataObject) -> None:
    width, height = data.draw(st.integers(1, 40 - x)), data.draw(st.integers(1, 30 - y))
    whole = _drawn()
    part = np.ascontiguousarray(whole[y : y + height, x : x + width])
    png = io.BytesIO()
    Image.fromarray(whole).save(png, "PNG")
    wanted = fit_pixels(part, SHAPE)
    for content in (whole, png.getvalue()):
        found = Picture(content, 0.0).fitted(SHAPE, (x, y, width, height))[1]
        assert np.array_equal(found, wanted)  # type: ignore[arg-type]


@given(st.integers(1, 700), st.integers(1, 500), st.sampled_from([1, 3, 4]), st.booleans(), st.data())
def test_pixels_are_brought_to_a_shape_as_a_file_of_them_is(
    width: int, height: int, channels: int, grey: bool, data: st.DataObject
) -> None:
    rng = np.random.default_rng(width * height)
    pixels = rng.integers(0, 256, (height, width) if grey else (height, width, 3), np.uint8)
    shape = (data.draw(st.integers(2, 64)), data.draw(st.integers(2, 64)), channels)
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    crop = x, y, data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y))
    assume(width * height > 1)  # a file of one pixel is refused
    png = io.BytesIO()
    Image.fromarray(pixels).save(png, "PNG", compress_level=0)
    for part in (None, crop):
        assert np.array_equal(fit_pixels(pixels, shape, part), decode_image(png.getvalue(), shape, part))


def test_no_second_copy_of_a_large_picture_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    picture, copied, fromarray = np.zeros((720, 1280, 3), np.uint8), [], Image.fromarray

    def counted(pixels: NDArray[np.uint8]) -> Image.Image:
        copied.append(pixels.size)
        return fromarray(pixels)

    monkeypatch.setattr(Image, "fromarray", counted)
    for shape, crop in (((48, 64, 1), None), ((128, 128, 3), (100, 64, 1000, 656))):
        assert fit_pixels(picture, shape, crop).shape == shape
    assert max(copied) < picture.size / 10


def test_a_picture_is_not_kept_while_the_next_is_read() -> None:
    """Neither by what hands pictures on, nor by the thread that decodes them."""
    pictures: list[weakref.ref[Picture]] = []
    alive: list[bool] = []

    class Camera:
        shown, ends = "a camera", True

        def pictures(self, every_s: float) -> Iterator[Picture]:
            for number in range(3):
                alive.append(any(picture() for picture in pictures))
                picture = Picture(np.zeros((4, 4, 3), np.uint8), float(number))
                pictures.append(weakref.ref(picture))
                yield picture
                del picture

    for picture in pictures_of(Camera(), 0.01):
        assert picture.taken_s >= 0
        del picture
    assert alive == [False] * 3

    pixels: list[weakref.ref[NDArray[np.uint8]]] = []
    is_dropped = threading.Event()

    def decode() -> NDArray[np.uint8]:
        made = np.zeros((4, 4, 3), np.uint8)
        pixels.append(weakref.ref(made))
        return made

    class Stream:
        def frames(self) -> Iterator[Decode | None]:
            yield decode
            is_dropped.wait(60)
            alive.append(pixels[0]() is not None)

        def close(self) -> None:
            is_dropped.set()

    frames = key_frames(Stream, 0.01)
    picture = next(frames)
    assert picture.content is pixels[0]()
    del picture
    is_dropped.set()
    with pytest.raises(CameraGoneError, match="the stream has ended"):
        next(frames)
    assert alive == [False] * 4


def test_a_crop_is_of_the_picture_as_it_is_shown() -> None:
    """A camera that hangs on its side says so in EXIF: the crop counts from what a viewer shows."""
    whole = _drawn()
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    png = io.BytesIO()
    Image.fromarray(whole).save(png, "PNG", exif=exif)
    shown = np.ascontiguousarray(np.rot90(whole, -1))
    found = Picture(png.getvalue(), 0.0).fitted(SHAPE, (3, 5, 20, 10))[1]
    assert np.array_equal(found, fit_pixels(np.ascontiguousarray(shown[5:15, 3:23]), SHAPE))  # type: ignore[arg-type]


def test_a_crop_that_a_picture_does_not_hold_is_an_answer_that_says_so() -> None:
    """A stream may change its size: what comes next may hold it again."""
    for content in (_drawn(), jpeg()):
        name, found = Picture(content, 0.0).fitted(SHAPE, (10, 10, 31, 5))
        assert found == Broken(name, "40 x 30 pixels, which do not hold the crop 10,10,31,5")
        assert name == "19700101T000000.000Z"


def test_a_picture_above_25_megapixels_is_refused_whatever_it_would_be_scaled_to(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("L", (5001, 5000)).save(out, "JPEG")  # which a photo may have: decoded at an eighth
    for content in (out.getvalue(), np.broadcast_to(np.uint8(0), (5000, 5001, 3))):
        found = Picture(content, 0.0).fitted(SHAPE)[1]
        assert isinstance(found, Broken)
        assert found.why == "5001 x 5000 pixels, more than 25,000,000"


def test_what_is_no_picture_is_an_answer_that_says_so() -> None:
    assert Picture(b"<html>", 0.0).fitted(SHAPE)[1] == Broken("19700101T000000.000Z", "no image of a known format")


@pytest.mark.parametrize(
    "text", ["", "1,2,3", "1,2,0,4", "-1,0,2,2", "1,2,3,4,5", "a,b,c,d", "1.5,0,2,2", "1,2,3,999999"]
)
def test_what_is_no_crop_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--crop, expected X,Y,WIDTH,HEIGHT in pixels"):
        read_crop(text)
    assert read_crop("100,50,640,480") == (100, 50, 640, 480)


def test_the_newest_picture_takes_the_place_of_one_that_was_not_taken() -> None:
    room = Newest()
    for second in (1.0, 2.0):
        room.put(Picture(b"", second))
    assert room.take().taken_s == 2.0
    with pytest.raises(CameraGoneError, match=r"no picture in 0.01 s"):
        room.take(0.01)
    room.put(Picture(b"", 3.0))
    room.end("gone")
    assert room.take().taken_s == 3.0
    with pytest.raises(CameraGoneError, match="gone"):
        room.take()
