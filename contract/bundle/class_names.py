"""The rules for class names: a reader can distinguish any two, on a screen and on a disk, and a command can take them.

`check_names` is for the names of a bundle. `check_proposed` is for a name that somebody proposes on a device's page,
which an operator then writes behind `--classes`: it is checked on the device, and by the aggregator that is told of it.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence

from protofleet.contract.errors import UsageError
from protofleet.contract.wire.messages import MAX_NAME

__all__ = ["can_be_proposed", "check_names", "check_proposed", "check_typed", "is_readable"]

_SEPARATOR, _ADDS, _OPTION = ",", "+", "-"  # between names, before a name that `--extend` adds, before an option
_PROPOSED = (
    f"a name of 1 to {MAX_NAME} characters that can be seen, without {_SEPARATOR},"
    f" and with no {_ADDS} or {_OPTION} at its beginning"
)


def is_readable(name: str) -> bool:
    """Whether a name has no control character, half of a pair, or end of a line, which no folder's name should."""
    return not any(unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp") for letter in name)


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
        if not is_readable(name):
            raise UsageError(where, expected="names of characters that can be seen", got=repr(name)[:80])
        twin = first_of.setdefault(_composed(name), name)
        if twin != name:
            got = f"{ascii(twin)[:80]} and {ascii(name)[:80]}"
            raise UsageError(where, expected="names that do not look the same", got=got)


def check_typed(names: Sequence[str], where: str = "--classes", *, hint: str | None = None) -> None:
    """Check names that somebody wrote into a command: a + before one is a sign that it is added, and no part of it.

    Raises:
        UsageError: naming the first that begins with one.
    """
    wrong = next((name for name in names if name.startswith(_ADDS)), None)
    if wrong is not None:
        raise UsageError(where, expected=f"names without {_ADDS} before them", got=repr(wrong)[:80], hint=hint)


def can_be_proposed(name: str) -> bool:
    """Whether commands take such a name; see `check_proposed`."""
    is_plain = 1 <= len(name) <= MAX_NAME and name.isprintable() and name == name.strip()
    return is_plain and _SEPARATOR not in name and not name.startswith((_ADDS, _OPTION))


def check_proposed(name: str, known: Iterable[str] = ()) -> None:
    """Check that a proposed class can become one: `export --extend --classes +NAME` takes it as it stands, and
    `learn PHOTO NAME` does afterwards.

    Args:
        known: the classes that there are.

    Raises:
        UsageError: it cannot, or looks like one of these.
    """
    if not can_be_proposed(name):
        raise UsageError("the proposed class", expected=_PROPOSED, got=repr(name)[: MAX_NAME + 16])
    twin = next((each for each in known if _composed(each) == _composed(name)), None)
    if twin is not None:
        expected, hint = "one that the fleet has not got", f"naming the photos {twin}"
        raise UsageError("the proposed class", expected=expected, got=repr(name)[: MAX_NAME + 16], hint=hint)


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)
