"""`protofleet advise`: which way to use a frozen backbone, measured on the user's own photos in about a minute.

1. Options become a plan.
2. `protofleet/advice/advice.py` measures.
3. This file shows the result: a table from few bytes to many, the errors of the figures, and one recommendation with
   the command that runs it.

It needs neither torch nor onnx.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.advice.advice import Advice, Measured, OnDone, Plan, advise
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.uplink_bytes import Rung
from protofleet.contract.console.interrupt import interruptible
from protofleet.contract.console.logs import told
from protofleet.contract.console.tables import show_table
from protofleet.contract.files.json_output import JSON_HELP, beside, check_target, write_json
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.printable import counted, printable
from protofleet.hw_profiles.units import size

__all__ = ["advise_command"]


# arguments: each is an option, as typer reads them
def advise_command(
    data: Annotated[
        Path, typer.Option(help="Your labelled photos: a folder per class, a .csv of path,label, a .npz, parquet.")
    ],
    bundle: Annotated[Path, typer.Option(help="A bundle of the backbone; of any method.")],
    devices: Annotated[int, typer.Option(help="Devices that the photos are dealt to.")] = 5,
    classes_per_device: Annotated[
        int | None, typer.Option(help="Each device holds so many classes.  [default: all]")
    ] = None,
    hold_out: Annotated[
        float, typer.Option(help="Share of every class to measure on, where the photos declare no test split.")
    ] = 0.2,
    photos: Annotated[int, typer.Option(help="Look at so many photos, at most.")] = 5_000,
    min_samples: Annotated[int, typer.Option(help="Devices withhold classes with fewer photos.")] = 1,
    seed: Annotated[int, typer.Option(help="Of hold-out, dealing and random groups.")] = 0,
    threads: Annotated[int | None, typer.Option(help="For the network.  [default: all cores]", min=1, max=256)] = None,
    cache: Annotated[Path | None, typer.Option(help="Keep decoded photos in this folder for the next time.")] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("all figures"))] = None,
) -> None:
    """Measure on your photos what each way without training gives for its bytes."""
    if method is not None:
        load_method(method)
    plan = Plan(devices, classes_per_device, hold_out, photos, min_samples, seed)
    loaded = read_bundle(bundle)
    check_target(json)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0)) if threads is None else threads
    show = told(lambda line: console.print(line, markup=False))
    with interruptible(), _progress(console) as on_done, show:
        advice = advise(
            loaded,
            data,
            plan,
            threads=cores,
            cache=cache,
            on_done=on_done,
        )
    write_json(json, advice.as_json())  # before it is shown: whoever reads along may leave (`| head`)
    _show(advice, bundle, beside(json, highlight=False))


@contextmanager
def _progress(console: Console) -> Iterator[OnDone]:
    """Show progress. On a terminal: one line, removed at the end. Otherwise: a line for each quarter of each step."""
    if console.is_terminal:
        with console.status("reading photos") as status:
            yield lambda what, done, whole: status.update(f"{what}: {done:,} of {whole:,}")
        return
    console.print("reading photos")
    shown: set[tuple[str, int]] = set()

    def tell(what: str, done: int, whole: int) -> None:
        quarter = 4 * done // max(whole, 1)
        if (what, quarter) not in shown:
            shown.add((what, quarter))
            console.print(f"{what}: {done:,} of {whole:,}", markup=False)

    yield tell


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────

_COLUMNS = ("way", "up once", "right", "+-", "alone")


def _show(advice: Advice, path: Path, console: Console) -> None:
    plan, chosen = advice.plan, advice.chosen
    per_device = "every class"
    if plan.classes_each is not None:
        per_device = f"{counted(plan.classes_each, 'class', 'classes')} each"
    console.print(
        f"{advice.photos:,} photos dealt to {counted(plan.devices, 'device')}, {per_device}; "
        f"measured on {counted(advice.held_out, 'other')}.",
        markup=False,
    )
    if advice.copies:
        console.print(
            f"{counted(advice.copies, 'photo')} like another, or nearly: nothing is measured on what was learned from.",
            markup=False,
        )
    rows = [_row(way, way is chosen) for way in advice.ways]
    show_table(console, _COLUMNS, rows)
    console.print(_LEGEND, style="dim")
    for name, up in advice.trained.items():
        console.print(
            f"{name} trains: {size(up)} a round, not measured here; protofleet lab run measures it", style="dim"
        )
    for line in (*advice.doubts, *filter(None, [chosen.doubt])):
        console.print(f"[yellow]mind[/yellow]: {escape(printable(line))}")
    for line in _recommendation(advice, path):
        console.print(printable(line), markup=False)


_LEGEND = (
    "up once: a device's largest contribution. right: of the held-out photos; +-: its standard error. alone: one "
    "device by itself"
)


def _row(way: Measured, is_chosen: bool) -> tuple[str, ...]:
    alone = "" if way.alone is None else f"{way.alone.mean():.1%}"
    up = size(way.uplink_bytes) if way.uplink_bytes else "nothing"
    return (f"{way.name}{' *' if is_chosen else ''}", up, f"{way.accuracy:.1%}", f"{way.error:.1%}", alone)


def _recommendation(advice: Advice, path: Path) -> Iterator[str]:
    """Lines: the choice, its loss, whether a fleet is needed, how to run it, and how it was chosen."""
    chosen, best = advice.chosen, advice.best
    cost = f"{size(chosen.uplink_bytes)} from each device" if chosen.uplink_bytes else "nothing is sent"
    line = f"* Take {chosen.name}: {chosen.accuracy:.1%} right, {cost}."
    if chosen is not best:
        behind, error = chosen.behind(best.right)
        line += f" That is {100 * behind:.1f} points behind {best.name}, no more than chance ({100 * error:.1f})."
    yield line
    if chosen.alone is not None:
        gain, error = Measured("", None, chosen.alone).behind(chosen.right)
        if gain <= error:
            yield "One device alone does as well on these photos: what a fleet adds cannot be seen in them."
    if chosen.rung is not None:
        yield from _commands(chosen.rung, advice, path)
    yield "It was chosen on these held-out photos, which flatters it a little; client --test tells on others."


def _commands(rung: Rung, advice: Advice, path: Path) -> Iterator[str]:
    """The commands that run this way, on the bundle as it is or on one that is exported for it."""
    name, own = rung.method.name, advice.bundle.manifest.method
    if rung.beside:
        given = "".join(f" --set {key}={value}" for key, value in rung.beside.items())
        yield f"  Export {path.name} again with --method {name}{given}, then:"
    method = "" if rung.beside or own == name else f" --method {name}"
    options = "".join(f" --{key} {value}" for key, value in rung.solved_with.items())
    yield f"  protofleet aggregate --bundle {path}{method}{options} --broker ... --store ..."
