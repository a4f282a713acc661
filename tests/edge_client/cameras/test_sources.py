"""edge_client/cameras/sources.py, url.py: which camera a text names, and what is said and done while it is gone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.cameras.camera import CameraGoneError, Pace, Picture
from protofleet.edge_client.cameras.sources import CAMERAS, camera_of, pictures_of


def test_each_kind_is_read_by_a_class_of_this_folder_which_takes_its_form(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").touch()
    there = {"file": f"file:{tmp_path / 'a.mp4'}", "folder": f"folder:{tmp_path}"}
    for word, kind in CAMERAS.items():
        camera = camera_of(there.get(word, kind.form.replace("HOST", "host").replace("BROKER", "host")))
        assert type(camera) is getattr(import_module(f"protofleet.edge_client.cameras.{kind.module}"), kind.reader)
        assert camera.ends == (word == "file")


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("0", UsageError, r"got 0, try v4l2:0$"),
        ("door", UsageError, r"expected v4l2:0, picamera2:0, rtsp://HOST/PATH, .*, got 4 characters"),
        ("rstp://h/x", UsageError, r"try .*rtsp"),
        ("v4l2:/etc/passwd", UsageError, r"expected v4l2:NUMBER, .*, got v4l2:/etc/passwd, try ls /dev/video"),
        ("picamera2:x", UsageError, r"expected picamera2:NUMBER, got picamera2:x"),
        ("rtsp://h:99999/x", UsageError, r"got 16 characters"),
        ("rtsp://h/a b", UsageError, r"got 12 characters"),
        ("http://me:a/b@h/x", UsageError, r"got 17 characters that begin with http://"),
        ("mqtt://h", UsageError, r"expected mqtt\[s\]://BROKER/TOPIC"),
        ("mqtt://h/a+/b", UsageError, r"expected mqtt\[s\]://BROKER/TOPIC"),
        ("file:nowhere.mp4", DataError, r"no video at nowhere.mp4"),
        ("folder:nowhere", DataError, r"no folder at nowhere, expected folder:DIRECTORY, got nothing there"),
    ],
)
def test_what_names_no_camera_is_one_line(text: str, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        camera_of(text)


@pytest.mark.parametrize("text", ["rtsp://me:hunter2@h/cam?pwd=hunter2", "http://h/snap?user=me&pwd=hunter2"])
def test_a_cameras_name_holds_neither_password_nor_path(text: str) -> None:
    assert "hunter2" not in camera_of(text).shown
    assert "hunter2" not in repr(vars(camera_of(text)))


@pytest.mark.parametrize(
    "text",
    [
        *("mqtt://me:hunter2@h", "mqtts://me:hunter2@h/a+/b", "mqtt://me:hunter2/x@h/a", "rtsp://me:hunter2@h/a b"),
        *("https://me:hunter2@h:99999/", "v4l3://me:hunter2@h/", "me:hunter2@h"),
        *("mqtt:me:hunter2/h", "rtsp:me:hunter2/h", "http:/me:hunter2/h"),
    ],
)
def test_a_password_in_what_names_no_camera_is_not_shown(text: str) -> None:
    with pytest.raises(UsageError) as refused:
        camera_of(text)
    assert "hunter2" not in f"{refused.value}{refused.value!r}"


class _Played:
    """A camera that gives so many pictures at each try, and is then gone."""

    shown, ends = "rtsp://h:554", False

    def __init__(self, tries: list[int]) -> None:
        self._tries = iter(tries)

    def pictures(self, every_s: float) -> Iterator[Picture]:
        for _ in range(next(self._tries)):
            yield Picture(b"", 0.0)
        raise CameraGoneError("Connection refused")


def test_a_camera_that_is_gone_is_one_line_longer_waits_and_back_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    pictures = pictures_of(_Played([1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1]), 0.0, sleep=slept.append)
    with caplog.at_level(logging.INFO, "protofleet"):
        for _ in range(4):
            next(pictures)
    assert slept == [1, 2, 4, 8, 16, 32, 60, 60, 1, 2]
    gone = "camera rtsp://h:554 gives no picture (Connection refused): tried again, at least every 60 s"
    assert [record.getMessage() for record in caplog.records] == [gone, "camera rtsp://h:554 is back"] * 2


def test_turns_are_steady_and_one_that_took_too_long_is_followed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    waits: list[float] = []

    def sleep(for_s: float) -> None:
        waits.append(round(for_s, 6))
        now[0] += for_s

    monkeypatch.setattr("protofleet.edge_client.cameras.camera.time.monotonic", lambda: now[0])
    monkeypatch.setattr("protofleet.edge_client.cameras.camera.time.sleep", sleep)
    pace = Pace(5.0)
    for takes_s in (1.0, 2.0, 12.0, 1.0, 0.0):
        pace.wait()
        now[0] += takes_s
    assert waits == [4.0, 3.0, 4.0]
