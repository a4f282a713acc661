"""What holds for every report's page, whatever it tells: `check_page`."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from protofleet.hw_profiles.charts.marks import LETTER, STYLE, WIDTH

PHONE_PX = 400
CHART_PX = PHONE_PX - 2 * 8 - 2 * 13  # beside it on a phone: the page's margin, and the card's with its border
_FONTS = {
    name: float(size) for name, size in re.findall(r"\.(t-[a-z]+) \{ font-size: ([\d.]+)px", STYLE.read_text("utf-8"))
}
_IMAGE = re.compile(
    r'<img alt="[^"<>]*" src="data:image/(?:png|jpeg);base64,[A-Za-z0-9+/=]+">'
)  # it is in the page itself
_STYLES = re.compile(r"--dark:[01]\.\d\d|fill-opacity:[01]\.\d{3}")


_SCRIPT = re.compile(r'<script(?: type="application/json" id="points")?>(.*?)</script>', re.DOTALL)


def check_page(html: str, *, scripts: int = 1) -> None:
    """The page fetches nothing, and by how it is made no part of it is wider than a phone.

    Args:
        scripts: how many the page has in it, that of charts and data among them.
    """
    within = _SCRIPT.findall(html)
    assert len(within) == scripts
    for script in within:
        assert not re.search(
            r"fetch\(|XMLHttpRequest|WebSocket|EventSource|import\(|sendBeacon|innerHTML|eval\(", script
        )
    text = _IMAGE.sub("", _SCRIPT.sub("", html))
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|<script|<link|<iframe|<img", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", html)) <= {"http://www.w3.org/2000/svg"}
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in html
    page = _Page()
    page.feed(html)
    assert page.open == []
    assert page.headings[0] == "h1"
    _check_style(page.style)


def check_chart(svg: str) -> None:
    """All of a chart lies in its frame."""
    page = _Page()
    page.feed(svg)
    assert page.open == []


def _check_style(style: str) -> None:
    assert "@media screen and (prefers-color-scheme: dark)" in style
    printed = style.split("@media print", 1)[1]
    assert "color-scheme: light" in printed  # ink on paper, whatever the screen's colours
    assert "details::details-content { content-visibility: visible" in printed  # what is folded is printed
    assert "white-space: normal" in printed  # paper does not scroll
    assert "svg { display: block; width: 100%; max-width: 560px; height: auto; overflow: visible; }" in style
    assert "overflow-wrap: anywhere" in style
    assert ".scroll { overflow-x: auto;" in style
    for rule, body in re.findall(r"([^{}]+)\{([^{}]*)\}", style):
        if "nowrap" in body:
            assert rule.strip() == "th, td"
        for px in re.findall(r"(?:^|[ ;])(?:min-)?width: (\d+)px", body):
            assert int(px) < 100, rule
        for px in re.findall(r"minmax\((\d+)px", body):
            raise AssertionError(f"{rule.strip()} has columns of at least {px} px, without min(100%, …)")


class _Page(HTMLParser):
    """Reads a page and asserts of each element what must hold."""

    _VOID = ("meta", "br", "hr", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[str] = []
        self.style = ""
        self.table: str | None = None
        self._text: dict[str, str | None] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        assert "style" not in found or _STYLES.fullmatch(found["style"] or ""), found
        if tag == "table":
            name, box = self.open[-1]
            assert (name, box.get("class"), box.get("tabindex"), box.get("role")) == ("div", "scroll", "0", "region")
            assert box.get("aria-label")
            self.table = found.get("class")
        if tag == "svg":
            left, top, width, height = map(float, (found["viewbox"] or "").split())
            assert (left, top, width) == (0, 0, WIDTH)
            assert height > 40
            assert "width" not in found
            assert "height" not in found
            assert found["role"] == "img"
            assert found["aria-label"]
        if any(name == "svg" for name, _ in self.open):
            self._inside(tag, found)
        if tag == "td" and "rows" in (self.table or ""):
            assert found["data-head"], "on a phone it is the name beside the value"
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(tag)
        if tag not in self._VOID:
            self.open.append((tag, found))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside(tag, dict(attrs))

    def _inside(self, tag: str, attrs: dict[str, str | None]) -> None:
        """A mark lies in the frame; letters are large enough on a phone."""
        if tag == "text":
            size = _FONTS[(attrs["class"] or "").split()[0]]
            assert size * CHART_PX / WIDTH >= 9.5, attrs
            self._text = attrs
        if tag == "rect":
            assert float(attrs["x"] or 0) >= -0.1
            assert float(attrs["x"] or 0) + float(attrs["width"] or 0) <= WIDTH + 0.1
        if tag == "circle":
            assert 0 <= float(attrs["cx"] or 0) <= WIDTH
        if tag == "polyline":
            assert all(0 <= float(point.split(",")[0]) <= WIDTH for point in (attrs["points"] or "").split())

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag
        self._text = None

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] == "style":
            self.style += data
        if self._text is not None and "transform" not in self._text:
            x, wide = float(self._text["x"] or 0), 0.9 * LETTER * len(data)
            left = {"start": x, "middle": x - wide / 2, "end": x - wide}[self._text["text-anchor"] or ""]
            assert left > -12, data
            assert left + wide < WIDTH + 12, data
