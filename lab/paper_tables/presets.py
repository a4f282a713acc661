"""The page `results/presets.md`: the settings of each table by source, side by side.

- For each row that the sources run differently: every setting in which they differ.
- For each table: the common values of the most important settings.

The settings are read from the definitions, with every default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from protofleet.lab.paper_tables.config import TABLES, Row, Table, read_table
from protofleet.lab.paper_tables.verdicts import flat

__all__ = ["presets_page"]

_SOURCES = {"printed": "as printed", "code": "the public code", "framework": "the authors' framework"}
_MAIN = ("backbone", "scaling", "batch", "course.rounds", "course.fraction", "partition.clients", "epochs", "lr")
_MAIN += ("optimizer", "momentum", "weight_decay", "lambda")


def presets_page() -> str:
    """The text of the page."""
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
    for preset, reading in table.presets.items():
        source = f"**{_SOURCES[preset]}**" if preset == table.preset else _SOURCES[preset]
        lines.append(f"- {source} (`{preset}`): {reading.says}.")
    rows = {row.name: _by_preset(table, row) for row in table.rows}
    lines += ["", "Every row: " + ", ".join(_common([by_preset[table.preset] for by_preset in rows.values()])) + "."]
    if len(table.presets) == 1:
        return lines
    heads = [f"**{preset}**" if preset == table.preset else preset for preset in table.presets]
    lines += ["", f"| row | setting | {' | '.join(heads)} |", "| --- | --- |" + " --- |" * len(heads)]
    apart = {name: _apart(list(by_preset.values())) for name, by_preset in rows.items()}
    shared = [cells for cells in apart[table.rows[0].name] if all(cells in differing for differing in apart.values())]
    lines += [_line("every row", cells) for cells in shared]
    lines += [_line(name, cells) for name, differing in apart.items() for cells in differing if cells not in shared]
    return lines


def _line(row: str, cells: tuple[str, ...]) -> str:
    return f"| {row} | {' | '.join(cells)} |"


def _apart(presets: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Each setting that differs between the presets, with its values."""
    names = dict.fromkeys(name for settings in presets for name in settings)
    texts = [(_word(name), *(str(settings.get(name, "–")) for settings in presets)) for name in names]
    return [line for line in texts if len(set(line[1:])) > 1]


def _by_preset(table: Table, row: Row) -> dict[str, dict[str, Any]]:
    column = next(c for r, c in table.choose((row.name,), ()) if r is row)
    settled = {name: table.settings_of(row, column, quick=False, preset=name) for name in table.presets}
    resolved = {name: settings.experiment(table.data, 0).resolved() for name, settings in settled.items()}
    return {name: dict(flat(values)) for name, values in resolved.items()}


def _common(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The main settings in which all rows agree."""
    same = [name for name in _MAIN if name in rows[0] and all(row.get(name) == rows[0][name] for row in rows)]
    return [f"{_word(name)} {rows[0][name]}" for name in same]


def _word(name: str) -> str:
    return name.rpartition(".")[2]
