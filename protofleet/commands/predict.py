"""`protofleet predict`: answers about photos, on a device or on any machine with a bundle and the fleet's result.

1. The knowledge is read: a state directory, whose client may be running, or a bundle. A store may be added to either.
2. Photos come from files, from folders, from watched folders (`--follow`), or from a camera. With `--follow` or a
   camera the command also loads what the client or the aggregator learns meanwhile
   (`edge_client/answers/predictor.py`).
3. Each photo gets a line for a person or a line of JSON, and with `--publish` a message on a broker's topic. A photo
   that cannot be read gets a line, too, and the command continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from protofleet.commands.solving import FORM_HELP, RIDGE_HELP, asked, source_of, tell
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, add_json_line, beside, is_stdout, write_text
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.printable import printable
from protofleet.edge_client.answers.answer_publisher import Target
from protofleet.edge_client.answers.photo_watch import camera_pictures, new_files
from protofleet.edge_client.answers.predictor import Answers
from protofleet.edge_client.data.decode import Broken
from protofleet.edge_client.data.folder import is_image
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.hardware.providers import PROVIDER_HELP
from protofleet.edge_client.journal.history import last_tested
from protofleet.edge_client.rollout.rollout_file import answering
from protofleet.library.predictor import Predictor
from protofleet.library.publisher import Publisher, facts

__all__ = ["predict_command"]

_CALIBRATED = 2_000  # the largest number of photos of known classes that are used


def predict_command(
    photos: Annotated[list[Path] | None, typer.Argument(help="Photos, or folders of photos, at any depth.")] = None,
    state: Annotated[Path | None, typer.Option(help="A device's state directory; its client may be running.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; with --state where the device's own lies now.")] = None,
    store: Annotated[
        str | None, typer.Option(metavar="FILE|URL", help="An aggregator's store: what the fleet learned last.")
    ] = None,
    top: Annotated[int, typer.Option(help="How many classes to show.", min=1)] = 3,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with photos that come into the folders.")] = False,
    camera: Annotated[int | None, typer.Option(help="A camera by its number, through OpenCV.")] = None,
    every: Annotated[
        float, typer.Option(help="Seconds between looks at folders or camera.", min=0.01, max=86_400)
    ] = 1.0,
    way: Annotated[str | None, typer.Option(help="The way of answering.  [default: the method's own]")] = None,
    known: Annotated[
        Path | None, typer.Option(help="Labelled photos of known classes: 95 % of them are to be known.")
    ] = None,
    unknown_above: Annotated[float | None, typer.Option(help="Novelty above which a photo is unknown.")] = None,
    threads: Annotated[int, typer.Option(help="Threads for a network's run.", min=1, max=256)] = 1,
    ridge: Annotated[str | None, typer.Option(help=RIDGE_HELP)] = None,
    form: Annotated[str | None, typer.Option(help=FORM_HELP)] = None,
    provider: Annotated[str, typer.Option(help=PROVIDER_HELP, show_default=False)] = "auto",
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    publish: Annotated[
        str | None, typer.Option(help="Publish each answer: mqtt://[user:password@]BROKER/TOPIC, or mqtts://.")
    ] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signs that broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of a certificate to publish with.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of its private key.")] = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("a line for each photo"))] = None,
) -> None:
    """Answer about photos, a folder or a camera, with what a device or its fleet has learned."""
    if method is not None:
        load_method(method)
    if (photos is None) == (camera is None):
        raise UsageError("protofleet predict", expected="photos or --camera", got="none" if camera is None else "both")
    log = lambda line: typer.echo(line, err=True)  # noqa: E731
    target = _target(publish, ca, cert, key)
    predictor = Predictor(
        source_of("protofleet predict", state, bundle),
        bundle=bundle if state else None,
        store=store,
        way=way,
        solve=asked(ridge, form),
        threads=threads,
        threshold=unknown_above,
        provider=provider,
        follow=follow or camera is not None,
        log=log,
    )
    tell(predictor)
    if known is not None:
        _calibrate(predictor, known)
    if json is not None and not is_stdout(json):
        write_text(json, "")
    console = beside(json, highlight=False, soft_wrap=True)
    _tell_basis(predictor, state, is_default=known is None and unknown_above is None)
    if camera is not None:
        answers = _asked_about_camera(predictor, camera, every)
    else:
        files = _files(photos or [], follow, every)
        answers = predictor.photos(files, together=1) if follow else predictor.photos(files)
    read = 0
    with contextlib.nullcontext() if target is None else Publisher(target, top=top, log=log) as publisher:
        for name, answer in answers:
            console.print(printable(_line(name, answer, top)), markup=False)
            add_json_line(json, facts(name, answer, top))
            if publisher is not None:
                publisher.put(name, answer)
            read += isinstance(answer, Answers)
    if not read:
        raise DataError("protofleet predict", expected="at least one photo that can be read", got="none")


def _target(url: str | None, ca: str | None, cert: str | None, key: str | None) -> Target | None:
    if url is not None:
        return Target.parse(url, ca_file=ca, cert_file=cert, key_file=key)
    if ca or cert or key:
        raise UsageError("a certificate file", expected="--publish mqtts://BROKER/TOPIC", got="none")
    return None


def _calibrate(predictor: Predictor, known: Path) -> None:
    data = load_data(known, predictor.bundle.manifest)
    chosen = np.random.default_rng(0).permutation(len(data))[:_CALIBRATED]
    predictor.calibrate(data.x[np.sort(chosen)])


def _tell_basis(predictor: Predictor, state: Path | None, *, is_default: bool) -> None:
    limit = "none is called unknown" if predictor.threshold is None else f"unknown above {predictor.threshold:.3g}"
    limit += "; --known PHOTOS makes a limit of yours" if is_default else ""
    typer.echo(
        f"answers by {predictor.way_in_words}, on {predictor.basis}; novelty: {predictor.measure}, {limit}",
        err=True,
    )
    others = _others(predictor.ways, state)
    if others:
        typer.echo(others, err=True)
    typer.echo(printable(predictor.runs_on), err=True)


def _others(ways: Sequence[str], state: Path | None) -> str:
    """The other ways of answering, if any, and their accuracy on the device's own test, best first."""
    if len(ways) < 2:
        return ""
    tested = last_tested(answering(state) / "history.jsonl") if state else None
    if tested is None:
        return f"--way takes one of {', '.join(ways)}"
    shares = {way: share for way, share in tested["accuracy"]["all_classes"].items() if way in ways}
    ranking = ", ".join(f"{way} {share:.1%}" for way, share in sorted(shares.items(), key=lambda item: -item[1]))
    only_own = tested["accuracy"]["own_classes"] == tested["accuracy"]["all_classes"]
    own = ", all of its own classes (easier for a way that names these only)" if only_own else ""
    photos = f"{tested['test_samples']:,} photos that the device was tested on{own}"
    return f"right after round {tested['round']}, of the {photos}: {ranking}; --way takes another"


