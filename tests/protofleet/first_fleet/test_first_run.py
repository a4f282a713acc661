"""Which photos a first run keeps back, to ask about them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofleet.first_fleet.first_run import kept_back
from protofleet.first_fleet.look import Photo


def each_alone(photos: Sequence[Photo]) -> NDArray[np.int64]:
    return np.arange(len(photos))


def test_one_photo_of_each_class_that_can_spare_one_and_of_twelve_at_most() -> None:
    counts = {f"class {n}": 5 for n in range(20)} | {"few": 4}
    photos = [Photo(Path(label) / str(n), label, (16, 16)) for label, count in counts.items() for n in range(count)]
    shown, asked = kept_back(photos, each_alone)
    labels = [photo.label for photo in asked]
    assert (len(asked), len(set(labels)), "few" in labels) == (12, 12, False)
    assert set(shown) | set(asked) == set(photos)
    assert not set(shown) & set(asked)
    assert kept_back([photo for photo in photos if photo.label == "few"], each_alone)[1] == []


def test_what_is_asked_about_has_no_near_copy_among_what_is_shown(tmp_path: Path) -> None:
    """Of a burst no frame is shown when another is asked about, and a class of one burst is not asked about."""
    rng, photos = np.random.default_rng(3), []
    for label, moments, frames in (("cat", 6, 3), ("dog", 40, 1), ("one burst", 1, 5)):
        for moment in range(moments):
            scene = rng.integers(0, 255, (6, 6, 3)).astype(np.uint8)
            image = np.asarray(Image.fromarray(scene).resize((96, 96), Image.Resampling.BICUBIC))
            for frame in range(frames):
                path = tmp_path / f"{label} {moment} {frame}.png"
                Image.fromarray(image[frame : 88 + frame, frame : 88 + frame]).save(path)
                photos.append(Photo(path, label, (88, 88)))
    for seed in range(4):
        shown, asked = kept_back(photos, seed=seed)
        assert [photo.label for photo in asked] == ["cat", "dog"]
        moments_shown = {photo.path.name.rsplit(" ", 1)[0] for photo in shown}
        assert not moments_shown & {photo.path.name.rsplit(" ", 1)[0] for photo in asked}
        assert len(photos) - len(shown) == 3 + 1
