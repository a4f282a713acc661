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
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np

from protofleet.commands.solving import FORM_HELP, RIDGE_HELP, asked, source_of, tell
from protofleet.contract.console import logs
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, add_json_line, beside, is_stdout, write_text
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.names import known
from protofleet.contract.printable import printable
from protofleet.contract.settings.command_line import command_of
from protofleet.contract.settings.common import LogSettings
from protofleet.contract.settings.options import Option
from protofleet.edge_client.answers.answer_publisher import Target
from protofleet.edge_client.answers.int8_answers import PRECISIONS
from protofleet.edge_client.answers.predictor import STRENGTHS, Answers, checked_coverage
from protofleet.edge_client.cameras.camera import Reader, checked_crop, read_crop, read_every
from protofleet.edge_client.cameras.motion import Motion
from protofleet.edge_client.cameras.photo_watch import new_files
from protofleet.edge_client.cameras.sources import CAMERA_HELP, ON_MOTION_HELP, camera_of, pictures_of
from protofleet.edge_client.data.decode import Broken, check_channels
from protofleet.edge_client.data.folder import is_image
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.hardware.providers import PROVIDER_HELP
from protofleet.edge_client.journal.history import last_tested
from protofleet.edge_client.rollout.rollout_file import answering
from protofleet.library.predictor import Predictor
from protofleet.library.publisher import Publisher, facts

__all__ = ["PredictSettings", "predict_command"]

logger = logging.getLogger(__name__)

_CALIBRATED = 2_000  # the largest number of photos of known classes that are used


def _answers(label: str, value: str) -> str:
    return known(STRENGTHS, value, label)


def _precision(label: str, value: str) -> str:
    return known(PRECISIONS, value, label)


def _coverage(label: str, value: float) -> float:
    return checked_coverage(value) or value


@dataclass(frozen=True, kw_only=True, repr=False)
class PredictSettings(LogSettings, command="predict"):
    """The settings of `protofleet predict`."""

    photos: Annotated[
        tuple[str, ...], Option("Photos, or folders of photos, at any depth.", positional=True, metavar="PHOTOS")
    ] = ()
    state: Annotated[str | None, Option("A device's state directory; its client may be running.")] = None
    bundle: Annotated[str | None, Option("A bundle; with --state where the device's own lies now.")] = None
    store: Annotated[
        str | None, Option("An aggregator's store: what the fleet learned last.", metavar="FILE|URL", url=True)
    ] = None
    top: Annotated[int, Option("How many classes to show.", low=1)] = 3
    follow: Annotated[bool, Option("Go on with photos that come into the folders.")] = False
    camera: Annotated[str | None, Option(CAMERA_HELP, metavar="SOURCE", url=True)] = None
    every: Annotated[
        str | float, Option("Time between looks at folders or camera.", check=read_every, metavar="DURATION")
    ] = 1.0
    crop: Annotated[
        str | None,
        Option("The part of the camera's pictures that counts, in pixels.", check=checked_crop, metavar="X,Y,W,H"),
    ] = None
    on_motion: Annotated[bool, Option(ON_MOTION_HELP)] = False
    way: Annotated[str | None, Option("The way of answering.", absent="the method's own")] = None
    answers: Annotated[
        str,
        Option(
            "How much this device's own class shares count: auto (as held-out photos said), own (fully) or fleet.",
            check=_answers,
        ),
    ] = "auto"
    coverage: Annotated[
        float | None,
        Option("Name a set of classes that holds the right one for this share of photos: 0.95.", check=_coverage),
    ] = None
    known: Annotated[str | None, Option("Labelled photos of known classes: 95 % of them are to be known.")] = None
    unknown_above: Annotated[float | None, Option("Novelty above which a photo is unknown.")] = None
    threads: Annotated[int, Option("Threads for a network's run.", low=1, high=256)] = 1
    ridge: Annotated[str | float | None, Option(RIDGE_HELP)] = None
    form: Annotated[str | None, Option(FORM_HELP)] = None
    provider: Annotated[str, Option(PROVIDER_HELP)] = "auto"
    precision: Annotated[
        str, Option("fp32, or int8: F.int8.onnx beside the bundle F.bundle, where it serves.", check=_precision)
    ] = "fp32"
    method: Annotated[str | None, Option(LOAD_HELP)] = None
    publish: Annotated[
        str | None, Option("Publish each answer: mqtt://[user:password@]BROKER/TOPIC, or mqtts://.", url=True)
    ] = None
    ca: Annotated[str | None, Option("PEM file of the authority that signs that broker.")] = None
    cert: Annotated[str | None, Option("PEM file of a certificate to publish with.")] = None
    key: Annotated[str | None, Option("PEM file of its private key.")] = None
    json: Annotated[str | None, Option(JSON_HELP.format("a line for each photo"))] = None

    def check(self) -> None:
        super().check()
        if bool(self.photos) == (self.camera is not None):
            got = "both" if self.photos else "none"
            raise UsageError("protofleet predict", expected="photos or --camera", got=got)
        if self.crop is not None and self.camera is None:
            raise UsageError("--crop", expected="--camera, whose pictures it is of", got="photos")
        if self.on_motion and self.camera is None:
            raise UsageError("--on-motion", expected="--camera, whose pictures it is about", got="photos")


