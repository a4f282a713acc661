"""A validation split: what settings are chosen by, so that no choice has seen what is published.

The test images are left out of it altogether. Their place takes a tenth of the training images, the same share of every
class, drawn by one generator whatever the seed of the run; clients divide the others. Of a client's own samples its own
test is taken away first, as in any run, and then as large a share of what is left, which is scored.

Where nobody is asked about test images no tenth is taken out: clients are divided as in the run that is stood in for,
and each keeps exactly that run's test away.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from edge_client.data.splits import held_out
from lab.data.datasets import DataSet, take
from lab.data.partition import Indices, hold_back

__all__ = ["SHARE", "hold_back_for_validation", "validation_split"]

SHARE = 0.1
_SEED = 0
_AGAIN = 2_000_003  # far from the seed of a client's own test


@lru_cache(maxsize=2)
def validation_split(data: DataSet, *, ask: bool = True) -> DataSet:
    """The data set with a tenth of its training images as its test, or, without `ask`, with none; its test split is not
    looked at."""
    held = held_out(data.train.y, SHARE if ask else 0.0, _SEED)
    sources = None if data.sources is None else data.sources[~held]
    return replace(data, train=take(data.train, ~held), test=take(data.train, held), sources=sources)


def hold_back_for_validation(part: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """As `hold_back`, of what it would leave for training: what a client trains on, and what is scored."""
    kept, _ = hold_back(part, share, seed)
    return hold_back(kept, share, seed + _AGAIN)
