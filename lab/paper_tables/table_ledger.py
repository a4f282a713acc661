"""A table's ledger, `NAME.json`: every cell that has been run, with its settings, and what its page is made from.

    protofleet.table/2   each cell says the code, the command, the preset, the seeds, and all settings with defaults
    protofleet.table/1   0.1's: the settings that were given, and one command; nothing says which code gave them

Both are read; /2 is written. `merged` puts newer cells in the place of older ones, so that one row can be run again, or
a missing one for the first time, without the others. What the pages say lies in `verdicts.py` and `render.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.lab.paper_tables.config import TABLES, Row, Table, read_table
from protofleet.lab.paper_tables.runner import Cell, Order

__all__ = ["UNNAMED", "Sheet", "SheetCell", "is_ledger", "merged", "read_sheet", "sheet_of", "write_json"]

_TABLE = "protofleet.table/"
SCHEMA = f"{_TABLE}2"
_BEFORE = f"{_TABLE}1"
UNNAMED = "code that its ledger does not name (0.1)"


class SheetCell(msgspec.Struct, frozen=True, kw_only=True):
    """A row in a column; accuracies are fractions, `spread` and `gain` as published.

    Attributes:
        settings: those that were given; `resolved` with every default, empty for a cell of `/1`.
        sent, gain, over: as the definition's row has them.
        code: of its runs; empty where it is not named.
        curve_std: standard deviation over seeds at each measured round.
        metrics, per_class: of the last round that was measured, `metrics.py`.
    """

    row: str
    column: str
    metric: str
    accuracy: float | None
    published: float | None
    difference: float | None
    values: list[float]
    std_over_seeds: float | None
    std_over_clients: float | None
    seconds: float
    uplink_bytes_per_client_round: float
    uplink_bytes_per_client: float
    curve: dict[str, float]
    failures: list[str]
    settings: dict[str, Any]
    resolved: dict[str, Any] = {}
    seeds: list[int] = []
    preset: str = ""
    code: list[str] = []
    command: str = ""
    family: str = "weights"
    note: str = ""
    why: str = ""
    spread: float | None = None
    gain: float | None = None
    over: str = ""
    sent: float | None = None
    curve_std: dict[str, float] = {}
    metrics: dict[str, float] = {}
    per_class: list[float | None] = []

    @property
    def runs(self) -> int:
        """Seeds, those that diverged among them."""
        return len(self.values) + len(self.failures)

    @property
    def rounds_apart(self) -> int:
        """Rounds between two evaluations."""
        return int(self.settings.get("evaluate_every") or 1)


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table's cells by one preset's settings, and the words around them; `quick` says what fraction it is.

    Attributes:
        data: the data set's name, of a folder its last part; empty where an older ledger does not say it.
    """

    schema: str
    table: str
    title: str
    source: str
    notes: list[str]
    cells: list[SheetCell]
    quick: str | None = None
    command: str = ""
    charts: list[str] = []
    preset: str = ""
    against: str = ""
    target: float | None = None
    data: str = ""

    @property
    def commands(self) -> list[str]:
        """That gave the cells, each once."""
        return list(dict.fromkeys(cell.command for cell in self.cells if cell.command))

    @property
    def code(self) -> list[str]:
        """That gave the cells, each once."""
        return list(dict.fromkeys(code for cell in self.cells for code in cell.code or [UNNAMED]))

    @property
    def validated(self) -> list[str]:
        """The rows with a cell that is of the validation split."""
        return list(dict.fromkeys(cell.row for cell in self.cells if cell.resolved.get("validation")))

    def cell(self, row: str, column: str) -> SheetCell | None:
        """By name; None where it has not been run."""
        return next((cell for cell in self.cells if (cell.row, cell.column) == (row, column)), None)


def sheet_of(name: str, order: Order, cells: Sequence[Cell], command: str) -> Sheet:
    """What a table's run gives."""
    table = order.table
    return Sheet(
        schema=SCHEMA,
        table=name,
        title=table.title,
        source=table.source,
        notes=list(table.notes),
        cells=[_sheet_cell(order, cell, command) for cell in cells],
        quick=table.fraction.says if order.quick else None,
        command=command,
        charts=list(table.charts),
        preset=order.preset or table.preset,
        against=table.against,
        target=table.target,
        data=_data_name(order.data or table.data),
    )


def _data_name(data: str) -> str:
    """A name as it is, of a folder its last part: where it lay is nobody's business."""
    return "+".join(Path(part).resolve().name if Path(part).exists() else part for part in data.split("+"))


