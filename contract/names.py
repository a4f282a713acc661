"""What is chosen by name is found in one table, by `known` and `named`; an unknown name raises with the nearest.

A table maps each name to the class or value that does what the name stands for: see the docstring of each for how to
add a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from protofleet.contract.errors import UsageError, near_names

__all__ = ["known", "listed", "named"]

Name = TypeVar("Name", bound=str)
Entry = TypeVar("Entry")


def known(table: Iterable[Name], name: str, option: str, expected: str = "") -> Name:
    """The name, if it is one of the table's.

    Args:
        option: what is chosen, for the error: `--rule`.
        expected: in words, where the names are too many for a line.

    Raises:
        UsageError: it is none.
    """
    for each in table:
        if each == name:
            return each
    raise UsageError(
        option, expected=expected or listed(table), got=name or "nothing", hint=near_names(str(name), table)
    )


def named(table: Mapping[Name, Entry], name: str, option: str, expected: str = "") -> Entry:
    """What stands under that name.

    Raises:
        UsageError: nothing does.
    """
    if name in table:
        return table[name]  # type: ignore[index]  # it is one of them
    return table[known(table, name, option, expected)]


def listed(names: Iterable[str]) -> str:
    """All of them, for a line: `os, ws or is`."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
