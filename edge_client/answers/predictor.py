"""Photos to answers, with what a device knows: its weights, its own class means, and what the fleet gave it.

1. `Knowledge` is what is known (`knowledge.py`): what a device's state directory keeps. On a machine that was never a
   device of the fleet it is only a global state beside a bundle.
2. A `Predictor` picks a way of answering (`answer_choice.py`): the method's own where this device has trained, or where
   no training is needed; else one over the features that all devices share.
3. Images are decoded and brought to the bundle's shape exactly as training images are (`edge_client/data/decode.py`).
4. The result is a score for every class, and how unlike all known classes an image is (`unknown.py`).
5. Scores become probabilities by the fleet's calibration, or by the device's own (`edge_client/device/calibration.py`).
   What the device usually sees may count in them (`class_shares.py`), as strongly as held-out photos of the fleet said.
6. Before each batch of answers the predictor asks whether there is something newer. The newer knowledge is prepared as
   a whole, and then replaces the old. If a global state cannot be true, or a file cannot be read, all stays as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.calibration import LEAST_PHOTOS, Bins, Calibration
from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import DataError, ProtofleetError, UsageError, near_names
from protofleet.contract.heads.answers import way_in_words
from protofleet.contract.methods import method
from protofleet.contract.names import named
from protofleet.contract.printable import counted
from protofleet.contract.sums.plausibility import largest_norm
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration
from protofleet.edge_client.answers.class_shares import ClassShares
from protofleet.edge_client.answers.int8_answers import Int8Features
from protofleet.edge_client.answers.knowledge import Knowledge
from protofleet.edge_client.data.decode import Broken, check_channels, decode_all
from protofleet.edge_client.data.npz import pixels
from protofleet.edge_client.device.answer_choice import Answering, known_answers, usual_way
from protofleet.edge_client.device.global_state_check import GlobalStateCheck
from protofleet.edge_client.device.left_out import LeftOut
from protofleet.edge_client.device.unknown import Novelty, novelty_of
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.local_samples import Remembered
from protofleet.edge_client.training.onnx_session import Providers
from protofleet.edge_client.training.trainer import Weights

__all__ = ["STRENGTHS", "Answers", "NoAnswerError", "Predictor", "checked_coverage"]

logger = logging.getLogger(__name__)

STRENGTHS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {"auto": lambda chosen: chosen, "own": lambda chosen: 1.0, "fleet": lambda chosen: 0.0}
)
"""How much the device's own class shares count, by name, of what held-out photos chose."""
_AMOUNTS = {0.0: "nothing", 0.25: "a quarter", 0.5: "half", 0.75: "three quarters", 1.0: "fully"}
_TOGETHER = 32  # photos that are decoded and asked about at once


class NoAnswerError(UsageError):
    """There is nothing to answer with yet."""


@dataclass(frozen=True, eq=False)
class Answers:
    """What was answered about N images.

    Attributes:
        names: the labels of all C classes, in the order of the class numbers.
        scores: (N, C) float64, higher is better; −inf for a class that could not be answered. Only scores of one image
            compare: they are no probabilities.
        probabilities: (N, C) float64; None where no held-out photos have said how scores become probabilities.
        sets: whether a class belongs to the set of a stated coverage (N, C) bool, by `Predictor(coverage=…)`; None
            where no coverage was asked for, or held-out photos are too few to say.
        novelty: (N,) how unlike every known class an image is (`edge_client/device/unknown.py`).
        unknown: (N,) bool, whether that is more than the threshold; False where there is none.
        version: of the global state that they rest on; 0 for none.
    """

    names: tuple[str, ...]
    scores: NDArray[np.float64]
    novelty: NDArray[np.float64]
    unknown: NDArray[np.bool_]
    version: int = 0
    probabilities: NDArray[np.float64] | None = None
    sets: NDArray[np.bool_] | None = None

    def __len__(self) -> int:
        return len(self.scores)

    @property
    def _ranks(self) -> NDArray[np.float64]:
        """By what classes are ordered: probability where there is one, since the class shares are in it."""
        return self.scores if self.probabilities is None else self.probabilities

    @property
    def classes(self) -> NDArray[np.int64]:
        """(N,) the number of the best class."""
        return np.asarray(self._ranks.argmax(axis=1), dtype=np.int64)

    @property
    def labels(self) -> list[str]:
        """The label of the best class of each image."""
        return [self.names[number] for number in self.classes]

    def order(self, row: int, count: int) -> list[int]:
        """The numbers of an image's best classes, best first; only classes that could be answered."""
        order = np.argsort(-self._ranks[row], kind="stable")[:count]
        return [int(number) for number in order if np.isfinite(self.scores[row, number])]

    def top(self, row: int, count: int = 1) -> list[tuple[str, float]]:
        """The best labels of an image with their scores, best first; only classes that could be answered."""
        return [(self.names[number], float(self.scores[row, number])) for number in self.order(row, count)]

    def set_of(self, row: int) -> list[str] | None:
        """The labels that belong to an image's set, best first; None where there are no sets."""
        if self.sets is None:
            return None
        return [self.names[number] for number in self.order(row, len(self.names)) if self.sets[row, number]]


