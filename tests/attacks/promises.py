"""What every target holds an error of ours to."""

from __future__ import annotations

from contract.errors import ProtofleetError

__all__ = ["is_one_line"]


def is_one_line(error: ProtofleetError) -> None:
    """What is hostile gets one line of our log, not more, and moves no terminal."""
    text = str(error)
    assert len(text) < 2000, "a line without end"
    assert text.isprintable(), f"no line: {text!r}"
