"""Photos to answers, with what a device knows: its weights, its own class means, and what the fleet gave it.

1. `Knowledge` is what is known: read from a device's state directory (`of_state`), or nothing but a global state beside
   a bundle, as on a machine that was never a device of the fleet.
2. A `Predictor` picks a way of answering (`answering.py`): the method's own where this device has trained, or nothing
   has to be; else one over the features that all devices share.
3. Images are decoded and brought to the bundle's shape exactly as training images are (`edge_client/data/decode.py`).
4. Scores of every class come out, and how unlike all known classes an image is (`unknown.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.bundle import Bundle, Manifest, read_bundle
from contract.errors import BundleError, DataError, UsageError, near_names
from contract.methods import METHODS, closing_method, method
from contract.state import GlobalState
from contract.terminal import counted
from edge_client.answering import Answering, known_answers
from edge_client.data.decode import Broken, check_channels, decode_all
from edge_client.data.npz import pixels
from edge_client.extractor import Extractor
from edge_client.global_state_check import Caution
from edge_client.journal import Kept, read_kept
from edge_client.local import OwnMeans, Remembered
from edge_client.provider_trials import Providers
from edge_client.trainer import Weights, check_weights
from edge_client.unknown import Novelty, novelty_of

__all__ = ["Answers", "Knowledge", "Predictor"]

_TOGETHER = 32  # photos that are decoded and asked about at once


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What is known beside the bundle.

    Attributes:
        weights: what training has changed, by name; empty where nothing was trained.
        means: of the device's own classes under these weights.
        state: the newest global state.
        rounds: how many this device has done.
    """

    weights: Weights = field(default_factory=dict)
    means: OwnMeans | None = None
    state: GlobalState | None = None
    rounds: int = 0

    @classmethod
    def of_state(cls, directory: Path, bundle: Path | None = None) -> tuple[Bundle, Knowledge, Path]:
        """What a device of this state directory knows, its bundle, and where that lies; its client may be running.

        Args:
            bundle: where the bundle lies; None for where it lay when the device last started.

        Raises:
            StoreError: there is no state that can be read.
            UsageError: the bundle is not known, or another one.
            BundleError: it cannot be read.
        """
        kept = read_kept(directory)
        path = bundle or kept.bundle_path
        if path is None or not path.is_file():
            raise UsageError(
                f"the bundle of {directory}", expected="its file", got=path or "none", hint="--bundle FILE"
            )
        found = read_bundle(path)
        if found.sha256 != kept.bundle:
            raise UsageError(
                f"{directory} is of another bundle than {path}",
                expected=f"sha256 {kept.bundle.hex()[:12]}…",
                got=f"{found.sha256.hex()[:12]}…",
                hint="the bundle that the device has",
            )
        _check_kept(kept, found.manifest)
        return found, cls(kept.weights, kept.means, kept.state, kept.rounds), path


@dataclass(frozen=True, eq=False)
class Answers:
    """What was answered about N images.

    Attributes:
        names: the labels of all C classes, in the order of the class numbers.
        scores: (N, C) float64, higher is better; −inf for a class that could not be answered. Only scores of one image
            compare: they are no probabilities.
        novelty: (N,) how unlike every known class an image is (`edge_client/unknown.py`).
        unknown: (N,) bool, whether that is more than the threshold; False where there is none.
    """

    names: tuple[str, ...]
    scores: NDArray[np.float64]
    novelty: NDArray[np.float64]
    unknown: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def classes(self) -> NDArray[np.int64]:
        """(N,) the class number of the highest score."""
        return np.asarray(self.scores.argmax(axis=1), dtype=np.int64)

    @property
    def labels(self) -> list[str]:
        """The label of the highest score of each image."""
        return [self.names[number] for number in self.classes]

    def top(self, row: int, count: int = 1) -> list[tuple[str, float]]:
        """The best labels of an image with their scores, best first; only classes that could be answered."""
        order = np.argsort(-self.scores[row], kind="stable")[:count]
        return [(self.names[n], float(self.scores[row, n])) for n in order if np.isfinite(self.scores[row, n])]


