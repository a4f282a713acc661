"""How often a device sees each class: soft counts that begin with its own labels and follow what it answers about.

1. At first the counts are those of the device's own training photos, cut to `CUT` photos together.
2. Each photo multiplies all counts by 2^(−1/`HALF_LIFE`), and adds the probabilities of its classes. These are the
   fleet's, without any class shares: an answer does not confirm itself.

So a class that is new to the device counts after a few sights, and a device that was moved forgets where it was. The
counts are kept in memory alone, and begin anew with each process. docs/decisions/253 has what was measured.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.calibration import log_shares
from protofleet.edge_client.device.calibration import first_counts

__all__ = ["HALF_LIFE", "ClassShares"]

HALF_LIFE = 100.0  # photos
_KEEP = 2.0 ** (-1.0 / HALF_LIFE)


class ClassShares:
    """Of one device.

    Args:
        counts: (C,) of its own training photos.
    """

    def __init__(self, counts: NDArray[np.integer]) -> None:
        self._first = np.asarray(counts)
        self._counts = first_counts(counts)

    def is_of(self, counts: NDArray[np.integer]) -> bool:
        """Whether it began with these counts."""
        return np.array_equal(self._first, counts)

    def follow(self, probabilities: NDArray[np.float64]) -> NDArray[np.float64]:
        """The log of the class shares before each of some photos, (N, C), in the order in which they came.

        Args:
            probabilities: (N, C) of the fleet's, for the same photos. They are counted.
        """
        shares = np.empty_like(probabilities)
        for row, found in enumerate(probabilities):
            shares[row] = log_shares(self._counts)
            self._counts = self._counts * _KEEP + found
        return shares
