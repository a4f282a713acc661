"""Each published number beside ours: the difference, and the verdict.

    inside our interval         the 95 % interval of our mean over seeds (`seeds.py`): a number there is no miss
    within 1 point              of the percentage, and where less than 10 % are wrong within a tenth of these; or of the
                                gain in percent
    within the paper's spread   its own ±
    within a tenth              of the parameters that a client sends, which some papers print in round thousands
    not reproduced              with what is known of why
    one seed                    whatever it gave: no verdict about what a seed decides
    not run                     no run with the settings that the table has now: the command, what it would cost, and
                                what the quick fraction gave where that was run

A table's definition has the published numbers, and its ledger has ours. A cell whose settings are no longer the table's
is not compared with the paper; its result is only mentioned. The cost of a missing run is that of the runs of the same
row, or of the same table, or else the definition's guess. A row that reads the paper another way than the row of its
number (`reading_of`) is compared with it, and not counted again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np

from protofleet.lab.paper_tables.config import Column, Row, Table
from protofleet.lab.paper_tables.seeds import half_interval
from protofleet.lab.paper_tables.table_ledger import Sheet, SheetCell

__all__ = ["NOT_REPRODUCED", "NOT_RUN", "ONE_SEED", "WITHIN", "Claim", "claims_of", "command_for", "flat", "hours_of"]

INSIDE, WITHIN, SPREAD, CLOSE = "inside our interval", "within 1 point", "within the paper's spread", "within a tenth"
NOT_REPRODUCED, NOT_RUN, ONE_SEED = "not reproduced", "not run", "one seed"
_POINT, _SHARE = 1.0, 0.1
_ROUNDING = ("trainer",)  # settings that change nothing but how numbers are rounded on the way


@dataclass(frozen=True)
class Quantity:
    """What a published number is of.

    Attributes:
        printed: a number of it as text, with its sign or not.
        published: of a row, the numbers by column.
        ours: of the cell, and of the cell that a gain is over.
        by_seed: the same of each seed; empty where the two cells have not the same ones.
        is_close: whether ours is near enough to the published, whatever the paper's spread; given both.
        close: that verdict.
        of_results: whether it depends on what was trained, and so on all settings.
        is_gain: over another row.
    """

    printed: Callable[[float, bool], str]
    published: Callable[[Row], Mapping[str, float]]
    ours: Callable[[SheetCell, SheetCell], float | None]
    by_seed: Callable[[SheetCell, SheetCell], Sequence[float]]
    is_close: Callable[[float, float], bool]
    close: str
    of_results: bool = True
    is_gain: bool = False


def _accuracy(cell: SheetCell, base: SheetCell) -> float | None:
    return None if cell.accuracy is None else 100.0 * cell.accuracy


def _gain(cell: SheetCell, base: SheetCell) -> float | None:
    return None if cell.accuracy is None or not base.accuracy else 100.0 * (cell.accuracy / base.accuracy - 1.0)


def _accuracies(cell: SheetCell, base: SheetCell) -> Sequence[float]:
    return [100.0 * value for value in cell.values]


def _gains(cell: SheetCell, base: SheetCell) -> Sequence[float]:
    if cell.seeds != base.seeds or len(cell.values) != len(base.values) or not all(base.values):
        return ()
    return [100.0 * (value / other - 1.0) for value, other in zip(cell.values, base.values, strict=True)]


def _sent(cell: SheetCell, base: SheetCell) -> float | None:
    return None if cell.accuracy is None else cell.uplink_bytes_per_client_round / 4.0


def _within_a_point(ours: float, published: float) -> bool:
    return abs(ours - published) <= _POINT


def _within_a_tenth_of_the_error(ours: float, published: float) -> bool:
    return abs(ours - published) <= min(_POINT, _SHARE * (100.0 - published))


ACCURACY = Quantity(
    lambda value, sign: f"{value:{'+' if sign else ''}.2f}",
    lambda row: row.published,
    _accuracy,
    _accuracies,
    _within_a_tenth_of_the_error,
    WITHIN,
)
GAIN = Quantity(
    lambda value, sign: f"{value:{'+' if sign else ''}.2f} %",
    lambda row: row.gains,
    _gain,
    _gains,
    _within_a_point,
    WITHIN,
    is_gain=True,
)
SENT = Quantity(
    lambda value, sign: f"{value:{'+' if sign else ''},.0f}",
    lambda row: row.sent,
    _sent,
    lambda cell, base: (),
    lambda ours, published: abs(ours - published) <= _SHARE * published,
    CLOSE,
    of_results=False,
)
QUANTITIES: Mapping[str, Quantity] = MappingProxyType(  # by what is printed of it; a further one is its line here
    {"accuracy": ACCURACY, "gain over {over}": GAIN, "parameters sent": SENT}
)


@dataclass(frozen=True)
class Claim:
    """A published number.

    Attributes:
        what: the name of its quantity, with the other row of a gain.
        quantity: what it is of.
        published, spread, ours: percent, of the other row's accuracy for a gain; numbers for parameters.
        seeds: that `ours` is of.
        half: half the 95 % interval of `ours` over these, in its units; None for fewer than two, and for parameters.
        why: of one that is not reproduced or not run; empty where nothing is known.
        hours: what a run would cost on one core; None where nothing is known of it.
        row_there: whether a row of the table gives it.
        is_again: whether another row has the same number of the paper, which is counted there.
        quick: of one that is not run, what the quick fraction gave, in the units of `ours`; None where it was not run.
        quick_failure: why the quick fraction gave nothing, though it was run; empty for any other.
    """

    row: str
    column: str
    what: str
    quantity: Quantity
    published: float
    spread: float | None = None
    ours: float | None = None
    seeds: int = 0
    half: float | None = None
    verdict: str = NOT_RUN
    why: str = ""
    hours: float | None = None
    row_there: bool = True
    is_again: bool = False
    quick: float | None = None
    quick_failure: str = ""

    @property
    def difference(self) -> float | None:
        """Ours less the published."""
        return None if self.ours is None else self.ours - self.published

    @property
    def held(self) -> bool:
        """Whether it is reproduced."""
        return self.verdict in (INSIDE, WITHIN, SPREAD, CLOSE)


def claims_of(table: Table, sheet: Sheet | None, preset: str = "", quick: Sheet | None = None) -> list[Claim]:
    """Every published number of a table, by the settings of one preset.

    Args:
        sheet: what has been run; None for nothing.
        preset: the settings as they stand when empty.
        quick: what has been run of the quick fraction, which says what it gave of a number that has not been run.
    """
    claims = []
    for row, column in table.choose((), ()):
        cell = sheet.cell(row.name, column.name) if sheet is not None else None
        hours = hours_of(table, sheet, row)
        for claim in _published(row, column.name):
            judged = _judged(replace(claim, hours=hours), table, sheet, row, column, cell, preset)
            if judged.verdict == NOT_RUN and quick is not None:
                gave, failure = _of_quick(claim, table, quick, row, column, preset)
                judged = replace(judged, quick=gave, quick_failure=failure)
            claims.append(judged)
    for missing_row in table.missing:
        pairs = missing_row.published.items()
        name, why = missing_row.name, missing_row.why
        claims += [
            Claim(name, column, "accuracy", ACCURACY, value, why=why, row_there=False) for column, value in pairs
        ]
    return claims


def _published(row: Row, column: str) -> Iterator[Claim]:
    for name, quantity in QUANTITIES.items():
        numbers, spread = quantity.published(row), row.spread.get(column) if quantity is ACCURACY else None
        if column in numbers:
            again = bool(row.reading_of)
            what = name.format(over=row.over)
            yield Claim(row.name, column, what, quantity, numbers[column], spread, is_again=again)


def _judged(
    claim: Claim, table: Table, sheet: Sheet | None, row: Row, column: Column, cell: SheetCell | None, preset: str
) -> Claim:
    needs = row.needs or table.needs
    if sheet is None or cell is None:
        return replace(claim, why=f"needs {needs}" if needs else "")
    base = sheet.cell(row.over, column.name) if claim.quantity.is_gain else cell
    if base is None:
        return replace(claim, why=f"{row.over} has not been run")
    ours, why = claim.quantity.ours(cell, base), _cause(row)
    if ours is None:
        return replace(claim, verdict=NOT_REPRODUCED, seeds=cell.runs, why="; ".join(cell.failures[:1]))
    by_seed = claim.quantity.by_seed(cell, base)
    claim = replace(claim, ours=ours, seeds=cell.runs, half=half_interval(by_seed))
    compared = _compared(table, row, cell, base)
    changes = (_changed(table, other, column, its_cell, preset) for other, its_cell in compared)
    changed = "; ".join(dict.fromkeys(filter(None, changes)))
    if changed and claim.quantity.of_results:
        gave = claim.quantity.printed(ours, claim.quantity.is_gain)
        return replace(claim, why=f"with earlier settings, {changed}, it gave {gave}", ours=None, seeds=0, half=None)
    verdict = _verdict(claim)
    return replace(claim, verdict=verdict, why=why if verdict == NOT_REPRODUCED else "")


def _of_quick(
    claim: Claim, table: Table, quick: Sheet, row: Row, column: Column, preset: str
) -> tuple[float | None, str]:
    """What the quick fraction gave, and why it gave nothing; neither where it was not run with today's settings."""
    cell = quick.cell(row.name, column.name)
    base = quick.cell(row.over, column.name) if claim.quantity.is_gain else cell
    if table.quick is None or cell is None or base is None:
        return None, ""
    compared = _compared(table, row, cell, base)
    changes = (_changed(table, other, column, its_cell, preset, quick=True) for other, its_cell in compared)
    if any(changes):
        return None, ""
    gave = claim.quantity.ours(cell, base)
    return gave, "" if gave is not None else next(iter([*cell.failures, *base.failures]), "no accuracy")


