"""What a device was taught, photo by photo: examples beside those of `--data`, in a file of their own.

`STATE/learned.sqlite` holds for each example:

- the image as it trains: a PNG of the bundle's shape, which loses nothing;
- its label;
- what was answered about it before it was learned, where that is known, and when it was learned;
- two hashes: of its pixels and of the file that it came from. Either one finds the example again. So a photo that is
  learned twice counts once, with its last label.

Writers are `protofleet learn` and `unlearn`, and `Predictor.learn` and `unlearn`. Each writes one transaction at a
time, and they wait for each other. What was confirmed survives a power cut.

The client only reads, at its start and before each round, and no writer disturbs its reading. It writes no more than
what SQLite needs to finish or undo the work of a killed process.

Examples always train. None is held out, and none tests. A photo of `--data` or `--test` with the same pixels is left
out there, whatever its label.

An example that is unlearned is overwritten in this file (SQLite's `secure_delete`, the log cut off). The client's
decoded images lose it when the client reads its samples next.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import sqlite3
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import DataError, InUseError, StoreError, UsageError, near_names
from protofleet.contract.files.sqlite import Database, Kind, Watch, as_written, cut_log, discard, read_only, typed
from protofleet.edge_client.data.listing import Images, Listing
from protofleet.edge_client.data.npz import pixels
from protofleet.edge_client.data.samples import LocalData, pixel_hash

__all__ = ["FILE", "Example", "ExampleGoneError", "Learned", "LearnedFile", "Outcome", "example_of"]

FILE = "learned.sqlite"
KIND = Kind(
    "file of learned examples",
    "--state",
    remedy="protofleet photos --erase --learned, which removes the file",
    application_id=0x50464C45,  # "PFLE"
    steps=(
        "CREATE TABLE examples (pixels BLOB PRIMARY KEY, source BLOB NOT NULL, label TEXT NOT NULL, png BLOB NOT NULL)",
        "ALTER TABLE examples ADD COLUMN answered TEXT NOT NULL DEFAULT '';"
        "ALTER TABLE examples ADD COLUMN learned_s REAL NOT NULL DEFAULT 0",
    ),
    pragmas={"cache_size": -1024, "secure_delete": 1},
)
_WAIT_S = 20.0  # for another process that writes: it does so for milliseconds


class ExampleGoneError(DataError):
    """An example was unlearned between two looks: what is wanted is to be looked at again."""


Outcome = Literal["learned", "known", "corrected"]
"""What `learn` found: nothing of this photo, the same example, or the photo with another label."""
Source = str | os.PathLike[str] | bytes | NDArray[Any]


@dataclass(frozen=True, eq=False)
class Example:
    """An image that is to be learned, or no longer.

    Attributes:
        x: (H, W, c) uint8, of the bundle's shape.
        source: 16 bytes, the hash of the file that it came from.
    """

    x: NDArray[np.uint8]
    source: bytes

    @property
    def pixels(self) -> bytes:
        """16 bytes, the hash of its pixels."""
        return pixel_hash(self.x)


def example_of(image: Source, manifest: Manifest) -> Example:
    """An image as it would train: a file by its path or bytes, or an array (H, W, c) uint8 of the bundle's shape.

    Raises:
        DataError: it cannot be read, is of another shape, or the bundle has channels that no image file has.
    """
    from protofleet.edge_client.data.decode import check_channels, decode_image

    shape = manifest.input_shape
    check_channels(shape, "the bundle")
    if isinstance(image, np.ndarray):
        x = pixels(image[None], "the image")[0]
        if x.shape != shape:
            raise DataError("the image", expected=f"{shape}", got=x.shape)
        return Example(np.ascontiguousarray(x), pixel_hash(x))
    name = "the image" if isinstance(image, bytes) else os.fspath(image)
    try:
        x = decode_image(image if isinstance(image, bytes) else name, shape)
        if isinstance(image, bytes):
            return Example(x, hashlib.sha256(image).digest()[:16])
        with open(name, "rb") as file:
            return Example(x, hashlib.file_digest(file, "sha256").digest()[:16])
    except DataError as error:
        raise DataError(f"cannot read {name}", expected="a whole image file", got=error.got) from None
    except OSError as error:
        raise DataError(f"cannot read {name}", expected="a whole image file", got=error.strerror) from None


# ── written ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class LearnedFile:
    """The examples of a state directory, to be changed; the file is open only while it is.

    Args:
        directory: of a device that has started at least once.
        labels: of its bundle.
    """

    def __init__(self, directory: Path, labels: tuple[str, ...]) -> None:
        self._path, self._labels = directory / FILE, labels

    def learn(self, example: Example, label: str, *, answered: str = "") -> Outcome:
        """Keep the example with this label, whatever was known of it. It is on the disk on return.

        Args:
            answered: the label that was answered about it before; empty where nobody asked. A corrected example keeps
                its first one, also where nobody asked: what is answered later has learned it.

        Raises:
            DataError: the bundle has no such class.
            StoreError: the disk refuses, or another process does not let go of the file.
        """
        if label not in self._labels:
            raise DataError(
                "the label",
                expected=f"a class of the bundle's {len(self._labels)}",
                got=repr(label)[:80],
                hint=near_names(label, self._labels[:1000]),
            )
        with self._changing() as db:
            query = "SELECT label, answered FROM examples WHERE pixels = ? OR source = ?"
            known = db.execute(query, _hashes(example)).fetchall()
            if len(known) == 1 and known[0][0] == label:
                return "known"
            db.execute("DELETE FROM examples WHERE pixels = ? OR source = ?", _hashes(example))
            if known:
                answered = next((str(before) for _, before in known if before), "")
            row = (example.pixels, example.source, label, _png(example.x), answered, time.time())
            db.execute("INSERT OR REPLACE INTO examples VALUES (?, ?, ?, ?, ?, ?)", row)  # a damaged index hides a row
        return "corrected" if known else "learned"

    def unlearn(self, example: Example) -> str:
        """Remove the example; returns the label that it had.

        Raises:
            DataError: it was not learned.
            StoreError: as `learn`.
        """
        return self.unlearn_hashed(*_hashes(example))

    def unlearn_hashed(self, pixels: bytes, source: bytes = b"") -> str:
        """As `unlearn`, of an example whose hashes are known."""
        row = None
        if os.path.exists(self._path):
            with self._changing(erasing=True) as db:
                query = "DELETE FROM examples WHERE pixels = ? OR source = ? RETURNING label"
                row = db.execute(query, (pixels, source)).fetchone()
        if row is None:
            raise DataError("nothing to unlearn", expected="a photo that this device was taught", got="another one")
        return str(row[0])

    def unlearn_all(self) -> int | None:
        """Remove every example; gives how many. A kill on the way leaves all of them or none.

        Where the file does not let that be done, it is removed as a whole: None.

        Raises:
            StoreError: as `learn`, or another process reads for half a minute.
        """
        if not os.path.exists(self._path):
            return 0
        try:
            with self._changing() as db:
                count = int(db.execute("DELETE FROM examples").rowcount)
        except InUseError:
            raise
        except (StoreError, UsageError):
            discard(self._path, KIND)
            return None
        cut_log(self._path, KIND)
        return count

    @contextlib.contextmanager
    def _changing(self, *, erasing: bool = False) -> Iterator[Any]:
        if not os.path.isdir(self._path.parent):
            raise StoreError(f"{self._path.parent}", expected="a device's state directory", got="no such folder")
        file = Database(self._path, KIND, wait_s=_WAIT_S)
        try:
            with file.transaction() as db:
                yield db
            if erasing:  # of the log, too
                with file.guard():
                    file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            file.close()


def _hashes(example: Example) -> tuple[bytes, bytes]:
    return example.pixels, example.source


def _png(x: NDArray[np.uint8]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(x[..., 0] if x.shape[2] == 1 else x).save(out, "PNG")
    return out.getvalue()


# ── read ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Learned:
    """The examples of a state directory as its client sees them: those of the last `look`.

    Attributes:
        hashes: (L,) of 16 bytes, of each example's pixels, rising.
        labels: of these, the labels.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE
        self._watch = Watch(self._path)
        self._take([])

    def _take(self, rows: list[tuple[bytes, str]]) -> None:
        self.hashes = tuple(bytes(key) for key, _ in rows)
        self.labels = tuple(label for _, label in rows)
        self._known = frozenset(self.hashes)

    def __len__(self) -> int:
        return len(self.hashes)

    def look(self) -> bool:
        """Look at the examples that are there now; returns whether they have changed.

        It costs nothing if nothing was written.

        Raises:
            DataError: there is a file that cannot be read.
        """
        before = self.hashes, self.labels
        if not os.path.exists(self._path):
            self._take([])
        elif self._watch.changed():
            try:
                self._take(self._rows())
            except DataError:
                self._finish()
                self._take(self._rows())
        return before != (self.hashes, self.labels)

    @property
    def mark(self) -> bytes:
        """What changes when an example comes, goes or gets another label."""
        return b"".join(self.ids()) if len(self) else b""

    def ids(self) -> list[bytes]:
        """8 bytes for each example and its label."""
        named = zip(self.hashes, self.labels, strict=True)
        return [hashlib.blake2b(key + label.encode(), digest_size=8).digest() for key, label in named]

    def close(self) -> None:
        """Let go of the file."""
        self._watch.close()

    def numbers(self, manifest: Manifest) -> NDArray[np.int64]:
        """(L,) the class numbers of these labels.

        Raises:
            DataError: the bundle has not got one of them.
        """
        missing = next((label for label in self.labels if label not in manifest.labels), None)
        if missing is not None:
            raise DataError(f"{self._path}", expected="labels of the bundle's", got=repr(missing)[:80])
        return np.array([manifest.labels.index(label) for label in self.labels], np.int64)

    def asked_before(self) -> list[tuple[str, str]]:
        """The label of each example and what was answered before it was learned, in the order of learning.

        The latter is empty where nobody asked.

        Raises:
            DataError: the file cannot be read.
        """
        if not os.path.exists(self._path):
            return []
        with self._reading() as db:
            rows = db.execute("SELECT label, answered FROM examples ORDER BY learned_s, rowid").fetchall()
            return [(str(label), str(answered)) for label, answered in (typed(row, str, str) for row in rows)]

    def images(self, rows: NDArray[np.int64]) -> Iterator[bytes]:
        """The encoded images of these examples.

        Raises:
            ExampleGoneError: one has been unlearned since the last `look`.
            DataError: the file cannot be read.
        """
        with self._reading() as db:
            for row in rows:
                example = db.execute("SELECT png FROM examples WHERE pixels = ?", (self.hashes[row],)).fetchone()
                if example is None:
                    raise ExampleGoneError(f"{self._path}", expected="the examples of a moment ago", got="others")
                yield typed(example, bytes)[0]

    def _rows(self) -> list[tuple[bytes, str]]:
        with self._reading() as db:
            rows = db.execute("SELECT pixels, label FROM examples ORDER BY pixels").fetchall()
            return [typed(row, bytes, str) for row in rows]

    def _finish(self) -> None:
        """Wait for whoever is just making the file, or finish what one who was killed began."""
        with _as_data():
            Database(self._path, KIND, wait_s=_WAIT_S).close()

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with _as_data(), read_only(self._path, KIND) as db, as_written(self._path, KIND):
            yield db

    def is_duplicate(self, hashed: bytes) -> bool:
        """Whether an image of this hash was learned."""
        return hashed in self._known

    def beside(self, listing: Listing, manifest: Manifest) -> tuple[Listing, NDArray[np.int64]]:
        """A source and the examples after it as one source, and which rows they are."""
        count, numbers = len(listing), self.numbers(manifest)
        pictures: Images | NDArray[np.uint8]
        if isinstance(listing.images, np.ndarray):
            pictures = np.concatenate([listing.images, self.decoded(manifest).x])
        else:
            pictures = _Joined(listing.images, self, count)
        ids = None
        if listing.ids is not None:
            ids = np.concatenate(
                [listing.ids, np.array([int.from_bytes(key[:8], "little") for key in self.hashes], "<u8")]
            )
        joined = replace(
            listing,
            images=pictures,
            labels=np.concatenate([listing.labels, numbers]),
            splits=np.concatenate([listing.splits, np.ones(len(numbers), np.uint8)]),
            stamp=listing.stamp and self.stamp(listing.stamp),
            ids=ids,
        )
        return joined, np.arange(count, len(joined))

    def stamp(self, source: bytes) -> bytes:
        """What a source's pixels follow from, `source`, together with the examples beside it or left out of it."""
        return hashlib.sha256(source + b"".join(self.hashes)).digest()

    def decoded(self, manifest: Manifest) -> LocalData:
        """All examples, in memory.

        Raises:
            DataError: as `images` and `numbers`.
        """
        from protofleet.edge_client.data.decode import decode_image

        x = [decode_image(png, manifest.input_shape) for png in self.images(np.arange(len(self)))]
        return LocalData(np.array(x, np.uint8).reshape(-1, *manifest.input_shape), self.numbers(manifest))

    def added(self, data: LocalData, held_out: LocalData, manifest: Manifest) -> tuple[LocalData, LocalData]:
        """Samples in memory, with the examples: those to train on, the examples first, and those held back.

        A sample that is among the examples is in neither of the two a second time.
        """
        if not len(self):
            return data, held_out
        own, rest = self.decoded(manifest), self._without(data)
        whole = LocalData(np.concatenate([own.x, rest.x]), np.concatenate([own.y, rest.y]))
        return whole, self._without(held_out)

    def _without(self, data: LocalData) -> LocalData:
        kept = np.array([not self.is_duplicate(pixel_hash(image)) for image in data.x], bool)
        return data if kept.all() else LocalData(data.x[kept], data.y[kept])


@contextlib.contextmanager
def _as_data() -> Iterator[None]:
    """A file that cannot be read is data that cannot be used."""
    try:
        yield
    except (StoreError, UsageError) as error:
        raise DataError(error.message, expected=error.expected, got=error.got, hint=error.hint) from None


class _Joined:
    """The images of a source, and after these the examples."""

    def __init__(self, images: Images, learned: Learned, count: int) -> None:
        self._images, self._learned, self._count = images, learned, count

    def name(self, row: int) -> str:
        """As the source says, or which example it is."""
        own = row - self._count
        return self._images.name(row) if own < 0 else f"learned/{self._learned.hashes[own].hex()[:12]}"

    def read(self, rows: NDArray[np.int64]) -> Iterator[str | bytes]:
        """The images of rising rows."""
        yield from self._images.read(rows[rows < self._count])
        yield from self._learned.images(rows[rows >= self._count] - self._count)
