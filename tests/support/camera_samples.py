"""Cameras for tests: servers that do as they are told, videos."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fractions import Fraction
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

SYSTEM_PYTHON = "/usr/bin/python3"
_SERVER = Path(__file__).with_name("rtsp_server.py")
_NEEDS = "import gi; gi.require_version('GstRtspServer', '1.0'); from gi.repository import GstRtspServer, Gst; "
_NEEDS += "Gst.init(None); assert Gst.ElementFactory.find('x264enc')"


def jpeg(width: int = 40, height: int = 30, colour: tuple[int, int, int] = (200, 20, 10)) -> bytes:
    """A picture of one colour."""
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "JPEG")
    return out.getvalue()


def key_frame(coding: str, width: int, height: int, level: int = 90) -> bytes:
    """A grey picture as an encoder of PyAV's makes it: units with start codes."""
    import av

    encoder = av.CodecContext.create(coding, "w")
    encoder.width, encoder.height, encoder.pix_fmt, encoder.time_base = width, height, "yuv420p", Fraction(1, 10)
    encoder.options = {"preset": "ultrafast", "tune": "zerolatency", "x265-params": "log-level=none"}
    frame = av.VideoFrame.from_ndarray(np.full((height, width, 3), level, np.uint8), format="rgb24")
    return b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])


def video(
    path: Path, levels: Sequence[int], *, rate: int = 10, key_every: int = 5, size: tuple[int, int] = (64, 48)
) -> Path:
    """A video whose pictures have these levels of grey, in the left half; the right one is black."""
    pictures = []
    for level in levels:
        pictures.append(np.zeros((size[1], size[0], 3), np.uint8))
        pictures[-1][:, : size[0] // 2] = level
    return video_of(path, pictures, rate=rate, key_every=key_every)


def video_of(path: Path, pictures: Sequence[NDArray[np.uint8]], *, rate: int = 10, key_every: int = 5) -> Path:
    """A video of these pictures (H, W, 3)."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.height, stream.width = pictures[0].shape[:2]
        stream.options = {"g": str(key_every), "keyint_min": str(key_every), "sc_threshold": "0"}
        for pixels in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path


def scene(
    seed: int, *, place: int | None = None, noise: float = 6.0, gain: float = 1.0, level: float = 0.0
) -> NDArray[np.uint8]:
    """A picture (240, 320, 3) of a room: its noise by `seed`, and an object of 1.6 % of it at one of four places.

    Args:
        noise: standard deviation of each pixel's, grey levels.
        gain, level: of its light: each pixel is multiplied, and this is added.
    """
    rng = np.random.default_rng(7)
    room = np.full((240, 320), 90.0) + np.linspace(-40, 50, 320)
    for _ in range(25):
        y, x = rng.integers(0, 200), rng.integers(0, 280)
        room[y : y + rng.integers(10, 60), x : x + rng.integers(10, 60)] = rng.uniform(30, 200)
    if place is not None:
        at = 20 + 75 * place
        room[90:130, at : at + 30] = 255 - room[90:130, at : at + 30]
        room[100:120, at + 5 : at + 25] = 240 if room[110, at + 10] < 130 else 15
    seen = room * gain + level + np.random.default_rng(seed).normal(0, noise, room.shape)
    return np.repeat(np.clip(seen, 0, 255).astype(np.uint8)[..., None], 3, axis=2)


def place_in(pixels: NDArray[np.uint8]) -> int | None:
    """Where the object is in such a picture, or one of it that was coded; light as of `scene` by default."""
    plain = scene(0, noise=0.0).astype(float)[..., 0]
    levels = pixels[..., 0].astype(float)
    levels = levels * (np.median(plain) / np.median(levels))
    found = [np.abs(levels - plain)[90:130, 20 + 75 * place : 50 + 75 * place].mean() for place in range(4)]
    return int(np.argmax(found)) if max(found) > 35 else None


@contextmanager
def scripted(answer: Callable[[socket.socket], object]) -> Iterator[int]:
    """A server on a port of this machine that does with each connection what `answer` does, as often as one comes."""
    server, made = socket.create_server(("127.0.0.1", 0)), []

    def one(connection: socket.socket) -> None:
        try:
            with connection:
                answer(connection)
        except OSError:  # who asked has gone
            pass

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            made.append(connection)
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        for connection in made:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join()


@cache
def _missing() -> str:
    if not os.access(SYSTEM_PYTHON, os.X_OK):
        return f"no {SYSTEM_PYTHON}"
    done = subprocess.run([SYSTEM_PYTHON, "-c", _NEEDS], capture_output=True, text=True)
    packages = "gir1.2-gst-rtsp-server-1.0 python3-gi gstreamer1.0-plugins-{base,good,ugly}"
    return f"no RTSP server, try apt install {packages}" if done.returncode else ""


def need_rtsp_server() -> None:
    """Skip where this machine has no RTSP server, fail in CI."""
    if why := _missing():
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)


@contextmanager
def rtsp_server(*words: object) -> Iterator[int]:
    """The real server with these options, and its port; skips where this machine has none, fails in CI."""
    need_rtsp_server()
    process = subprocess.Popen(
        [SYSTEM_PYTHON, str(_SERVER), *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def no_reader_is_left() -> None:
    """Every thread that reads a camera ends, however slow the machine."""
    deadline = time.monotonic() + 60.0
    while any(thread.name == "camera" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
