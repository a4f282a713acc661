"""`v4l2:0`, `v4l2:/dev/video0`: a camera at this board, by USB or as the kernel shows it. Not run on a board."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from protofleet.contract.errors import UsageError
from protofleet.contract.printable import undisclosed_if_url
from protofleet.edge_client.cameras.camera import Picture
from protofleet.edge_client.cameras.key_frames import Decode, decoded, key_frames, opened

__all__ = ["V4l2"]

_DEVICE = re.compile(r"(?:/dev/)(?:video\d{1,3}|v4l/by-(?:id|path)/[\w.:+-]+)")


class V4l2:
    """A device of the kernel's."""

    ends = False

    def __init__(self, text: str) -> None:
        given = text.partition(":")[2]
        device = f"/dev/video{given}" if re.fullmatch(r"\d{1,3}", given) else given
        if not _DEVICE.fullmatch(device):
            expected = "v4l2:NUMBER, v4l2:/dev/videoNUMBER or v4l2:/dev/v4l/by-id/NAME"
            raise UsageError("--camera", expected=expected, got=undisclosed_if_url(text), hint="ls /dev/video*")
        self._device, self.shown = device, device

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`."""
        return key_frames(lambda: _Frames(self._device), every_s)


class _Frames:
    """See `key_frames.Stream`. The driver has room for a few frames, and leaves out what finds none."""

    def __init__(self, device: str) -> None:
        self._device = device

    def frames(self) -> Iterator[Decode | None]:
        with opened(self._device, form="v4l2") as container:
            stream = container.streams.video[0]
            for packet in container.demux(stream):
                is_key = packet.is_keyframe and packet.size
                yield functools.partial(decoded, stream.codec_context, packet) if is_key else None

    def close(self) -> None:
        pass  # the next frame, or the end of patience with it, ends the loop