def _sheet_cell(order: Order, cell: Cell, command: str) -> SheetCell:
    return SheetCell(
        row=cell.row.name,
        column=cell.column.name,
        metric=cell.metric,
        accuracy=cell.mean,
        published=cell.published,
        difference=cell.difference,
        values=list(cell.values),
        std_over_seeds=cell.over_seeds,
        std_over_clients=cell.over_clients,
        seconds=cell.seconds,
        uplink_bytes_per_client_round=cell.uplink_bytes,
        uplink_bytes_per_client=cell.total_bytes,
        curve={str(number): value for number, value in cell.curve.items()},
        failures=list(cell.failures),
        settings=msgspec.to_builtins(cell.settings),
        resolved=cell.resolved,
        seeds=list(cell.seeds),
        preset=order.preset or order.table.preset,
        code=list(cell.code),
        command=command,
        curve_std={str(number): value for number, value in cell.curve_std.items()},
        metrics=cell.metrics,
        per_class=cell.per_class,
        **_of_row(cell.row, cell.column.name),
    )


def _of_row(row: Row, column: str) -> dict[str, Any]:
    """What the definition says of a row in a column."""
    gain = row.gains.get(column)
    facts = {"family": row.family, "note": row.note, "why": row.why, "sent": row.sent.get(column)}
    return facts | {"spread": row.spread.get(column), "gain": gain, "over": row.over if gain is not None else ""}


def is_ledger(path: Path) -> bool:
    """Whether the file is a table's ledger, and not one of another command. One that cannot be read counts, so that
    `read_sheet` says what is wrong with it; so does an empty one."""
    try:
        content = path.read_bytes()
    except OSError:
        return path.is_file()
    try:
        value = msgspec.json.decode(content)
    except ValueError:
        return not content or _TABLE.encode() in content
    return isinstance(value, dict) and str(value.get("schema")).startswith(_TABLE)


def read_sheet(path: Path) -> Sheet:
    """A ledger of either schema.

    Raises:
        StoreError: it cannot be read.
        UsageError: it is no ledger, or one of a later Protofleet.
    """
    try:
        sheet = msgspec.json.decode(path.read_bytes(), type=Sheet)
    except OSError as error:
        raise StoreError(f"{path}", expected="a table's ledger", got=error.strerror) from None
    except ValueError as error:
        raise UsageError(f"{path}", expected="a table's ledger", got=error) from None
    if sheet.schema == SCHEMA:
        return sheet
    if sheet.schema != _BEFORE:
        raise UsageError(
            f"{path}", expected=f"schema {SCHEMA} or {_BEFORE}", got=sheet.schema, hint="a newer Protofleet"
        )
    return _lifted(sheet)


def _lifted(sheet: Sheet) -> Sheet:
    """A ledger of `/1`, with what only the definition says of its rows."""
    table = read_table(sheet.table)[1] if sheet.table in TABLES else None
    rows = {row.name: row for row in table.rows} if table else {}
    cells = []
    for cell in sheet.cells:
        more: dict[str, Any] = _of_row(rows[cell.row], cell.column) if cell.row in rows else {}
        preset = _preset_of(table, cell) if table else ""
        seeds = list(range(cell.runs)) if not cell.failures else []
        cells.append(msgspec.structs.replace(cell, command=sheet.command, preset=preset, seeds=seeds, **more))
    if table is None:
        return msgspec.structs.replace(sheet, cells=cells)
    more = {"charts": list(table.charts), "preset": table.preset, "against": table.against}
    return msgspec.structs.replace(sheet, cells=cells, **more)


def _preset_of(table: Table, cell: SheetCell) -> str:
    """The preset by which the table's row has exactly the settings that the cell was given; empty for none."""
    rows = [row for row in table.rows if row.name == cell.row]
    columns = [column for column in table.columns if column.name == cell.column]
    for name in (table.preset, *table.presets) if rows and columns else ():
        if msgspec.to_builtins(table.settings_of(rows[0], columns[0], quick=False, preset=name)) == cell.settings:
            return name
    return ""


def merged(before: Sheet, newer: Sheet) -> Sheet:
    """`before` with the cells of `newer` in the place of its own, in the definition's order.

    Raises:
        UsageError: they are not of one table, or one of them is of another fraction of it.
    """
    if (before.table, before.preset, before.quick) != (newer.table, newer.preset, newer.quick):
        raise UsageError("lab results --take", expected=f"a run of {_which(before)}", got=_which(newer))
    cells = {(cell.row, cell.column): cell for cell in [*before.cells, *newer.cells]}
    order = _places(newer.table)
    return msgspec.structs.replace(
        newer, cells=sorted(cells.values(), key=lambda cell: order.get((cell.row, cell.column), -1))
    )


def _which(sheet: Sheet) -> str:
    preset = f" by the settings {sheet.preset!r}" if sheet.preset else ""
    return f"{sheet.table}{preset}{f', quick ({sheet.quick})' if sheet.quick else ', whole'}"


def _places(name: str) -> dict[tuple[str, str], int]:
    if name not in TABLES:
        return {}
    _, table = read_table(name)
    return {(row.name, column.name): place for place, (row, column) in enumerate(table.choose((), ()))}


def write_json(path: Path, sheet: Sheet) -> None:
    """Write the ledger.

    Raises:
        StoreError: when the disk refuses.
    """
    text = msgspec.json.format(msgspec.json.encode(sheet), indent=1).decode() + "\n"
    try:
        with whole_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise StoreError(f"{path}", expected="a file that can be written", got=error.strerror) from None
