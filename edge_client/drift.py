"""Whether a device's newest photos are like those that it had before: what it may tell of that (`contract/drift.py`).

After a contribution the photos that are there are compared with those that were measured before, by a digest of their
pixels and class. Once `LEAST` have come, their features are compared with the class means of the earlier ones, and then
they belong to these. The first ones are compared with nothing, and nothing is told of them.

`STATE/drift-told` has 8 bytes for each photo that was measured. Where photos went, and after a restart, the means are
computed anew of those that are left: nothing of a photo that its owner has taken away is kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from contract.drift import FARTHEST, LEAST, Drift
from contract.files import whole_file
from contract.sphere import unit_rows
from contract.statistics import class_sums
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.standing import sample_keys
from edge_client.unknown import USUAL_THRESHOLD

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
        made = Reference(*self._sums.shape)
        made._sums, made._counts = self._sums.copy(), self._counts.copy()
        return made

    @property
    def _freedom(self) -> int:
        return int(np.maximum(self._counts - 1, 0).sum())

    @property
    def is_usable(self) -> bool:
        """Whether it says how far photos of a class usually are from its mean."""
        return self._freedom >= LEAST

    def distances(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of unit features (N, D): (N,) squared distances to the nearest mean, in units of the usual one, at most
        `FARTHEST`. The usual one is pooled over classes: ‖z − μ‖² has mean 1 − ‖μ‖² over unit features."""
        held = self._counts > 0
        counts, means = self._counts[held], self._sums[held] / self._counts[held, None]  # (K,), (K, D)
        squares = (means**2).sum(axis=1)
        usual = max(float((counts * (1.0 - squares)).sum()) / self._freedom, 1e-9)
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
        self._seen: LocalData | None = None
        self._told = self._read()
        self._reference: Reference | None = None

    def measure(self) -> Drift | None:
        """What the photos say that came since the last time; None where they are too few, or there is nothing to
        compare them with."""
        data = self._device.samples
        if data is self._seen:
            return None
        self._seen = data
        keys = [key[-_KEY_BYTES:] for key in sample_keys(data)]  # the end of the digest, and the class
        if not self._told <= set(keys):
            self._keep(self._told & set(keys))
            self._reference = None
        new = np.array([row for row, key in enumerate(keys) if key not in self._told], np.intp)
        if len(new) < LEAST:
            return None
        reference = self._reference or self._of([row for row, key in enumerate(keys) if key in self._told])
        distances = self._added(reference, new)
        self._reference = reference
        self._keep(set(keys))
        if distances is None or not np.isfinite(distances).all():
            return None
        return Drift(len(new), float((distances > USUAL_THRESHOLD).mean()), float(distances.mean()))

    def _keep(self, told: set[bytes]) -> None:
        """These were measured, and are there."""
        self._told = told
        with contextlib.suppress(OSError), whole_file(self._path) as file:  # or they are measured once more
            file.write(b"".join(sorted(told)))

    def _of(self, rows: list[int]) -> Reference:
        made = Reference(self._device.classes, self._device.width)
        for features, labels in self._features(np.array(rows, np.intp)):
            made.add(features, labels)
        return made

    def _added(self, reference: Reference, rows: NDArray[np.intp]) -> NDArray[np.float64] | None:
        """How far new photos are from the reference as it was, to which they belong after; None where it is none."""
        before, found = reference.copy(), []
        for features, labels in self._features(rows):
            if before.is_usable:
                found.append(before.distances(features))
            reference.add(features, labels)
        return np.concatenate(found) if found else None

    def _features(self, rows: NDArray[np.intp]) -> Iterator[tuple[NDArray[np.float64], NDArray[np.int64]]]:
        for features, labels in self._device.frozen_features(rows):
            yield np.asarray(unit_rows(features.astype(np.float64)), dtype=np.float64), labels

    def _read(self) -> set[bytes]:
        try:
            told = self._path.read_bytes()
        except OSError:
            return set()
        return {told[start : start + _KEY_BYTES] for start in range(0, len(told) - _KEY_BYTES + 1, _KEY_BYTES)}
