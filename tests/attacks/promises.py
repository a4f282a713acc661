"""What every target holds an error of ours to."""

from __future__ import annotations

from collections.abc import Callable

from protofleet.contract.errors import ProtofleetError

__all__ = ["is_one_line", "may_refuse"]


def is_one_line(error: ProtofleetError) -> None:
    """What is hostile gets one line of our log, not more, and moves no terminal."""
    text = str(error)
    assert len(text) < 2000, "a line without end"
    assert text.isprintable(), f"no line: {text!r}"


def may_refuse(act: Callable[[], object], *errors: type[ProtofleetError]) -> None:
    """Do it; it may end in one of these, in one line, and in nothing else."""
    try:
        act()
    except errors as error:
        is_one_line(error)
