"""Which samples train and which are held back: splits that a source declares, or a stratified, shuffled hold-out.

A source declares splits by names: folders `train/` and `test/` above the class folders, a column `split` in a CSV,
parquet files that begin with them, arrays `x_train` and `x_test`. Training gets the split `train`. Testing gets `test`,
or `valid` where there is no `test`. From a source without splits each gets everything.

- `held_out` sets a share aside where no split is declared: the same share of every class, drawn at random, the same at
  every start. Every tenth row instead would follow whatever order the rows have. `held_out` looks at all labels
  together.
- `rows_each_alone` is for where noise protects what is sent. Which side a sample is on follows from that sample alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.data.draws import Draws
from protofleet.edge_client.data.listing import Listing
from protofleet.edge_client.data.samples import UNUSABLE, Purpose

__all__ = [
    "SPLITS", "declared_rows", "fewer_rows", "held_out", "ranks_of", "rows_each_alone", "split_code",
    "train_and_held_rows",
]  # fmt: skip

Rows = NDArray[np.int64]
SPLITS = ("", "train", "valid", "test")
_WORDS = {
    "train": 1,
    "training": 1,
    "valid": 2,
    "val": 2,
    "validation": 2,
    "dev": 2,
    "test": 3,
    "testing": 3,
}


def split_code(name: str) -> int | None:
    """The code of a split by one of its usual names, as an index into `SPLITS`; None for any other word."""
    return _WORDS.get(name.strip().lower())


def held_out(
    labels: NDArray[np.int64],
    share: float,
    seed: int,
    *,
    ranks: NDArray[np.uint64] | None = None,
    least: int = 1,
) -> NDArray[np.bool_]:
    """Which samples to hold out: `share` of all, the same share of every class, drawn from `seed`.

    1. Each class gives the whole part of its share.
    2. The classes that lost the largest fraction by that give one more, until round(share · N) are held.

    A class always keeps a sample to train on, so a class of a single sample gives none. Samples without a label are
    never held out. The same labels, share and seed give the same answer on any machine.

    Args:
        labels: (N,) class numbers; negative for no label.
        share: 0 up to 1, without 1.
        ranks: (N,) one number for each sample: the samples with the smallest numbers of a class are held, instead of
            drawn ones. Ranks that follow from a sample's name (as `train_and_held_rows` makes them) leave nearly all
            samples where they are when others are added.
        least: a class with fewer samples gives none, and does not count.

    Returns:
        (N,) bool, true for held.

    Raises:
        UsageError: when `share` is out of range.
    """
    if not 0 <= share < 1:
        raise UsageError("share held out", expected="0 up to 1, without 1", got=share)
    rng, is_held = np.random.default_rng(seed), np.zeros(len(labels), dtype=bool)
    classes, counts = np.unique(labels[labels >= 0], return_counts=True)
    classes, counts = classes[counts >= least], counts[counts >= least]
    wanted = share * counts
    quota = np.minimum(np.floor(wanted).astype(np.int64), counts - 1)
    order = np.lexsort((rng.permutation(len(classes)), quota - wanted))  # the largest fraction lost first
    for index in order[: max(round(share * int(counts.sum())) - int(quota.sum()), 0)]:
        quota[index] = min(quota[index] + 1, counts[index] - 1)
    for label, few in zip(classes, quota, strict=True):
        rows = np.flatnonzero(labels == label)
        first = rng.permutation(rows) if ranks is None else rows[np.argsort(ranks[rows], kind="stable")]
        is_held[first[:few]] = True
    return is_held


def declared_rows(listing: Listing, purpose: Purpose) -> Rows:
    """The rows for training or for testing, samples without a label last.

    Raises:
        DataError: when the source declares splits, and none for this purpose.
    """
    codes = listing.splits
    for code in (0, 1) if purpose == "train" else (0, 3, 2):
        rows = np.flatnonzero(codes == code)
        if len(rows) or (code == 0 and not len(listing)):
            return _labelled_first(rows, listing)
    declared = ", ".join(SPLITS[code] for code in np.unique(codes) if code)
    raise DataError(f"{listing.where} has no {purpose} split", expected=f"samples of a split {purpose}", got=declared)


def train_and_held_rows(listing: Listing, share: float, seed: int, *, least: int = 1) -> tuple[Rows, Rows]:
    """The rows to train on, and those to test with: a declared `test` or else `valid`, or else `share` held out.

    Args:
        least: a class with fewer samples has none held out.

    Raises:
        DataError: as `declared_rows`.
        UsageError: as `held_out`.
    """
    train = declared_rows(listing, "train")
    for code in (3, 2):
        if (rows := np.flatnonzero(listing.splits == code)).size:
            return train, rows
    ranks = ranks_of((listing.name(int(row)) for row in train), len(train), seed)
    is_held = held_out(listing.labels[train], share, seed, ranks=ranks, least=least)
    return train[~is_held], train[is_held]


def rows_each_alone(listing: Listing, share: float, draws: Draws) -> tuple[Rows, Rows]:
    """The rows to train on, and those held out, where each sample is on its side whatever others there are.

    - A sample that is declared to test is held out. With a share of 0 it is not used.
    - A sample that is declared to train, or not declared, is held out if it is drawn.
    - A sample without a label trains. If it is declared to test, it is left out.
    - A sample that the bundle cannot use is left out.

    Raises:
        DataError: a file of many images cannot be read.
    """
    usable = listing.labels != UNUSABLE
    train = np.flatnonzero(usable & (listing.splits < 2))
    drawn = draws.held_out(listing, train, share) & (listing.labels[train] >= 0)
    codes = (3, 2) if share else ()
    tests = (np.flatnonzero((listing.labels >= 0) & (listing.splits == code)) for code in codes)
    declared = next((rows for rows in tests if len(rows)), train[:0])
    return _labelled_first(train[~drawn], listing), np.sort(np.concatenate([train[drawn], declared]))


def fewer_rows(listing: Listing, rows: Rows, share: float, seed: int) -> Rows:
    """The same share of every class of some labelled rows, by the samples' names, and of a small class one; all of them
    for a share of 1."""
    if share >= 1:
        return rows
    ranks = ranks_of((listing.name(int(row)) for row in rows), len(rows), seed)
    return rows[~held_out(listing.labels[rows], 1.0 - share, seed, ranks=ranks)]


def _labelled_first(rows: Rows, listing: Listing) -> Rows:
    known = listing.labels[rows] >= 0
    return np.concatenate([rows[known], rows[~known]])


def ranks_of(names: Iterable[str], count: int, seed: int) -> NDArray[np.uint64]:
    """(N,) a number for each of `count` samples that follows from its name alone."""
    return np.fromiter((_rank(name, seed) for name in names), np.uint64, count)


def _rank(name: str, seed: int) -> int:
    """A number that follows from a sample's name, so that it is the same whatever other samples there are."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(errors="surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
