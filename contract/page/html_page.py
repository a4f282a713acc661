"""The HTML of every page: one frame, the head of a page that has a script, and what stands between.

A place is `{{name}}`. Each is filled once, so what is put in may itself look like one. What is put in is HTML; texts
are escaped here.
"""

from __future__ import annotations

import html
import re
from importlib.resources import files

__all__ = ["filled", "form_page", "site_page"]

_PLACE = re.compile(r"\{\{([^{}]+)\}\}")


def site_page(package: str, title: str, about: str, first: str) -> str:
    """A whole page: the body is `page.html` of a package.

    Args:
        title: a text, what the page is about.
        about: a text, what the browser's tab says beside it.
        first: JSON, the state that the page comes with.
    """
    safe = first.replace("<", "\\u003c").replace("&", "\\u0026")
    head = filled(_text(__package__, "head.html"), {"first": safe})
    body = filled(_text(package, "page.html"), {"title": html.escape(title)})
    return _framed(f"{title} – {about}", head, body)


def form_page(code_at: str, wrong: str) -> str:
    """The form for the pairing code.

    Args:
        code_at: a text, where the code stands.
        wrong: HTML, what was wrong with the last one; empty for nothing.
    """
    body = filled(_text(__package__, "pair.html"), {"code at": html.escape(code_at), "wrong": wrong})
    return _framed("Pairing code", "", body)


def filled(text: str, places: dict[str, str]) -> str:
    """The text with its places filled.

    Raises:
        KeyError: nothing was given for one of them.
    """
    return _PLACE.sub(lambda found: places[found[1]], text)


def _framed(title: str, head: str, body: str) -> str:
    return filled(_text(__package__, "frame.html"), {"title": html.escape(title), "head": head, "body": body})


def _text(package: str, name: str) -> str:
    return files(package).joinpath(name).read_text("utf-8")