# ── where photos come from ──────────────────────────────────────────────────────────────────────────────────────────


def _files(photos: list[Path], follow: bool, every_s: float) -> Iterator[tuple[str, str | bytes]]:
    for path in photos:
        if not path.exists():
            raise DataError(f"no photo at {path}", expected="a photo or a folder", got="nothing there")
    folders = [path for path in photos if path.is_dir()]
    if follow and not folders:
        raise UsageError("--follow", expected="a folder to watch", got="photos only")
    yield from ((str(path), str(path)) for path in photos if not path.is_dir())
    if follow:
        yield from new_files(folders, every_s)
        return
    for folder in folders:
        yield from ((str(path), str(path)) for path in sorted(folder.rglob("*")) if _is_shown(path, folder))


def _is_shown(path: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
    return is_image(path.name) and not hidden and path.is_file()


def _asked_about_camera(predictor: Predictor, number: int, every_s: float) -> Iterator[tuple[str, Answers]]:
    shape = predictor.bundle.manifest.input_shape
    for index, picture in enumerate(camera_pictures(number, shape, every_s)):
        yield f"camera {number}, picture {index + 1}", predictor(picture)


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────


def _line(name: str, answer: Answers | Broken, top: int) -> str:
    if isinstance(answer, Broken):
        return f"{name}: cannot be read ({answer.why})"
    best = "  ".join(f"{label} {score:.3f}" for label, score in answer.top(0, top))
    return f"{name}: {'unknown, nearest ' if answer.unknown[0] else ''}{best}"
