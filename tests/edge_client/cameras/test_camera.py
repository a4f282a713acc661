"""edge_client/cameras/camera.py: a picture's name, its crop, and one that is too large; the room for the newest."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from camera_samples import jpeg
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from protofleet.contract.errors import UsageError
from protofleet.edge_client.cameras.camera import CameraGoneError, Newest, Picture, read_crop
from protofleet.edge_client.data.decode import Broken, fit_pixels
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
