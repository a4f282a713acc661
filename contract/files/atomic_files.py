"""Files that are written whole or not at all, and files that one process at a time may use.

`whole_file` gives a file to write to, and puts it in its place when it is complete:

1. The file is written beside its place.
2. It is forced to the disk.
3. It is renamed. So a reader finds the old file or the new one, at whatever point the process is interrupted.

Only one process at a time writes a file. A second process is refused, so the two cannot mix their parts. A target that
is no regular file (`/dev/stdout`, a pipe) is written to directly. A symbolic link is followed, not replaced.

`lock` takes a file for this process until the descriptor is closed. It locks the inode and not the name, so a second
name (a symbolic link, a hard link) leads to the same lock.

`own_directory` makes a directory that only its owner may enter.

`read_toml` reads a file that a person wrote, or says in one line what is wrong with it.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from protofleet.contract.errors import StoreError, UsageError

__all__ = ["lock", "open_to_lock", "own_directory", "read_toml", "take_lock", "whole_file"]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write bytes to. At the end of the block it takes the place of `path`.

    Args:
        private: whether only its owner may read it, from the first moment on.

    Raises:
        OSError: when the disk refuses, or another process is writing the file. Then the file at `path` is as it was,
            and nothing else is left.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    partial = target.with_name(target.name + ".partial")
    _make_room(partial)
    with open(partial, "xb", opener=_for_owner if private else None) as file:
        try:
            _flock(file.fileno())
            if not _is(partial, file.fileno()):  # one that made room before we had locked it
                raise _busy()
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(partial, target)
            _sync_directory(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                if _is(partial, file.fileno()):
                    partial.unlink()
            raise


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _make_room(partial: Path) -> None:
    """Remove the partial file of a killed process, or a link in its place. A file that is being written stays."""
    try:
        descriptor = os.open(partial, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # none, a link, or not for us to read
        partial.unlink(missing_ok=True)
        return
    try:
        _flock(descriptor)
        partial.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def _flock(descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _busy() from None
    except OSError:
        pass  # a disk that knows no locks


def _busy() -> OSError:
    return OSError(errno.EBUSY, "another process that is writing it")


def _is(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except OSError:
        return False


def lock(path: str | os.PathLike[str]) -> int:
    """A descriptor of the file, locked until it is closed. A missing file is made, for its owner alone.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be opened for writing, or is no regular file.
    """
    descriptor = open_to_lock(path)
    try:
        take_lock(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_to_lock(path: str | os.PathLike[str]) -> int:
    """The first half of `lock`: a descriptor without one.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)


def take_lock(descriptor: int) -> None:
    """The second half. The descriptor stays open, whatever comes of it.

    Raises:
        BlockingIOError: another process has it.
        OSError: it is of no regular file.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise OSError(0, "no regular file")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def own_directory(directory: Path, hint: str) -> None:
    """Make a directory for its owner alone, if it does not exist yet.

    Args:
        hint: what to do if it cannot be made.

    Raises:
        StoreError: it cannot be made, or something else is in its place.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"cannot use {directory}", expected="a writable directory", got=error.strerror, hint=hint
        ) from None


def _sync_directory(directory: Path) -> None:
    """Make a rename durable, where the system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_MARKS = {
    codecs.BOM_UTF8: "a byte order mark of UTF-8",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}


def read_toml(path: str | os.PathLike[str], what: str, *, hint: str = "") -> dict[str, Any]:
    """The keys of a TOML file.

    Args:
        what: names it in an error: `--policy policy.toml`.
        hint: where the file cannot be read.

    Raises:
        UsageError: the file cannot be read, is not in UTF-8, or is no TOML.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(what, expected="a TOML file", got=error.strerror, hint=hint) from None
    for mark, encoding in _MARKS.items():
        if content.startswith(mark) or (b"\0" in content[:4] and mark == codecs.BOM_UTF16_LE):
            raise UsageError(
                what, expected="TOML in UTF-8 without a byte order mark", got=encoding,
                hint="save it so; PowerShell's > writes UTF-16, its `| Set-Content -Encoding ascii` does not",
            )  # fmt: skip
    try:
        return tomllib.loads(content.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n"))
    except UnicodeDecodeError as error:  # whose own words show bytes of the file
        raise UsageError(what, expected="TOML", got=f"bytes that are no UTF-8 at {error.start}") from None
    except (ValueError, RecursionError) as error:  # no TOML, nested without end
        raise UsageError(what, expected="TOML", got=error) from None
