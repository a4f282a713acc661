"""A file of names and their secrets, which nobody else on the machine may read."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from protofleet.contract.errors import UsageError

__all__ = ["read_passwords"]

_MOST_BYTES = 1 << 20


def read_passwords(path: Path, option: str, *, of: str = "USER:PASSWORD") -> dict[str, str]:
    """The passwords by user, of a file with a line `USER:PASSWORD` for each. A line that begins with # says nothing.

    Args:
        option: that names the file.
        of: what a line is called.

    Raises:
        UsageError: it cannot be read, everybody on this machine may read it, or a line is of another form. No line is
            shown.
    """
    label = f"{option} {path}"
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IROTH:
                raise UsageError(
                    label, expected="a file that others may not read", got="one that they may", hint=f"chmod 600 {path}"
                )
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise UsageError(label, expected=f"a file of {of} lines", got=error.strerror) from None
    if len(text) > _MOST_BYTES:
        raise UsageError(label, expected=f"at most {_MOST_BYTES:,} bytes", got="more")
    passwords: dict[str, str] = {}
    for number, line in enumerate(text.decode("utf-8", "replace").splitlines(), 1):
        user, separator, password = line.partition(":")
        if not line.strip() or line.startswith("#"):
            continue
        if not (user and separator and password and line.isprintable()) or user in passwords:
            raise UsageError(label, expected=f"{of}, each name once", got=f"another line {number}")
        passwords[user] = password
    if not passwords:
        raise UsageError(label, expected=f"a line {of} or more", got="none")
    return passwords
