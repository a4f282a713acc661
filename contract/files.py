"""Files that are written whole or not at all, and files that one process may use at a time.

`whole_file` gives a file to write to and puts it in its place when it is complete: written beside it, forced to the
disk, then renamed, so that a reader finds the old file or the new one, whatever is interrupted. One process at a time
writes it: a second one is refused, and neither puts half of the other's in its place. A target that is no regular file
(`/dev/stdout`, a pipe) is written to as it is; a symbolic link is followed, not replaced.

`lock` takes a file for this process until the descriptor is closed. It locks the inode, not the name, so that a second
name (a symbolic link, a hard link) leads to the same lock.

`own_directory` makes a directory that its owner alone may enter.

`read_toml` reads what a person wrote, or says in one line why it is none.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from contract.errors import StoreError, UsageError

__all__ = ["lock", "own_directory", "read_toml", "whole_file"]


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, private: bool = False) -> Iterator[IO[bytes]]:
    """A file to write bytes to, which takes the place of `path` at the end of the block.

    Args:
        private: for its owner alone from the first moment on.

    Raises:
        OSError: when the disk refuses, or another process is writing it; then what was at `path` is still there, and
            nothing else is left.
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
    """Remove what a killed process left, or a link that somebody laid there; what a process is writing stays."""
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
    """A descriptor of the file, made for its owner alone when it is not there, and locked until it is closed.

    Raises:
        BlockingIOError: another process has it.
        OSError: it cannot be opened for writing, or is no regular file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "no regular file")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def own_directory(directory: Path, hint: str) -> None:
    """Make a directory for its owner alone, where it is not there yet.

    Args:
        hint: what to do where it cannot be made.

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


def read_toml(path: str | os.PathLike[str], what: str) -> dict[str, Any]:
    """The keys of a TOML file.

    Args:
        what: names it in an error: `--policy policy.toml`.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(what, expected="a TOML file", got=error.strerror) from None
    except UnicodeDecodeError as error:  # whose own words show bytes of the file
        raise UsageError(what, expected="TOML", got=f"bytes that are no UTF-8 at {error.start}") from None
    except (ValueError, RecursionError) as error:  # no TOML, nested without end
        raise UsageError(what, expected="TOML", got=error) from None
