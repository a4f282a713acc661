"""A table's cells, shown: on the screen, as `NAME.json`, as `NAME.md`, and as charts of their own.

Every rendering puts the published number beside ours with the difference, and says how many seeds, the spread, the
wall time of a run and the bytes that one client sends. Accuracies are percent; a quick run is labelled as one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group
from rich.table import Table as Shown

from contract.errors import StoreError
from hw_profiles.charts.curves import Line, curves
from hw_profiles.charts.marks import standalone
from hw_profiles.charts.scatter import Mark, scatter
from hw_profiles.units import nice_bytes
from lab.paper_tables.runner import Cell, Order

__all__ = ["show", "write_sheet"]

SCHEMA = "protofleet.table/1"
_LEGEND = "± is the standard deviation over seeds, up/round what one client sends in a round, time/run wall time"
_KINDS = {"nothing": "local", "prototypes": "fed", "sums": "ffc", "weights": "pooled"}
_HEADINGS = ("", "", "ours", "paper", "diff.", "seeds", "up/round", "time/run")


def show(name: str, order: Order, cells: Sequence[Cell]) -> Group:
    """The table for a screen."""
    shown = Shown(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="left" if index < 2 else "right", no_wrap=index > 1)
    before = None
    for cell in cells:
        if before not in (None, cell.column.name):
            shown.add_section()
        before = cell.column.name
        shown.add_row(*_texts(cell))
    lines = [f"[bold]{order.table.title}[/bold]", f"[dim]{order.table.source}[/dim]"]
    lines += [f"[yellow]{_quick(order)}[/yellow]"] if order.quick else []
    return Group("", *lines, "", shown, "", *(f"[dim]{note}[/dim]" for note in _notes(cells, order)))


def write_sheet(name: str, order: Order, cells: Sequence[Cell], command: str) -> list[Path]:
    """Write the JSON, the Markdown and the charts into the order's directory; returns the paths.

    Raises:
        StoreError: when the disk refuses.
    """
    stem = f"{name}-quick" if order.quick else name
    texts = {
        f"{stem}.json": json.dumps(_as_json(name, order, cells, command), indent=1) + "\n",
        f"{stem}.md": _as_markdown(order, cells, command, stem),
        **{f"{stem}-{which}.svg": svg for which, svg in _charts(order, cells).items()},
    }
    paths = []
    for file, text in texts.items():
        path = order.out / file
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(f"{path}", expected="a file that can be written", got=error.strerror) from None
        paths.append(path)
    return paths


def _texts(cell: Cell) -> tuple[str, ...]:
    mean = "diverged" if cell.failures and cell.mean is None else "–" if cell.mean is None else _percent(cell.mean)
    spread = cell.over_seeds
    difference = "" if cell.difference is None else f"{cell.difference * 100:+.2f}"
    return (
        cell.row.name,
        cell.column.name,
        mean + (f" ± {spread * 100:.2f}" if spread is not None else ""),
        "" if cell.published is None else _percent(cell.published),
        difference,
        str(len(cell.values) + len(cell.failures)),
        nice_bytes(cell.uplink_bytes) if cell.uplink_bytes else "",
        _time(cell.seconds) if cell.seconds else "",
    )


def _notes(cells: Sequence[Cell], order: Order) -> list[str]:
    notes = [f"{cell.row.name}: {cell.row.note}" for cell in cells if cell.row.note]
    failed = [f"{cell.row.name}, {cell.column.name}: {line}" for cell in cells for line in cell.failures]
    return [*dict.fromkeys([*order.table.notes, *notes]), *failed]


def _quick(order: Order) -> str:
    return f"quick: {order.table.fraction.says}; not comparable with the published numbers"


def _as_markdown(order: Order, cells: Sequence[Cell], command: str, stem: str) -> str:
    lines = [f"# {order.table.title}", "", f"{order.table.source}. Written by `{command}`.", ""]
    lines += [f"**{_quick(order)}**", ""] if order.quick else []
    lines += ["| " + " | ".join(_HEADINGS) + " |", "| --- | --- |" + " ---: |" * (len(_HEADINGS) - 2)]
    lines += ["| " + " | ".join(_texts(cell)) + " |" for cell in cells]
    lines += ["", f"Accuracy in percent; {_LEGEND}.", ""]
    lines += [f"- {note}" for note in _notes(cells, order)]
    lines += ["", *(f"![{which}]({stem}-{which}.svg)" for which in _charts(order, cells))]
    return "\n".join(lines).rstrip() + "\n"


def _as_json(name: str, order: Order, cells: Sequence[Cell], command: str) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "table": name,
        "title": order.table.title,
        "source": order.table.source,
        "command": command,
        "quick": order.table.fraction.says if order.quick else None,
        "notes": list(order.table.notes),
        "cells": [_cell_json(cell) for cell in cells],
    }


def _cell_json(cell: Cell) -> dict[str, Any]:
    return {
        "row": cell.row.name,
        "column": cell.column.name,
        "metric": cell.metric,
        "accuracy": cell.mean,
        "published": cell.published,
        "difference": cell.difference,
        "values": cell.values,
        "std_over_seeds": cell.over_seeds,
        "std_over_clients": cell.over_clients,
        "seconds": cell.seconds,
        "uplink_bytes_per_client_round": cell.uplink_bytes,
        "uplink_bytes_per_client": cell.total_bytes,
        "curve": {str(number): value for number, value in cell.curve.items()},
        "failures": cell.failures,
        "settings": msgspec.to_builtins(cell.settings),
    }


def _charts(order: Order, cells: Sequence[Cell]) -> dict[str, str]:
    """By name: for each column, curves over rounds and accuracy against bytes, as the table asks."""
    charts = {}
    columns = list(dict.fromkeys(cell.column.name for cell in cells))
    for number, column in enumerate(columns, start=1):
        suffix = f"-{number}" if len(columns) > 1 else ""
        mine = [cell for cell in cells if cell.column.name == column and cell.mean is not None]
        over_rounds = [cell for cell in mine if len(cell.curve) > 1]
        if "curves" in order.table.charts and over_rounds:
            charts[f"curves{suffix}"] = standalone(_curves(over_rounds, f"accuracy over rounds, {column}"))
        if "bytes" in order.table.charts and mine:
            charts[f"bytes{suffix}"] = standalone(_bytes(mine, f"accuracy against bytes from one client, {column}"))
    return charts


def _bytes(cells: Sequence[Cell], title: str) -> str:
    marks = [
        Mark(cell.row.name, _KINDS.get(cell.row.family, "pooled"), cell.total_bytes, cell.mean or 0.0) for cell in cells
    ]
    return scatter(marks, title)


def _curves(cells: Sequence[Cell], title: str) -> str:
    """Rounds at even distances that every row has measured."""
    every = max(cell.settings.evaluate_every or 1 for cell in cells)
    common = sorted(set.intersection(*(set(cell.curve) for cell in cells)))
    even = [number for number in common if number % every == 0]
    rounds = even if len(even) > 1 else common
    kinds = tuple(_KINDS.values())
    lines = [
        Line(
            cell.row.name,
            kinds[(place + 1) % len(kinds)],
            [cell.curve[number] for number in rounds],
            dashed=place >= len(kinds),
        )
        for place, cell in enumerate(cells)
    ]
    return curves(lines, [str(number) for number in rounds], title)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.2f}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
