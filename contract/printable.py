"""Text for a person: text from outside cannot style or move the terminal, and no character can break it.

- `printable` shows escape codes, and characters that turn a line around, as `\\x1b` and the like. Such text may come
  from the network, a bundle or a file name. Errors pass through it when they are made, log lines when they are written.
- `undisclosed` tells only the length of a text. It is for text that could not be read as what it should be: a URL may
  hold a password anywhere until it has been read, and a password may look like anything.
- `without_password` guards an error that names such a text by mistake, for example as a file.
- `as_written` shows a value of a file that is not what was expected.
- `keep_printable` is called once, when a process starts. From then on, a character that the terminal's encoding lacks
  is written as the nearest ASCII (a dash, three dots, a letter without its accent) or as its escape. It never raises.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from typing import Any

__all__ = [
    "as_written",
    "counted",
    "keep_printable",
    "printable",
    "undisclosed",
    "undisclosed_if_url",
    "without_password",
]

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
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_SCHEME = re.compile(r"(?i)\s*(mqtts?|postgres(?:ql)?|mysql|https?|tcp|tls|ssl|wss?|file)://")
_SIGNED_IN = re.compile(r"(?is)\b(mqtts?|postgres(?:ql)?):/{1,2}[^@]*:.*@")
_MAYBE_SIGNED_IN = re.compile(r"(?<![^\s'\"(])(?:([A-Za-z][\w+.-]*):/{1,2})?[^\s:@/'\"]*:(?!/)[^\s@]+@(?=\S)")


def undisclosed(text: str) -> str:
    """The length of a text that may hold a password, and its scheme if that is a known one."""
    scheme = _SCHEME.match(text)
    begins = f" that begin with {scheme[1].lower()}://" if scheme else ""
    return f"{counted(len(text), 'character')}{begins}" if text else "nothing"


def undisclosed_if_url(text: str) -> str:
    """A word of a command line as it is; only its length if it may be a URL or a part of one."""
    return undisclosed(text) if "@" in text or "://" in text else text


def without_password(text: str) -> str:
    """`text` without user and password in every URL of a broker or a server, and in what looks like such a URL."""
    text_only = _SIGNED_IN.sub(r"\1://…@", text)
    return _MAYBE_SIGNED_IN.sub(lambda match: f"{match[1]}://…@" if match[1] else "…@", text_only)


def counted(number: int, thing: str, things: str = "") -> str:
    """A number of things in words: `1 device`, `2 devices`; `things` where an s is not enough."""
    return f"{number:,} {thing if number == 1 else things or f'{thing}s'}"


def as_written(value: object, most: int = 80) -> str:
    """What a file has, as an error shows it: at most so many letters, whatever it is.

    Python writes no integer of more than 4,300 digits, which TOML may have in hexadecimal.
    """
    try:
        text = repr(value)
    except ValueError:
        return "a number of more than 4,300 digits"
    return text if len(text) <= most else f"{text[: most - 1]}…"


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
