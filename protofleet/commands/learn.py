"""`protofleet learn` and `unlearn`: add a photo with its label to a device's own data, or remove it.

The example is on the disk when the command ends (`edge_client/data/learned.py`). The device's client uses it from its
next round on, whether it runs now or later. To correct a wrong label, learn the photo again with the right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of

__all__ = ["learn_command", "unlearn_command"]

SCHEMA = "protofleet.learn/1"
_STATE_HELP = "The device's state directory; its client may be running."
_BUNDLE_HELP = "Where the device's bundle lies now, if it was moved."
_OUTCOMES = {"learned": "learned", "known": "was learned already", "corrected": "corrected: learned"}

Photo = Annotated[Path, typer.Argument(help="An image file.")]
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
    outcome = LearnedFile(state, manifest.labels).learn(example_of(photo, manifest), label)
    facts = {"photo": photo, "label": label, "outcome": outcome}
    _tell(state, f"{photo}: {_OUTCOMES[outcome]} as {label}", facts, json)


def unlearn_command(photo: Photo, state: State, bundle: At = None, json: Json = None) -> None:
    """Take a learned photo out of a device's data again: its next contribution is made without it."""
    manifest = _manifest(state, bundle)
    label = LearnedFile(state, manifest.labels).unlearn(example_of(photo, manifest))
    facts = {"photo": photo, "label": label, "outcome": "unlearned"}
    _tell(state, f"{photo}: unlearned, it was {label}", facts, json)


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
    beside(json, highlight=False, soft_wrap=True).print(printable(line), markup=False)
    write_json(json, {"schema": SCHEMA, **facts, "photo": str(facts["photo"]), "examples": len(learned)})
