"""edge_client/cameras/motion.py: what moves is seen, noise and light are not; on a real stream, a video, a client."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from camera_samples import jpeg, place_in, rtsp_server, scene
from commands import one_error_line, run
from numpy.typing import NDArray

from protofleet.edge_client.cameras.camera import Picture
from protofleet.edge_client.cameras.motion import CELLS, LOOK_S, STILL_S, Motion, changed_cells
from protofleet.edge_client.cameras.sources import ON_MOTION_HELP, camera_of, pictures_of

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"
LIGHT = [(1.0, 0.0), (0.5, 0.0), (1.2, 0.0), (1.0, 40.0), (0.8, -20.0), (1.1, 15.0)]  # none saturates


def cells(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    _, x = Picture(pixels, 0.0).fitted((48, 64, 1))
    assert isinstance(x, np.ndarray)
    return x[..., 0].astype(np.float32)


def is_wanted(motion: Motion, at_s: float, seed: int, **more: float) -> bool:
    return motion.is_wanted(Picture(scene(seed, **more), at_s))  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 6.0, 20.0])
@pytest.mark.parametrize(("gain", "level"), LIGHT)
def test_noise_and_another_light_change_no_cell_and_an_object_does(noise: float, gain: float, level: float) -> None:
    before = cells(scene(0, noise=noise))
    for seed in range(1, 6):
        still = scene(seed, noise=noise, gain=gain, level=level)
        moved = scene(seed, place=seed % 4, noise=noise, gain=gain, level=level)
        assert changed_cells(before, cells(still)) < CELLS / 2
        assert changed_cells(before, cells(moved)) > CELLS


def test_another_scene_is_a_change_and_the_light_that_goes_out_is_none() -> None:
    before, rng = cells(scene(0)), np.random.default_rng(0)
    other = rng.integers(0, 256, (12, 16, 3), np.uint8).repeat(20, 0).repeat(20, 1)
    assert changed_cells(before, cells(other)) > 500
    assert changed_cells(before, cells(np.zeros_like(other))) == 0
    assert changed_cells(cells(np.full_like(other, 90)), before) > 500
    assert (
        changed_cells(cells(np.full_like(other, 90)), cells(np.full_like(other, 140))) == 0
    )  # a wall in another light


def test_a_still_scene_gives_the_first_picture_and_one_each_ten_minutes() -> None:
    motion = Motion(5.0)
    assert motion.look_s == LOOK_S
    times = [at for at in range(0, 1900, 5) if is_wanted(motion, at, at, gain=1.0 + 0.3 * np.sin(at))]
    assert times == [0, STILL_S, 2 * STILL_S, 3 * STILL_S]
    hourly = Motion(3600.0)
    assert [at for at in range(0, 4000, 100) if is_wanted(hourly, at, at, place=at // 100 % 4)] == [0, 3600]
    assert "where nothing moves, one each 10 minutes, or each --every if that is longer" in ON_MOTION_HELP


def test_what_moves_is_at_most_one_picture_each_every_and_what_stays_is_one() -> None:
    motion, times = Motion(5.0), []
    for at in range(60):
        place = None if at < 10 else at % 4 if at < 31 else 2
        if is_wanted(motion, 100.0 + at, at, **({} if place is None else {"place": place})):
            times.append(at)
    assert times == [0, 10, 15, 20, 25, 30]  # at 30 it is where it stays
    assert not is_wanted(motion, 161.0, 1, place=2)
    assert is_wanted(motion, 162.0, 1)  # it has gone
    assert is_wanted(motion, 50.0, 2, place=1)  # the clock was set back


def test_outside_the_crop_nothing_counts_and_what_cannot_be_read_is_told() -> None:
    motion = Motion(1.0, (0, 140, 320, 100))
    assert [is_wanted(motion, at, at, place=at % 4) for at in range(4)] == [True, False, False, False]
    motion = Motion(1.0)
    assert [motion.is_wanted(Picture(b"no picture", at)) for at in (0.0, 0.5, 1.0)] == [True, False, True]
    pictures = [Picture(jpeg(colour=(level,) * 3), 9.0 + level) for level in (100, 120)]
    assert [motion.is_wanted(picture) for picture in pictures] == [True, False]


def test_of_a_real_stream_only_what_moved_comes(tmp_path: Path) -> None:
    """Key frames of x264, in turn: a still room in three lights, then something at two places."""
    shown = [scene(1), scene(2, gain=1.3), scene(3, gain=0.75), scene(4, place=0), scene(5, place=3)]
    luma = [picture[..., 0].astype(float) * 219 / 255 + 16 for picture in shown]  # I420 has a limited range
    chroma = bytes([128]) * (320 * 240 // 2)
    (tmp_path / "frames").write_bytes(b"".join(each.astype(np.uint8).tobytes() + chroma for each in luma))
    size = ("--width", 320, "--height", 240, "--kbit", 4000)
    with rtsp_server("--key-s", 0.5, "--frames", tmp_path / "frames", *size) as port:
        motion, looked, wanted = Motion(0.1), 0, []
        for picture in pictures_of(camera_of(f"rtsp://127.0.0.1:{port}/clock"), motion.look_s):
            assert isinstance(picture.content, np.ndarray)
            looked += 1
            if motion.is_wanted(picture):
                wanted.append(place_in(picture.content))
            if len(wanted) == 7:
                break
    assert {None, 0, 3} == set(wanted)
    assert all(one != other for one, other in itertools.pairwise(wanted))
    assert looked > len(wanted) + 1


def test_without_a_camera_it_is_refused_in_one_line() -> None:
    for words in (
        ["predict", "a.png", "--bundle", BUNDLE],
        ["client", "--bundle", BUNDLE, "--id", "a", "--state", "s"],
    ):
        done = run(
            *words, "--on-motion", *(["--broker", "mqtt://127.0.0.1:1", "--data", "d"] if "--id" in words else [])
        )
        assert (done.returncode, "--on-motion, expected --camera" in one_error_line(done)) == (2, True)
