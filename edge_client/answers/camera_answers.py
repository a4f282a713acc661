"""The client's own camera: each picture is answered about and kept, in a thread of the client's process.

1. A picture is brought to the bundle's shape (`edge_client/cameras/`), and answered about with what the client's
   journal keeps, as `predict` does. The network is the client's own session (`CompiledGraphs`); there is no second
   copy of its weights. Before there is anything to answer with, only its features are computed.
2. It goes into the ring of kept photos (`edge_client/photos/`), with the answer.
3. Once there is a newer global state, the newest photos that wait for nothing are asked about anew.
4. A camera that is gone is one line, and is tried again; nothing that happens to it ends the client.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.console.logs import Changes
from protofleet.contract.errors import DataError, ProtofleetError
from protofleet.contract.files.sqlite import Watch
from protofleet.contract.heads.sphere import unit_rows
from protofleet.edge_client.answers.knowledge import Following, Knowledge
from protofleet.edge_client.answers.predictor import Answers, NoAnswerError, Predictor
from protofleet.edge_client.answers.suggestions import uncertainty_of
from protofleet.edge_client.cameras.camera import Picture, Reader
from protofleet.edge_client.cameras.motion import Motion
from protofleet.edge_client.cameras.sources import pictures_of
from protofleet.edge_client.data.decode import Broken, Crop, Shape, decode_image, image_shape
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.journal.journal import FILE, read_kept
from protofleet.edge_client.photos.kept_photo import NewPhoto, id_of
from protofleet.edge_client.photos.photo_ring import PhotoRing
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.trainer import Weights

__all__ = ["Answered", "CameraAnswers", "OwnAnswers"]

logger = logging.getLogger(__name__)

_VIEW_PIXELS = 480  # the longer side of what a person looks at
_AGAIN_S = 60.0  # after what should never be
_ANEW = 24  # photos that are asked about again
_ENDING_S = 15.0  # for a read that is under way: a camera's own limits end it


class OwnAnswers:
    """Answers of a running client, from its journal and by its own sessions.

    Args:
        directory: of the journal.
        bundle: that runs.
        graphs: of the client.
    """

    def __init__(self, directory: Path, bundle: Bundle, graphs: CompiledGraphs) -> None:
        self._directory, self._bundle, self._graphs = directory, bundle, graphs
        self._watch = Watch(directory / FILE)
        self._predictor: Predictor | None = None

    @property
    def shape(self) -> Shape:
        """(H, W, c) of the bundle's photos."""
        return self._bundle.manifest.input_shape

    @property
    def basis(self) -> str:
        """What answers rest on, in words."""
        return "no answers yet" if self._predictor is None else self._predictor.basis

    @property
    def predictor(self) -> Predictor | None:
        """What answers; None while there is nothing to answer with."""
        return self._predictor

    def about(self, x: NDArray[np.uint8]) -> tuple[NDArray[np.float32], Answers | None, float]:
        """Unit features (D,) of an image (H, W, c), the answer, and how unsure it is, 0 to 1.

        Raises:
            ProtofleetError: the journal or the bundle cannot be used.
        """
        if self._predictor is None and self._watch.changed():
            self._predictor = self._made()
        if self._predictor is None:
            return _unit(self._graphs.shared_extractor().features(x[None]))[0], None, 1.0
        features, answers = self._predictor.with_features(x)
        scale = self._predictor.answering.answer.scale
        return _unit(features)[0], answers, float(uncertainty_of(answers.scores, scale, answers.probabilities)[0])

    def _made(self) -> Predictor | None:
        known = self._read()
        newer = Following(Watch(self._directory / FILE), self._read, known)
        try:
            return Predictor(self._bundle, known, newer=newer, extractors=self._extractor)
        except NoAnswerError:
            return None

    def _read(self) -> Knowledge:
        kept = read_kept(self._directory)
        return Knowledge.of_kept(kept, self._bundle, f"{self._directory} is of another bundle")

    def _extractor(self, own: Weights | None) -> Extractor:
        return self._graphs.shared_extractor() if own is None else self._graphs.extractor(own)


@dataclass(frozen=True)
class Answered:
    """What was answered about a picture; as of `NewPhoto`."""

    id: str
    answer: str
    probability: float | None
    is_unknown: bool


