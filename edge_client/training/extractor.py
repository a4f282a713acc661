"""Inference on the device: images to features with the bundle's `features.onnx` and a given set of weights.

The graph holds no weights. They are supplied when the session is made, so a device that has just trained gets a
session over its own weights, fused and prepacked like any other (docs/bundle.md). Features come in blocks, so that
a large data set is never held as N × D floats.

On the CPU the graph runs over a few photos at a time, over a single one where photos are large. The memory of a run
grows with the photos in it; the time of a photo does not fall (docs/decisions/240).

A session keeps the memory of its largest run. One that stays, and mostly runs over a single photo, gives it back after
runs over several (docs/decisions/273).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS
from protofleet.contract.errors import BundleError
from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.training.onnx_session import CPU, Provider, give_back, open_session
from protofleet.edge_client.training.trainer import Weights

__all__ = ["BLOCK_SAMPLES", "Extractor", "GivenFeatures", "checked"]

BLOCK_SAMPLES, BLOCK_NUMBERS = 512, 65_536  # whose features are taken at a time, at most: 51 of width 1,280
Whole = tuple[str, bytes]


class Extractor:
    """f(x): uint8 images to float32 features.

    Args:
        bundle: whose graph to run.
        params: weights by state-tensor name; those of the backbone are used.
        threads: within an operator.
        provider: where it runs.
        whole: another graph of the same images and features, by its name, with its weights inside.
        gives_back: after runs over several photos, the memory that a run over one does not need.

    Attributes:
        on_batch: called after each run over images.

    Raises:
        BundleError: when the graph and the weights do not fit each other.
    """

    on_batch: Callable[[], None] = staticmethod(lambda: None)
    _gives_back = False

    def __init__(
        self,
        bundle: Bundle,
        params: Weights,
        threads: int = 1,
        provider: Provider = CPU,
        whole: Whole | None = None,
        *,
        gives_back: bool = False,
    ) -> None:
        m = self._manifest = bundle.manifest
        self._gives_back = gives_back
        self._at_once = m.extraction_batch if provider.name == "cpu" else m.batch
        weights = {name: params[name] for name in bundle.manifest.weights} if whole is None else {}
        self._name, graph = whole or ("features.onnx", bundle.features)
        self._session, self._weights = open_session(
            graph, self._name, threads=threads, weights=weights, provider=provider
        )

    @property
    def width(self) -> int:
        """D, the feature width."""
        return self._manifest.features

    def features(self, x: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The features of images (N, H, W, c): (N, D) float32. For sets that fit memory; see `blocks` for others."""
        out = np.empty((len(x), self.width), np.float32)
        for start in range(0, len(x), self._at_once):
            out[start : start + self._at_once] = self._run(x[start : start + self._at_once])
            release_pages(x)
            self.on_batch()
        if self._gives_back and min(len(x), self._at_once) > 1:
            self._gives_back = give_back(self._session, ["z"], {"x": np.ascontiguousarray(x[:1])})
        return out

    def blocks(self, x: NDArray[np.uint8], samples: int | None = None) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """The features of images (N, H, W, c), block by block: (which rows, their features).

        Args:
            samples: of a block; by default as many as the width allows.
        """
        samples = samples or min(BLOCK_SAMPLES, max(BLOCK_NUMBERS // self.width, 1))
        for start in range(0, len(x), samples):
            rows = slice(start, min(start + samples, len(x)))
            yield rows, self.features(x[rows])

    def _run(self, x: NDArray[np.uint8]) -> NDArray[np.float32]:
        try:
            (z,) = self._session.run(["z"], {"x": np.ascontiguousarray(x)})
        except ORT_ERRORS as error:
            raise BundleError(self._name, expected="input x and output z", got=error) from None
        return checked(self._name, z, (len(x), self.width))


class GivenFeatures(Extractor):
    """An extractor for what has been extracted already: what stands for images is features (N, D).

    Args:
        width: D.
    """

    def __init__(self, width: int) -> None:
        self._width = width

    @property
    def width(self) -> int:
        return self._width

    def features(self, x: NDArray[Any]) -> NDArray[np.float32]:
        return np.asarray(x, dtype=np.float32)


def checked(graph: str, output: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """What a graph gave, if it is what the manifest says of it.

    Raises:
        BundleError: another shape or type.
    """
    if not isinstance(output, np.ndarray) or output.shape != shape or output.dtype != np.float32:
        got = f"{output.dtype} {output.shape}" if isinstance(output, np.ndarray) else type(output).__name__
        raise BundleError(f"what {graph} gives", expected=f"float32 {shape}, as the manifest says", got=got)
    return output
