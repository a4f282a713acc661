"""edge_client/data/decode.py: what becomes of every kind of picture, and of what is none."""

from __future__ import annotations

import io
import os
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from protofleet.contract.errors import DataError
from protofleet.edge_client.data.decode import Broken, decode_all, decode_image, image_shape
from protofleet.edge_client.data.load import load_data
from tests.edge_client.data.test_load import manifest, png, samples, sorted_rows, write_folder


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(width: int, height: int) -> Image.Image:
    """A smooth picture with a corner that tells which way it lies, as JPEG keeps well."""
    y, x = np.mgrid[0:height, 0:width]
    red, green = 255 * x / width, 255 * y / height
    blue = np.where((x < width / 3) & (y < height / 3), 230, 20)
    return Image.fromarray(np.stack([red, green, blue], -1).astype(np.uint8))


def off(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one.astype(int) - other.astype(int)).mean())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientations(orientation: int, kind: str) -> None:
    """Whatever way a camera was held, the picture comes out as a viewer shows it."""
    stored = photo(600, 400)
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = stored.copy()
    shown.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(shown).resize((30, 40), Image.Resampling.BILINEAR))
    options = {"quality": 95} if kind in ("JPEG", "WEBP") else {}
    assert off(decode_image(encoded(stored, kind, exif=exif, **options), (40, 30, 3)), expected) < 4


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_is_decoded_at_reduced_scale_and_looks_the_same(
    channels: int, progressive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large picture comes out as if all had been decoded, while a sixty-fourth of its pixels are."""
    large = photo(1400, 1050)
    taken: list[int] = []
    load = JpegImageFile.load

    def loading(image: JpegImageFile) -> object:
        taken.append(image.width)
        return load(image)

    monkeypatch.setattr(JpegImageFile, "load", loading)
    raw = encoded(large, "JPEG", quality=92, progressive=progressive)
    found = decode_image(raw, (48, 64, channels))
    assert max(taken) == 175
    expected = np.asarray(large.convert("L" if channels == 1 else "RGB").resize((64, 48), Image.Resampling.BILINEAR))
    assert off(found, expected.reshape(found.shape)) < 3


def _kinds() -> dict[str, tuple[bytes, int]]:
    """Pictures whose left half is dark and whose right half is bright (200), of every mode; and what bright becomes."""
    grey = Image.new("L", (40, 20), 20)
    grey.paste(200, (20, 0, 40, 20))
    wide = np.where(np.asarray(grey) > 100, 200 * 256 + 77, 20 * 256).astype(np.uint16)
    see_through = grey.convert("RGBA")
    see_through.putalpha(Image.eval(grey, lambda value: 255 if value < 100 else 0))
    palette = grey.convert("P")
    return {
        "grey": (encoded(grey), 200),
        "bits": (encoded(grey.point(lambda value: 255 * (value > 100)).convert("1")), 255),
        "palette": (encoded(palette), 200),
        "palette with one transparent colour": (encoded(palette, transparency=palette.getpixel((30, 10))), 255),
        "palette with transparency of each": (encoded(palette, transparency=bytes(200) + bytes([255] * 56)), 200),
        "grey with alpha": (encoded(see_through.convert("LA")), 255),
        "transparent": (encoded(see_through), 255),
        "CMYK": (encoded(grey.convert("RGB").convert("CMYK"), "JPEG", quality=95), 200),
        "sixteen bits": (encoded(Image.fromarray(wide)), 200),
        "sixteen bits, TIFF": (encoded(Image.fromarray(wide), "TIFF"), 200),
        "gif": (encoded(grey, "GIF"), 200),
        "bmp": (encoded(grey.convert("RGB"), "BMP"), 200),
        "webp": (encoded(grey.convert("RGB"), "WEBP", lossless=True), 200),
    }


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("kind", _kinds())
def test_every_mode_becomes_what_a_viewer_shows(kind: str, channels: int) -> None:
    raw, bright = _kinds()[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decode_image(raw, (10, 20, channels))
    assert found.shape == (10, 20, channels)
    if channels == 4:
        return  # transparent stays transparent
    dark = 0 if kind == "bits" else 255 if kind == "palette with transparency of each" else 20
    assert abs(found[:, 14:].astype(int) - bright).max() <= 3
    assert abs(found[:, :6].astype(int) - dark).max() <= 3


def test_mixed_sizes_become_the_bundles(tmp_path: Path) -> None:
    for number, size in enumerate([(80, 80), (640, 480), (31, 97), (50, 50)]):
        folder = tmp_path / ("ant" if number % 2 else "bee")
        folder.mkdir(exist_ok=True)
        photo(*size).save(folder / f"{number}.jpg")
    data = load_data(tmp_path, manifest(shape=(24, 36, 3)))
    assert data.x.shape == (4, 24, 36, 3)
    for image in data.x:
        assert off(image, np.asarray(photo(36, 24))) < 16


# ── what is no image ──


def test_a_picture_of_one_pixel_is_a_plane_of_one_colour_and_none() -> None:
    one = encoded(Image.new("RGB", (1, 1), "red"))
    with pytest.raises(DataError, match="got a picture of one pixel"):
        decode_image(one, (4, 4, 3))
    assert decode_image(one, (1, 1, 3)).tolist() == [[[255, 0, 0]]]
    assert decode_image(encoded(Image.new("RGB", (2, 1), "red")), (4, 4, 3)).shape == (4, 4, 3)
    (found,) = decode_all([("a.png", one)], (4, 4, 3))
    assert found == Broken("a.png", "a picture of one pixel")


HEIC = b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic" + bytes(40)
NO_IMAGES = {
    "torn.jpg": (encoded(photo(64, 64), "JPEG")[:500], "runcated"),
    "torn.png": (png(samples(1, (64, 64, 3))[0][0])[:5000], "runcated"),
    "torn.webp": (encoded(photo(64, 64), "WEBP")[:100], "("),
    "empty.jpg": (b"", "an empty file"),
    "text.jpg": (b"hello, I am no picture", "no image of a known format"),
    "IMG_0001.HEIC": (HEIC, "HEIC is not supported, save it as JPEG"),
    "renamed.jpg": (HEIC, "HEIC is not supported, save it as JPEG"),
    "bomb.png": (b"", "pixels"),  # filled in below
    "float.tif": (encoded(Image.fromarray(np.zeros((4, 4), np.float32)), "TIFF"), "floating-point"),
}


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """A few hundred kilobytes that unfold to 30 megapixels."""
    return encoded(Image.new("1", (6000, 5000)))


@pytest.mark.parametrize("name", NO_IMAGES)
def test_what_cannot_be_read_is_named_with_its_reason_and_the_rest_is_used(
    name: str, bomb: bytes, tmp_path: Path, said: list[str]
) -> None:
    x, y = samples()
    write_folder(tmp_path / "d", x, y, manifest().labels)
    content, reason = NO_IMAGES[name]
    (tmp_path / "d" / "bee" / name).write_bytes(bomb if name == "bomb.png" else content)
    data = load_data(tmp_path / "d", manifest())
    assert sorted_rows(data.x, data.y) == sorted_rows(x, y)
    (line,) = said
    assert line.startswith(f"skipped 1 of 10 images of {tmp_path / 'd'}, which cannot be read: bee/{name} (")
    assert reason in line
    assert "0x" not in line


def test_a_file_that_this_user_may_not_read_is_skipped_too(tmp_path: Path) -> None:
    found = list(decode_all([("gone.png", str(tmp_path / "gone.png"))], (4, 4, 3)))
    assert found == [Broken("gone.png", "No such file or directory")]


def test_broken_metadata_refuses_no_picture() -> None:
    raw = encoded(photo(40, 40), "JPEG", exif=b"Exif\x00\x00II*\x00\xff\xff\xff\xff" + bytes(20))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert decode_image(raw, (8, 8, 3)).shape == (8, 8, 3)


def test_only_pictures_of_a_camera_are_opened_whatever_they_are_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pillow knows PostScript by its first bytes, and runs Ghostscript, if there is one, for what it says."""
    ghostscript, called = tmp_path / "bin" / "gs", tmp_path / "called"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\necho called >> {called}\nexit 1\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # Pillow looks for it once
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 14 14\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "photo.png").write_bytes(postscript)
    (found,) = decode_all([("photo.png", str(tmp_path / "photo.png"))], (14, 14, 1))
    assert found == Broken("photo.png", "no image of a known format")
    assert image_shape(postscript) is None
    assert not called.exists()


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """In a list of paths, or given to predict, a name can lead anywhere."""
    os.mkfifo(tmp_path / "photo.png")
    (found,) = decode_all([("photo.png", str(tmp_path / "photo.png"))], (14, 14, 1))
    assert found == Broken("photo.png", "no regular file")
    assert image_shape(str(tmp_path / "photo.png")) is None


