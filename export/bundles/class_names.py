"""The rules for class names in a bundle: a reader can distinguish any two of them, on a screen and on a disk."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from protofleet.contract.errors import UsageError

__all__ = ["check_names"]


def check_names(names: Sequence[str], where: str = "--classes") -> None:
    """Check that names differ and can be read.

    - No name has control characters, or characters that are no text.
    - No two names are equal in Unicode's composed form, like `é` and `e` with an accent after it. A disk may change a
      folder's name from one into the other.

    Args:
        where: they are given, for an error.

    Raises:
        UsageError: naming the first name that breaks a rule.
    """
    if not all(names):
        raise UsageError(where, expected="names that are not empty", got="an empty name")
    if len(set(names)) < len(names):
        repeated = next(name for place, name in enumerate(names) if name in names[:place])
        raise UsageError(where, expected="names that differ", got=f"{repeated!r} again"[:80])
    first_of: dict[str, str] = {}
    for name in names:
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in name):
            raise UsageError(where, expected="names of characters that can be seen", got=repr(name)[:80])
        twin = first_of.setdefault(unicodedata.normalize("NFC", name), name)
        if twin != name:
            got = f"{ascii(twin)[:80]} and {ascii(name)[:80]}"
            raise UsageError(where, expected="names that do not look the same", got=got)
