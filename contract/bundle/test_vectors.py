"""Test vectors: a few images, and the features that a bundle's own weights give them, as the exporter computed them.

Sums of features add up only over devices whose extractors are the same. The hash of the bundle shows that graph and
weights are the same. The test vectors show that a device's processor computes the same with them. They are one member
of the bundle, and were computed by ONNX Runtime on the CPU at export:

    vectors.safetensors      x uint8 (n, H, W, c), z float32 (n, D)

A device compares its own features with `z` by `distance`. It sums features only where the distance is within
`TOLERANCE` (docs/decisions/110-which-provider-may-sum.md).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import BundleError

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
        arrays = load(raw)
        x, z = arrays["x"], arrays["z"]
    except (SafetensorError, KeyError, ValueError) as error:
        raise BundleError(f"{path}: {VECTORS}", expected="safetensors with x and z", got=error) from None
    expected = f"x uint8 (n, {', '.join(map(str, shape))}) and finite z float32 (n, {features})"
    fits = x.dtype == np.uint8 and x.shape[1:] == shape and z.dtype == np.float32 and z.shape == (len(x), features)
    if not fits or not len(x) or not np.isfinite(z).all():
        raise BundleError(f"{path}: {VECTORS}", expected=expected, got=f"x {x.dtype} {x.shape}, z {z.dtype} {z.shape}")
    return Vectors(x, z)


def probe_images(shape: tuple[int, int, int], count: int = _COUNT) -> NDArray[np.uint8]:
    """Images (count, H, W, c) uint8 of coarse patches under noise.

    SHAKE-256 draws them, so they are the same on every machine and in every version. Images of pure noise would all
    look alike to a network that averages over a plane.
    """
    height, width, channels = shape
    patches = _drawn(b"patches", (count, _PATCHES, _PATCHES, channels)).astype(np.int64)
    rows, columns = (np.arange(side) * _PATCHES // side for side in (height, width))
    noise = _drawn(b"noise", (count, *shape)).astype(np.int64) // 8 - 16
    return np.clip(patches[:, rows][:, :, columns] + noise, 0, 255).astype(np.uint8)


def _drawn(label: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    count = int(np.prod(shape))
    return np.frombuffer(hashlib.shake_256(b"protofleet " + label).digest(count), np.uint8).reshape(shape)


def distance(features: NDArray[np.floating], reference: NDArray[np.floating]) -> float:
    """The largest distance of one image's features (n, D) from the reference, relative to the reference's length.

    Infinite where the features are no finite numbers.
    """
    if features.shape != reference.shape or not np.isfinite(features).all():
        return float("inf")
    exact = np.asarray(reference, np.float64)
    distances = np.linalg.norm(np.asarray(features, np.float64) - exact, axis=1)
    return float((distances / np.maximum(np.linalg.norm(exact, axis=1), 1e-30)).max())