@dataclass(frozen=True, eq=False)
class _Ready:
    """All that answers need, made of one knowledge: taken up as a whole."""

    known: Knowledge
    bundle: Bundle
    ways: tuple[str, ...]
    way: str
    answering: Answering
    params: Weights
    basis: str
    head_owner: str
    own: bool
    extractor: Extractor
    novelty: Novelty
    version: int
    calibration: AnnouncedCalibration | None
    calibrated_by: str
    counts: NDArray[np.int64] | None


class Predictor:
    """Answers about images; may be used from several threads.

    Args:
        bundle: whose graph, labels and image shape are used.
        knowledge: what is known beside it.
        way: the way of answering by name; None for the best that this knowledge allows.
        threads: within an operator.
        threshold: an image whose novelty is larger is unknown; None for what the fleet's statistics say, if they do.
        providers: where the bundle's graph runs; the CPU unless one was chosen.
        newer: gives what is newer than what it gave before, or None; asked before each batch of answers.
        answers: how much the device's own class shares count: `auto` as much as held-out photos said, `own` fully,
            `fleet` not at all.
        coverage: the share of images whose set is to hold the right class; None for no sets.
        extractors: gives the extractor of a bundle with these own weights, or with its own; one of its own when None.
        int8: the bundle's features in int8, which are tried; features by own weights stay in float.

    Raises:
        UsageError: there is no such way, or none at all; the threshold is not a number; `own` where this device's class
            shares or a calibration are not known.
        WireError: the global state is not of this bundle's fleet.
    """

    # arguments: what answers depend on, by name; each but the bundle has its default
    def __init__(
        self,
        bundle: Bundle,
        knowledge: Knowledge | None = None,
        *,
        way: str | None = None,
        threads: int = 1,
        threshold: float | None = None,
        providers: Providers | None = None,
        newer: Callable[[], Knowledge | None] | None = None,
        answers: str = "auto",
        coverage: float | None = None,
        extractors: Callable[[Weights | None], Extractor] | None = None,
        int8: Int8Features | None = None,
    ) -> None:
        self._extractors, self._int8 = extractors, int8
        if threshold is not None and np.isnan(threshold):
            raise UsageError("the novelty above which an image is unknown", expected="a number", got=threshold)
        m = bundle.manifest
        self._first, self._shape = bundle, m.input_shape  # of the images, for good
        self._wanted, self._threads, self._providers = way, threads, providers or Providers()
        self._given_threshold = threshold
        self._strength, self._coverage = named(STRENGTHS, answers, "--answers"), checked_coverage(coverage)
        self._shares: ClassShares | None = None
        self._sharing = threading.Lock()
        self._newer, self._changes = newer, Changes(logger)
        self._renewing = threading.Lock()
        self._ready = self._prepared(knowledge or Knowledge(), None)
        if answers == "own" and (self._ready.calibration is None or self._ready.counts is None):
            raise UsageError(
                "--answers own",
                expected="a device that has labels, and held-out photos of its own or of its fleet",
                got=self.calibrated,
                hint="--answers auto",
            )

    @property
    def bundle(self) -> Bundle:
        """Whose graph and labels are used: the one it was made with, or one that the device has changed to since."""
        return self._ready.bundle

    @property
    def labels(self) -> tuple[str, ...]:
        """Of all classes, in the order of their numbers."""
        return self.bundle.manifest.labels

    @property
    def ways(self) -> tuple[str, ...]:
        """The ways of answering that there are."""
        return self._ready.ways

    @property
    def way(self) -> str:
        """The one that is used."""
        return self._ready.way

    @property
    def answering(self) -> Answering:
        """How it answers, and over whose features."""
        return self._ready.answering

    @property
    def params(self) -> Weights:
        """The weights that features are made with."""
        return self._ready.params

    @property
    def basis(self) -> str:
        """What the answers rest on, for a person."""
        return self._ready.basis

    @property
    def way_in_words(self) -> str:
        """The way that is used, and whose head it is, for a person."""
        return way_in_words(self.way, whose=self._ready.head_owner)

    @property
    def measure(self) -> str:
        """What novelty is measured by, in words."""
        return self._ready.novelty.description

    @property
    def calibrated(self) -> str:
        """What the probabilities rest on, in words."""
        ready = self._ready
        if ready.calibration is None:
            return (
                "no percentages yet, the numbers are scores, to compare within one photo: percentages need "
                f"{LEAST_PHOTOS} photos kept for tests, here or in the fleet (client --hold-out 0.3, or --test FOLDER)"
            )
        calibration = ready.calibration
        strength = self._effective_strength(ready)
        of_devices = f" of {counted(calibration.devices, 'device')}" if calibration.devices > 1 else ""
        line = f"probabilities by {ready.calibrated_by} {counted(calibration.photos, 'held-out photo')}{of_devices}"
        shares = f"what this device usually sees counts {_AMOUNTS.get(strength, f'{strength:g}')}"
        return f"{line}; {shares}{self._why_no_sets(ready)}"

    def _why_no_sets(self, ready: _Ready) -> str:
        """Why a coverage that was asked for gives no sets, in words; else empty."""
        if self._coverage is None or self._bins(ready) is not None:
            return ""
        if not self._is_as_announced(ready):
            return "; no sets: held-out photos have not said them for this, --answers auto"
        return "; no sets: held-out photos are not counted yet"

    @property
    def threshold(self) -> float | None:
        """The novelty above which an image is unknown; None where none is."""
        return self._ready.novelty.threshold if self._given_threshold is None else self._given_threshold

    @threshold.setter
    def threshold(self, value: float | None) -> None:
        self._given_threshold = value

    def renew(self) -> bool:
        """Take up what is newer, if anything is; True when something was. Each batch of answers calls this first."""
        if self._newer is None or not self._renewing.acquire(blocking=False):
            return False  # another thread is at it: what was known serves until it is done
        try:
            newer = self._newer()
            if newer is None:
                return False
            before, self._ready = self._ready, self._prepared(newer, self._ready)
        except ProtofleetError as error:
            self._changes.say(f"nothing new is taken up: {error}", level=logging.WARNING)
            return False
        finally:
            self._renewing.release()
        if before.known.mark == self._ready.known.mark:
            return False
        self._changes.say(f"taken up: {self.basis}; answers by {self.way}")
        return True

    def __call__(self, images: NDArray[Any]) -> Answers:
        """Answers about images (N, H, W, c) uint8 of the bundle's shape; a single one (H, W, c) is a batch of one.

        Raises:
            DataError: they are of another shape or type.
        """
        return self.with_features(images)[1]

    def with_features(self, images: NDArray[Any]) -> tuple[NDArray[np.float32], Answers]:
        """As a call, and the features (N, D) that the answers follow from.

        Raises:
            DataError: the images are of another shape or type.
        """
        x = pixels(images[None] if images.shape == self._shape else images, "the images")
        if x.shape[1:] != self._shape:
            raise DataError("the images", expected=f"(N, {', '.join(map(str, self._shape))})", got=x.shape)
        self.renew()
        ready, threshold = self._ready, self.threshold
        scores_of = ready.answering.answer.scores
        if self._int8 is None or ready.own:
            features = ready.extractor.features(x)
        else:
            features = self._int8.features(x, ready.extractor, ready.bundle, scores_of)
        novelty = ready.novelty.of(features)
        over = np.zeros(len(x), bool) if threshold is None else novelty > threshold
        labels, scores = ready.bundle.manifest.labels, scores_of(features)
        probabilities = self._probabilities(ready, scores)
        sets = self._sets(ready, probabilities, scores)
        return features, Answers(labels, scores, novelty, over, ready.version, probabilities, sets)

    def _probabilities(self, ready: _Ready, scores: NDArray[np.float64]) -> NDArray[np.float64] | None:
        """(N, C) of scores (N, C); what the device sees is counted on the way."""
        if ready.calibration is None:
            return None
        scaled, fleet = scores / ready.answering.answer.scale, ready.calibration.calibration
        plain = np.exp(Calibration(fleet.temperature).log_probabilities(scaled))
        strength = self._effective_strength(ready)
        if ready.counts is None or not strength:
            return np.asarray(plain, dtype=np.float64)
        with self._sharing:  # what is seen is counted in the order of the calls
            if self._shares is None or not self._shares.is_of(ready.counts):
                self._shares = ClassShares(ready.counts)
            shares = self._shares.follow(plain)
        return np.asarray(np.exp(Calibration(fleet.temperature, strength).log_probabilities(scaled, shares)))

    def _effective_strength(self, ready: _Ready) -> float:
        """How much this device's class shares count, 0 to 1; nothing where they are not known."""
        if ready.calibration is None or ready.counts is None:
            return 0.0
        return self._strength(ready.calibration.strength)

    def _is_as_announced(self, ready: _Ready) -> bool:
        return ready.calibration is not None and self._effective_strength(ready) == ready.calibration.strength

    def _bins(self, ready: _Ready) -> Bins | None:
        """What sets follow from: it holds for the announced strength alone."""
        return ready.calibration.bins if ready.calibration is not None and self._is_as_announced(ready) else None

    def _sets(
        self, ready: _Ready, probabilities: NDArray[np.float64] | None, scores: NDArray[np.float64]
    ) -> NDArray[np.bool_] | None:
        """Which classes belong to each image's set, the best always."""
        bins = self._bins(ready)
        if self._coverage is None or bins is None or probabilities is None:
            return None
        sets = (probabilities >= bins.least_in_set(self._coverage)) & np.isfinite(scores)
        sets[np.arange(len(sets)), probabilities.argmax(axis=1)] = True
        return np.asarray(sets)

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
            whole = [image for image in decoded if not isinstance(image, Broken)]
            answers = iter(_one_by_one(self(np.stack(whole)))) if whole else iter(())
            for (name, _), image in zip(some, decoded, strict=True):
                yield name, image if isinstance(image, Broken) else next(answers)

    def calibrate(self, images: NDArray[Any], keep: float = 0.95) -> float:
        """Set the threshold so that of images of known classes, best some that trained nothing, this share is known.

        Raises:
            DataError, UsageError: images of another shape, none, or a share that is none.
        """
        if not 0.0 < keep <= 1.0 or not len(images):
            raise UsageError("calibration", expected="some images, and a share above 0 and up to 1", got=keep)
        threshold = float(np.quantile(self(images).novelty, keep))
        self.threshold = threshold
        return threshold

    def _prepared(self, known: Knowledge, before: _Ready | None) -> _Ready:
        """What answers need, of this knowledge; of what was ready before, an extractor that has not changed.

        Raises:
            UsageError: the bundle takes images of another size than those that this one is given.
        """
        bundle = known.bundle or self._first
        m = bundle.manifest
        if m.input_shape != self._shape:
            raise UsageError(
                "the device's new bundle",
                expected=f"images of {self._shape}",
                got=f"{m.input_shape}",
                hint="starting this program anew",
            )
        own_method, params = method(m.method), {**bundle.params, **known.weights}
        local = Remembered(m.classes, m.features, own_method.resolved_in(m.hyper), params, known.means)
        state = None if known.state is None else known.state.below(m.classes)
        doubt = state and GlobalStateCheck(own_method, m.hyper).doubt(
            state, lambda: largest_norm(own_method.own_prototypes(local)[0])
        )
        if state is not None and doubt:
            self._changes.say(f"global version {state.version} is not taken up: {doubt}", level=logging.WARNING)
            state = None if before is None else before.known.state
        alone = None if self._wanted is not None else known.alone  # a way that is asked for is the fleet's
        by = state  # what the answers follow from
        together = alone is not None and alone.answers_together
        if alone is not None and (together or not known.weights) and known.own is not None:
            by = known.own.below(m.classes)
        answers, wanted = known_answers(m, local, by), self._wanted
        if together:
            shared = {way: candidate for way, candidate in answers.items() if candidate.extractor == "bundle"}
            wanted = usual_way(shared, m.method, trained=False)
        elif alone is not None and known.weights and own_method.alone_way(m.head) in answers:
            wanted = own_method.alone_way(m.head)
        way = _chosen(answers, m.method, bool(known.weights), wanted)
        answering = answers[way]
        own = answering.extractor == "local" and bool(known.weights)
        settled = replace(known, state=state)
        found = known.calibration.of_way(way) if alone is None else None
        counts = np.array(known.calibration.counts, np.int64)
        return _Ready(
            known=settled,
            bundle=bundle,
            ways=tuple(answers),
            way=way,
            answering=answering,
            params=params if own else bundle.params,
            basis=_basis(answering, settled, alone),
            head_owner="the fleet's" if alone is None else alone.head_owner,
            own=own,
            extractor=self._extractor(bundle, known, params if own else None, before),
            novelty=novelty_of(
                answering, known.means, by, m, known.calibration.limit_of(way) if alone is None else None
            ),
            version=0 if state is None or alone is not None else state.version,
            calibration=None if found is None else found[0],
            calibrated_by="" if found is None else found[1],
            counts=counts if len(counts) == m.classes and counts.any() else None,
        )

    def _extractor(self, bundle: Bundle, known: Knowledge, own: Weights | None, before: _Ready | None) -> Extractor:
        """With these own weights, or the bundle's; that of before, where they have not changed since."""
        same = before is not None and before.own == (own is not None) and _share_features(before.bundle, bundle)
        if before is not None and same and (own is None or before.known.rounds == known.rounds):
            return before.extractor
        if self._extractors is not None:
            return self._extractors(own)
        choice = self._providers.choice
        provider = self._providers.of(choice.answers if own is None else choice.own_answers)
        return Extractor(bundle, bundle.params if own is None else own, self._threads, provider)


