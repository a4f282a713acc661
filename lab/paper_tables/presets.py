"""The page `results/presets.md`: the settings of each table by source, side by side.

Of each row that the sources run differently: every setting in which they do. Of each table: what they agree on, from
the settings that decide most. Read from the definitions, with every default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lab.paper_tables.config import TABLES, Row, Table, read_table
from lab.paper_tables.verdicts import flat

__all__ = ["presets_page"]

_SOURCES = {"printed": "as printed", "code": "the public code", "framework": "the authors' framework"}
_MAIN = ("backbone", "scaling", "batch", "course.rounds", "course.fraction", "partition.clients", "epochs", "lr")
_MAIN += ("optimizer", "momentum", "weight_decay", "lambda")


def presets_page() -> str:
    """The page's text."""
    lines = ["# Settings by source, side by side", ""]
    lines += [
        "Where a paper, its public code and its authors' framework differ, each reading has a name:",
        "`protofleet lab table NAME --preset printed|code|framework`. The default is in bold. Where a source has no",
        "column, nothing of it is public, or it agrees. Made by `protofleet lab results` from the tables' definitions.",
    ]
    for name in TABLES:
        _, table = read_table(name)
        lines += _section(name, table) if table.presets else []
    return "\n".join(lines) + "\n"


def _section(name: str, table: Table) -> list[str]:
    lines = ["", f"## {name}", "", f"{table.source}.", ""]
    for preset, found in table.presets.items():
        words = f"**{_SOURCES[preset]}**" if preset == table.preset else _SOURCES[preset]
        lines.append(f"- {words} (`{preset}`): {found.says}.")
    rows = {row.name: _by_preset(table, row) for row in table.rows}
    lines += ["", "Every row: " + ", ".join(_common([each[table.preset] for each in rows.values()])) + "."]
    if len(table.presets) == 1:
        return lines
    heads = [f"**{preset}**" if preset == table.preset else preset for preset in table.presets]
    lines += ["", f"| row | setting | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    apart = {name: _apart(list(found.values())) for name, found in rows.items()}
    shared = [each for each in apart[table.rows[0].name] if all(each in found for found in apart.values())]
    lines += [_line("every row", each) for each in shared]
    lines += [_line(name, each) for name, found in apart.items() for each in found if each not in shared]
    return lines


def _line(row: str, each: tuple[str, ...]) -> str:
    return f"| {row} | {' | '.join(each)} |"


def _apart(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Each setting that is not the same by every preset, and what it is."""
    names = dict.fromkeys(name for each in found for name in each)
    texts = [(_word(name), *(str(each.get(name, "–")) for each in found)) for name in names]
    return [each for each in texts if len(set(each[1:])) > 1]


def _by_preset(table: Table, row: Row) -> dict[str, dict[str, Any]]:
    column = next(c for r, c in table.choose((row.name,), ()) if r is row)
    settled = {name: table.settle(row, column, quick=False, preset=name) for name in table.presets}
    return {name: dict(flat(each.experiment(table.data, 0).resolved())) for name, each in settled.items()}


def _common(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The main settings in which all rows agree."""
    same = [name for name in _MAIN if name in rows[0] and all(row.get(name) == rows[0][name] for row in rows)]
    return [f"{_word(name)} {rows[0][name]}" for name in same]


def _word(name: str) -> str:
    return name.rpartition(".")[2]
