"""What should be in the sums of a simulated month: books of photos, added up by a naive computation of its own.

Three books of the same fleet are compared, see benchmarks/living/month.py:

    photos     which photos each device has, kept by whoever gives and takes them; their sums are made anew
    journals   what each device says that it sent, generation by generation, and how that ended
    store      what the aggregator holds of each device, and the global state that it has made of it

A number x of a sum is the integer round(x · 2⁴⁰), half to even, here in one int64 and without
`protofleet.contract.sums.fixed_point`; numbers below 2¹⁴ in sums of a few hundred devices leave room.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.aggregator.store.schema import KIND as STORE
from protofleet.contract.bundle.bundle_file import Bundle, extractor_of
from protofleet.contract.files.sqlite import read_only
from protofleet.contract.identity.signatures import inside
from protofleet.contract.methods import Method
from protofleet.contract.sums.statistics import Statistic
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.global_state import GlobalCollector, GlobalState
from protofleet.contract.wire.messages import Contribution, GlobalPart
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.journal.journal import KIND as JOURNAL
from protofleet.edge_client.training.extractor import Extractor

UNIT = 2.0**40
Integers = tuple[NDArray[np.int64], ...]


class World(Protocol):
    """Photos.

    Attributes:
        x: (N, H, W, c) uint8, no two alike.
        y: (N,) classes.
    """

    x: NDArray[np.uint8]
    y: NDArray[np.int64]


@dataclass
class Book:
    """One device, as whoever gives it photos knows it.

    Attributes:
        pattern: how often it wakes, in days; 0 for always on.
        whole: whether it is a process of its own.
        photos: in the order of its list.
        learned: those that it was taught one by one.
        bundle: that it starts with.
        joins, leaves: days; it vanishes for good at the end of the second.
        longer: whether it runs the bundle with a class more.
        out: whether it was forgotten or has withdrawn, and is not admitted.
    """

    fleet: str
    name: str
    folder: Path
    bundle: Path
    pattern: float = 1.0
    whole: bool = False
    photos: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    classes: Sequence[int] = ()
    joins: int = 1
    leaves: int = 10**9
    longer: bool = False
    out: bool = False

    @property
    def data(self) -> Path:
        return self.folder / "photos.csv"

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def has_journal(self) -> bool:
        """Whether it has started; killed while it makes its journal, it has not."""
        path = self.state / "journal.sqlite"
        return path.exists() and path.stat().st_size > 0

    def rows(self, world: World) -> list[int]:
        """Its photos in the order in which a device holds them: its list, then what it learned by hash."""
        return [*self.photos, *sorted(self.learned, key=lambda photo: pixel_hash(world.x[photo]))]


# ── what is there ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class StoreContents:
    """What the aggregator's store holds.

    Attributes:
        stands: generation and payload of each device; None for the payload of one that was taken out.
    """

    run: bytes
    stands: dict[str, tuple[int, bytes | None]]
    state: GlobalState | None


def store_contents(path: Path) -> StoreContents:
    """A store, while its aggregator runs."""
    with read_only(path, STORE) as db:
        (run,) = db.execute("SELECT value FROM meta WHERE name = 'run'").fetchone()
        rows = db.execute("SELECT device, generation, payload FROM standing").fetchall()
        parts = [decode(part) for (part,) in db.execute("SELECT payload FROM global ORDER BY version, part")]
    collector, state = GlobalCollector(), None
    for part in parts:
        assert isinstance(part, GlobalPart)
        state = collector.add(part) or state
    return StoreContents(bytes(run), {device: (number, payload) for device, number, payload in rows}, state)


def tally(path: Path) -> dict[str, int]:
    """Messages by what became of them, but for those that were committed."""
    with read_only(path, STORE) as db:
        return dict(db.execute("SELECT outcome, sum(messages) FROM tally GROUP BY outcome").fetchall())


@dataclass(frozen=True, eq=False)
class Sent:
    """What a device's journal says of a run: payload, its size and outcome by (round or generation, method)."""

    newest: int
    made: dict[tuple[int, str], tuple[bytes | None, int, str | None]]


