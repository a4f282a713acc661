"""`protofleet init`: from a folder of photos to a fleet that can be started, without torch and without a network.

1. The photos are looked at, and described (`first_fleet/look.py`).
2. What `protofleet advise` measures, over the shipped extractor or that of `--backbone`, chooses the method.
3. The fleet's folder is written (`first_fleet/files.py`), and the next commands are said.
4. With `--run` they are started here, and the device is asked about photos that it was not shown.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # several would take turns in spinning, for heads this small

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from protofleet.advice.advice import Advice, Measured, Plan, advise
from protofleet.aggregator.server.broker import try_to_listen
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.class_names import check_names, check_typed
from protofleet.contract.bundle.shipped_extractor import PHOTOS, photos_bundle
from protofleet.contract.bundle.uplink_bytes import Rung
from protofleet.contract.console.interrupt import interruptible
from protofleet.contract.errors import DataError, StoreError, UsageError
from protofleet.contract.mqtt.address import parse_listen
from protofleet.contract.printable import counted, printable
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.first_fleet.files import Choice, FleetFiles, check_folder, write_fleet
from protofleet.first_fleet.first_run import ASKED, first_run
from protofleet.first_fleet.look import FEW, Look, look_at

__all__ = ["init_command"]

MEASURED = 600  # photos, at most: what is measured on them ends within a minute
SEVERAL, SPLITS, HELD_OUT = 200, 3, 0.4  # of fewer photos, several splits are measured, each with more held out
_DEVICES = 2
PLAIN_WAYS = {
    "ncm": "the nearest class mean",
    "ffc": "one linear head from the sums of all devices",
    "ffc discriminant": "class means, corrected for how photos of a class differ",
}

Say = Callable[[str], None]


def init_command(
    photos: Annotated[
        Path | None, typer.Argument(help="A folder of photos, with one subfolder for each class.", show_default=False)
    ] = None,
    out: Annotated[Path, typer.Option(help="The new folder for bundle and settings files.")] = Path("fleet"),
    backbone: Annotated[
        str, typer.Option(help="photos, the shipped extractor, or a FILE.bundle of a method that trains nothing.")
    ] = PHOTOS,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the broker; 0.0.0.0:1883 for devices on other machines.")
    ] = "127.0.0.1:1883",
    classes: Annotated[str | None, typer.Option(help="With --no-photos: the classes, cat,dog,…")] = None,
    no_photos: Annotated[bool, typer.Option("--no-photos", help="The devices will collect their photos.")] = False,
    run: Annotated[
        bool, typer.Option("--run", help="Start broker, aggregator and one device here, and ask it.")
    ] = False,
) -> int:
    """Make a fleet of a folder of photos: look at them, choose a method, write its files."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(printable(line), markup=False)

    _check(photos, classes, no_photos, run, listen)
    check_folder(out)
    extractor = read_bundle(photos_bundle() if backbone == PHOTOS else backbone)
    with interruptible():
        if photos is None:
            names = [name.strip() for name in (classes or "").split(",")]
            check_names(names)
            check_typed(names)
            files = write_fleet(out, extractor, names, Choice(), listen=listen, photos=None)
            say(f"Each device puts its photos into folders named after the classes: {files.photos}/{names[0]}/1.jpg")
            _tell_next(files, say)
            return 0
        with _progress(console) as tell:
            look = look_at(photos, lambda done, whole: tell("looking at photos", done, whole))
        for line in look.lines:
            say(line)
        choice = _chosen(extractor, photos, look, console, say)
        files = write_fleet(out, extractor, look.labels, choice, listen=listen, photos=photos)
        say(f"{files.folder} has the fleet's bundle and settings files.")
        if run:
            return _run(files, look, say)
        _tell_next(files, say)
    return 0


def _check(photos: Path | None, classes: str | None, no_photos: bool, run: bool, listen: str) -> None:
    parse_listen(listen)
    if photos is None and not no_photos:
        raise UsageError(
            "protofleet init", expected="a folder of photos", got="none", hint="--no-photos --classes cat,dog"
        )
    if photos is not None and no_photos:
        raise UsageError("--no-photos", expected="it, or a folder of photos", got="both")
    if no_photos and (classes is None or len(classes.split(",")) < 2):
        raise UsageError("--no-photos", expected="--classes with two names or more", got=classes or "none")
    if classes is not None and not no_photos:
        raise UsageError("--classes", expected="it with --no-photos", got="photos, whose folders name the classes")
    if run and no_photos:
        raise UsageError("--run", expected="photos", got="--no-photos")
    if run:
        _check_free(listen)


def _check_free(listen: str) -> None:
    """Before anything is measured: the broker that comes later can listen there."""
    try:
        try_to_listen(*parse_listen(listen))
    except OSError as error:
        raise UsageError(
            f"--listen {listen}", expected="an address that is free", got=error.strerror, hint="another port"
        ) from None


