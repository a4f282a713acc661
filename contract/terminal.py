"""What a person sees: text from outside cannot style or move the terminal, and no character can break it.

Strings from the network, from a bundle or from a file name may hold escape codes or characters that turn the line
around. `printable` shows them as `\\x1b` and the like. Errors pass through it when they are made, log lines where they
are written.

`keep_printable` is called once, when a process starts: what the terminal's encoding lacks is then written as the
nearest ASCII (a dash, three dots, a letter without its accent) or as its escape, and never raises.
"""

from __future__ import annotations

import codecs
import unicodedata
from typing import Any

__all__ = ["counted", "keep_printable", "printable"]

_NEAREST = {
    **dict.fromkeys("‐‑‒–—―−─━╌╴╶", "-"),
    **dict.fromkeys("│┃╷╵", "|"),
    **dict.fromkeys("“”„", '"'),
    **dict.fromkeys("‘’‚", "'"),
    "…": "...",
    "×": "x",
    "≤": "<=",
    "≥": ">=",
    "≈": "~",
    "→": "->",
    "µ": "u",
    "μ": "u",
    "λ": "lambda",
    "ε": "epsilon",
    "·": ".",
    "•": "*",
    "√": "sqrt",
    "Σ": "sum",
    "°": "deg ",
}


def printable(text: str) -> str:
    """`text` with every character that is no visible sign or plain space written as its escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things in words: `1 device`, `2 devices`; `things` where an s is not enough."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def _nearest(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_plain(c) for c in error.object[error.start : error.end]), error.end


def _plain(character: str) -> str:
    bare = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return _NEAREST.get(character) or bare or character.encode("unicode_escape").decode("ascii")


codecs.register_error("protofleet.nearest", _nearest)


def keep_printable(*streams: Any) -> None:
    """Let text streams write what their encoding lacks as the nearest ASCII; streams that are no files are left."""
    for stream in streams:
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="protofleet.nearest")
