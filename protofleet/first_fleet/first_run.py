"""A first run of a fleet on this machine: broker, aggregator and one device as processes, then questions.

1. Of each class that can spare one, a photo is kept back. The device is given the others, as a list of paths.
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

from protofleet.contract.errors import LinkError, ProtofleetError, StoreError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.mqtt.address import parse_listen
from protofleet.edge_client.data.decode import decode_image
from protofleet.first_fleet.files import FIRST, FleetFiles
from protofleet.first_fleet.look import FEW, Photo
from protofleet.lab.demo.processes import Fleet, wait_for_port
from protofleet.library.predictor import Predictor

__all__ = ["Asked", "first_run", "kept_back"]

PATIENCE_S = 120.0
_ASKED = 12  # photos, at most


@dataclass(frozen=True)
class Asked:
    """A photo that the device was not shown, and what it said."""

    photo: Photo
    answer: str

    @property
    def is_right(self) -> bool:
        return self.answer == self.photo.label


def kept_back(photos: Sequence[Photo], seed: int = 0) -> tuple[list[Photo], list[Photo]]:
    """(shown, kept back): one photo of each class with more than `FEW`, of at most twelve classes."""
    rng = np.random.default_rng(seed)
    of_class: dict[str, list[Photo]] = {}
    for photo in photos:
        of_class.setdefault(photo.label, []).append(photo)
    able = [label for label, own in of_class.items() if len(own) > FEW]
    chosen = sorted(rng.permutation(len(able))[:_ASKED])
    asked = [of_class[able[place]][int(rng.integers(len(of_class[able[place]])))] for place in chosen]
    paths = {photo.path for photo in asked}
    return [photo for photo in photos if photo.path not in paths], asked


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
