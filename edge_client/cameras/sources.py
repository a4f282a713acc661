"""Which camera a text names, and its pictures for as long as the process runs.

A further kind is a module of this folder, and its line in `CAMERAS`.

A camera that is gone is told of in one line, and tried again after 1, 2, 4 … seconds, at most a minute; it is told of
again when it is back. Only a file comes to an end.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType

from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.names import listed
from protofleet.contract.printable import undisclosed
from protofleet.edge_client.cameras.camera import CameraGoneError, Picture, Reader

__all__ = ["CAMERAS", "CAMERA_HELP", "ON_MOTION_HELP", "Kind", "camera_of", "pictures_of"]

logger = logging.getLogger(__name__)

_FIRST_S, _LONGEST_S = 1.0, 60.0


@dataclass(frozen=True)
class Kind:
    """One kind of camera.

    Attributes:
        form: how such a camera is named, for help and errors.
        module, reader: of this folder, the class that reads it. It is imported when it is used.
    """

    form: str
    module: str
    reader: str


CAMERAS: Mapping[str, Kind] = MappingProxyType(  # by the word before the colon
    {
        "v4l2": Kind("v4l2:0", "v4l2", "V4l2"),
        "picamera2": Kind("picamera2:0", "picamera", "Picamera"),
        "rtsp": Kind("rtsp://HOST/PATH", "rtsp", "Rtsp"),
        "http": Kind("http://HOST/SNAPSHOT", "http_snapshot", "HttpSnapshot"),
        "https": Kind("https://HOST/SNAPSHOT", "http_snapshot", "HttpSnapshot"),
        "mqtt": Kind("mqtt://BROKER/TOPIC", "mqtt_snapshots", "MqttSnapshots"),
        "mqtts": Kind("mqtts://BROKER/TOPIC", "mqtt_snapshots", "MqttSnapshots"),
        "file": Kind("file:VIDEO", "video_file", "VideoFile"),
        "folder": Kind("folder:DIRECTORY", "folder", "Folder"),
    }
)
_FORMS = listed(kind.form for kind in CAMERAS.values())
CAMERA_HELP = f"A camera: {_FORMS}."
ON_MOTION_HELP = (
    "Take a picture when something has moved, at most one each --every; where nothing moves, one each 10 minutes, or"
    " each --every if that is longer."
)


def camera_of(text: str) -> Reader:
    """What reads the camera that a text names; nothing of it is read yet.

    Raises:
        UsageError: it names none.
        DataError: a file or folder that it names is not there.
    """
    word = text.partition(":")[0].lower()
    if ":" not in text or word not in CAMERAS:
        if text.isdecimal():
            raise UsageError("--camera", expected=_FORMS, got=text, hint=f"v4l2:{text}")
        hint = near_names(word, CAMERAS) if ":" in text and "@" not in word else None
        raise UsageError("--camera", expected=_FORMS, got=undisclosed(text), hint=hint)
    kind = CAMERAS[word]
    reader: Callable[[str], Reader] = getattr(import_module(f"{__package__}.{kind.module}"), kind.reader)
    return reader(text)


def pictures_of(camera: Reader, every_s: float, *, sleep: Callable[[float], None] = time.sleep) -> Iterator[Picture]:
    """Pictures of a camera, one every so many seconds; ends where the camera is a file.

    Raises:
        ProtofleetError: it never gives one.
    """
    wait_s, is_gone = _FIRST_S, False
    while True:
        why = "it has ended"
        try:
            with contextlib.closing(camera.pictures(every_s)) as pictures:  # type: ignore[type-var]
                for picture in pictures:
                    if is_gone:
                        logger.info(f"camera {camera.shown} is back")
                    wait_s, is_gone = _FIRST_S, False
                    yield picture
                    del picture  # not kept while the next one is read
        except CameraGoneError as error:
            why = str(error)
        if camera.ends:
            return
        if not is_gone:
            again = f"tried again, at least every {_LONGEST_S:g} s"
            logger.warning(f"camera {camera.shown} gives no picture ({why}): {again}")
        is_gone = True
        sleep(wait_s)
        wait_s = min(2 * wait_s, _LONGEST_S)