@command_of(PredictSettings)
def predict_command(settings: PredictSettings) -> None:
    """Answer about photos, a folder or a camera, with what a device or its fleet has learned."""
    logs.set_up(settings.log_format)
    if settings.method is not None:
        load_method(settings.method)
    camera = None if settings.camera is None else camera_of(settings.camera)
    target = _target(settings.publish, settings.ca, settings.cert, settings.key)
    state, bundle = (None if given is None else Path(given) for given in (settings.state, settings.bundle))
    predictor = Predictor(
        source_of("protofleet predict", state, bundle),
        bundle=bundle if state else None,
        store=settings.store,
        way=settings.way,
        solve=asked(settings.ridge, settings.form),
        threads=settings.threads,
        threshold=settings.unknown_above,
        provider=settings.provider,
        answers=settings.answers,
        coverage=settings.coverage,
        precision=settings.precision,
        follow=settings.follow or camera is not None,
    )
    tell(predictor)
    if settings.known is not None:
        _calibrate(predictor, Path(settings.known))
    if settings.json is not None and not is_stdout(settings.json):
        write_text(settings.json, "")
    console = beside(settings.json, highlight=False, soft_wrap=True)
    _tell_basis(predictor, state, is_default=settings.known is None and settings.unknown_above is None)
    if camera is not None:
        answers = _asked_about_camera(predictor, camera, settings)
    else:
        files = _files([Path(photo) for photo in settings.photos], settings.follow, settings.every)
        answers = predictor.photos(files, together=1) if settings.follow else predictor.photos(files)
    read, top = 0, settings.top
    with contextlib.nullcontext() if target is None else Publisher(target, top=top) as publisher:
        for name, answer in answers:
            console.print(printable(_line(name, answer, top)), markup=False)
            add_json_line(settings.json, facts(name, answer, top))
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
    logger.info(f"answers by {predictor.way_in_words}, on {predictor.basis}; novelty: {predictor.measure}, {limit}")
    logger.info(predictor.calibrated)
    others = _others(predictor.ways, state)
    if others:
        logger.info(others)
    logger.info(predictor.runs_on)
    if predictor.int8_line:
        logger.info(predictor.int8_line)


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


def _asked_about_camera(
    predictor: Predictor, camera: Reader, settings: PredictSettings
) -> Iterator[tuple[str, Answers | Broken]]:
    shape = predictor.bundle.manifest.input_shape
    check_channels(shape, "the bundle")
    crop = None if settings.crop is None else read_crop(settings.crop)
    every_s = float(settings.every)
    motion = Motion(every_s, crop) if settings.on_motion else None
    for picture in pictures_of(camera, every_s if motion is None else motion.look_s):
        if motion is None or motion.is_wanted(picture):
            name, x = picture.fitted(shape, crop)
            yield name, x if isinstance(x, Broken) else predictor(x)
        del picture  # not kept while the next one is read


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────


def _line(name: str, answer: Answers | Broken, top: int) -> str:
    if isinstance(answer, Broken):
        return f"{name}: cannot be read ({answer.why})"
    if answer.probabilities is None:
        best = "  ".join(f"{label} {score:.3f}" for label, score in answer.top(0, top))
    else:
        found = answer.probabilities[0]
        best = "  ".join(f"{answer.names[number]} {found[number]:.0%}" for number in answer.order(0, top))
    members = answer.set_of(0)
    one_of = "" if members is None else f"  one of: {', '.join(members)}"
    return f"{name}: {'unknown, nearest ' if answer.unknown[0] else ''}{best}{one_of}"
