"""Which class names a bundle can have: each is told from every other by whoever reads it, on a screen or a disk."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from contract.errors import UsageError

__all__ = ["check_names"]


def check_names(names: Sequence[str]) -> None:
    """That names differ and show what they are: no control characters, nothing that is no text, and no two that are one
    name in Unicode's composed form, as `é` and `e` with an accent after it: a folder is of either, as its disk pleases.

    Raises:
        UsageError: naming the first that is not so.
    """
    if not all(names):
        raise UsageError("--classes", expected="names that are not empty", got="an empty name")
    if len(set(names)) < len(names):
        again = next(name for place, name in enumerate(names) if name in names[:place])
        raise UsageError("--classes", expected="names that differ", got=f"{again!r} again"[:80])
    seen: dict[str, str] = {}
    for name in names:
        if any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name):
            raise UsageError("--classes", expected="names of characters that can be seen", got=repr(name)[:80])
        twin = seen.setdefault(unicodedata.normalize("NFC", name), name)
        if twin != name:
            got = f"{ascii(twin)[:80]} and {ascii(name)[:80]}"
            raise UsageError("--classes", expected="names that do not look the same", got=got)
