"""While attacked, a process writes nowhere but in one folder, starts nothing and calls nobody: whatever tries, raises.

Python's audit events say it of every file that is opened to write, made, renamed or removed, of every process and every
connection, whichever library does it in Python.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["Trespass", "guarded", "in_memory", "scratch"]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# event → where among its arguments paths stand, each with the folder that a relative one is of
_CHANGES: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.mkdir": ((0, 2),),
    "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "shutil.rmtree": ((0, 1),),
}
_NEVER = frozenset({"socket.connect", "socket.bind", "subprocess.Popen", "os.system", "os.exec", "os.posix_spawn"})
_allowed: str | None = None  # the one folder; None while nothing is watched
_watching = False
_others: frozenset[int] = frozenset()  # threads that were there before, and belong to no target


class Trespass(BaseException):
    """What no target may do; no `except Exception` on the way swallows it."""


@contextmanager
def guarded() -> Iterator[None]:
    """Within, this process may change files in one folder alone: that of its temporary files, which is gone at the end.

    What a thread does that was there before, such as a link of another test's that still dials, is no target's doing.
    It lies in memory where the system has such.
    """
    global _allowed, _others, _watching
    if not _watching:  # a hook stays for the life of a process, and does nothing outside of this
        sys.addaudithook(_hook)
        _watching = True
    before, compiles = tempfile.tempdir, sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # a module that is imported within leaves nothing beside it
    _others = frozenset(t.ident for t in threading.enumerate() if t.ident is not None) - {threading.get_ident()}
    with tempfile.TemporaryDirectory(prefix="pf-attack-", dir=in_memory()) as folder:
        tempfile.tempdir, _allowed = folder, os.path.realpath(folder) + os.sep
        try:
            yield
        finally:
            tempfile.tempdir, _allowed, sys.dont_write_bytecode = before, None, compiles


def in_memory() -> str | None:
    """Where temporary files cost no disk, unless the environment says where they go."""
    memory = "/dev/shm"
    return memory if "TMPDIR" not in os.environ and os.access(memory, os.W_OK) else None


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder for one input's files."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _allowed is None or threading.get_ident() in _others:
        return
    if event in _NEVER:
        raise Trespass(f"{event} {arguments!r}"[:300])
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITES and not isinstance(path, int):
            _check(event, path)
    for place, folder in _CHANGES.get(event, ()):
        of = arguments[folder] if folder is not None and folder < len(arguments) else None
        _check(event, arguments[place], of if isinstance(of, int) and of >= 0 else None)


def _check(event: str, path: object, folder: int | None = None) -> None:
    assert _allowed is not None
    if isinstance(path, str | bytes | os.PathLike):
        start = "" if folder is None else os.readlink(f"/proc/self/fd/{folder}")
        real = os.path.realpath(os.path.join(start, os.fsdecode(path)))
        if not f"{real}{os.sep}".startswith(_allowed) and real != os.devnull:
            raise Trespass(f"{event} of {real}, outside of {_allowed}")
