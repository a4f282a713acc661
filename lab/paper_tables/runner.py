"""Run a table: every cell that has no line in the ledger yet, seed by seed, so that a half-done table is a whole one
with fewer seeds. A run that was interrupted goes on from its checkpoint.

`run_table` validates every cell before the first round is trained, loads the data once, and returns `Cell`s: what was
measured beside what was published. A run that diverges is a result, too: its cell says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from contract.errors import DivergedError
from contract.methods import closing_method
from lab.data.datasets import DataSet, load_dataset
from lab.engine.checkpoint import Checkpoint
from lab.engine.deployed import RoundRecord
from lab.engine.experiment import Experiment, run_experiment
from lab.paper_tables.config import PARTS, Column, Row, Settings, Table
from lab.paper_tables.run_log import Finished, Ledger, data_mark, run_key

__all__ = ["Cell", "Order", "run_table"]


@dataclass(frozen=True)
class Order:
    """What is asked of a table.

    Attributes:
        data: a name or a directory; the table's own when None.
        seeds: instead of the table's number.
        rows, columns: by name; all when empty.
        show: nothing is run; only the cells that have been run, at least in part, are there.
    """

    table: Table
    out: Path
    data: str | None = None
    seeds: int | None = None
    quick: bool = False
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    show: bool = False

    def __post_init__(self) -> None:
        self.table.choose(self.rows, self.columns)  # an unknown name ends here, before anything is loaded

    @property
    def runs(self) -> int:
        """Seeds for each cell."""
        return self.seeds or (self.table.fraction.seeds if self.quick else self.table.seeds)


@dataclass(frozen=True)
class Cell:
    """A row in a column, over its seeds.

    Attributes:
        values: accuracy as a fraction, one for each finished seed.
        published: as a fraction; None where the paper has none.
        over_clients: standard deviation over clients, mean over seeds; None where it is not known.
        uplink_bytes: of one client in one round, mean.
        total_bytes: of one client over the whole run, closings included where the metric is theirs.
        curve: round → accuracy, mean over seeds.
        failures: one line for each seed that diverged.
    """

    row: Row
    column: Column
    settings: Settings
    metric: str
    values: list[float] = field(default_factory=list)
    published: float | None = None
    over_clients: float | None = None
    seconds: float = 0.0
    uplink_bytes: float = 0.0
    total_bytes: float = 0.0
    curve: dict[int, float] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def mean(self) -> float | None:
        """Over seeds."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def over_seeds(self) -> float | None:
        """Standard deviation over seeds (n − 1); None for fewer than two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Ours less the published."""
        return None if self.mean is None or self.published is None else self.mean - self.published


@dataclass(frozen=True)
class Progress:
    """Who wants to know: `on_run(done, of, words)` before each run, `on_device` and `on_round` within it."""

    on_run: Callable[[int, int, str], None]
    on_round: Callable[[str, RoundRecord], None]
    on_text: Callable[[str], None]


def run_table(order: Order, progress: Progress) -> list[Cell]:
    """Run what is missing, and read every cell.

    Raises:
        UsageError, MethodError, DataError: a cell's settings do not fit, or the data cannot be had.
        StoreError: the disk refuses.
    """
    table, name = order.table, order.data or order.table.data
    chosen = table.choose(order.rows, order.columns)
    ledger, mark = Ledger(order.out), data_mark(name)
    wanted: dict[str, tuple[Settings, int, str]] = {}
    for seed in range(order.runs):
        for row, column in chosen:
            settings = table.settle(row, column, quick=order.quick)
            settings.experiment(name, seed)  # refuses what does not fit before hours of training
            words = f"{row.name}, {column.name}, seed {seed}"
            wanted.setdefault(run_key(settings, seed, mark), (settings, seed, words))
    done = ledger.read()
    missing = {key: run for key, run in wanted.items() if key not in done and not order.show}
    if missing:
        progress.on_text("loading the data")
        data = load_dataset(name)
        for number, (key, (settings, seed, words)) in enumerate(missing.items()):
            progress.on_run(len(wanted) - len(missing) + number, len(wanted), words)
            done[key] = _run(key, settings.experiment(name, seed), settings, data, ledger, words, progress)
            ledger.append(done[key])
    progress.on_run(len(wanted), len(wanted), "")
    cells = [_cell(order, row, column, mark, done) for row, column in chosen]
    return [cell for cell in cells if cell.values or cell.failures or not order.show]


