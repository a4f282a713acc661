"""What a person sees: text from outside cannot style or move the terminal, and no character can break it.

Strings from the network, from a bundle or from a file name may hold escape codes or characters that turn the line
around. `printable` shows them as `\\x1b` and the like. Errors pass through it when they are made, log lines where they
are written.

A URL may hold a password anywhere until it has been read, and a password may look like anything. So of text that was
not read as what it should be, `undisclosed` tells the length alone, and `without_password` guards an error that names
such text by mistake, say as a file.

`keep_printable` is called once, when a process starts: what the terminal's encoding lacks is then written as the
nearest ASCII (a dash, three dots, a letter without its accent) or as its escape, and never raises.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from typing import Any

__all__ = ["counted", "keep_printable", "printable", "undisclosed", "undisclosed_if_url", "without_password"]

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


_SCHEME = re.compile(r"(?i)\s*(mqtts?|postgres(?:ql)?|mysql|https?|tcp|tls|ssl|wss?|file)://")
_SIGNED_IN = re.compile(r"(?is)\b(mqtts?|postgres(?:ql)?):/{1,2}[^@]*:.*@")
_MAYBE_SIGNED_IN = re.compile(r"(?<![^\s'\"(])(?:([A-Za-z][\w+.-]*):/{1,2})?[^\s:@/'\"]*:(?!/)[^\s@]+@(?=\S)")


def undisclosed(text: str) -> str:
    """What an error may say of text that may hold a password: its length, and a scheme that everybody knows."""
    scheme = _SCHEME.match(text)
    begins = f" that begin with {scheme[1].lower()}://" if scheme else ""
    return f"{counted(len(text), 'character')}{begins}" if text else "nothing"


def undisclosed_if_url(text: str) -> str:
    """A word of a command line, unless it may be a URL or a piece of one."""
    return undisclosed(text) if "@" in text or "://" in text else text


def without_password(text: str) -> str:
    """`text`, where it names a broker's or a server's URL, or what looks like one, without user and password."""
    known = _SIGNED_IN.sub(r"\1://…@", text)
    return _MAYBE_SIGNED_IN.sub(lambda found: f"{found[1]}://…@" if found[1] else "…@", known)


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
