"""`protofleet photos`: which photos of its camera a device keeps, and `--erase`, which deletes them all.

Photos of a camera lie in `STATE/photos.sqlite` (`edge_client/photos/`); those that were named lie in
`STATE/learned.sqlite`, too, as they train. `--erase` deletes the first: labels and answers stay as they are.
`--erase --learned` deletes both: the next contribution is made without them. What was decoded of the latter beside
`--data` goes with them, or, where a client runs, when it looks at its samples next.

Both files are changed beside a client that runs, each in one transaction: a kill leaves all photos of a file or none.
What is deleted is overwritten in the file, and its log is cut off. The same command again finishes what a kill cut off.
A file that cannot be read is removed as a whole; that of the camera's photos not while a client runs on it.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.contract.errors import DataError, StoreError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.data.learned import Learned, LearnedFile
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.edge_client.rollout.rollout_file import drop_decoded

__all__ = ["photos_command"]

SCHEMA = "protofleet.photos/1"


def photos_command(
    state: Annotated[Path, typer.Option(help="The device's state directory; its client may be running.")],
    erase: Annotated[
        bool, typer.Option("--erase", help="Delete all photos that the camera's client keeps; labels stay.")
    ] = False,
    learned: Annotated[
        bool,
        typer.Option("--learned", help="With --erase: delete all that the device was taught, too. Labels are lost."),
    ] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("what is shown"))] = None,
) -> None:
    """Say which photos of its camera a device keeps, or delete them all; nothing is asked before."""
    if learned and not erase:
        raise UsageError("--learned", expected="--erase beside it", got="none")
    if not state.is_dir():
        raise UsageError("--state", expected="a device's state directory", got="no such folder")
    photos = PhotosBeside(state)
    found = _found(photos, erases=erase)
    gone = photos.erase_all() if erase else 0  # first, whatever is wrong with what was learned
    found |= {"learned": _learned(state, erases=learned)}
    lines = _in_words(found)
    if erase:
        unlearned = LearnedFile(state, ()).unlearn_all() if learned else 0
        is_gone = drop_decoded(state) if learned else True  # also of what an earlier call, or `unlearn`, left
        stay = 0 if learned else found["learned"]
        lines = _erased(gone, unlearned, stay, is_gone=is_gone)
        found |= {"erased": gone, "unlearned": unlearned}
    console = beside(json, highlight=False, soft_wrap=True)
    for line in lines:
        console.print(printable(line), markup=False)
    write_json(json, {"schema": SCHEMA, **found})


def _found(photos: PhotosBeside, *, erases: bool) -> dict[str, Any]:
    """What is kept; with `erases`, also of a file that cannot be read."""
    try:
        kept = photos.photos() if photos.is_there else []
        refused = photos.refused if photos.is_there else ""
    except (StoreError, UsageError) as error:
        if not erases:
            removes = "the same with --erase, which removes the file"
            hint = error.hint if isinstance(error, UsageError) and error.hint else removes
            raise type(error)(error.message, expected=error.expected, got=error.got, hint=hint) from None
        unknown = dict.fromkeys(("kept", "oldest_s", "newest_s", "waiting", "proposed"))
        return {**unknown, "bytes": photos.taken_bytes, "refused": "", "unreadable": str(error.got)}
    return {
        "kept": len(kept),
        "bytes": photos.taken_bytes if kept else 0,
        "oldest_s": min((photo.taken_s for photo in kept), default=None),
        "newest_s": max((photo.last_s for photo in kept), default=None),
        "waiting": sum(photo.waits > 0 for photo in kept),
        "proposed": sum(photo.proposed != "" for photo in kept),
        "refused": refused,
        "unreadable": "",
    }


def _learned(state: Path, *, erases: bool) -> int | None:
    """How many examples the device has; with `erases`, None where their file cannot be read."""
    taught = Learned(state)
    try:
        taught.look()
        return len(taught)
    except DataError as error:
        if erases:
            return None
        hint = "protofleet photos --erase --learned, which removes the file"
        raise DataError(error.message, expected=error.expected, got=error.got, hint=hint) from None
    finally:
        taught.close()


def _in_words(found: dict[str, Any]) -> list[str]:
    if not found["kept"]:
        lines = ["no photo of a camera is kept here"]
    else:
        since, until = (_time(found[name]) for name in ("oldest_s", "newest_s"))
        size = f"{found['bytes'] / 1e6:.1f} MB"
        lines = [f"{counted(found['kept'], 'photo')} of the camera kept here, {size}, {since} to {until}"]
    if found["waiting"]:
        lines.append(f"{found['waiting']:,} of them named, on the way to the fleet: they do not leave before")
    if found["proposed"]:
        lines.append(f"{found['proposed']:,} of them proposed for a class that the fleet has not got")
    if found["learned"]:
        lines.append(f"{counted(found['learned'], 'photo')} learned, which train: --erase --learned deletes them, too")
    if found["refused"] and found["kept"]:
        lines.append(f"the fleet takes nothing more of this device ({found['refused']}); its photos stay: --erase")
    return lines


def _erased(gone: int | None, unlearned: int | None, stay: int, *, is_gone: bool) -> list[str]:
    lines = ["the file of kept photos could not be read: it is removed, and all photos in it"]
    if gone is not None:
        lines = [f"{counted(gone, 'photo')} of the camera erased; its client goes on with new ones while it runs"]
    if unlearned is None:
        lines.append("the file of learned photos could not be read: it is removed, and all photos in it")
    elif unlearned:
        lines.append(f"{counted(unlearned, 'learned photo')} erased; its next contribution is made without them")
    if not is_gone:
        lines.append("what its client decoded of learned photos goes when it looks at its samples next")
    if stay:
        learned = counted(stay, "learned photo")
        lines.append(f"{learned} stay, since they train; protofleet photos --erase --learned deletes them, too")
    return lines


def _time(of_s: float) -> str:
    return datetime.fromtimestamp(of_s).astimezone().strftime("%Y-%m-%d %H:%M")
