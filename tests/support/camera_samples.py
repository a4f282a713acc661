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
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=rate)
        stream.width, stream.height = size
        stream.options = {"g": str(key_every), "keyint_min": str(key_every), "sc_threshold": "0"}
        for level in levels:
            pixels = np.zeros((size[1], size[0], 3), np.uint8)
            pixels[:, : size[0] // 2] = level
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))
    return path


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


@contextmanager
def rtsp_server(*words: object) -> Iterator[int]:
    """The real server with these options, and its port; skips where this machine has none, fails in CI."""
    if why := _missing():
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)
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
