"""Features in int8 for answers: tried beside the bundle's own on the first photos, and used if answers stay the same.

    photo → features.onnx (float) ─┐ same class? faster?
          → F.int8.onnx ───────────┘ for the first TRIED photos; then one of the two

Until the trial is over, answers follow from float. int8 is taken where at least `ALIKE` of the tried photos get the
same class by both, and where a photo takes less than `GAIN` of the time. One line says what came of it. On a processor
without dot products integer sums may saturate (docs/decisions/247): such a processor is found by the trial.

Answers leave no device with it: what is sent and summed is extracted in float.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.graph_checks import check_graph
from protofleet.contract.errors import UsageError
from protofleet.edge_client.training.extractor import Extractor

__all__ = ["ALIKE", "PRECISIONS", "TRIED", "Int8Features", "int8_file"]

PRECISIONS = ("fp32", "int8")
TRIED = 64  # photos that both forms are asked about
ALIKE = 0.8  # of them, at least, get the same class by both
GAIN = 0.9  # of float's time a photo, at most

logger = logging.getLogger(__name__)

Scores = Callable[[NDArray[np.float32]], NDArray[np.float64]]


def int8_file(bundle: Path) -> Path:
    """Where `export --precision int8` puts the form: beside the bundle."""
    return bundle.with_suffix(".int8.onnx")


class Int8Features:
    """The int8 form of a bundle's features, and whether it serves here.

    Args:
        path: of the bundle, beside which the form lies.
        bundle: whose features it gives.
        threads: within an operator.

    Raises:
        UsageError: there is no such file.
        BundleError: it is no graph of this bundle's images and features.
    """

    def __init__(self, path: Path, bundle: Bundle, threads: int = 1) -> None:
        file, m = int8_file(path), bundle.manifest
        try:
            graph = file.read_bytes()
        except OSError as error:
            raise UsageError(
                "--precision int8",
                expected=f"{file}, which holds the bundle's features in int8",
                got=error.strerror or error,
                hint="export with --target, --precision int8 and --data",
            ) from None
        check_graph(graph, file.name, {})
        self._of = bundle.sha256
        self._integer = Extractor(bundle, bundle.params, threads, whole=(file.name, graph))
        self._alike = self._tried = 0
        self._least = [np.inf, np.inf]  # seconds a photo: float, int8
        self._verdict: bool | None = None
        self._trying = threading.Lock()
        self._integer.features(np.zeros((1, *m.input_shape), np.uint8))  # a graph of other images or features ends here

    @property
    def line(self) -> str:
        """What came of the trial, for a person; which is still to come at first."""
        if self._verdict is None:
            return f"answers in float until {TRIED} photos were tried in int8, too"
        whole, integer = (1e3 * seconds for seconds in self._least)
        found = f"{integer:.3g} ms a photo where float takes {whole:.3g}, {self._alike} of {self._tried} answered alike"
        return f"answers in int8: {found}" if self._verdict else f"answers in float; int8: {found}"

    def features(self, x: NDArray[np.uint8], whole: Extractor, of: Bundle, scores: Scores) -> NDArray[np.float32]:
        """Features (N, D) of images (N, H, W, c), in int8 where the trial was for it.

        Args:
            whole: the extractor in float.
            of: the bundle that is answered by now; by another than the form's, in float.
            scores: features to a score for each class.
        """
        if of.sha256 != self._of:
            return whole.features(x)
        if self._verdict is None:
            with self._trying:  # from several threads, photos are counted one after the other
                tried = self._try(x[: TRIED - self._tried], whole, scores)
            x = x[len(tried) :]
            if not len(x):
                return tried
            return np.concatenate([tried, self._integer.features(x) if self._verdict else whole.features(x)])
        return self._integer.features(x) if self._verdict else whole.features(x)

    def _try(self, x: NDArray[np.uint8], whole: Extractor, scores: Scores) -> NDArray[np.float32]:
        """Float's features of images that both forms are asked about; the last of them decides."""
        if not len(x):  # another thread has tried enough
            return np.empty((0, whole.width), np.float32)
        exact, integer = self._timed(0, whole.features, x), self._timed(1, self._integer.features, x)
        self._alike += int((scores(exact).argmax(axis=1) == scores(integer).argmax(axis=1)).sum())
        self._tried += len(x)
        if self._tried >= TRIED:
            alike, faster = self._alike >= ALIKE * self._tried, self._least[1] < GAIN * self._least[0]
            self._verdict = alike and faster
            logger.info(self.line)
        return exact

    def _timed(
        self, form: int, run: Callable[[NDArray[np.uint8]], NDArray[np.float32]], x: NDArray[np.uint8]
    ) -> NDArray[np.float32]:
        """Features of each image on its own; the quickest one's processor time counts."""
        out = []
        for row in range(len(x)):
            start = time.process_time()
            out.append(run(x[row : row + 1]))
            self._least[form] = min(self._least[form], time.process_time() - start)
        return np.concatenate(out)
