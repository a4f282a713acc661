"""The frozen part of a network whose tail a device trains: photos to activations, once for each photo.

- `TrunkGraph` runs the bundle's `trunk.onnx`, one photo at a time. So the activations of a photo do not depend on
  other photos, and a device that kept the activations trains exactly as one that computes them again.
- `FrozenTrunk` knows the device's photos. It takes activations from the store (`data/activations.py`) where they are
  there, and else runs the graph.
- `TailExtractor` turns activations into features, with weights that the device has trained.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.graph_checks import external_weights
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.errors import BundleError
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.data.samples import release_pages
from protofleet.edge_client.training.extractor import Extractor, checked
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.edge_client.training.trainer import Weights

__all__ = ["FrozenTrunk", "TailExtractor", "TrunkGraph"]

Float32 = NDArray[np.float32]


class TrunkGraph:
    """`trunk.onnx` with the bundle's weights.

    Args:
        bundle: one with a cut.
        threads: within an operator.

    Raises:
        BundleError: the graph cannot be loaded.
    """

    def __init__(self, bundle: Bundle, threads: int = 1) -> None:
        assert bundle.trunk is not None
        weights = {name: bundle.params[name] for name in external_weights(bundle.trunk)}
        self._session, self._weights = open_session(bundle.trunk, "trunk.onnx", threads=threads, weights=weights)
        self._names = [tensor.name for tensor in bundle.manifest.cut]
        self._shapes = [tensor.shape for tensor in bundle.manifest.cut]

    def run(self, photo: NDArray[np.uint8]) -> Float32:
        """The activations of one photo (H, W, c), end to end: (F,)."""
        try:
            outputs = self._session.run(self._names, {"x": np.ascontiguousarray(photo[None])})
        except ORT_ERRORS as error:
            raise BundleError("trunk.onnx", expected="input x and the manifest's activations", got=error) from None
        given = zip(outputs, self._shapes, strict=True)
        return np.concatenate([checked("trunk.onnx", output, (1, *shape)).reshape(-1) for output, shape in given])


class FrozenTrunk:
    """Activations of a device's photos.

    Args:
        bundle: one with a cut.
        graph: opens the trunk, when it is needed.
        store: keeps activations; None keeps none.
        on_photo: called after each photo that went through the trunk.
    """

    def __init__(
        self,
        bundle: Bundle,
        graph: Callable[[], TrunkGraph],
        store: ActivationStore | None,
        on_photo: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_photo = on_photo
        self._shapes = [tensor.shape for tensor in bundle.manifest.cut]
        self._width = sum(prod(shape) for shape in self._shapes)
        self._open, self._store, self._identity = graph, store, _identity(bundle)
        self._graph: TrunkGraph | None = None
        self._named: list[tuple[str, NDArray[np.uint8]]] = []
        self._kept: dict[str, Float32] = {}

    def keep(self, name: str, x: NDArray[np.uint8]) -> None:
        """The activations of these photos (N, H, W, c) are to be kept, once they are needed."""
        if len(x) and x.flags.c_contiguous and all(known is not x for _, known in self._named):
            self._named.append((name, x))

    def forget(self) -> None:
        """No photos are known any more; what is on the disk of them stays until others take its place."""
        self._named.clear()
        self._kept.clear()

    def rest(self) -> None:
        """Let go of the graph until it is needed again."""
        self._graph = None

    def fill(self, x: NDArray[np.uint8], rows: NDArray[np.int64], into: Sequence[Float32]) -> None:
        """Write the activations of these rows of `x` to the beginning of the arrays `into`, (B, …) each."""
        location = self._find(x)
        kept, first = (None, 0) if location is None else location
        for place, row in enumerate(rows):
            known = kept is not None and first + row < len(kept)
            numbers = kept[first + row] if known and kept is not None else self._run(x[row])
            start = 0
            for target, shape in zip(into, self._shapes, strict=True):
                target[place] = numbers[start : start + prod(shape)].reshape(shape)
                start += prod(shape)
        if kept is not None:
            release_pages(kept)

    def of(self, x: NDArray[np.uint8]) -> list[Float32]:
        """The activations of photos (N, H, W, c): (N, …) each."""
        into = [np.empty((len(x), *shape), np.float32) for shape in self._shapes]
        self.fill(x, np.arange(len(x)), into)
        return into

    def _run(self, photo: NDArray[np.uint8]) -> Float32:
        self._graph = self._graph or self._open()
        activations = self._graph.run(photo)
        self._on_photo()
        return activations

    def _find(self, x: NDArray[np.uint8]) -> tuple[Float32, int] | None:
        """The kept activations of the set that `x` is a stretch of, and which row is its first."""
        start = _address(x)
        for name, known in self._named:
            begin = _address(known)
            if x.shape[1:] == known.shape[1:] and x.flags.c_contiguous and begin <= start < begin + known.nbytes:
                return self._activations(name, known), (start - begin) // prod(x.shape[1:])
        return None

    def _activations(self, name: str, x: NDArray[np.uint8]) -> Float32:
        if name not in self._kept:
            if self._store is None:
                self._kept[name] = np.empty((0, self._width), np.float32)
            else:
                run = lambda row: self._run(x[row])  # noqa: E731
                self._kept[name] = self._store.fetch(name, self._identity, x, self._width, run)
        return self._kept[name]


class TailExtractor(Extractor):
    """f(x) by way of the trunk: what the trunk makes of images, and `tail.onnx` with a given set of weights.

    Args:
        bundle: one with a cut.
        params: weights by state-tensor name; those of the tail are used.
        trunk: of the device.
        threads: within an operator.
    """

    def __init__(self, bundle: Bundle, params: Weights, trunk: FrozenTrunk, threads: int = 1) -> None:
        assert bundle.tail is not None
        self._manifest, self._trunk = bundle.manifest, trunk
        self._at_once = bundle.manifest.batch
        weights = {name: params[name] for name in external_weights(bundle.tail)}
        self._session, self._weights = open_session(bundle.tail, "tail.onnx", threads=threads, weights=weights)
        self._names = [tensor.name for tensor in bundle.manifest.cut]

    def _run(self, x: NDArray[np.uint8]) -> Float32:
        try:
            (z,) = self._session.run(["z"], dict(zip(self._names, self._trunk.of(x), strict=True)))
        except ORT_ERRORS as error:
            raise BundleError("tail.onnx", expected="the manifest's activations and output z", got=error) from None
        return checked("tail.onnx", z, (len(x), self.width))


def _identity(bundle: Bundle) -> bytes:
    """32 bytes: the trunk's graph, its weights, and what runs it."""
    assert bundle.trunk is not None
    digest = hashlib.sha256(bundle.trunk + ort.__version__.encode())
    for name in sorted(external_weights(bundle.trunk)):
        digest.update(name.encode() + np.ascontiguousarray(bundle.params[name]).tobytes())
    return digest.digest()


def _address(x: NDArray[np.uint8]) -> int:
    return int(x.__array_interface__["data"][0])
