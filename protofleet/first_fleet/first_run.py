"""A first run of a fleet on this machine: broker, aggregator and one device as processes, then questions.

1. Of each class that can spare one, a photo is kept back. The device is given the others, as a list of paths, without
   near copies of what is kept back: who has learned a burst's other frames is not asked about a new photo.
2. The processes start from the fleet's own settings files. They end with this one, however it ends.
3. When the device has the fleet's head, it is asked about the photos that were kept back.
"""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.advice.near_copies import near_copies
from protofleet.contract.errors import LinkError, ProtofleetError, StoreError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.mqtt.address import parse_listen
from protofleet.edge_client.data.decode import decode_image
from protofleet.first_fleet.files import FIRST, FleetFiles
from protofleet.first_fleet.look import FEW, Photo
from protofleet.lab.demo.processes import Fleet, wait_for_port
from protofleet.library.predictor import Predictor

__all__ = ["ASKED", "Asked", "first_run", "kept_back"]

PATIENCE_S = 120.0
ASKED = 12  # photos, at most
_COMPARED = 100  # photos of a class, at most, in the order of their names, which puts a burst together
_THUMBNAIL = (32, 32, 3)


@dataclass(frozen=True)
class Asked:
    """A photo that the device was not shown, and what it said."""

    photo: Photo
    answer: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.photo.label


def kept_back(
    photos: Sequence[Photo], groups_of: Callable[[Sequence[Photo]], NDArray[np.int64]] | None = None, seed: int = 0
) -> tuple[list[Photo], list[Photo]]:
    """(shown, kept back): one photo of each class, of at most twelve classes, whose near copies are in neither list.

    Of a class with more than `FEW` photos one is kept back if beside it and its near copies `FEW` are left.

    Args:
        groups_of: a number for each of some photos, equal for near copies; None to compare their pixels.
    """
    rng = np.random.default_rng(seed)
    of_class: dict[str, list[Photo]] = {}
    for photo in photos:
        of_class.setdefault(photo.label, []).append(photo)
    able = [label for label, own in of_class.items() if len(own) > FEW]
    chosen = [able[place] for place in sorted(rng.permutation(len(able))[:ASKED])]
    compared = [photo for label in chosen for photo in of_class[label][:_COMPARED]]
    numbers = (groups_of or _groups)(compared)
    group = {photo.path: int(number) for photo, number in zip(compared, numbers, strict=True)}
    asked: list[Photo] = []
    apart: set[Path] = set()
    for label in chosen:
        own = of_class[label]
        candidates = own[:_COMPARED]
        first = int(rng.integers(len(candidates)))
        for photo in (*candidates[first:], *candidates[:first]):
            alike = {other.path for other in candidates if group[other.path] == group[photo.path]}
            if len(own) - len(alike) >= FEW:
                asked.append(photo)
                apart |= alike
                break
    return [photo for photo in photos if photo.path not in apart], asked


def _groups(photos: Sequence[Photo]) -> NDArray[np.int64]:
    thumbnails = [decode_image(str(photo.path), _THUMBNAIL) for photo in photos]
    return near_copies([np.stack(thumbnails)] if thumbnails else [])


def first_run(files: FleetFiles, photos: Sequence[Photo], on_start: Callable[[str], None]) -> list[Asked]:
    """Run the fleet until its device answers. Everything that was started has ended on return.

    Args:
        photos: those that can be read.
        on_start: called with each command that is started.

    Raises:
        LinkError: a process failed, or no head came in time; its log is named.
        StoreError: the disk refuses.
    """
    shown, asked = kept_back(photos)
    listed = files.folder / "shown.csv"
    _write_list(listed, shown)
    broker, aggregator, client = files.commands
    with Fleet(files.folder / "logs", on_start=on_start) as fleet:
        fleet.start("broker", broker)
        wait_for_port(fleet, "broker", parse_listen(files.listen)[1])
        fleet.start("aggregator", aggregator)
        fleet.start(FIRST, [*client, "--data", str(listed)])
        predictor = _answering(fleet, files)
        return [Asked(photo, _answer(predictor, photo)) for photo in asked]


def _answering(fleet: Fleet, files: FleetFiles) -> Predictor:
    """A predictor over the device's state, once that has what the fleet has learned."""
    deadline, why = time.monotonic() + PATIENCE_S, "no state"
    history = files.state / "history.jsonl"
    while time.monotonic() < deadline:
        fleet.check(lasting=("broker", "aggregator", FIRST))
        if history.is_file():
            try:
                return Predictor(files.state, bundle=files.bundle, provider="cpu")
            except ProtofleetError as error:
                why = str(error)
        time.sleep(0.2)
    raise LinkError(FIRST, expected=f"a head within {PATIENCE_S:.0f} s", got=why, hint=f"its log {fleet.log(FIRST)}")


def _answer(predictor: Predictor, photo: Photo) -> str:
    pixels = decode_image(str(photo.path), predictor.bundle.manifest.input_shape)
    answers = predictor(pixels)
    return answers.names[int(answers.classes[0])]


def _write_list(path: Path, photos: Sequence[Photo]) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["path", "label"])
    writer.writerows([str(photo.path), photo.label] for photo in photos)
    try:
        with whole_file(path) as file:
            file.write(text.getvalue().encode("utf-8", "surrogateescape"))
    except OSError as error:
        raise StoreError(f"cannot write {path}", got=error.strerror, hint="another --out") from None
