"""A table that does not fit a phone becomes a block for each row there: this marks it, `site.css` draws it.

Each cell is given its column's heading as `data-label`, and its role, which a cell that is drawn as a block would lose.
"""

from __future__ import annotations

import html
import re

FITS = 38  # letters beside each other on a page of 400 px
WRAPS = 18  # a column need not be wider than that: its words go on in the next line


def text_of(cell: str) -> str:
    """What a reader sees of a cell."""
    return html.unescape(re.sub(r"<[^>]+>", "", cell)).strip()


def letters(rows: list[list[str]]) -> int:
    """How many letters wide a table is, of these texts."""
    return sum(min(WRAPS, max(map(len, column))) for column in zip(*rows, strict=True))


def block(table: str) -> str:
    """One table's HTML; unchanged where it fits, or where its rows are not of one length."""
    rows = [re.findall(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", row, re.DOTALL) for row in table.split("<tr")[1:]]
    texts = [[text_of(cell) for cell in row] for row in rows]
    if "<thead>" not in table or len({len(row) for row in texts}) != 1 or letters(texts) <= FITS:
        return table
    column = 0

    def cell(found: re.Match[str]) -> str:
        nonlocal column
        label = texts[0][column % len(texts[0])]
        column += 1
        return (
            f'<td role="cell" data-label="{html.escape(label)}"{found[1]}>' if label else f'<td role="cell"{found[1]}>'
        )

    head, body = table.split("</thead>")
    body = re.sub(r"<td\b([^>]*)>", cell, body).replace("<tr ", '<tr role="row" ')
    return re.sub(r'<table class="', '<table role="table" class="blocks ', head) + "</thead>" + body


def blocks(body: str) -> str:
    """A page's HTML, with each of its tables marked that does not fit."""
    return re.sub(r"<table\b.*?</table>", lambda found: block(found[0]), body, flags=re.DOTALL)


def setup(app) -> None:
    """Add it to Sphinx."""

    def page(app, docname: str, template: str, context: dict, doctree) -> None:
        if doctree is not None:
            context["body"] = blocks(context["body"])

    app.connect("html-page-context", page)
