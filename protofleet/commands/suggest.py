"""`protofleet suggest`: which photos to name next, the most useful first.

1. The photos are decoded and put through the device's network. A photo that cannot be read gets a line; one that the
   device has learned already is left out.
2. `edge_client/answers/suggestions.py` chooses, from features alone.
3. Each suggestion gets a line for a person, or a line of JSON.

Without photos, those that `client --camera` keeps in the state directory are ranked: they have features and answers
already, near copies are one (×12), and what is unknown to the fleet is told apart (`answers/photos_to_name.py`).

Nothing is written, moved or sent. Without a state or a head it works, too: then no answer is unsure, and photos are
chosen by how they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from protofleet.commands.solving import source_of
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.console import logs
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, add_json_line, beside, is_stdout, write_text
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.answers.photos_to_name import photos_to_name
from protofleet.edge_client.answers.predictor import NoAnswerError
from protofleet.edge_client.answers.suggestions import RANDOM, Suggestion, suggested, uncertainty_of
from protofleet.edge_client.data.decode import Broken, check_channels, decode_all
from protofleet.edge_client.data.folder import is_image
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.edge_client.training.extractor import Extractor
from protofleet.library.predictor import Predictor

__all__ = ["suggest_command"]

logger = logging.getLogger(__name__)

SCHEMA = "protofleet.suggest/1"
_TOGETHER = 32  # photos that are decoded and looked at at once


def suggest_command(
    photos: Annotated[
        list[Path] | None,
        typer.Argument(help="Photos without a name, or folders of such; none for those that --state keeps."),
    ] = None,
    state: Annotated[Path | None, typer.Option(help="A device's state directory; its client may be running.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="A bundle; with --state where the device's own lies now.")] = None,
    labelled: Annotated[
        Path | None, typer.Option(help="Photos that have a name, as --data of a client; learned ones are known.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, max=1_000, help="How many photos to suggest.")] = 10,
    random: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="The share of them that is drawn at random.")
    ] = RANDOM,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws others.")] = 0,
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads for a network's run.")] = 1,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("a line for each suggestion"))] = None,
) -> None:
    """Say which photos to name next: those whose names would teach most, near copies once."""
    logs.set_up("text")
    if not photos:
        _suggest_kept(_kept_of(state), state, count, seed=seed, random_share=random, json=json)
        return
    looker = _Looker(source_of("protofleet suggest", state, bundle), bundle if state else None, threads)
    learned = None if state is None else Learned(state)
    if learned is not None:
        learned.look()
    console = beside(json, highlight=False, soft_wrap=True)
    names, features, uncertainty = _looked_at(looker, photos, learned, console)
    named = _named(looker, labelled, learned)
    chosen = suggested(features, uncertainty, named, count, seed=seed, random_share=random)
    if json is not None and not is_stdout(json):
        write_text(json, "")
    logger.info(f"{counted(len(names), 'photo')} without a name, {len(named):,} with one; by {looker.basis}")
    if not len(named):
        logger.info("--labelled PHOTOS says which photos have a name; none like these is then asked about first")
    for suggestion in chosen:
        name = names[suggestion.row]
        console.print(printable(f"{name}: {_why(suggestion, is_named=bool(len(named)))}"), markup=False)
        facts = {
            "schema": SCHEMA,
            "photo": name,
            "why": suggestion.why,
            "alike": suggestion.alike,
            "uncertainty": suggestion.uncertainty,
        }
        add_json_line(json, facts)


def _kept_of(state: Path | None) -> PhotosBeside:
    photos = None if state is None else PhotosBeside(state)
    if photos is None or not photos.is_there:
        expected = "photos, or --state of a client with --camera"
        raise UsageError("protofleet suggest", expected=expected, got="none" if state is None else "none kept there")
    return photos


def _suggest_kept(
    kept: PhotosBeside, state: Path | None, count: int, *, seed: int, random_share: float, json: Path | None
) -> None:
    learned = Learned(state or Path())
    learned.look()
    photos, features = kept.features()
    named = set(learned.hashes)
    wanted, unknown = photos_to_name(photos, features, named, count, seed=seed, random_share=random_share)
    if not wanted and not unknown:
        raise DataError("protofleet suggest", expected="kept photos without a name", got="none")
    if json is not None and not is_stdout(json):
        write_text(json, "")
    console = beside(json, highlight=False, soft_wrap=True)
    logger.info(f"{counted(len(photos), 'photo')} kept, {sum(photo.pixels in named for photo in photos):,} with a name")
    for is_unknown, found in ((False, wanted), (True, unknown)):
        if found and is_unknown:
            console.print("unlike all that the fleet knows; a new class?", markup=False)
        for one in found:
            photo = one.photo
            sure = "" if photo.probability is None else f" {photo.probability:.0%}"
            times = f" (×{one.times})" if one.times > 1 else ""
            answer = f"{photo.answer}{sure}" if photo.answer else "no answer yet"
            console.print(printable(f"{photo.id}{times}: {answer}, {_WHY_KEPT[one.why]}"), markup=False)
            facts = {"schema": SCHEMA, "photo": photo.id, "name": photo.name, "why": one.why, "alike": len(one.alike)}
            facts |= {"times": one.times, "answer": photo.answer, "probability": photo.probability}
            add_json_line(json, facts | {"uncertainty": photo.uncertainty})


class _Looker:
    """Photos to unit features, and how unsure the answer is.

    Attributes:
        basis: what it looks with, for a person.
    """

    def __init__(self, source: Path, bundle: Path | None, threads: int) -> None:
        self._predictor: Predictor | None = None
        try:
            self._predictor = Predictor(source, bundle=bundle, threads=threads, answers="fleet", follow=False)
        except NoAnswerError:
            if source.is_dir():
                raise
            self.bundle = read_bundle(source)
            self._extractor = Extractor(self.bundle, self.bundle.params, threads)
            self.basis = "how they differ, there is no answer yet to be unsure of"
        else:
            self.bundle: Bundle = self._predictor.bundle
            self.basis = f"how they differ and how unsure {self._predictor.way_in_words} is"

    def __call__(self, images: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """Unit features (N, D) of images (N, H, W, c), and the entropy (N,) of their answers, 0 to 1."""
        if self._predictor is None:
            features = self._extractor.features(images)
            return _unit(features), np.ones(len(images))
        features, answers = self._predictor.with_features(images)
        scale = self._predictor.answering.answer.scale
        return _unit(features), uncertainty_of(answers.scores, scale, answers.probabilities)


_WHY_KEPT = {
    "new": "unlike every photo with a name",
    "unsure": "like photos with a name",
    "random": "at random",
    "unknown": "unknown",
}


def _unit(features: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float32)


def _looked_at(
    looker: _Looker, photos: list[Path], learned: Learned | None, console: Any
) -> tuple[list[str], NDArray[np.float32], NDArray[np.float64]]:
    """Names, features (N, D) and uncertainty (N,) of the photos that can be read and were not learned.

    Raises:
        DataError: there is none.
    """
    shape = looker.bundle.manifest.input_shape
    check_channels(shape, "the bundle")
    names: list[str] = []
    features: list[NDArray[np.float32]] = []
    uncertainty: list[NDArray[np.float64]] = []
    files, broken, known = _files(photos), 0, 0
    while some := list(islice(files, _TOGETHER)):
        whole = []
        for path, image in zip(some, decode_all(((str(p), str(p)) for p in some), shape), strict=True):
            if isinstance(image, Broken):
                console.print(printable(f"{path}: cannot be read ({image.why})"), markup=False)
                broken += 1
            elif learned is not None and learned.is_duplicate(pixel_hash(image)):
                known += 1
            else:
                names.append(str(path))
                whole.append(image)
        if whole:
            found, unsure = looker(np.stack(whole))
            features.append(found)
            uncertainty.append(unsure)
    if not names:
        got = f"{broken} that cannot be read, {known} that were learned already"
        raise DataError("protofleet suggest", expected="photos without a name", got=got)
    return names, np.concatenate(features), np.concatenate(uncertainty)


def _files(photos: list[Path]) -> Iterator[Path]:
    for path in photos:
        if not path.exists():
            raise DataError(f"no photo at {path}", expected="a photo or a folder", got="nothing there")
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.is_file() and is_image(file.name))
        else:
            yield path


def _named(looker: _Looker, labelled: Path | None, learned: Learned | None) -> NDArray[np.float32]:
    """Features (M, D) of the photos that have a name."""
    m, found = looker.bundle.manifest, [np.empty((0, looker.bundle.manifest.features), np.float32)]
    if labelled is not None:
        x = load_data(labelled, m).x
        found += [looker(x[start : start + _TOGETHER])[0] for start in range(0, len(x), _TOGETHER)]
    if learned is not None and len(learned):
        encoded = enumerate(learned.images(np.arange(len(learned))))
        images = decode_all(((str(row), image) for row, image in encoded), m.input_shape)
        whole = [image for image in images if not isinstance(image, Broken)]
        if whole:
            found.append(looker(np.stack(whole))[0])
    return np.concatenate(found)


def _why(suggestion: Suggestion, *, is_named: bool) -> str:
    """Why a photo is suggested, for a person; `is_named`: whether any photo with a name is known."""
    others = suggestion.alike - 1
    alike = f"{counted(others, 'other')} like it" if others else "no other like it"
    before = "with a name or suggested already" if is_named else "suggested already"
    reasons = {
        "new": f"unlike every photo with a name, {alike}" if is_named else f"a kind of its own, {alike}",
        "unsure": f"like photos {before}, and the answer is {suggestion.uncertainty:.0%} unsure, {alike}",
        "random": "at random, so that what is taken for sure is asked about, too",
    }
    return reasons[suggestion.why]
