"""Whether a device's newest photos are like those that it had before: what it may tell of that (`contract/drift.py`).

1. After a contribution the present photos are compared with those that were measured before. A photo is known by a
   digest of its pixels and its class.
2. Once `LEAST` new photos have come, their features are compared with the class means of the earlier photos.
3. The class means of the new photos are compared with those of the earlier ones, too.
4. Then the new photos count as earlier ones.

The first photos are compared with nothing, and nothing is told of them.

`STATE/drift-told` has 8 bytes for each photo that was measured. When photos were removed, and after a restart, the
class means are computed again from the photos that are left. So nothing stays of a photo that its owner has taken away.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.drift import FARTHEST, LEAST, MOST_MOVED, Drift
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.sums.statistics import class_sums
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.samples import sample_keys
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.unknown import USUAL_THRESHOLD

__all__ = ["DriftWatch", "Reference"]

_KEY_BYTES = 8


class Reference:
    """Class sums (C, D) of unit features, and counts (C,): what a device had."""

    def __init__(self, classes: int, width: int) -> None:
        self._sums, self._counts = np.zeros((classes, width)), np.zeros(classes, np.int64)

    def add(self, features: NDArray[np.float64], labels: NDArray[np.int64]) -> None:
        """These belong to it, too: unit features (N, D) and class numbers (N,)."""
        sums, counts = class_sums(features, labels, len(self._counts))
        self._sums += sums
        self._counts += counts

    def copy(self) -> Reference:
        """As it is now."""
        copied = Reference(*self._sums.shape)
        copied._sums, copied._counts = self._sums.copy(), self._counts.copy()
        return copied

    @property
    def _freedom(self) -> int:
        return int(np.maximum(self._counts - 1, 0).sum())

    @property
    def is_usable(self) -> bool:
        """Whether it says how far photos of a class usually are from its mean."""
        return self._freedom >= LEAST

    @property
    def _usual(self) -> float:
        """The mean squared distance of a photo to its class's mean, pooled over classes."""
        present = self._counts > 0
        counts, means = self._counts[present], self._sums[present] / self._counts[present, None]
        return max(float((counts * (1.0 - (means**2).sum(axis=1))).sum()) / self._freedom, 1e-9)

    def moved(self, newer: Reference) -> float | None:
        """How far the class means of newer photos are from these, as a multiple of what chance makes of it.

        A class with n photos here and m newer ones counts with h = nm / (n + m), since means of so many photos differ
        by the usual squared distance divided by h, if nothing has changed. The result is Σ h ‖difference‖² over the
        usual distance, divided by the number of classes. None for no class in both.
        """
        both = (self._counts > 0) & (newer._counts > 0)
        if not both.any():
            return None
        here, there = self._counts[both].astype(np.float64), newer._counts[both].astype(np.float64)
        apart = self._sums[both] / here[:, None] - newer._sums[both] / there[:, None]
        weighted = float((here * there / (here + there) * (apart**2).sum(axis=1)).mean())
        return min(weighted / self._usual, MOST_MOVED)

    def distances(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Squared distances (N,) of unit features (N, D) to the nearest mean, in units of the usual distance.

        They are at most `FARTHEST`. The usual distance is pooled over classes: ‖z − μ‖² has mean 1 − ‖μ‖² over unit
        features.
        """
        present = self._counts > 0
        means = self._sums[present] / self._counts[present, None]  # (K, D)
        squares, usual = (means**2).sum(axis=1), self._usual
        nearest = (1.0 + squares - 2.0 * features @ means.T).min(axis=1)
        return np.asarray(np.clip(nearest / usual, 0.0, FARTHEST), dtype=np.float64)


class DriftWatch:
    """Measures one device.

    Args:
        device: its core.
        state: its state directory.
    """

    def __init__(self, device: Device, state: Path) -> None:
        self._device, self._path = device, state / "drift-told"
        self._last_data: LocalData | None = None
        self._measured = self._read()
        self._reference: Reference | None = None

    def measure(self) -> Drift | None:
        """How unlike the earlier photos the photos are that came since the last time.

        None where there are too few of them, or nothing to compare them with.
        """
        data = self._device.samples
        if data is self._last_data:
            return None
        self._last_data = data
        keys = [key[-_KEY_BYTES:] for key in sample_keys(data)]  # the end of the digest, and the class
        if not self._measured <= set(keys):
            self._keep(self._measured & set(keys))
            self._reference = None
        new = np.array([row for row, key in enumerate(keys) if key not in self._measured], np.intp)
        if len(new) < LEAST:
            return None
        reference = self._reference or self._reference_from(
            [row for row, key in enumerate(keys) if key in self._measured]
        )
        distances, moved = self._added(reference, new)
        self._reference = reference
        self._keep(set(keys))
        if distances is None or not np.isfinite(distances).all():
            return None
        return Drift(len(new), float((distances > USUAL_THRESHOLD).mean()), float(distances.mean()), moved)

    def _keep(self, keys: set[bytes]) -> None:
        """These photos were measured, and are still there."""
        self._measured = keys
        with contextlib.suppress(OSError), whole_file(self._path) as file:  # or they are measured once more
            file.write(b"".join(sorted(keys)))

    def _reference_from(self, rows: list[int]) -> Reference:
        reference = Reference(self._device.classes, self._device.width)
        for features, labels in self._features(np.array(rows, np.intp)):
            reference.add(features, labels)
        return reference

    def _added(self, reference: Reference, rows: NDArray[np.intp]) -> tuple[NDArray[np.float64] | None, float | None]:
        """How far new photos, and their class means, are from the reference as it was; None where it is not usable.

        The new photos belong to the reference afterwards.
        """
        before, distances = reference.copy(), []
        newer = Reference(self._device.classes, self._device.width)
        for features, labels in self._features(rows):
            if before.is_usable:
                distances.append(before.distances(features))
            reference.add(features, labels)
            newer.add(features, labels)
        return (np.concatenate(distances), before.moved(newer)) if distances else (None, None)

    def _features(self, rows: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        for features, labels in self._device.frozen_features(rows):
            yield np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float64), labels

    def _read(self) -> set[bytes]:
        try:
            content = self._path.read_bytes()
        except OSError:
            return set()
        return {content[start : start + _KEY_BYTES] for start in range(0, len(content) - _KEY_BYTES + 1, _KEY_BYTES)}