def checked_coverage(coverage: float | None) -> float | None:
    """A share of images whose set holds the right class.

    Raises:
        UsageError: it is not above 0 and below 1.
    """
    if coverage is not None and not 0.0 < coverage < 1.0:
        raise UsageError("--coverage", expected="a share above 0 and below 1, such as 0.95", got=coverage)
    return coverage


def _share_features(one: Bundle, other: Bundle) -> bool:
    """Whether two bundles turn images into the same features."""
    return one.sha256 == other.sha256 or (
        bool(one.manifest.extractor) and one.manifest.extractor == other.manifest.extractor
    )


def _one_by_one(answers: Answers) -> Iterator[Answers]:
    for row in range(len(answers)):
        one = slice(row, row + 1)
        yield replace(
            answers,
            scores=answers.scores[one],
            novelty=answers.novelty[one],
            unknown=answers.unknown[one],
            probabilities=None if answers.probabilities is None else answers.probabilities[one],
            sets=None if answers.sets is None else answers.sets[one],
        )


def _chosen(answers: dict[str, Answering], own: str, trained: bool, wanted: str | None) -> str:
    """The name of the way to answer by."""
    if wanted is not None:
        if wanted not in answers:
            hint = near_names(wanted, answers) if answers else "a round first"
            raise UsageError("--way", expected="a way of answering that is known here", got=wanted, hint=hint)
        return wanted
    way = usual_way(answers, own, trained=trained)
    if way is not None:
        return way
    raise NoAnswerError(
        "nothing to answer with",
        expected="a device that has done a round, a global state that knows a class, or a bundle with a head",
        got="none of these",
        hint="--state DIR or --store FILE",
    )


def _basis(answering: Answering, known: Knowledge, alone: LeftOut | None) -> str:
    """What the answers rest on, for a person."""
    own = answering.extractor == "local" and known.weights
    features = f"own weights after {counted(known.rounds, 'round')}" if own else "the bundle's weights"
    state = known.state
    if alone is not None:
        return f"{features}, this device's {alone.chosen}"
    return f"{features}, {'no global state' if state is None else f'global version {state.version}'}"
