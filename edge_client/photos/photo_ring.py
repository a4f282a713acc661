"""The last photos of a camera, in one file of the state directory: `STATE/photos.sqlite`, for its owner alone (0600).

- The file has a limit. Where another photo needs room the oldest leave; then the file is as small as what is in it.
- A photo that was named stays until the fleet has committed a contribution that was made after it was named. A ring
  that is full of such photos takes no further ones.
- A photo of the same pixels as one that is kept is counted, and not kept twice.
- What is removed is overwritten (SQLite's `secure_delete`, the log cut off). A write that was cut off by a power cut is
  undone as a whole by SQLite. A file that cannot be read any more is removed (`discard`): the labels are elsewhere
  (`edge_client/data/learned.py`).
- Photos that another network has looked at leave when the ring begins, since their features mean something else.

The client has the file while it runs (`PhotoRing`); commands read and change it beside that (`PhotosBeside`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.bundle.class_names import check_proposed
from protofleet.contract.errors import DataError, InUseError, StoreError, UsageError
from protofleet.contract.files.sqlite import (
    Database,
    Kind,
    as_written,
    beside,
    cut_log,
    discard,
    is_made,
    is_taken,
    read_only,
    typed,
)
from protofleet.contract.printable import counted
from protofleet.edge_client.data.samples import pixel_hash
from protofleet.edge_client.photos.kept_photo import ID, KeptPhoto, NewPhoto, jpeg_of, png_of

__all__ = ["FILE", "KIND", "LEAST_BYTES", "USUAL_BYTES", "PhotoRing", "PhotosBeside", "basis_of"]

logger = logging.getLogger(__name__)

FILE = "photos.sqlite"
USUAL_BYTES = 64 << 20
LEAST_BYTES = 1 << 20
KIND = Kind(
    "file of kept photos",
    "--state",
    remedy="protofleet photos --erase, which removes the file",
    application_id=0x50465048,  # "PFPH"
    steps=(
        "CREATE TABLE photo (number INTEGER PRIMARY KEY AUTOINCREMENT, pixels BLOB NOT NULL UNIQUE,"
        " name TEXT NOT NULL, taken_s REAL NOT NULL, last_s REAL NOT NULL, times INTEGER NOT NULL,"
        " answer TEXT NOT NULL, probability REAL, novelty REAL, is_unknown INTEGER NOT NULL,"
        " uncertainty REAL NOT NULL, version INTEGER NOT NULL, waits INTEGER NOT NULL, aside TEXT NOT NULL,"
        " proposed TEXT NOT NULL, features BLOB NOT NULL, png BLOB NOT NULL, view BLOB NOT NULL);"
        "CREATE TABLE basis (id INTEGER PRIMARY KEY CHECK (id = 1), network TEXT NOT NULL, namings INTEGER NOT NULL)",
        "ALTER TABLE photo ADD COLUMN first_answer TEXT",
        "ALTER TABLE basis ADD COLUMN refused TEXT NOT NULL DEFAULT ''",
    ),
    pragmas={"auto_vacuum": 1, "cache_size": -512, "secure_delete": 1},
)
_COLUMNS = (
    "number, pixels, name, taken_s, last_s, times, answer, probability, novelty, is_unknown, uncertainty, version,"
    " waits, aside, proposed, first_answer"
)
_ASIDES = ("", "unsure", "none")
_ANSWERED = (
    "UPDATE photo SET answer = ?, probability = ?, novelty = ?, is_unknown = ?, uncertainty = ?, version = ?"
    " WHERE pixels = ?"
)
_SLACK = 1.1  # of a photo's bytes: what the file takes for them


def _answer_of(photo: NewPhoto) -> tuple[str | float | None, ...]:
    """As `_ANSWERED` takes it."""
    unknown = int(photo.is_unknown)
    return photo.answer, photo.probability, photo.novelty, unknown, photo.uncertainty, photo.version


def basis_of(manifest: Manifest) -> str:
    """What the pixels and features of kept photos are of."""
    return f"{manifest.extractor or manifest.features} {manifest.input_shape}"


class _Photos:
    """What can be asked of the file, and done to it; `_reading` and `_writing` say by which connection."""

    path: Path

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        raise NotImplementedError
        yield

    @contextlib.contextmanager
    def _writing(self, *, erasing: bool = False) -> Iterator[sqlite3.Connection]:
        raise NotImplementedError
        yield

    def photos(self, most: int | None = None) -> list[KeptPhoto]:
        """The photos, newest first.

        Raises:
            StoreError: the file cannot be read.
        """
        with self._reading() as db:
            rows = db.execute(f"SELECT {_COLUMNS} FROM photo ORDER BY number DESC LIMIT ?", (most or -1,)).fetchall()
            return [_photo(row) for row in rows]

    def proposed(self) -> dict[str, int]:
        """The classes that were proposed, and for how many photos: of most photos first."""
        with self._reading() as db:
            query = "SELECT proposed, count(*) AS photos FROM photo WHERE proposed != '' GROUP BY 1 ORDER BY 2 DESC, 1"
            return {str(name): int(photos) for name, photos in db.execute(query).fetchall()}

    def unknown(self) -> tuple[int, int]:
        """How many photos were unlike all classes when they were answered about, and how many have an answer."""
        with self._reading() as db:
            row = db.execute("SELECT total(is_unknown), count(*) FROM photo WHERE answer != ''").fetchone()
            return int(row[0]), int(row[1])

    def find(self, id: str) -> KeptPhoto | None:
        """The photo with this id; None where there is none, or no longer."""
        if not ID.fullmatch(id):
            return None
        with self._reading() as db:
            query = f"SELECT {_COLUMNS} FROM photo WHERE substr(hex(pixels), 1, 12) = ?"
            row = db.execute(query, (id.upper(),)).fetchone()
            return None if row is None else _photo(row)

    def count(self) -> int:
        """How many photos are kept."""
        with self._reading() as db:
            return int(db.execute("SELECT count(*) FROM photo").fetchone()[0])

    def features(self, most: int | None = None) -> tuple[list[KeptPhoto], NDArray[np.float32]]:
        """The photos, newest first, and their features (N, D)."""
        with self._reading() as db:
            query = f"SELECT {_COLUMNS}, features FROM photo ORDER BY number DESC LIMIT ?"
            rows = db.execute(query, (most or -1,)).fetchall()
            photos = [_photo(row[:-1]) for row in rows]
            found = [np.frombuffer(typed(row[-1:], bytes)[0], "<f2") for row in rows]
            if not found:
                return [], np.empty((0, 0), np.float32)
            return photos, np.stack(found).astype(np.float32)

    def image(self, photo: KeptPhoto, column: str = "view") -> bytes:
        """The encoded image of a photo: `view` is a JPEG to look at, `png` has the pixels that train.

        Raises:
            DataError: it has left.
        """
        query = {"view": "SELECT view FROM photo WHERE pixels = ?", "png": "SELECT png FROM photo WHERE pixels = ?"}
        with self._reading() as db:
            row = db.execute(query[column], (photo.pixels,)).fetchone()
            if row is None:
                raise DataError(f"photo {photo.id}", expected="a photo that is kept", got="one that has left")
            return bytes(typed(row, bytes)[0])

    def naming(self, photos: Sequence[KeptPhoto], label: str = "") -> None:
        """These photos are about to be named: they stay until the fleet has committed that. On the disk on return.

        A class that was proposed for them is no more proposed, unless it is this label: that stays until `named`.
        """
        with self._writing() as db:
            (number,) = db.execute("UPDATE basis SET namings = namings + 1 RETURNING namings").fetchone()
            for photo in photos:
                db.execute(
                    "UPDATE photo SET waits = ?, aside = '', proposed = CASE proposed WHEN ? THEN proposed ELSE '' END,"
                    " first_answer = coalesce(first_answer, answer) WHERE pixels = ?",
                    (number, label, photo.pixels),
                )

    def named(self, photos: Sequence[KeptPhoto]) -> None:
        """These photos are examples of the class that was proposed for them."""
        with self._writing() as db:
            db.executemany("UPDATE photo SET proposed = '' WHERE pixels = ?", [(photo.pixels,) for photo in photos])

    def no_longer_named(self, photos: Sequence[KeptPhoto]) -> None:
        """The labels of these photos were taken back: they may leave."""
        with self._writing() as db:
            db.executemany("UPDATE photo SET waits = 0 WHERE pixels = ?", [(photo.pixels,) for photo in photos])

    def said_before(self, photos: Sequence[KeptPhoto]) -> None:
        """Whether these photos are set aside, and what was proposed for them, is again what these values say."""
        rows = [(photo.aside, photo.proposed, photo.pixels) for photo in photos]
        with self._writing() as db:
            db.executemany("UPDATE photo SET aside = ?, proposed = ? WHERE pixels = ?", rows)

    def set_aside(self, photos: Sequence[KeptPhoto], why: str, proposed: str = "") -> None:
        """Their owner does not name these photos: `unsure`, or `none` of the classes; empty takes that back.

        Args:
            proposed: the class that they should belong to, which the fleet has not got.

        Raises:
            UsageError: there is no such reason, or no class can be called that.
            StoreError: the disk refuses.
        """
        if why not in _ASIDES:
            raise UsageError("a photo that is set aside", expected=" or ".join(_ASIDES[1:]), got=repr(why)[:40])
        if proposed:
            check_proposed(proposed)
        with self._writing() as db:
            for photo in photos:
                row = (why, proposed, photo.pixels)
                db.execute("UPDATE photo SET aside = ?, proposed = ? WHERE pixels = ?", row)

    @property
    def refused(self) -> str:
        """Why the fleet takes nothing of this device, in words; empty where it does, or has not said so."""
        with self._reading() as db:
            row = db.execute("SELECT refused FROM basis").fetchone()
            return "" if row is None else str(typed(row, str)[0])

    @refused.setter
    def refused(self, why: str) -> None:
        with self._writing() as db:
            db.execute("UPDATE basis SET refused = ?", (why,))

    @property
    def taken_bytes(self) -> int:
        """What the file takes on the disk, without its log."""
        return os.path.getsize(self.path)

    def erase(self) -> int:
        """Erase all photos; gives how many. A kill on the way leaves all of them or none."""
        with self._writing(erasing=True) as db:
            return db.execute("DELETE FROM photo").rowcount

    def remove(self, pixels: bytes) -> bool:
        """Erase the photo of these pixels; whether it was there."""
        with self._writing(erasing=True) as db:
            return db.execute("DELETE FROM photo WHERE pixels = ?", (pixels,)).rowcount > 0


class PhotosBeside(_Photos):
    """The kept photos of a state directory whose client may be running."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    @property
    def is_there(self) -> bool:
        """Whether photos are kept."""
        return is_made(self.path)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with read_only(self.path, KIND) as db, as_written(self.path, KIND):
            yield db

    @contextlib.contextmanager
    def _writing(self, *, erasing: bool = False) -> Iterator[sqlite3.Connection]:
        with as_written(self.path, KIND), beside(self.path, KIND) as db:
            yield db
        if erasing:  # of the log, too; while somebody reads, whoever writes next cuts it off
            with contextlib.suppress(StoreError):
                cut_log(self.path, KIND, wait_s=5.0)

    def erase_all(self) -> int | None:
        """Erase all photos, and what an earlier call that was killed left in the log; gives how many.

        Where the file does not let that be done, it is removed as a whole; None where it cannot be said how many.

        Raises:
            InUseError: the file cannot be read, and its client runs.
            StoreError: the disk refuses, or another process reads for half a minute, and the client runs.
        """
        if not is_made(self.path):
            return self._erase_unmade()
        count: int | None = None
        try:
            count = self.count()
            count = self.erase()
            cut_log(self.path, KIND)
        except (StoreError, UsageError) as error:
            try:
                discard(self.path, KIND)
            except InUseError as in_use:
                raise (in_use if count is None else error) from None
        return count

    def _erase_unmade(self) -> int | None:
        """Remove what no client has made, or what is left of it; nothing where one is just making it."""
        size = os.path.getsize(self.path) if self.path.is_file() else 0
        is_left = self.path.is_file() or os.path.exists(f"{os.path.realpath(self.path)}-wal")
        if is_left and not is_taken(self.path):
            discard(self.path, KIND)
            return None if size else 0
        return 0


