"""`picamera2:0`: a Raspberry Pi's own camera, through libcamera. Not run on a board.

Picamera2 comes from the system's packages, and a virtual environment cannot import it. So a process of the system's
Python runs `picamera_helper.py`, and gives a JPEG whenever it is asked for one.
"""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.contract.printable import undisclosed_if_url
from protofleet.edge_client.cameras.camera import LARGEST_BYTES, CameraGoneError, Pace, Picture

__all__ = ["Picamera"]

PYTHON = "/usr/bin/python3"
_HELPER = Path(__file__).with_name("picamera_helper.py")
_PATIENCE_S = 20.0


class Picamera:
    """A camera that libcamera knows, by its number."""

    ends = False

    def __init__(self, text: str) -> None:
        self._number, self.shown = text.partition(":")[2], text
        if not re.fullmatch(r"\d{1,2}", self._number):
            raise UsageError("--camera", expected="picamera2:NUMBER", got=undisclosed_if_url(text), hint="picamera2:0")

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`.

        Raises:
            UsageError: the system has no Python.
        """
        command = [PYTHON, str(_HELPER), self._number]
        try:
            helper = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
            )
        except OSError as error:
            raise UsageError("--camera picamera2:", expected=PYTHON, got=error.strerror) from None
        with helper:
            try:
                pace = Pace(every_s)
                while True:
                    pace.wait()
                    asked_s = time.time()
                    yield Picture(_asked(helper), asked_s)
            finally:
                helper.kill()


def _asked(helper: subprocess.Popen[bytes]) -> bytes:
    assert helper.stdin is not None
    try:
        helper.stdin.write(b"\n")
    except OSError:
        raise CameraGoneError("its process has ended") from None
    deadline_s = time.monotonic() + _PATIENCE_S
    kind, size = _read(helper, 1, deadline_s), int.from_bytes(_read(helper, 4, deadline_s), "big")
    if size > LARGEST_BYTES:
        raise CameraGoneError(f"more than {LARGEST_BYTES >> 20} MiB")
    content = _read(helper, size, deadline_s)
    if kind != b"P":
        raise CameraGoneError(content[:200].decode(errors="replace"))
    return content


def _read(helper: subprocess.Popen[bytes], count: int, deadline_s: float) -> bytes:
    assert helper.stdout is not None
    found = b""
    while len(found) < count:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([helper.stdout], [], [], left_s)[0]:
            raise CameraGoneError(f"no picture in {_PATIENCE_S:g} s")
        part = os.read(helper.stdout.fileno(), count - len(found))
        if not part:
            raise CameraGoneError("its process has ended")
        found += part
    return found