def sent(state: Path, run: bytes) -> Sent:
    """A journal, while its device may run."""
    with read_only(state / "journal.sqlite", JOURNAL) as db:
        query = "SELECT round, method, payload, payload_bytes, outcome FROM contributions WHERE run = ?"
        made = {
            (number, method): (payload, size, outcome)
            for number, method, payload, size, outcome in db.execute(query, (run,))
        }
        row = db.execute("SELECT generation FROM standing WHERE run = ?", (run,)).fetchone()
    return Sent(0 if row is None else int(row[0]), made)


def rounds(path: Path) -> tuple[list[tuple[int, float, float | None]], list[tuple[int, str, str, bytes]]]:
    """Of a store with rounds: (number, opened at, seconds) of each, and (round, method, device, payload)."""
    with read_only(path, STORE) as db:
        found = db.execute("SELECT number, opened_at, seconds FROM round ORDER BY number").fetchall()
        query = "SELECT c.round, c.method, c.device, p.bytes FROM contribution c JOIN payload p ON p.id = c.payload"
        return found, db.execute(query).fetchall()


# ── the naive computation ───────────────────────────────────────────────────────────────────────────────────────────


class Naive:
    """Sums of one method over the bundle's extractor, as integers.

    Args:
        longest: the bundle with all classes.
    """

    def __init__(self, longest: Bundle, found: Method, extractor: Extractor, encoding: str, world: World) -> None:
        self._bundle, self._method, self._extractor = longest, found, extractor
        self._encoding, self.world = encoding, world
        m = longest.manifest
        self._hyper = found.resolved_in(m.hyper)
        self._size = (m.classes, found.row_width(self._hyper, m.features))
        self.of_photos = lru_cache(1024)(self._of_photos)
        self.of_payload = lru_cache(1024)(self._of_payload)

    def _of_payload(self, payload: bytes) -> Integers:
        message = inside(payload)
        assert isinstance(message, Contribution)
        return integers(message.statistic(self._method.statistic, *self._size))

    def _of_photos(self, rows: tuple[int, ...]) -> Integers:
        """Of what a device sends that has these photos in this order."""
        local = _Samples(self._extractor, self.world.x[list(rows)], self.world.y[list(rows)], *self._size)
        local.hyper = self._hyper
        made = Contribution.of(
            self._method.summarise(local),  # type: ignore[arg-type]
            run=bytes(4),
            round=1,
            method=self._method.name,
            bundle=self._bundle.sha256,
            extractor=extractor_of(self._bundle.manifest, self._bundle.sha256, self._method),
        )
        return self._of_payload(encode(made, self._encoding))  # type: ignore[arg-type]

    def total(self, all_of_them: Iterable[Integers]) -> Integers:
        """Added up one by one."""
        found = list(all_of_them)
        if not found:
            return integers(self._method.statistic.zero(*self._size))
        return tuple(np.sum(arrays, axis=0) for arrays in zip(*found, strict=True))

    def is_made_of(self, state: GlobalState | None, total: Integers) -> bool:
        """Whether a global state is what these sums come to, bit for bit."""
        *arrays, counts = total
        merged = self._method.statistic(*(each / UNIT for each in arrays), counts)  # type: ignore[call-arg]
        for kind, rows in self._method.next_rows({}, merged, self._hyper).items():
            there = None if state is None else state.rows.get(kind)
            if there is None:
                return False
            if not (np.array_equal(there.classes, rows.classes) and np.array_equal(there.rows, rows.rows)):
                return False
        return True


class _Samples:
    """Samples as a method sees them (`protofleet.contract.methods.base.Local`), without a device."""

    hyper: object = None
    factor_rows = 0  # the month asks for triangles

    def __init__(self, extractor: Extractor, x: NDArray[np.uint8], y: NDArray[np.int64], classes: int, width: int):
        self._extractor, self._x, self._y = extractor, x, y
        self.classes, self.width, self.counts = classes, width, np.bincount(y, minlength=classes)

    def features(self, which: str) -> Iterable[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        yield self._extractor.features(self._x), self._y


def integers(statistic: Statistic) -> Integers:
    return (*(np.rint(array * UNIT).astype(np.int64) for array in statistic.arrays()), statistic.counts)


def alike(one: Integers, other: Integers) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