def _chosen(extractor: Bundle, photos: Path, look: Look, console: Console, say: Say) -> Choice:
    """The method that the photos recommend; the nearest class mean where nothing can be measured on so few."""
    advice = None
    try:
        with tempfile.TemporaryDirectory(prefix="protofleet-") as folder, _progress(console) as tell:
            bundle = read_bundle(fleet_bundle(extractor, look.labels, Path(folder) / "look.bundle").path)
            plan = Plan(devices=_DEVICES, most=max(MEASURED, 2 * len(look.labels)))
            plans = [plan]
            if len(look.photos) < SEVERAL:
                plans = [replace(plan, hold_out=HELD_OUT, seed=seed) for seed in range(SPLITS)]
            cores = len(os.sched_getaffinity(0))
            advice = together(
                [advise(bundle, photos, each, threads=cores, wanted=_is_first_choice, on_done=tell) for each in plans]
            )
    except (DataError, UsageError) as error:
        say(f"Nothing can be measured on so few photos ({error}); the method is ncm, the nearest class mean.")
    except OSError as error:
        raise StoreError(
            "a folder for temporary files", got=error.strerror, hint="TMPDIR, or room on the disk"
        ) from None
    except StoreError as error:  # of the bundle that is measured, which lies there
        raise StoreError(error.message, got=error.got, hint="TMPDIR=FOLDER, one on a disk with room") from None
    if advice is None or advice.chosen.rung is None:
        return Choice()
    _tell_advice(advice, say)
    rung = advice.chosen.rung
    return Choice(rung.method.name, rung.beside, rung.solved_with)


def _is_first_choice(rung: Rung) -> bool:
    """Whether a way is measured: sums that stand, without noise, as the method is set. `protofleet advise` has all."""
    return rung.method.stands and not rung.beside and rung.method.mechanism(rung.hyper) is None


def together(advices: Sequence[Advice]) -> Advice:
    """One advice of several splits of the same photos: of each way, the answers of all."""
    first = advices[0]
    ways = []
    for way in first.ways:
        same = [other for advice in advices for other in advice.ways if other.name == way.name]
        alone = (
            None if way.alone is None else np.concatenate([other.alone for other in same if other.alone is not None])
        )
        ways.append(replace(way, right=np.concatenate([other.right for other in same]), alone=alone))
    return replace(first, ways=tuple(ways), held_out=sum(advice.held_out for advice in advices))


def _tell_advice(advice: Advice, say: Say) -> None:
    way = advice.chosen
    if advice.copies:
        say(f"{counted(advice.copies, 'photo')} like another, or nearly: nothing is measured on what was learned from.")
    say(
        f"Tried here: your photos, dealt to {counted(_DEVICES, 'device')}; each way of learning then named photos that "
        f"it had not been shown, {counted(advice.held_out, 'answer')} each."
    )
    for each in advice.ways:
        alone = "" if each.alone is None else f"; one device without the others {100 * each.alone.mean():.0f} %"
        right = f"{100 * each.accuracy:.0f} % right, give or take {100 * doubtful(each):.0f}{alone}"
        say(f"  {in_plain_words(each)}: {right}; {each.uplink_bytes / 1000:,.0f} kB sent by each device")
    say(f"Your fleet learns by {in_plain_words(way)}. `protofleet advise` measures more ways, also cheaper ones.")
    for doubt in advice.doubts:
        if not doubt.startswith("only "):  # of one split's held-out photos
            say(f"Mind: {doubt}.")


def in_plain_words(way: Measured) -> str:
    """What a way does, and the name by which other commands know it."""
    words = PLAIN_WAYS.get(way.name) or (way.rung.method.summary if way.rung is not None else "")
    return f"{words} ({way.name})" if words else way.name


def doubtful(way: Measured) -> float:
    """How far off its accuracy may be, as a fraction: its standard error, and at least that of one wrong answer more.

    With all answers right the formula gives no error at all, however few were asked.
    """
    return max(way.error, 1 / len(way.right))


def _tell_next(files: FleetFiles, say: Say) -> None:
    say("Next, each in a terminal of its own:")
    for command in files.commands:
        say(f"  protofleet {' '.join(shlex.quote(word) for word in command)}")
    say("Then ask about a photo:")
    ask = f"protofleet predict --state {shlex.quote(str(files.state))}"
    say(f"  {ask} PHOTO.jpg")
    say("A photo of something else may be named after one of these classes, too; shown what belongs, it says unknown:")
    say(f"  {ask} --known {shlex.quote(str(files.photos))} PHOTO.jpg")
    _tell_second(files, say)


def _tell_second(files: FleetFiles, say: Say) -> None:
    say("On a second device, with photos in folders of the same names; the line holds the fleet's password:")
    say(f"  {files.second_device()}")
    if not files.is_open:
        port = parse_listen(files.listen)[1]
        say(f"  (now the broker serves this machine alone; --listen 0.0.0.0:{port} opens it to your network)")


def _run(files: FleetFiles, look: Look, say: Say) -> int:
    asked = first_run(files, look.photos, say)
    for one in asked:
        mark = "right" if one.is_right else f"wrong: it is {one.photo.label}"
        say(f"{one.photo.path.name}, which was not shown: {one.answer} ({mark})")
    if asked:
        say(f"{sum(one.is_right for one in asked)} of {len(asked)} photos that were not shown are named right.")
    labels = {one.photo.label for one in asked}
    unable = [
        label for label, count in look.counts.items() if count <= FEW or (label not in labels and len(asked) < ASKED)
    ]
    if unable:
        names = ", ".join(unable[:6]) + (f" and {len(unable) - 6:,} more" if len(unable) > 6 else "")
        say(f"Not asked about: {names}. A class needs {FEW + 1} photos, near copies not counted, for that.")
    _tell_next(files, say)
    return 0


@contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Show what is being done: on a terminal, in one line that goes; into a pipe, nothing."""
    if not sys.stderr.isatty():
        yield lambda what, done, whole: None
        return
    with console.status("looking at photos") as status:
        yield lambda what, done, whole: status.update(f"{what}: {done:,} of {whole:,}")
