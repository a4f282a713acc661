"""edge_client/cameras/video_file.py and folder.py, on real videos and folders."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from camera_samples import jpeg, video

from protofleet.contract.errors import DataError
from protofleet.edge_client.cameras.sources import camera_of, pictures_of

LEVELS = [*range(20, 240, 8)]  # 28 pictures, 2.8 s; key frames at 0, 0.5, 1, 1.5, 2 and 2.5 s


@pytest.mark.parametrize(("every_s", "taken"), [(0.01, [0, 5, 10, 15, 20, 25]), (1.0, [0, 10, 20]), (1.2, [0, 15, 25])])
def test_a_videos_key_frames_come_by_the_videos_clock_each_with_its_time_and_place(
    every_s: float, taken: list[int], tmp_path: Path
) -> None:
    path = video(tmp_path / "a.mp4", LEVELS)
    os.utime(path, (1_000_000, 1_000_000))
    found = list(pictures_of(camera_of(f"file:{path}"), every_s))
    assert [picture.file for picture in found] == [f"{path}#t={at / 10:.3f}" for at in taken]
    assert [round(picture.taken_s - 1_000_000 + 2.8, 3) for picture in found] == [at / 10 for at in taken]
    for picture, at in zip(found, taken, strict=True):
        assert isinstance(picture.content, np.ndarray)
        assert picture.content.shape == (48, 64, 3)
        assert abs(int(picture.content[24, 8, 0]) - LEVELS[at]) < 8  # lossy
        assert picture.content[24, 56, 0] < 8


def test_a_video_that_was_filmed_on_its_side_comes_upright(tmp_path: Path) -> None:
    import av

    plain, turned = video(tmp_path / "a.mp4", [200]), tmp_path / "b.mp4"
    with av.open(str(plain)) as source, av.open(str(turned), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        if not hasattr(stream, "set_display_rotation"):
            pytest.skip("this PyAV writes no rotation; that one is read is tried with newer ones")
        stream.set_display_rotation(90)
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                target.mux(packet)
    (picture,) = pictures_of(camera_of(f"file:{turned}"), 1.0)
    assert isinstance(picture.content, np.ndarray)
    assert picture.content.shape == (64, 48, 3)
    with av.open(str(turned)) as source:
        rotation = next(source.decode(video=0)).rotation
    assert rotation in (90, -90)
    bright = picture.content[56, 24, 0] if rotation == 90 else picture.content[8, 24, 0]  # counted anticlockwise
    assert bright > 150


@pytest.mark.parametrize(
    "content", [b"", b"no video" * 100, b"#EXTM3U\n#EXTINF:1,\nsecret.ts\n", b"ffconcat version 1.0\nfile secret.mp4\n"]
)
def test_what_is_no_video_is_refused_and_names_no_other_file(content: bytes, tmp_path: Path) -> None:
    video(tmp_path / "secret.mp4", LEVELS)
    (tmp_path / "secret.ts").write_bytes((tmp_path / "secret.mp4").read_bytes())
    for name in ("a.mp4", "a.m3u8", "a.txt"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=rf"cannot read .*{name}, expected a video, got [\w ]+$"):
            list(pictures_of(camera_of(f"file:{tmp_path / name}"), 1.0))


def test_a_photo_that_is_put_into_a_folder_comes_with_its_path_and_the_time_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg())
    os.utime(tmp_path / "a.jpg", (5, 5))
    pictures = pictures_of(camera_of(f"folder:{tmp_path}"), 0.01)
    picture = next(pictures)
    assert (picture.file, picture.content, picture.taken_s) == (f"{tmp_path}/a.jpg", f"{tmp_path}/a.jpg", 5.0)
    (tmp_path / "b.jpg").write_bytes(jpeg())
    assert next(pictures).file == f"{tmp_path}/b.jpg"