def _run(
    key: str,
    experiment: Experiment,
    settings: Settings,
    data: DataSet,
    ledger: Ledger,
    words: str,
    progress: Progress,
) -> Finished:
    path = ledger.rounds_of(*words.split(", "), key[:8])
    checkpoint = Checkpoint(path.with_suffix(".checkpoint"), key)
    failure = None
    records: list[RoundRecord] = []

    def on_round(record: RoundRecord) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_json()) + "\n")
        progress.on_round(words, record)

    try:
        records = run_experiment(
            experiment,
            data=data,
            on_round=on_round,
            on_device=lambda number, turn: progress.on_text(f"{words}, round {number} of {experiment.course.rounds}"),
            on_text=lambda text: progress.on_text(f"{words}, {text}" if text else words),
            checkpoint=checkpoint,
        )
    except DivergedError as error:
        failure = str(error)
        checkpoint.remove()
    lines = [_compact(record) for record in records]
    return Finished(key, experiment.course.seed, msgspec.to_builtins(settings), checkpoint.elapsed, lines, failure)


def _compact(record: RoundRecord) -> dict[str, Any]:
    """A record without its empty parts."""
    return {name: value for name, value in record.as_json().items() if value not in ({}, None) and name != "schema"}


def _cell(order: Order, row: Row, column: Column, mark: str, done: dict[str, Finished]) -> Cell:
    table = order.table
    settings, metric = table.settle(row, column, quick=order.quick), table.metric_of(row, column)
    keys = [run_key(settings, seed, mark) for seed in range(order.runs)]
    runs = [done[key] for key in keys if key in done]
    good = [run for run in runs if run.failure is None]
    curves = [_curve(run.records, metric) for run in good]
    values = [_last(curve, run.records, table.last) for curve, run in zip(curves, good, strict=True) if curve]
    spreads = [found for run in good if (found := _over_clients(run.records, metric)) is not None]
    published = row.published.get(column.name)
    return Cell(
        row,
        column,
        settings,
        metric,
        values,
        None if published is None else published / 100.0,
        float(np.mean(spreads)) if spreads else None,
        float(np.mean([run.seconds for run in runs])) if runs else 0.0,
        float(np.mean([_uplink(run.records) for run in good])) if good else 0.0,
        float(np.mean([_total(run.records, metric, settings.clients or 1) for run in good])) if good else 0.0,
        _mean_curve(curves),
        [run.failure for run in runs if run.failure],
    )


def _curve(records: Iterable[dict[str, Any]], metric: str) -> dict[int, float]:
    part, _, way = metric.partition("/")
    tables = {record["round"]: record.get(PARTS[part], {}) for record in records}
    return {number: table[way] for number, table in tables.items() if way in table}


def _last(curve: dict[int, float], records: Sequence[dict[str, Any]], last: int) -> float:
    final = max(record["round"] for record in records)
    recent = [value for number, value in curve.items() if number > final - last]
    return float(np.mean(recent)) if recent else curve[max(curve)]


def _over_clients(records: Sequence[dict[str, Any]], metric: str) -> float | None:
    part, _, way = metric.partition("/")
    for record in reversed(records):
        if f"{PARTS[part]}/{way}" in record.get("spread", {}):
            return float(record["spread"][f"{PARTS[part]}/{way}"])
    return None


def _uplink(records: Sequence[dict[str, Any]]) -> float:
    active = [record for record in records if record["participants"]]
    training = [record for record in active if record["method"] != closing_method().name]
    sent = [record["uplink_bytes"] for record in training or active]
    return float(np.mean(sent)) if sent else 0.0


def _total(records: Sequence[dict[str, Any]], metric: str, clients: int) -> float:
    """Bytes of one client over the run: rounds by how often it takes part, and a closing where the metric is one."""
    way = metric.rpartition("/")[2]
    total = 0.0
    for record in records:
        if record["method"] == closing_method().name:
            total += record["uplink_bytes"] if way == "linear" else 0.0
        else:
            total += record["uplink_bytes"] * record["participants"] / clients
        total += record.get("closing_bytes", {}).get(way, 0)
    return total


def _mean_curve(curves: Sequence[dict[int, float]]) -> dict[int, float]:
    if not curves:
        return {}
    common = set.intersection(*(set(curve) for curve in curves))
    return {number: float(np.mean([curve[number] for curve in curves])) for number in sorted(common)}
