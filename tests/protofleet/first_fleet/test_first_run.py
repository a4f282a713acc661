"""Which photos a first run keeps back, to ask about them."""

from __future__ import annotations

from pathlib import Path

from protofleet.first_fleet.first_run import kept_back
from protofleet.first_fleet.look import Photo


def test_one_photo_of_each_class_that_can_spare_one_and_of_twelve_at_most() -> None:
    counts = {f"class {n}": 5 for n in range(20)} | {"few": 4}
    photos = [Photo(Path(label) / str(n), label, (16, 16)) for label, count in counts.items() for n in range(count)]
    shown, asked = kept_back(photos)
    labels = [photo.label for photo in asked]
    assert (len(asked), len(set(labels)), "few" in labels) == (12, 12, False)
    assert set(shown) | set(asked) == set(photos)
    assert not set(shown) & set(asked)
    assert kept_back([photo for photo in photos if photo.label == "few"])[1] == []
