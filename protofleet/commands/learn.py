"""`protofleet learn` and `unlearn`: add a photo with its label to a device's own data, or remove it.

The example is on the disk when the command ends (`edge_client/data/learned.py`). The device's client uses it from its
next round on, whether it runs now or later. To correct a wrong label, learn the photo again with the right one.

A photo is a file, or one that `client --camera` keeps (`edge_client/photos/`), by its id. What was answered about the
latter before it was learned is kept with it, and tells how often answers were right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import DataError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.data.learned import Example, Learned, LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import KeptPhoto, id_in
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.edge_client.rollout.rollout_file import has_decoded

__all__ = ["learn_command", "unlearn_command"]

SCHEMA = "protofleet.learn/1"
_STATE_HELP = "The device's state directory; its client may be running."
_BUNDLE_HELP = "Where the device's bundle lies now, if it was moved."
_OUTCOMES = {"learned": "learned", "known": "was learned already", "corrected": "corrected: learned"}

Photo = Annotated[Path, typer.Argument(help="An image file, or the id of a kept photo of the camera.")]
State = Annotated[Path, typer.Option(help=_STATE_HELP)]
At = Annotated[Path | None, typer.Option(help=_BUNDLE_HELP)]
Json = Annotated[Path | None, typer.Option(help=JSON_HELP.format("what was done"))]


def learn_command(
    photo: Photo,
    label: Annotated[str, typer.Argument(help="Its class, one of the bundle's.")],
    state: State,
    bundle: At = None,
    json: Json = None,
) -> None:
    """Teach a device a photo: its next contribution holds it. Once more with another label corrects it."""
    manifest = _manifest(state, bundle)
    example, kept = _example(photo, state, manifest)
    if kept is not None:
        PhotosBeside(state).naming([kept])
    answered = "" if kept is None else kept.answer_before
    outcome = LearnedFile(state, manifest.labels).learn(example, label, answered=answered)
    facts = {"photo": photo, "label": label, "outcome": outcome}
    _tell(state, f"{photo}: {_OUTCOMES[outcome]} as {label}", facts, json)


def unlearn_command(photo: Photo, state: State, bundle: At = None, json: Json = None) -> None:
    """Take a learned photo out of a device's data again: its next contribution is made without it.

    Where the camera's photos are kept, it is erased there, too.
    """
    manifest = _manifest(state, bundle)
    pixels, source = _hashes(photo, state, manifest)
    label = LearnedFile(state, manifest.labels).unlearn_hashed(pixels, source)
    photos = PhotosBeside(state)
    if photos.is_there:
        photos.remove(pixels)
    facts = {"photo": photo, "label": label, "outcome": "unlearned"}
    _tell(state, f"{photo}: unlearned, it was {label}", facts, json)


def _example(photo: Path, state: Path, manifest: Manifest) -> tuple[Example, KeptPhoto | None]:
    """The example of a file, or of a kept photo by its id.

    Raises:
        DataError: there is neither.
    """
    id = id_in(str(photo))
    if id is None or os.path.exists(photo):
        return example_of(photo, manifest), None
    photos = PhotosBeside(state)
    kept = photos.find(id) if photos.is_there else None
    if kept is None:
        got = "neither a file nor a photo that is still kept"
        raise DataError(str(photo), expected="an image file, or the id of a kept photo", got=got)
    return example_of(photos.image(kept, "png"), manifest), kept


def _hashes(photo: Path, state: Path, manifest: Manifest) -> tuple[bytes, bytes]:
    """By which an example is found: of a file, or of a learned photo by its id, which may have left the ring."""
    id = id_in(str(photo))
    if id is not None and not os.path.exists(photo):
        learned = Learned(state)
        learned.look()
        learned.close()
        known = next((pixels for pixels in learned.hashes if pixels.hex().startswith(id)), None)
        if known is not None:
            return known, b""
    example, _ = _example(photo, state, manifest)
    return example.pixels, example.source


def _manifest(state: Path, bundle: Path | None) -> Manifest:
    return Knowledge.of_state(state, bundle)[0].manifest


def _tell(state: Path, line: str, facts: dict[str, Any], json: Path | None) -> None:
    learned = Learned(state)
    learned.look()
    learned.close()
    line += f"; {counted(len(learned), 'example')} learned on this device"
    if facts["outcome"] != "known":
        is_first = facts["outcome"] != "unlearned" and learned.labels.count(facts["label"]) == 1
        line += f", the first that you taught it of {facts['label']}" if is_first else ""
        line += "; answers change once its client's next contribution is merged"
    if facts["outcome"] == "unlearned" and has_decoded(state):
        line += "; what its client decoded of the photo goes when it looks at its samples next"
    beside(json, highlight=False, soft_wrap=True).print(printable(line), markup=False)
    write_json(json, {"schema": SCHEMA, **facts, "photo": str(facts["photo"]), "examples": len(learned)})
