"""Key frames of a stream, through PyAV (extra `camera`), none of them older than the stream's next one.

1. A thread reads all that comes, as fast as it comes. So nothing waits anywhere: what is read is what is sent now.
2. Only key frames are decoded, and of these only those that are wanted. All other packets are thrown away unread. That
   is most of the processor time that a stream costs.
3. Whoever wants a picture says so, and gets the next key frame that begins after that.
4. A stream that stops, or that has no key frame for a minute, is gone.

A picture may change its size from key frame to key frame: each has its own. One above 25 megapixels is never decoded.

What FFmpeg says of an error names what it reads. So only the system's words for its number are used.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.edge_client.cameras.camera import CameraGoneError, Newest, Pace, Picture
from protofleet.edge_client.data.decode import MAX_PIXELS

__all__ = ["FORMATS", "Decode", "Stream", "decoded", "decoder", "key_frames", "opened", "pyav", "why"]

FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,h264,hevc,mjpeg"  # none that names other files or hosts
Pixels = NDArray[np.uint8]
Decode = Callable[[], Pixels | None]
"""Decodes one key frame: (H, W, 3) uint8 RGB, upright, or None where it is not whole."""
_PATIENCE_S = 60.0  # longer than between two key frames of any camera
_BROKEN = 30  # key frames, or parts of one, that cannot be decoded
_BOUNDS = {"max_pixels": str(MAX_PIXELS)}
_OPENING_S, _READING_S = 10.0, 10.0
_ENDING_S = 2.0


def pyav() -> Any:
    """The module `av`.

    Raises:
        UsageError: it is not installed.
    """
    try:
        import av
    except ModuleNotFoundError:
        hint = install_command("camera")
        raise UsageError("--camera", expected="PyAV (av)", got="nothing", hint=hint) from None
    return av


class Stream(Protocol):
    """What goes on and has key frames."""

    def frames(self) -> Iterator[Decode | None]:
        """For each key frame what decodes it, and None as often as there is a chance to end."""
        ...

    def close(self) -> None:
        """End, from another thread."""
        ...


def opened(where: str, *, form: str | None = None, **options: str) -> Any:
    """A file or device of FFmpeg's that has pictures, for `with`.

    Raises:
        CameraGoneError: it cannot be opened, or has no pictures.
    """
    av = pyav()
    options = {**_BOUNDS, **options}
    try:
        container = av.open(where, format=form, options=options, timeout=(_OPENING_S, _READING_S))
    except (av.FFmpegError, OSError, ValueError) as error:
        raise CameraGoneError(why(error)) from None
    if not container.streams.video:
        container.close()
        raise CameraGoneError("a stream without pictures")
    context = container.streams.video[0].codec_context
    context.thread_count, context.thread_type = 1, "NONE"
    return container


def decoder(coding: str) -> Callable[[bytes], Pixels | None]:
    """What decodes key frames of a coding, each by itself, as `decoded` does."""
    av = pyav()
    context = av.CodecContext.create(coding, "r")
    context.options, context.thread_count, context.thread_type = _BOUNDS, 1, "NONE"
    return lambda frame: decoded(context, av.Packet(frame))


def decoded(context: Any, packet: Any) -> Pixels | None:
    """A key frame as (H, W, 3) uint8 RGB, upright; None where it is not whole, or too large."""
    try:
        frames = [*context.decode(packet), *context.decode(None)]  # the decoder holds frames back, which follow no more
    except pyav().FFmpegError:
        return None
    finally:
        context.flush_buffers()
    whole = [frame for frame in frames if not frame.is_corrupt]
    if not whole:
        return None
    pixels = whole[0].to_ndarray(format="rgb24")
    return np.ascontiguousarray(np.rot90(pixels, round(whole[0].rotation / 90)))


def why(error: Exception) -> str:
    """Why FFmpeg refuses, without the name of what it refuses."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and 0 < number < 1000:
        return os.strerror(number)
    said = getattr(error, "strerror", None)
    return said if isinstance(said, str) else type(error).__name__


def key_frames(opens: Callable[[], Stream], every_s: float) -> Iterator[Picture]:
    """Key frames of a stream, one every so many seconds.

    Raises:
        CameraGoneError: it cannot be opened, or has ended.
        UsageError: PyAV is not installed.
    """
    pyav()
    drain, pace = _Drain(opens()), Pace(every_s)
    try:
        while True:
            pace.wait()
            yield drain.next()
    finally:
        drain.close()


class _Drain:
    """The thread that reads all that comes."""

    def __init__(self, stream: Stream) -> None:
        self._stream, self._newest = stream, Newest()
        self._wanted, self._closing = threading.Event(), threading.Event()
        self._wanted.set()  # the first one always is: a short stream may end before it is asked for
        self._thread = threading.Thread(target=self._read, name="camera", daemon=True)
        self._thread.start()

    def next(self) -> Picture:
        self._wanted.set()
        return self._newest.take(_PATIENCE_S)

    def close(self) -> None:
        self._closing.set()
        self._stream.close()
        self._thread.join(timeout=_ENDING_S)  # it may be within a call that cannot be ended: it ends by itself

    def _read(self) -> None:
        broken = 0
        try:
            for decode in self._stream.frames():
                if self._closing.is_set():
                    return
                if decode is None or not self._wanted.is_set():
                    continue
                came_s, pixels = time.time(), decode()
                broken = 0 if pixels is not None else broken + 1
                if pixels is not None:
                    self._wanted.clear()
                    self._newest.put(Picture(pixels, came_s))
                    pixels = None  # whoever has it now lets go of it while the next is decoded
                elif broken == _BROKEN:
                    raise CameraGoneError(f"no key frame of {_BROKEN} is whole, and at most {MAX_PIXELS:,} pixels")
            self._newest.end("the stream has ended")
        except CameraGoneError as error:
            self._newest.end(str(error))
        except Exception as error:  # whatever it is, who waits for a picture is to hear of it
            self._newest.end(why(error))
