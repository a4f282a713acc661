"""What a person sees: text from outside cannot style or move the terminal, and no character can break it.

Strings from the network, from a bundle or from a file name may hold escape codes or characters that turn the line
around. `printable` shows them as `\\x1b` and the like. Errors pass through it when they are made, log lines where they
are written.
"""

from __future__ import annotations

import sys

__all__ = ["forgive_streams", "printable"]


def printable(text: str) -> str:
    """`text` with every character that is no visible sign or plain space written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def forgive_streams() -> None:
    """Let standard output and error write what their encoding lacks as an escape, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")
