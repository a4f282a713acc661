"""Test vectors: a few images, and the features that a bundle's own weights give them, as its exporter computed them.

Sums add up over devices whose extractors are the same. That the graph and the weights are the same, the bundle's hash
says; that a device's processor computes the same with them, these vectors do. They lie in the bundle as one member,
written with the CPU of ONNX Runtime at export:

    vectors.safetensors      x uint8 (n, H, W, c), z float32 (n, D)

A device compares by `distance`, and sums features only where it is within `TOLERANCE`
(docs/decisions/110-which-provider-may-sum.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from contract.errors import BundleError

__all__ = ["TOLERANCE", "VECTORS", "Vectors", "distance", "probe_images", "read_vectors"]

VECTORS = "vectors.safetensors"
TOLERANCE = 5e-5
_COUNT = 3
_PATCHES = 4  # along each side


@dataclass(frozen=True, eq=False)
class Vectors:
    """Images (n, H, W, c) uint8, and their features (n, D) float32."""

    x: NDArray[np.uint8]
    z: NDArray[np.float32]

    def packed(self) -> bytes:
        """The bytes of the member: always the same for the same arrays."""
        from safetensors.numpy import save

        return save({"x": np.ascontiguousarray(self.x), "z": np.ascontiguousarray(self.z)})


def read_vectors(raw: bytes, shape: tuple[int, int, int], features: int, path: object) -> Vectors:
    """The member's arrays.

    Args:
        shape: (H, W, c) of the bundle's images.
        features: D.
        path: of the bundle, for the error.

    Raises:
        BundleError: they are not of this bundle's shapes, or no finite numbers.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        found = load(raw)
        x, z = found["x"], found["z"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: {VECTORS}", expected="safetensors with x and z", got=error) from None
    expected = f"x uint8 (n, {', '.join(map(str, shape))}) and finite z float32 (n, {features})"
    fits = x.dtype == np.uint8 and x.shape[1:] == shape and z.dtype == np.float32 and z.shape == (len(x), features)
    if not fits or not len(x) or not np.isfinite(z).all():
        raise BundleError(f"{path}: {VECTORS}", expected=expected, got=f"x {x.dtype} {x.shape}, z {z.dtype} {z.shape}")
    return Vectors(x, z)


def probe_images(shape: tuple[int, int, int], count: int = _COUNT) -> NDArray[np.uint8]:
    """Images (count, H, W, c) uint8 of coarse patches under noise: the same everywhere and for ever, since SHAKE-256
    draws them. Pure noise would not do: averaged over a plane, one image of it is like any other.
    """
    height, width, channels = shape
    patches = _drawn(b"patches", (count, _PATCHES, _PATCHES, channels)).astype(np.int64)
    rows, columns = (np.arange(side) * _PATCHES // side for side in (height, width))
    noise = _drawn(b"noise", (count, *shape)).astype(np.int64) // 8 - 16
    return np.clip(patches[:, rows][:, :, columns] + noise, 0, 255).astype(np.uint8)


def _drawn(what: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    count = int(np.prod(shape))
    return np.frombuffer(hashlib.shake_256(b"protofleet " + what).digest(count), np.uint8).reshape(shape)


def distance(found: NDArray[np.floating], reference: NDArray[np.floating]) -> float:
    """The largest distance of one image's features (n, D) from the reference, relative to the reference's length.

    Infinite where the features are no finite numbers.
    """
    if found.shape != reference.shape or not np.isfinite(found).all():
        return float("inf")
    exact = np.asarray(reference, np.float64)
    apart = np.linalg.norm(np.asarray(found, np.float64) - exact, axis=1)
    return float((apart / np.maximum(np.linalg.norm(exact, axis=1), 1e-30)).max())
