"""Tables that keep their numbers on any terminal.

`show_table` draws a table if it fits. If not, each row becomes a block: its name, then its `heading value` pairs,
wrapped between the pairs. So text may wrap, and no number is ever cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

__all__ = ["show_table"]

_GAP = "   "
_ANY_WIDTH = 10_000


def show_table(
    console: Console,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: Collection[int] = (0,),
    title: str = "",
) -> None:
    """Draw rows under headings, or, where the console is too narrow, one block for each row.

    Args:
        headings: one for each column; the first column names the row.
        rows: cells as plain text; an empty one is left out of a block.
        words: columns that hold words and are set to the left; the others hold numbers.
        title: a line above.
    """
    if title:
        console.print(escape(title), style="italic", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False, show_edge=False, header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(escape(heading), justify="left" if number in words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    natural = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).maximum
    if natural <= console.width:
        console.print(table)
        return
    for row in rows:
        console.print(f"[bold]{escape(row[0])}[/bold]", highlight=False, soft_wrap=True)
        pairs = [f"{heading} {cell}".strip() for heading, cell in zip(headings[1:], row[1:], strict=True) if cell]
        for line in _filled(pairs, console.width - 2):
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)


def _filled(pairs: Sequence[str], width: int) -> list[str]:
    """Pairs in as few lines as they take, each pair whole."""
    lines: list[str] = []
    for pair in pairs:
        longer = f"{lines[-1]}{_GAP}{pair}" if lines else ""
        if lines and cell_len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(pair)
    return lines