def test_channels_that_no_image_has_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, *samples(), manifest().labels)
    with pytest.raises(DataError, match="expected a bundle of 1, 3 or 4 channels to decode images for, got 2"):
        load_data(tmp_path, manifest(shape=(4, 6, 2)))


def test_shapes_are_known_from_the_first_bytes() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    assert image_shape(encoded(photo(60, 40), "JPEG", exif=turned)) == (60, 40, 3)
    assert image_shape(encoded(photo(60, 40))[:80]) == (40, 60, 3)
    assert image_shape(encoded(Image.new("L", (5, 7)))) == (7, 5, 1)
    assert image_shape(b"none") is None


# ── side by side ──


def test_images_come_in_their_turn_whatever_the_threads() -> None:
    x, _ = samples(100)
    items = [(str(row), png(pixels) if row % 7 else b"torn") for row, pixels in enumerate(x)]
    for threads in (1, 2, 5, None):
        found = list(decode_all(items, (4, 6, 3), threads=threads))
        for row, one in enumerate(found):
            if row % 7:
                assert (one == x[row]).all()
            else:
                assert one == Broken(str(row), "no image of a known format")


def test_images_are_decoded_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads are in Pillow at the same moment; each waits there until all are."""
    together = threading.Barrier(4, timeout=20)
    real = Image.open

    def opening(source: object, **options: object) -> Image.Image:
        together.wait()
        return real(source, **options)

    monkeypatch.setattr("protofleet.edge_client.data.decode.Image.open", opening)
    items = [("p", encoded(photo(300, 300)))] * 8
    found = list(decode_all(items, (1000, 1000, 3), threads=4))  # so large that a thread gets one at a time
    assert not any(isinstance(one, Broken) for one in found)


def test_only_so_many_images_are_under_way() -> None:
    """Whoever takes the images slowly is not run over by those that are ready."""
    asked: list[int] = []
    raw = encoded(photo(30, 30))

    def items():
        for row in range(2_000):
            asked.append(row)
            yield str(row), raw

    before = set(threading.enumerate())  # another test's may still be ending
    found = decode_all(items(), (64, 64, 3), threads=2)
    next(found)
    time.sleep(0.2)
    assert len(asked) <= 32 * 7
    found.close()
    assert len(set(threading.enumerate()) - before) < 4


def test_large_pictures_are_decoded_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With four threads: twelve megapixels take 48 MB each, and would add up."""
    guard, inside, most = threading.Lock(), [0], [0]
    real = ImageFile.ImageFile.load

    def loading(image: ImageFile.ImageFile) -> object:
        with guard:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        try:
            return real(image)
        finally:
            with guard:
                inside[0] -= 1

    monkeypatch.setattr(ImageFile.ImageFile, "load", loading)
    monkeypatch.setattr("protofleet.edge_client.data.decode._TASK_IMAGES", 1)
    items = [(str(number), encoded(photo(30, 30))) for number in range(12)]
    for large, at_once in ((900, 4), (899, 1)):  # above so many pixels
        monkeypatch.setattr("protofleet.edge_client.data.decode._LARGE_PIXELS", large)
        most[0] = 0
        assert all(off(one, np.asarray(photo(8, 8))) < 40 for one in decode_all(items, (8, 8, 3), threads=4))
        assert (most[0] == 1) if at_once == 1 else (1 < most[0] <= at_once)


def test_a_progressive_jpeg_counts_with_all_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the coefficients of all of them, at whatever scale it is decoded."""
    monkeypatch.setattr("protofleet.edge_client.data.decode.MAX_PIXELS", 200 * 100 - 1)
    plain, progressive = (encoded(photo(200, 100), "JPEG", progressive=kind) for kind in (False, True))
    assert decode_image(plain, (5, 10, 3)).shape == (5, 10, 3)
    with pytest.raises(DataError, match="pixels, more than 19,999"):
        decode_image(progressive, (5, 10, 3))
