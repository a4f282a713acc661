"""Of a built site: each link, picture and anchor exists in it, and nothing is loaded from elsewhere.

    python docs/site/check_links.py build/site

It prints a line for each fault and ends with 1 if there is one. A link to click on (`<a href>`) may lead out
of the site, by https; a picture, a script, a style or a font may not: pages are read without anybody hearing of it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADS = {("img", "src"), ("script", "src"), ("iframe", "src"), ("source", "src"), ("use", "href"), ("link", "href")}


class Page(HTMLParser):
    """What one page links to, loads, and can be linked at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._in_style = tag == "style"
        for name, value in attributes:
            if name == "id" or (tag == "a" and name == "name"):
                self.ids.add(value or "")
            elif tag == "a" and name == "href":
                self.links.append(value or "")
            elif (tag, name) in LOADS:
                self.loads.append(value or "")

    def handle_data(self, text: str) -> None:
        if self._in_style:
            self.loads += loaded_by_style(text)

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False


def loaded_by_style(text: str) -> list[str]:
    """What a style sheet loads, without what is written in it as data."""
    found = re.findall(r"(?:url\(|@import\s)\s*[\"']?([^\"')\s;]+)", text)
    return [target for target in found if not target.startswith(("data:", "#"))]


def elsewhere(target: str) -> bool:
    """Whether another server would hear of it."""
    return "://" in target or target.startswith("//")


def faults(site: Path) -> Iterator[str]:
    """A line for each thing that is not there, or that is elsewhere."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site}, expected a built site, got no page"
    for file, page in pages.items():
        name = file.relative_to(site)
        for target in page.loads:
            if elsewhere(target):
                yield f"{name}: loads {target}"
        for target in [*page.links, *(target for target in page.loads if not elsewhere(target))]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                if parts.scheme not in ("https", "mailto", "data"):
                    yield f"{name}: {target}, expected https"
                continue
            there = Path(os.path.normpath(file.parent / unquote(parts.path))) if parts.path else file
            if not there.is_file():
                yield f"{name}: {target}, expected a file of the site, got none"
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].ids | {"_"}:
                yield f"{name}: {target}, expected that anchor there, got none"
    for file in sorted(site.rglob("*.css")):
        for target in loaded_by_style(file.read_text()):
            if elsewhere(target):
                yield f"{file.relative_to(site)}: loads {target}"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1])))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    sys.exit(bool(found))
