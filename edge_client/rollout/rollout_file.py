"""What a device remembers of roll-outs, on the disk: one record in `STATE/rollout.sqlite`, written as a whole.

    rollout.sqlite           the record (`rollout_decisions.py`), changed in one transaction: it alone says what runs
    bundles/SHA256.bundle    what runs, and what ran before
    bundles/SHA256.part      what is being fetched; its length says how far it is
    fleets/NAME-SHA/         journal, decoded images and history of a fleet that the device went over to

A file with such a name that is not in the record has no meaning. It is removed when it is in the way. Other files stay.

The record is made where a key is trusted. Without a trusted key no offer is ever taken, so there is no record.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Concatenate, ParamSpec

import msgspec

from protofleet.contract.errors import StoreError
from protofleet.contract.files.atomic_files import own_directory, whole_file
from protofleet.contract.files.sqlite import Database, Kind, is_taken, read_only
from protofleet.edge_client.journal import journal
from protofleet.edge_client.rollout.rollout_decisions import InstalledBundle, Rollouts

__all__ = [
    "FILE", "RolloutFile", "answering", "bundle_file", "drop_decoded", "has_decoded", "part_file", "read_rollouts",
]  # fmt: skip

FILE = "rollout.sqlite"
KIND = Kind(
    "record of roll-outs",
    "--state",
    application_id=0x50464452,  # "PFDR"
    steps=("CREATE TABLE rollouts (id INTEGER PRIMARY KEY CHECK (id = 1), json BLOB NOT NULL)",),
    pragmas={"cache_size": -256},
)
_CACHES = ("images", "activations")  # of a directory: what can be made again of the photos
_OURS = re.compile(r"[0-9a-f]{64}\.(bundle|part)(\.partial)?")  # in `bundles`; the last of a copy that was cut off
_P = ParamSpec("_P")


def bundle_file(state: Path, sha256: str) -> Path:
    """Where a bundle lies that a roll-out brought, or that one replaced."""
    return state / "bundles" / f"{sha256}.bundle"


def part_file(state: Path, sha256: str) -> Path:
    """Where a bundle lies that is being fetched."""
    return state / "bundles" / f"{sha256}.part"


def read_rollouts(state: Path) -> Rollouts:
    """What is remembered, while a client may be running; nothing is changed.

    Raises:
        StoreError: it cannot be read.
        UsageError: it is of another version.
    """
    path = state / FILE
    if not path.is_file() or not path.stat().st_size:  # empty: a device that starts for the first time makes it
        return Rollouts()
    with read_only(path, KIND) as db:
        return _decoded(db.execute("SELECT json FROM rollouts").fetchone(), path)


def answering(state: Path) -> Path:
    """The directory whose journal answers.

    It is that of the fleet that the device is in. As long as that one has no global state, it is that of the fleet
    before.

    Raises:
        StoreError, UsageError: as `read_rollouts`.
    """
    known = read_rollouts(state)
    active, previous = known.active, known.previous
    if active is None:
        return state
    if previous is None or previous.directory == active.directory or _has_global(state / active.directory):
        return state / active.directory
    return state / previous.directory


def _has_global(directory: Path) -> bool:
    """Whether this directory has a journal with a global state."""
    path = directory / journal.FILE
    if not path.is_file():
        return False
    with read_only(path, journal.KIND) as db:
        return db.execute("SELECT 1 FROM global").fetchone() is not None


def has_decoded(state: Path) -> bool:
    """Whether anything that was decoded of photos is kept, of any fleet that the device was in."""
    return any((directory / name).is_dir() for directory in (state, *_listed(state / "fleets")) for name in _CACHES)


def drop_decoded(state: Path) -> bool:
    """Remove what was decoded of photos, of every fleet that the device was in; whether nothing of it is left.

    Where a client runs its own stays: it is made anew when the client looks at its samples next.

    Raises:
        StoreError: the disk refuses.
    """
    is_gone = True
    for directory in (state, *_listed(state / "fleets")):
        caches = [directory / name for name in _CACHES if (directory / name).is_dir()]
        if caches and is_taken(directory / journal.FILE):
            is_gone = False
            continue
        for cache in caches:
            try:
                shutil.rmtree(cache)
            except OSError as error:
                expected, hint = "a folder that can be removed", "the same again"
                raise StoreError(f"{cache}", expected=expected, got=error.strerror, hint=hint) from None
    return is_gone


class RolloutFile:
    """The record, for the one process that runs on the state directory. Use as a context manager.

    Args:
        state: the state directory.
        make: whether to make a record where there is none; without it, what is changed lasts as long as the process.

    Attributes:
        known: what is remembered.

    Raises:
        StoreError: the disk refuses, or another process has the directory.
    """

    def __init__(self, state: Path, *, make: bool) -> None:
        self.state, self.known = state, Rollouts()
        self._db: Database | None = None
        path = state / FILE
        if not make and not path.is_file():
            return
        own_directory(state, "another --state")
        self._db = Database(path, KIND)
        try:
            with self._db.guard():
                self.known = _decoded(self._db.connection.execute("SELECT json FROM rollouts").fetchone(), path)
        except BaseException:
            self._db.close()
            raise

    def __enter__(self) -> RolloutFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._db is not None:
            self._db.close()

    def change(
        self, how: Callable[Concatenate[Rollouts, _P], Rollouts], *args: _P.args, **options: _P.kwargs
    ) -> Rollouts:
        """What is known after `how`, a function of `rollout_decisions.py`; durable on return.

        Raises:
            StoreError: the disk refused; then nothing has changed.
        """
        return self.put(how(self.known, *args, **options))

    def put(self, known: Rollouts) -> Rollouts:
        """This is known from now on; durable on return, and written only where it differs.

        Raises:
            StoreError: as `change`.
        """
        if known != self.known and self._db is not None:
            with self._db.transaction() as db:
                db.execute("INSERT OR REPLACE INTO rollouts VALUES (1, ?)", (msgspec.json.encode(known),))
        self.known = known
        return known

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def keep(self, path: Path, sha256: str) -> None:
        """Make sure that a bundle that runs lies in `bundles/`, where a roll-back finds it.

        Raises:
            StoreError: `path` holds something else by now, or the disk refuses.
        """
        target = bundle_file(self.state, sha256)
        if target.is_file():
            return
        try:
            target.parent.mkdir(mode=0o700, exist_ok=True)
            with path.open("rb") as source, whole_file(target) as file:
                shutil.copyfileobj(source, file)
            with target.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"cannot keep {path}", expected="room beside it", got=error.strerror) from None
        if digest != sha256:
            target.unlink()
            raise StoreError(
                f"cannot keep {path}",
                expected=f"sha256 {sha256[:12]}…, which runs",
                got=f"{digest[:12]}…",
                hint="starting the client again",
            )

    def tidy(self, *besides: str) -> None:
        """Remove bundles that are not needed, and the directories of fleets that were given up.

        A bundle is needed if it runs, if it may have to run again, or if it is being fetched (`besides`, sha256 in
        hex). What cannot be removed stays for the next time.
        """
        kept = [bundle for bundle in (self.known.active, self.known.previous) if bundle is not None]
        bundles = {bundle.sha256 for bundle in kept} | set(besides)
        directories = {Path(bundle.directory).name for bundle in kept}
        failed = {sha256[:8] for sha256 in self.known.failed}
        for path in _listed(self.state / "bundles"):
            if _OURS.fullmatch(path.name) and path.name.partition(".")[0] not in bundles:
                with contextlib.suppress(OSError):
                    path.unlink()
        for path in _listed(self.state / "fleets"):
            if path.name not in directories and path.name.rpartition("-")[2] in failed:
                shutil.rmtree(path, ignore_errors=True)

    def drop_caches(self, installed: InstalledBundle) -> None:
        """Remove what the directory of a fleet that was left holds twice: it can be made again of the photos."""
        for name in _CACHES:
            shutil.rmtree(self.state / installed.directory / name, ignore_errors=True)


_RECORDS = msgspec.json.Decoder(Rollouts)  # made here: see `protofleet.contract.bundle.bundle_file._MANIFESTS`


def _decoded(row: tuple[bytes] | None, path: Path) -> Rollouts:
    try:
        return Rollouts() if row is None else _RECORDS.decode(row[0])
    except (msgspec.MsgspecError, RecursionError, TypeError, ValueError) as error:
        raise StoreError(
            f"record of roll-outs {path}", expected="what a device wrote", got=error, hint="another --state"
        ) from None


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
