"""The further tables of a page: what the seeds say together, and what lies behind one accuracy."""

from __future__ import annotations

import math

from protofleet.hw_profiles.units import nice_bytes
from protofleet.lab.paper_tables.metrics import METRICS
from protofleet.lab.paper_tables.seeds import half_interval, paired
from protofleet.lab.paper_tables.table_ledger import Sheet, SheetCell

__all__ = ["metrics_table", "seeds_table"]

_COUNTS = ("rounds to target", "bytes to target", "Jain")


def seeds_table(sheet: Sheet) -> list[str]:
    """Intervals, and differences to the row that the table compares with; nothing where no cell has two seeds."""
    cells = [cell for cell in sheet.cells if len(cell.values) > 1]
    if not cells:
        return []
    heads = ["95 % of the mean", *([f"less {sheet.against}", "p", "pairs"] if sheet.against else [])]
    lines = ["", "Over seeds: Student's 95 % interval of the mean" + _compared(sheet), ""]
    lines += [f"|  |  | {' | '.join(heads)} |", "| --- | --- |" + " ---: |" * len(heads)]
    for cell in cells:
        half = half_interval(cell.values) or 0.0
        mean = f"{(cell.accuracy or 0.0) * 100:.2f} ± {half * 100:.2f}"
        texts = [mean, *(_difference(sheet, cell) if sheet.against else [])]
        lines.append(f"| {cell.row} | {cell.column} | {' | '.join(texts)} |")
    return lines


def _compared(sheet: Sheet) -> str:
    if not sheet.against:
        return "."
    return f", and the difference to {sheet.against} on the same seeds with its own interval and the paired t-test's p."


def _difference(sheet: Sheet, cell: SheetCell) -> list[str]:
    base = sheet.cell(sheet.against, cell.column)
    if base is None or base is cell or len(base.values) != len(base.seeds) or len(cell.values) != len(cell.seeds):
        return ["", "", ""]
    difference = paired(cell.values, cell.seeds, base.values, base.seeds)
    if difference is None:
        return ["", "", ""]
    return [
        f"{difference.mean * 100:+.2f} ± {difference.half * 100:.2f}",
        "–" if math.isnan(difference.p) else f"{difference.p:.3f}",
        str(difference.pairs),
    ]


def metrics_table(sheet: Sheet) -> list[str]:
    """Clients, classes, calibration, and the way to the target; nothing where no cell has them."""
    cells = [cell for cell in sheet.cells if cell.metrics]
    if not cells:
        return []
    names = [name for name in METRICS if any(name in cell.metrics for cell in cells)]
    goal = f" The target is {sheet.target:g} %." if sheet.target is not None else ""
    heading = "Behind the accuracy, of the last measured round; in percent but for Jain's index, rounds and bytes."
    lines = ["", heading + goal, ""]
    lines += [f"|  |  | {' | '.join(names)} |", "| --- | --- |" + " ---: |" * len(names)]
    for cell in cells:
        lines.append(f"| {cell.row} | {cell.column} | {' | '.join(_text(cell, name) for name in names)} |")
    return lines


def _text(cell: SheetCell, name: str) -> str:
    value = cell.metrics.get(name)
    if value is None:
        return "–"
    if name == "bytes to target":
        return nice_bytes(value)
    if name in _COUNTS:
        return f"{value:.3f}" if name == "Jain" else f"{value:.0f}"
    return f"{value * 100:.2f}"
