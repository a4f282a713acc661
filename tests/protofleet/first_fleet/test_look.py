"""What is said of a folder of photos: where few, uneven and small begin."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter

from protofleet.contract.errors import DataError
from protofleet.first_fleet.look import LEAST_PX, look_at


def said(root: Path, counts: dict[str, int], px: tuple[int, int] = (LEAST_PX, LEAST_PX)) -> str:
    rng = np.random.default_rng(0)
    for label, count in counts.items():
        (root / label).mkdir(parents=True)
        for n in range(count):
            Image.fromarray(rng.integers(0, 255, (px[1], px[0], 3), dtype=np.uint8)).save(root / label / f"{n}.png")
    return "\n".join(look_at(root).lines)


def test_few_and_uneven_are_said_from_their_bounds_on(tmp_path: Path) -> None:
    assert "Fewer than 4 photos: dog." in said(tmp_path / "few", {"cat": 4, "dog": 3})
    even = said(tmp_path / "even", {"cat": 20, "dog": 4})
    assert "Fewer" not in even
    assert "Uneven" not in even
    assert "Uneven: cat has 21 photos, dog 4." in said(tmp_path / "uneven", {"cat": 21, "dog": 4})


def test_blurred_photos_are_counted(tmp_path: Path) -> None:
    rng, side = np.random.default_rng(0), 200
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for n in range(4):
            grey = np.full((side, side, 3), 90, dtype=np.uint8)
            top, left = rng.integers(20, 80, 2)
            grey[top : top + 90, left : left + 90] = 200
            photo = Image.fromarray(grey)
            blurred = (
                photo.filter(ImageFilter.GaussianBlur(0.06 * side)) if (label, n) in (("dog", 1), ("dog", 2)) else photo
            )
            light = 0.2 if n == 3 else 1.0
            ImageEnhance.Brightness(blurred).enhance(light).save(tmp_path / label / f"{n}.png")
    Image.new("RGB", (side, side), (80, 80, 80)).save(tmp_path / "cat" / "wall.png")
    look = look_at(tmp_path)
    assert [path.name for path in look.blurred] == ["1.png", "2.png"]
    assert any(line.startswith("2 photos look blurred (dog/1.png)") for line in look.lines)


def test_the_shorter_side_of_most_photos_decides(tmp_path: Path) -> None:
    assert "All are 40 × 16 px." in said(tmp_path / "least", {"cat": 1, "dog": 1}, (40, LEAST_PX))
    with pytest.raises(DataError, match="photos of 16 px or more, got most of 15 px"):
        said(tmp_path / "small", {"cat": 1, "dog": 1}, (40, LEAST_PX - 1))