class CameraAnswers:
    """The thread that takes pictures, answers and keeps.

    Args:
        every_s: between two pictures.
        crop: the part of the pictures that counts.
        on_motion: whether only pictures are taken in which something has moved (`cameras/motion.py`).

    Attributes:
        on_photo: called in that thread after each picture that was kept.
        taken: how many pictures were answered about.
        newest_s: when the newest was taken; None before the first.
        newest: what was answered about it.
    """

    def __init__(
        self,
        camera: Reader,
        answers: OwnAnswers,
        ring: PhotoRing,
        *,
        every_s: float,
        crop: Crop | None = None,
        on_motion: bool = False,
    ) -> None:
        self.camera, self._answers, self._ring = camera, answers, ring
        self._motion = Motion(every_s, crop) if on_motion else None
        self._look_s, self._crop = every_s if self._motion is None else self._motion.look_s, crop
        self.on_photo: Callable[[], None] = lambda: None
        self._changes, self._stopping = Changes(logger), threading.Event()
        self._thread = threading.Thread(target=self._run, name="camera-answers", daemon=True)
        self.taken, self._version = 0, 0
        self.newest_s: float | None = None
        self.newest: Answered | None = None

    def start(self) -> None:
        """Begin to take pictures."""
        self._thread.start()

    def stop(self) -> None:
        """Take no further picture. The ring is not used any more on return."""
        self._stopping.set()
        self._thread.join(_ENDING_S)
        if self._thread.is_alive():
            logger.debug(f"camera {self.camera.shown} is still being read")

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._follow()
                if self.camera.ends and not self._stopping.is_set():
                    logger.info(f"camera {self.camera.shown} has ended after {self.taken:,} pictures")
                    return
            except _StoppedError:
                return
            except ProtofleetError as error:
                self._changes.say(f"camera {self.camera.shown}: {error}", level=logging.WARNING)
            except Exception as error:  # whatever a camera or a codec does, the client goes on
                self._changes.say(f"camera {self.camera.shown}: {type(error).__name__}", level=logging.WARNING)
                logger.debug("the camera's thread", exc_info=True)
            self._stopping.wait(_AGAIN_S)

    def _follow(self) -> None:
        for picture in pictures_of(self.camera, self._look_s, sleep=self._sleep):
            if self._stopping.is_set():
                return
            if self._motion is None or self._motion.is_wanted(picture):
                self._take(picture)
            del picture  # not kept while the next one is read

    def _sleep(self, duration_s: float) -> None:
        if self._stopping.wait(duration_s):
            raise _StoppedError

    def _take(self, picture: Picture) -> None:
        name, x = picture.fitted(self._answers.shape, self._crop)
        if isinstance(x, Broken):
            self._changes.say(f"a picture of camera {self.camera.shown} cannot be read ({x.why})")
            return
        view = _view(picture, self._crop)
        features, answers, uncertainty = self._answers.about(x)
        if self._stopping.is_set():
            return
        photo = _photo(name, picture.taken_s, x, x if view is None else view, features, answers, uncertainty)
        self._ring.keep(photo)
        version = 0 if answers is None else answers.version
        if version != self._version:
            self._version = version
            self._answer_anew(version)
        self.newest = Answered(id_of(pixel_hash(x)), photo.answer, photo.probability, photo.is_unknown)
        if not self.taken:
            logger.info(f"camera {self.camera.shown}: the first picture is there")
        self.taken, self.newest_s = self.taken + 1, time.time()
        self.on_photo()

    def _answer_anew(self, version: int) -> None:
        """Answer again about the newest photos, but for those whose labels are on their way."""
        for photo in self._ring.photos(_ANEW):
            if photo.waits or photo.version == version or self._stopping.is_set():
                continue
            with contextlib.suppress(DataError):  # it has left meanwhile
                x = decode_image(self._ring.image(photo, "png"), self._answers.shape)
                found = self._answers.about(x)
                self._ring.answered_anew(photo, _photo(photo.name, photo.taken_s, x, x, *found))


class _StoppedError(Exception):
    """The client ends."""


def _photo(
    name: str,
    taken_s: float,
    x: NDArray[np.uint8],
    view: NDArray[np.uint8],
    features: NDArray[np.float32],
    answers: Answers | None,
    uncertainty: float,
) -> NewPhoto:
    if answers is None:
        return NewPhoto(x, view, name, taken_s, features)
    best = int(answers.classes[0])
    probability = None if answers.probabilities is None else float(answers.probabilities[0, best])
    novelty = float(answers.novelty[0])
    return NewPhoto(
        x,
        view,
        name,
        taken_s,
        features,
        answer=answers.names[best],
        probability=probability,
        novelty=novelty if np.isfinite(novelty) else None,
        is_unknown=bool(answers.unknown[0]),
        uncertainty=uncertainty,
        version=answers.version,
    )


def _view(picture: Picture, crop: Crop | None) -> NDArray[np.uint8] | None:
    """The picture for a person, in its own proportions."""
    content = picture.content
    if isinstance(content, np.ndarray):
        height, width = content.shape[:2]
    else:
        height, width, _ = image_shape(content) or (1, 1, 3)
    if crop is not None:
        width, height = crop[2:]
    share = min(_VIEW_PIXELS / max(height, width), 1.0)
    _, view = picture.fitted((max(round(height * share), 1), max(round(width * share), 1), 3), crop)
    return None if isinstance(view, Broken) else view


def _unit(features: NDArray[np.floating]) -> NDArray[np.float32]:
    return np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float32)
