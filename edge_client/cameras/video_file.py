"""`file:video.mp4`: the key frames of a video, one every so many seconds of the video, as fast as they can be read.

A picture was taken as long before the file was last written as it stands before the file's end.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from protofleet.contract.errors import DataError
from protofleet.edge_client.cameras.camera import CameraGoneError, Picture
from protofleet.edge_client.cameras.key_frames import FORMATS, decoded, opened, pyav, why

__all__ = ["VideoFile"]


class VideoFile:
    """A file of a video."""

    ends = True

    def __init__(self, text: str) -> None:
        self._path = text.partition(":")[2]
        self.shown = "a video"
        if not os.path.isfile(self._path):
            raise DataError(f"no video at {self._path}", expected="file:VIDEO, a video's file", got="nothing there")

    def pictures(self, every_s: float) -> Iterator[Picture]:
        """See `Reader`.

        Raises:
            DataError: it is no video, or breaks off in a way that cannot be read.
        """
        av = pyav()
        path = os.path.abspath(self._path)  # FFmpeg would take a word and a colon for a protocol
        try:
            with opened(f"file:{path}", protocol_whitelist="file", format_whitelist=FORMATS) as container:
                stream, last_s = container.streams.video[0], os.stat(path).st_mtime
                lasts_s = (container.duration or 0) / 1_000_000
                begins_s, due_s = None, 0.0
                for packet in container.demux(stream):
                    if not packet.is_keyframe or not packet.size or packet.pts is None:
                        continue
                    at_s = float(packet.pts * packet.time_base)
                    begins_s = at_s if begins_s is None else begins_s
                    at_s -= begins_s
                    if at_s < due_s or (pixels := decoded(stream.codec_context, packet)) is None:
                        continue
                    due_s = max(due_s, at_s - every_s) + every_s
                    yield Picture(pixels, last_s - max(lasts_s - at_s, 0.0), f"{self._path}#t={at_s:.3f}")
        except (CameraGoneError, av.FFmpegError, OSError, ValueError) as error:
            said = str(error) if isinstance(error, CameraGoneError) else why(error)
            raise DataError(f"cannot read {self._path}", expected="a video", got=said) from None
