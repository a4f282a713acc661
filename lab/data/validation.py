"""A validation split for the choice of settings, so that no choice depends on the published test images.

- The test images are not used at all. A tenth of the training images takes their place, the same share of every class.
  One generator draws it, whatever the seed of the run. The clients divide the other training images.
- From a client's samples its own test is taken away first, as in any run. Then an equal share of the rest is taken away
  and scored.
- A run without test images takes no tenth out. Its clients are divided as in the original run, and each leaves out
  exactly that run's test.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from protofleet.edge_client.data.splits import held_out
from protofleet.lab.data.datasets import DataSet, take
from protofleet.lab.data.partition import Indices, hold_back

__all__ = ["SHARE", "hold_back_for_validation", "validation_split"]

SHARE = 0.1
_SEED = 0
_AGAIN = 2_000_003  # far from the seed of a client's own test


@lru_cache(maxsize=2)
def validation_split(data: DataSet, *, ask: bool = True) -> DataSet:
    """The data set with a tenth of its training images as its test, or without `ask` with no test. Its own test split
    is not used."""
    mask = held_out(data.train.y, SHARE if ask else 0.0, _SEED)
    sources = None if data.sources is None else data.sources[~mask]
    return replace(data, train=take(data.train, ~mask), test=take(data.train, mask), sources=sources)


def hold_back_for_validation(part: Indices, share: float, seed: int) -> tuple[Indices, Indices]:
    """Apply `hold_back` twice: the samples that a client trains on, and the samples that are scored."""
    kept, _ = hold_back(part, share, seed)
    return hold_back(kept, share, seed + _AGAIN)
