"""edge_client/cameras/v4l2.py and picamera.py with recorded pictures in the place of a camera: not run on a board."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from camera_samples import jpeg, video

from protofleet.contract.errors import UsageError
from protofleet.edge_client.cameras import key_frames, picamera, v4l2
from protofleet.edge_client.cameras.camera import CameraGoneError, Picture
from protofleet.edge_client.cameras.sources import camera_of


@pytest.mark.parametrize(("text", "device"), [("v4l2:3", "/dev/video3"), ("v4l2:/dev/v4l/by-id/usb-a_b-index0",) * 2])
def test_a_device_is_read_as_ffmpeg_reads_it(
    text: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recorded film of a few pictures stands for the device."""
    film, asked = video(tmp_path / "a.avi", [40, 200, 40, 200], key_every=1), []

    def opened(where: str, *, form: str | None = None) -> Any:
        asked.append((where, form))
        return key_frames.opened(str(film))

    monkeypatch.setattr(v4l2, "opened", opened)
    pictures = camera_of(text).pictures(0.01)
    picture = next(pictures)
    assert isinstance(picture.content, np.ndarray)
    assert picture.content.shape == (48, 64, 3)
    with pytest.raises(CameraGoneError, match="the stream has ended"):
        list(pictures)
    assert asked == [(device.removeprefix("v4l2:"), "v4l2")]


def test_a_device_that_is_not_there_is_gone_for_now() -> None:
    """FFmpeg's own driver is asked."""
    with pytest.raises(CameraGoneError, match=r"^No such file or directory$"):
        next(iter(camera_of("v4l2:987").pictures(1.0)))


_FAKE = """
import os
class Picamera2:
    def __init__(self, number): self.number = number; print("libcamera says much")
    def create_still_configuration(self, main, buffer_count): return {{"main": main}}
    def configure(self, configuration): assert configuration["main"]["size"] == (1280, 720)
    def start(self):
        if self.number == 9: raise RuntimeError("Camera __init__ sequence did not complete.")
    def capture_file(self, file, format):
        assert format == "jpeg"
        file.write(open({recorded!r}, "rb").read())
        if self.number == 8: os._exit(1)
"""


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """The system's Python with a Picamera2 that plays one picture."""
    (tmp_path / "a.jpg").write_bytes(jpeg(64, 48))
    (tmp_path / "picamera2.py").write_text(_FAKE.format(recorded=str(tmp_path / "a.jpg")))
    monkeypatch.setattr(picamera, "PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return jpeg(64, 48)


def _one(text: str) -> Picture:
    return next(iter(camera_of(text).pictures(0.01)))


def test_a_pis_camera_is_asked_through_a_process_that_ends_with_it(recorded: bytes) -> None:
    before = set(os.listdir("/proc"))
    pictures = camera_of("picamera2:0").pictures(0.01)
    assert [next(pictures).content for _ in range(3)] == [recorded] * 3
    assert any("picamera_helper" in _command(pid) for pid in set(os.listdir("/proc")) - before)
    pictures.close()  # type: ignore[attr-defined]
    assert not any("picamera_helper" in _command(pid) for pid in set(os.listdir("/proc")) - before)


def _command(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_text()
    except OSError:
        return ""


def test_what_a_pis_camera_says_is_why_it_is_gone(recorded: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CameraGoneError, match=r"RuntimeError: Camera __init__ sequence did not complete\."):
        _one("picamera2:9")
    with pytest.raises(CameraGoneError, match="its process has ended"):
        _one("picamera2:8")
    monkeypatch.delenv("PYTHONPATH")
    with pytest.raises(CameraGoneError, match="try apt install python3-picamera2"):
        _one("picamera2:0")
    monkeypatch.setattr(picamera, "PYTHON", "/nowhere/python3")
    with pytest.raises(UsageError, match="expected /nowhere/python3, got No such file or directory"):
        _one("picamera2:0")


def test_a_stream_that_ends_before_it_is_asked_for_has_given_its_first_picture() -> None:
    class Short:
        def frames(self) -> Any:
            yield from [lambda: np.zeros((2, 3, 3), np.uint8)] * 3

        def close(self) -> None:
            pass

    drain = key_frames._Drain(Short())
    drain._thread.join(timeout=60)
    assert drain.next().content.shape == (2, 3, 3)  # type: ignore[union-attr]
    with pytest.raises(CameraGoneError, match="the stream has ended"):
        drain.next()
    drain.close()
