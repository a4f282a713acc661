"""`protofleet labels`: what a device was taught, class by class, and whether that is enough.

It reads `STATE/learned.sqlite`, and the classes that were proposed for kept photos; nothing is changed or sent.
`edge_client/answers/label_report.py` has how it is counted.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from protofleet.contract.console.tables import show_table
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.answers.label_report import ClassLabels, report_of
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.photo_ring import PhotosBeside

__all__ = ["labels_command"]

SCHEMA = "protofleet.labels/1"
_COLUMNS = ("class", "labels", "right before", "95 % interval")


def labels_command(
    state: Annotated[Path, typer.Option(help="The device's state directory; its client may be running.")],
    bundle: Annotated[Path | None, typer.Option(help="Where the device's bundle lies now, if it was moved.")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("what is shown"))] = None,
) -> None:
    """Say of each class how many photos you named, how many were right before, and where more would help."""
    names = Knowledge.of_state(state, bundle)[0].manifest.labels
    report = report_of(names, Learned(state).asked_before())
    photos = PhotosBeside(state)
    proposed = photos.proposed() if photos.is_there else {}
    console = beside(json, highlight=False, soft_wrap=True)
    show_table(console, _COLUMNS, [_row(one) for one in report.classes], words=[0])
    lines = [
        f"{name} was proposed for {counted(count, 'photo')}, and is no class of the fleet"
        for name, count in proposed.items()
    ]
    if report.most_helpful:
        lines.insert(0, f"ten more of {report.most_helpful} would help most")
    for line in (*lines, *report.warnings):
        console.print(printable(line), markup=False)
    facts = {"schema": SCHEMA, **asdict(report), "proposed": proposed}
    write_json(json, facts)


def _row(one: ClassLabels) -> tuple[str, ...]:
    shares = (f"{one.right} of {one.asked}", f"{one.low:.0%} to {one.high:.0%}") if one.asked else ("nobody asked", "")
    return (printable(one.label), f"{one.labels:,}", *shares)
