"""`protofleet advise`: which way of a frozen backbone to take, measured on the user's own photos in about a minute.

Options become a plan, `protofleet/advice.py` measures, and here it is told: a ladder from few bytes to many, what the
figures are worth, and one recommendation with the command that runs it. Needs no torch and no onnx.
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

from contract.bundle import read_bundle
from contract.interrupt import interruptible
from contract.json_output import JSON_HELP, beside, check_target, write_json
from contract.methods import LOAD_HELP, load_method
from contract.tables import show_table
from contract.terminal import counted, printable
from contract.uplink_bytes import Rung
from hw_profiles.units import size
from protofleet.advice import Advice, Measured, OnDone, Plan, advise

__all__ = ["advise_command"]


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
    found = read_bundle(bundle)
    check_target(json)
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0)) if threads is None else threads
    with interruptible(), _progress(told) as on_done:
        advice = advise(
            found,
            data,
            plan,
            threads=cores,
            cache=cache,
            log=lambda line: told.print(printable(line), markup=False),
            on_done=on_done,
        )
    write_json(json, advice.as_json())  # before it is shown: whoever reads along may leave (`| head`)
    _show(advice, bundle, beside(json, highlight=False))


@contextmanager
def _progress(console: Console) -> Iterator[OnDone]:
    """How far the work is: on a terminal one line, gone when it is done; else a line for each step, and each fourth."""
    if console.is_terminal:
        with console.status("reading photos") as status:
            yield lambda what, done, whole: status.update(f"{what}: {done:,} of {whole:,}")
        return
    console.print("reading photos")
    said: set[tuple[str, int]] = set()

    def tell(what: str, done: int, whole: int) -> None:
        quarter = 4 * done // max(whole, 1)
        if (what, quarter) not in said:
            said.add((what, quarter))
            console.print(f"{what}: {done:,} of {whole:,}", markup=False)

    yield tell


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────

_COLUMNS = ("way", "up once", "right", "+-", "alone")


def _show(advice: Advice, path: Path, console: Console) -> None:
    plan, chosen = advice.plan, advice.chosen
    each = "every class" if plan.classes_each is None else f"{counted(plan.classes_each, 'class', 'classes')} each"
    console.print(
        f"{advice.photos:,} photos dealt to {counted(plan.devices, 'device')}, {each}; "
        f"measured on {counted(advice.held_out, 'other')}.",
        markup=False,
    )
    if advice.copies:
        console.print(
            f"{counted(advice.copies, 'photo')} like another, or nearly: nothing is measured on what was learned from.",
            markup=False,
        )
    rows = [_row(one, one is chosen) for one in advice.ways]
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


def _row(one: Measured, is_chosen: bool) -> tuple[str, ...]:
    alone = "" if one.alone is None else f"{one.alone.mean():.1%}"
    up = size(one.uplink_bytes) if one.uplink_bytes else "nothing"
    return (f"{one.name}{' *' if is_chosen else ''}", up, f"{one.accuracy:.1%}", f"{one.error:.1%}", alone)


def _recommendation(advice: Advice, path: Path) -> Iterator[str]:
    """The choice, what it gives up, whether a fleet is needed for it at all, how to run it, and what chose it."""
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
    """What runs this way: on the bundle as it is, or on one that is exported for it."""
    name, own = rung.method.name, advice.bundle.manifest.method
    if rung.beside:
        given = "".join(f" --set {key}={value}" for key, value in rung.beside.items())
        yield f"  Export {path.name} again with --method {name}{given}, then:"
    method = "" if rung.beside or own == name else f" --method {name}"
    told = "".join(f" --{key} {value}" for key, value in rung.solved_with.items())
    yield f"  protofleet aggregate --bundle {path}{method}{told} --broker ... --store ..."