class Predictor:
    """Answers about images.

    Args:
        bundle: whose graph, labels and image shape are used.
        knowledge: what is known beside it.
        way: the way of answering by name; None for the best that this knowledge allows.
        threads: within an operator.
        threshold: an image whose novelty is larger is unknown; None for what the fleet's statistics say, if they do.
        providers: where the bundle's graph runs; the CPU unless one was chosen.

    Raises:
        UsageError: there is no such way, or none at all; the threshold is not a number.
        WireError: the global state is not of this bundle's fleet.
    """

    def __init__(
        self,
        bundle: Bundle,
        knowledge: Knowledge | None = None,
        *,
        way: str | None = None,
        threads: int = 1,
        threshold: float | None = None,
        providers: Providers | None = None,
    ) -> None:
        if threshold is not None and np.isnan(threshold):
            raise UsageError("the novelty above which an image is unknown", expected="a number", got=threshold)
        known, m = knowledge or Knowledge(), bundle.manifest
        self.bundle, self._shape, self.labels = bundle, m.input_shape, m.labels
        found, params = method(m.method), {**bundle.params, **known.weights}
        local = Remembered(m.classes, m.features, found.settled_in(m.hyper), params, known.means)
        judged = Caution(found, m.hyper).judge(known.state, lambda: 0.0)
        answers = known_answers(m, local, judged.state)
        self.ways = tuple(answers)
        self.way = _chosen(answers, m.method, bool(known.weights), way)
        self.answering: Answering = answers[self.way]
        is_own = self.answering.extractor == "local" and bool(known.weights)
        self.params: Weights = params if is_own else bundle.params
        self.basis = _basis(self.answering, known, judged.state)
        where = providers or Providers()
        provider = where.of(where.choice.own_answers if is_own else where.choice.answers)
        self._extractor = Extractor(bundle, self.params, threads, provider)
        self._novelty: Novelty = novelty_of(self.answering, known.means, judged.state, m)
        self.threshold = self._novelty.threshold if threshold is None else threshold

    @property
    def measure(self) -> str:
        """What novelty is measured by, in words."""
        return self._novelty.words

    def __call__(self, images: NDArray[Any]) -> Answers:
        """Answers about images (N, H, W, c) uint8 of the bundle's shape; a single one (H, W, c) is a batch of one.

        Raises:
            DataError: they are of another shape or type.
        """
        x = pixels(images[None] if images.shape == self._shape else images, "the images")
        if x.shape[1:] != self._shape:
            raise DataError("the images", expected=f"(N, {', '.join(map(str, self._shape))})", got=x.shape)
        features = self._extractor.features(x)
        novelty = self._novelty.of(features)
        over = np.zeros(len(x), bool) if self.threshold is None else novelty > self.threshold
        return Answers(self.labels, self.answering.answer.scores(features), novelty, over)

    def photos(
        self, files: Iterable[tuple[str, str | bytes]], together: int = _TOGETHER
    ) -> Iterator[tuple[str, Answers | Broken]]:
        """Answers about image files, one by one: (name, path or bytes) to (name, an answer or why there is none).

        Args:
            together: how many are waited for before they are asked about; 1 where each is to be answered at once.

        Raises:
            DataError: the bundle's images have channels that no file has.
        """
        check_channels(self._shape, "the bundle")
        waiting = iter(files)
        while some := list(islice(waiting, together)):
            decoded = list(decode_all(some, self._shape))
            whole = [found for found in decoded if not isinstance(found, Broken)]
            answers = iter(_one_by_one(self(np.stack(whole)))) if whole else iter(())
            for (name, _), found in zip(some, decoded, strict=True):
                yield name, found if isinstance(found, Broken) else next(answers)

    def calibrate(self, images: NDArray[Any], keep: float = 0.95) -> float:
        """Set the threshold so that of images of known classes, best some that trained nothing, this share is known.

        Raises:
            DataError, UsageError: images of another shape, none, or a share that is none.
        """
        if not 0.0 < keep <= 1.0 or not len(images):
            raise UsageError("calibration", expected="some images, and a share above 0 and up to 1", got=keep)
        self.threshold = float(np.quantile(self(images).novelty, keep))
        return self.threshold


def _check_kept(kept: Kept, m: Manifest) -> None:
    """That what a state directory says it keeps is of its bundle."""
    check_weights(kept.weights, m)
    means = kept.means
    if means is not None and (means.classes.sums.shape, means.spread.shape) != ((m.classes, m.features), (m.classes,)):
        raise BundleError(
            "device state", expected="the bundle's classes and width", got="others", hint="another --state"
        )


def _one_by_one(answers: Answers) -> Iterator[Answers]:
    for row in range(len(answers)):
        one = slice(row, row + 1)
        yield Answers(answers.names, answers.scores[one], answers.novelty[one], answers.unknown[one])


def _chosen(answers: dict[str, Answering], own: str, trained: bool, wanted: str | None) -> str:
    """The name of the way to answer by."""
    if wanted is not None:
        if wanted not in answers:
            hint = near_names(wanted, answers) if answers else "a round first"
            raise UsageError("--way", expected="a way of answering that is known here", got=wanted, hint=hint)
        return wanted
    found = method(own)
    shared = [found, closing_method(), *METHODS.values()]
    over_bundle = [each.way for each in shared if not each.trains]
    order = [found.way, *over_bundle] if trained else [*over_bundle, found.way, "head"]
    for way in order:
        if way in answers:
            return way
    raise UsageError(
        "nothing to answer with",
        expected="a device that has done a round, a global state that knows a class, or a bundle with a head",
        got="none of these",
        hint="--state DIR or --store FILE",
    )


def _basis(answering: Answering, known: Knowledge, state: GlobalState | None) -> str:
    """What the answers rest on, for a person."""
    own = answering.extractor == "local" and known.weights
    features = f"own weights after {counted(known.rounds, 'round')}" if own else "the bundle's weights"
    return f"{features}, {'no global state' if state is None else f'global version {state.version}'}"