def _compared(table: Table, row: Row, cell: SheetCell, base: SheetCell) -> Iterator[tuple[Row, SheetCell]]:
    """The row with its cell and, where `base` is another, the row that its gain is over with that."""
    yield row, cell
    yield from ((other, base) for other in table.rows if base is not cell and other.name == row.over)


def _cause(row: Row) -> str:
    """What is known of a number that is not reproduced, and which table tests it."""
    return "; ".join(filter(None, (row.why, f"the table {row.tested} tests why" if row.tested else "")))


def _verdict(claim: Claim) -> str:
    ours, apart = claim.ours or 0.0, abs(claim.difference or 0.0)
    if claim.quantity.of_results and claim.seeds < 2:
        return ONE_SEED
    if claim.half is not None and apart <= claim.half:
        return INSIDE
    if claim.quantity.is_close(ours, claim.published):
        return claim.quantity.close
    return SPREAD if claim.spread is not None and apart <= claim.spread else NOT_REPRODUCED


def _changed(table: Table, row: Row, column: Column, cell: SheetCell, preset: str, *, quick: bool = False) -> str:
    """In which settings the cell differs from what the table has now; empty for none.

    A setting that is newer than the cell is none of them: its default leaves things as they were.
    """
    settings = table.settings_of(row, column, quick=quick, preset=preset)
    if cell.resolved:
        now, then = settings.experiment(table.data, 0).resolved(), cell.resolved
    else:
        now, then = msgspec.to_builtins(settings), cell.settings
    flat_now, flat_then = dict(flat(now)), dict(flat(then))
    if cell.resolved:
        flat_now = {name: value for name, value in flat_now.items() if name in flat_then}
    every = [name for name in dict.fromkeys([*flat_then, *flat_now]) if name not in _ROUNDING]
    names = [name for name in every if flat_then.get(name) != flat_now.get(name)]
    changes = [f"{name} {flat_then.get(name, 'not given')} for {flat_now.get(name, 'none')}" for name in names]
    if cell.metric != table.metric_of(row, column):
        changes.append(f"metric {cell.metric}")
    return ", ".join(changes)


def flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as (name, value), the names with points between; a hyper-parameter by its own name."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}".removeprefix("hyper."), list(value) if isinstance(value, tuple) else value


def hours_of(table: Table, sheet: Sheet | None, row: Row) -> float | None:
    """What the row's runs in one column would take, from runs that were timed."""
    timed = [cell for cell in sheet.cells if cell.seconds] if sheet is not None else []
    mine = [cell.seconds for cell in timed if cell.row == row.name] or [cell.seconds for cell in timed]
    if mine:
        return float(np.mean(mine)) * table.seeds / 3600.0
    return None if table.hours is None else table.hours * table.seeds


def command_for(name: str, rows: Sequence[str], columns: Sequence[str] = (), preset: str = "") -> str:
    """The command that runs these rows, each once."""
    parts = [f"protofleet lab table {name}"]
    parts += [f"--preset {preset}"] if preset else []
    parts += [f"--only '{','.join(dict.fromkeys(rows))}'"] if rows else []
    parts += [f"--columns '{','.join(dict.fromkeys(columns))}'"] if columns else []
    return " ".join(parts)