class PhotoRing(_Photos):
    """The photos of a running client; may be used from several threads.

    Args:
        directory: the state directory.
        basis: of the client's bundle (`basis_of`).
        limit_bytes: of the file.
        for_s: how long a photo stays at most; None for as long as there is room.

    Raises:
        StoreError: the disk refuses.
    """

    def __init__(
        self, directory: Path, basis: str, *, limit_bytes: int = USUAL_BYTES, for_s: float | None = None
    ) -> None:
        self.path, self._limit_bytes, self._for_s = directory / FILE, limit_bytes, for_s
        self._lock = threading.RLock()
        self._is_full = False
        self._file = self._opened()
        try:
            self._begin(basis)
        except StoreError as error:  # pages that are not as they were written are found when they are read
            self._file.close()
            self._discard(error)
            self._file = self._opened()
            self._begin(basis)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._file.close()

    def keep(self, photo: NewPhoto) -> bool:
        """Keep a photo; False where there is no room, since all that is kept waits for the fleet.

        Raises:
            StoreError: the disk refuses.
        """
        pixels, png, view = pixel_hash(photo.x), png_of(photo.x), jpeg_of(photo.view)
        features = photo.features.astype("<f2").tobytes()
        need = int(_SLACK * (len(png) + len(view) + len(features))) + 8192
        with self._writing() as db:
            again = "UPDATE photo SET times = times + 1, last_s = ? WHERE pixels = ?"
            if db.execute(again, (photo.taken_s, pixels)).rowcount:
                db.execute(f"{_ANSWERED} AND waits = 0", (*_answer_of(photo), pixels))
                return True
            self._let_old_ones_go(db, photo.taken_s)
            has_room = self._make_room(db, need)
            if has_room:
                row = (
                    *(pixels, photo.name, photo.taken_s, photo.taken_s, 1, photo.answer, photo.probability),
                    *(photo.novelty, int(photo.is_unknown), photo.uncertainty, photo.version, 0, "", "", None),
                    *(features, png, view),
                )
                marks = ", ".join("?" for _ in row)
                db.execute(f"INSERT INTO photo ({_COLUMNS[8:]}, features, png, view) VALUES ({marks})", row)
        if not has_room and not self._is_full:
            logger.warning("no room for further photos: all that are kept wait until the fleet has their labels")
        self._is_full = not has_room
        return has_room

    def answered_anew(self, photo: KeptPhoto, again: NewPhoto) -> None:
        """What is answered about a kept photo now."""
        with self._writing() as db:
            db.execute(_ANSWERED, (*_answer_of(again), photo.pixels))

    def let_old_ones_go(self, now_s: float) -> None:
        """Remove what was kept for long enough."""
        if self._for_s is not None:
            with self._writing(erasing=True) as db:
                self._let_old_ones_go(db, now_s)

    @property
    def namings(self) -> int:
        """The number of the last naming."""
        with self._reading() as db:
            return int(db.execute("SELECT namings FROM basis").fetchone()[0])

    @property
    def commits_of_others(self) -> int:
        """Another number once a command has changed anything beside this client."""
        with self._reading() as db:
            return int(db.execute("PRAGMA data_version").fetchone()[0])

    def committed(self, naming: int) -> None:
        """The fleet has what was named up to this naming."""
        with self._writing() as db:
            db.execute("UPDATE photo SET waits = 0 WHERE waits BETWEEN 1 AND ?", (naming,))

    def forget(self, labels: Sequence[str], pixels: Sequence[bytes] = ()) -> int:
        """Erase the photos that were answered as one of these classes, and those of these pixels; gives how many."""
        with self._writing(erasing=True) as db:
            gone = sum(db.execute("DELETE FROM photo WHERE answer = ?", (label,)).rowcount for label in labels)
            return gone + sum(db.execute("DELETE FROM photo WHERE pixels = ?", (each,)).rowcount for each in pixels)

    def _opened(self) -> Database:
        try:
            return Database(self.path, KIND)
        except InUseError:
            raise
        except (StoreError, UsageError) as error:
            self._discard(error)
        return Database(self.path, KIND)

    def _discard(self, error: StoreError | UsageError) -> None:
        if not self.path.is_file():
            raise error
        logger.warning(f"the photos that were kept cannot be read ({error.got}): none of them is kept; labels are")
        discard(self.path, KIND)

    def _begin(self, basis: str) -> None:
        with self._reading() as db:
            for _ in db.execute(f"SELECT {_COLUMNS}, features FROM photo"):  # whether all can be read
                pass
            row = db.execute("SELECT network FROM basis").fetchone()
        with self._writing(erasing=True) as db:
            if row is None:
                db.execute("INSERT INTO basis (id, network, namings) VALUES (1, ?, 0)", (basis,))
            elif row[0] != basis:
                gone = db.execute("DELETE FROM photo").rowcount
                db.execute("UPDATE basis SET network = ?", (basis,))
                logger.info(f"{counted(gone, 'kept photo')} of another network removed")
            self._make_room(db, 0)

    def _let_old_ones_go(self, db: sqlite3.Connection, now_s: float) -> None:
        if self._for_s is not None:
            db.execute("DELETE FROM photo WHERE taken_s < ? AND waits = 0", (now_s - self._for_s,))

    def _make_room(self, db: sqlite3.Connection, need: int) -> bool:
        (page,) = db.execute("PRAGMA page_size").fetchone()
        while True:
            (pages,), (free,) = (db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "freelist_count"))
            if (pages - free) * page + need <= self._limit_bytes:
                return True
            oldest = "DELETE FROM photo WHERE number = (SELECT min(number) FROM photo WHERE waits = 0)"
            if not db.execute(oldest).rowcount:
                return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._lock, self._file.reading():
            yield self._file.connection

    @contextlib.contextmanager
    def _writing(self, *, erasing: bool = False) -> Iterator[sqlite3.Connection]:
        with self._lock:
            with as_written(self.path, KIND), self._file.transaction() as db:
                yield db
            with self._file.guard():
                self._file.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _photo(row: tuple[object, ...]) -> KeptPhoto:
    """A photo of a row.

    Raises:
        TypeError: a value is of another kind.
    """
    kinds = (int, bytes, str, float, float, int, str, None, None, int, float, int, int, str, str)
    for value, kind in zip(row[:-1], kinds, strict=True):
        if type(value) is not kind if kind is not None else not isinstance(value, float | None):
            raise TypeError(f"{type(value).__name__} in a photo")
    if not isinstance(row[-1], str | None):
        raise TypeError(f"{type(row[-1]).__name__} in a photo")
    values = list(row)
    values[9] = bool(values[9])
    return KeptPhoto(*values)  # type: ignore[arg-type]
