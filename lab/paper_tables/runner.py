"""Runs a table: every run that has no line in the ledger yet, seed by seed.

- A half-done table is a complete one with fewer seeds. An interrupted run continues from its checkpoint.
- With several workers (`lab/workers/workers.py`) several runs are under way at a time, each a task. The rounds of a run
  in another process are read from its file. If fewer runs are left than workers, a run spreads its clients over its
  share of them.
- Only this process writes the ledger, in the order in which runs end. Its lines have keys, so the cells do not depend
  on that order.
- `run_table` validates every cell before the first round, loads the data once, and returns `Cell`s: measured beside
  published figures. A run that diverges is a result, too: its cell says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from protofleet.contract.errors import MethodError, UsageError
from protofleet.contract.methods import closing_method
from protofleet.lab.data.datasets import DataSet, load_dataset
from protofleet.lab.paper_tables.config import PARTS, Column, Row, Settings, Table
from protofleet.lab.paper_tables.metrics import METRICS, metrics_of, per_class_of
from protofleet.lab.paper_tables.one_run import Progress, Run, Watch, WorkerOptions, run_cell, run_elsewhere
from protofleet.lab.paper_tables.run_log import Finished, Ledger, code_mark, data_mark, run_key
from protofleet.lab.workers.workers import OneProcess, Workers

__all__ = ["Cell", "Order", "Progress", "run_table"]


@dataclass(frozen=True)
class Order:
    """What to run of a table.

    Attributes:
        data: a name or a directory; None for the table's own.
        seeds: number of seeds; None for the table's.
        first_seed: the first seed; the others follow it.
        preset: name of a preset of the table; empty for the settings as they stand.
        any_code: whether runs of other code count, too.
        rows, columns: names; empty for all.
        show: run nothing, and give only the cells with finished runs.
    """

    table: Table
    out: Path
    data: str | None = None
    seeds: int | None = None
    quick: bool = False
    rows: Sequence[str] = ()
    columns: Sequence[str] = ()
    show: bool = False
    first_seed: int = 0
    preset: str = ""
    any_code: bool = False

    def __post_init__(self) -> None:
        for row, column in self.table.choose(self.rows, self.columns):  # an unknown name ends here, before anything is
            self.settings_of(row, column)

    def settings_of(self, row: Row, column: Column) -> Settings:
        """The settings of a cell."""
        return self.table.settings_of(row, column, quick=self.quick, preset=self.preset)

    @property
    def numbers(self) -> range:
        """The seeds."""
        return range(self.first_seed, self.first_seed + self.runs)

    @property
    def runs(self) -> int:
        """Number of seeds for each cell."""
        return self.seeds or (self.table.fraction.seeds if self.quick else self.table.seeds)


@dataclass(frozen=True)
class Cell:
    """A row in a column, over its seeds.

    Attributes:
        values: accuracy as a fraction, one for each finished seed.
        published: as a fraction; None where the paper has none.
        over_clients: standard deviation over clients, mean over seeds; None where unknown.
        uplink_bytes: mean bytes of one client in one round.
        total_bytes: bytes of one client over the whole run, with the closing where the metric is of one.
        curve: round → accuracy, mean over seeds.
        failures: one line for each seed that diverged.
        curve_std: round → standard deviation over seeds; empty for fewer than two.
        metrics: further metrics (`lab/paper_tables/metrics.py`), mean over seeds.
        per_class: share of right answers for each class, mean over seeds.
        resolved: every setting that was used, defaults too.
        code: `code_mark` of its runs.
        seeds: the seeds of `values`.
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
    curve_std: dict[int, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    per_class: list[float | None] = field(default_factory=list)
    resolved: dict[str, Any] = field(default_factory=dict)
    code: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()

    @property
    def mean(self) -> float | None:
        """Mean over seeds."""
        return float(np.mean(self.values)) if self.values else None

    @property
    def over_seeds(self) -> float | None:
        """Standard deviation over seeds (n − 1); None for fewer than two."""
        return float(np.std(self.values, ddof=1)) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        """Our figure minus the published one."""
        return None if self.mean is None or self.published is None else self.mean - self.published


def run_table(order: Order, progress: Progress, workers: Workers | None = None) -> list[Cell]:
    """Do the missing runs, and read every cell.

    Args:
        workers: where the runs are computed; None for this process.

    Raises:
        UsageError, MethodError, DataError: a cell's settings do not fit, or the data cannot be had.
        StoreError: the disk refuses.
        WorkerError: workers are lost again and again.
    """
    table, name = order.table, order.data or order.table.data
    chosen = table.choose(order.rows, order.columns)
    ledger, mark = Ledger(order.out), data_mark(name)
    wanted: dict[str, tuple[Settings, int, str]] = {}
    for seed in order.numbers:
        for row, column in chosen:
            settings = order.settings_of(row, column)
            title = f"{row.name}, {column.name}, seed {seed}"
            resolved = _resolved(settings, name, seed, title)
            wanted.setdefault(run_key(resolved, seed, mark), (settings, seed, title))
    done = ledger.read(None if order.any_code else code_mark())
    _tell_others(ledger, wanted, done, progress)
    missing = {key: run for key, run in wanted.items() if key not in done and not order.show}
    if missing:
        progress.on_text("loading the data")
        data = load_dataset(name)
        runs = [
            Run(key, name, *run, ledger.rounds_of(*run[2].split(", "), key[:8], code_mark()[-9:-1]))
            for key, run in missing.items()
        ]
        for finished in _finished(runs, data, len(wanted), progress, workers or OneProcess()):
            done[finished.key] = finished
            ledger.append(finished)
    progress.on_run(len(wanted), len(wanted), "")
    cells = [_cell(order, row, column, mark, done) for row, column in chosen]
    return [cell for cell in cells if cell.values or cell.failures or not order.show]


def _resolved(settings: Settings, data: str, seed: int, title: str) -> dict[str, Any]:
    """A run's settings with every default. Settings that do not fit are refused before hours of training.

    Raises:
        UsageError, MethodError: they do not fit. The line begins with the run's title.
    """
    try:
        return settings.experiment(data, seed).resolved()
    except (UsageError, MethodError) as error:
        line = f"{title}: {error.message}"
        raise type(error)(line, expected=error.expected, got=error.got, hint=error.hint) from None


def _finished(runs: list[Run], data: DataSet, total: int, progress: Progress, workers: Workers) -> Iterator[Finished]:
    """Do the runs, and yield each when it ends."""
    before, ended = total - len(runs), 0
    if workers.jobs == 1 or len(runs) == 1:
        for number, run in enumerate(runs):
            progress.on_run(before + number, total, run.title)
            yield run_cell(run, data, progress, workers)
        return
    watch = Watch(progress.on_round, progress.on_text)

    def begin() -> Iterator[tuple[Run, WorkerOptions]]:
        for number, run in enumerate(runs):
            progress.on_run(before + ended, total, run.title)
            watch.add(run.title, run.path, run.rounds)
            share = max(workers.jobs // (len(runs) - number), 1)
            yield run, WorkerOptions(workers.engine, share, workers.threads)

    with workers.at_site(data) as site:
        for place, finished in site.as_done(run_elsewhere, None, begin(), ahead=0, on_wait=watch.look):
            ended += 1
            watch.end(runs[place].title)
            progress.on_run(before + ended, total, runs[place].title)
            yield finished


def _tell_others(ledger: Ledger, wanted: Iterable[str], done: Mapping[str, Finished], progress: Progress) -> None:
    """Report that the ledger has runs of other code."""
    others = {key: run for key, run in ledger.read().items() if key in set(wanted) and key not in done}
    if others:
        codes = ", ".join(sorted({run.code or "code that is not named" for run in others.values()}))
        progress.on_line(f"{len(others)} runs in {ledger.path} are of {codes}; --any-code counts them")


def _cell(order: Order, row: Row, column: Column, mark: str, done: dict[str, Finished]) -> Cell:
    table, name = order.table, order.data or order.table.data
    settings, metric = order.settings_of(row, column), table.metric_of(row, column)
    resolved = settings.experiment(name, 0).resolved()
    keys = [run_key(resolved, seed, mark) for seed in order.numbers]
    runs = [done[key] for key in keys if key in done]
    good = [run for run in runs if run.failure is None]
    curves = [_curve(run.records, metric) for run in good]
    values = [_last(curve, run.records, table.last) for curve, run in zip(curves, good, strict=True) if curve]
    spreads = [deviation for run in good if (deviation := _over_clients(run.records, metric)) is not None]
    published = row.published.get(column.name)
    curve, curve_std = _mean_curve(curves)
    return Cell(
        row,
        column,
        settings,
        metric,
        values,
        None if published is None else published / 100.0,
        _mean(spreads) if spreads else None,
        _mean([run.seconds for run in runs]),
        _mean([_uplink(run.records) for run in good]),
        _mean([_total(run.records, metric, settings.clients or 1) for run in good]),
        curve,
        [run.failure for run in runs if run.failure],
        curve_std=curve_std,
        metrics=_metrics(good, curves, metric, settings.clients or 1, table.target),
        per_class=_per_class(good, metric),
        resolved=resolved,
        code=tuple(sorted({run.code for run in runs})),
        seeds=tuple(run.seed for run, points in zip(good, curves, strict=True) if points),
    )


def _metrics(
    runs: Sequence[Finished], curves: Sequence[dict[int, float]], metric: str, clients: int, target: float | None
) -> dict[str, float]:
    """Mean metrics over the seeds. Those about the target are given only if every seed has reached it."""
    goal = None if target is None else target / 100.0
    pairs = zip(runs, curves, strict=True)
    tables = [metrics_of(run.records, _named(metric), curve, clients, goal) for run, curve in pairs]
    whole = [name for name in METRICS if tables and all(name in one for one in tables)]
    return {name: _mean([one[name] for one in tables]) for name in whole}


def _per_class(runs: Sequence[Finished], metric: str) -> list[float | None]:
    """Mean share for each class over seeds; None for a class without images."""
    tables = [shares for run in runs if (shares := per_class_of(run.records, _named(metric)))]
    columns = [[share for share in column if share is not None] for column in zip_longest(*tables)]
    return [_mean(column) if column else None for column in columns]


def _named(metric: str) -> str:
    part, _, way = metric.partition("/")
    return f"{PARTS[part]}/{way}"


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def _curve(records: Iterable[dict[str, Any]], metric: str) -> dict[int, float]:
    part, _, way = metric.partition("/")
    tables = {record["round"]: record.get(PARTS[part], {}) for record in records}
    return {number: table[way] for number, table in tables.items() if way in table}


def _last(curve: dict[int, float], records: Sequence[dict[str, Any]], last: int) -> float:
    final = max(record["round"] for record in records)
    recent = [value for number, value in curve.items() if number > final - last]
    return float(np.mean(recent)) if recent else curve[max(curve)]


def _over_clients(records: Sequence[dict[str, Any]], metric: str) -> float | None:
    name = _named(metric)
    for record in reversed(records):
        if len(accuracies := record.get("clients", {}).get(name, ())) > 1:
            return float(np.std(accuracies))
        if name in record.get("spread", {}):
            return float(record["spread"][name])
    return None


def _uplink(records: Sequence[dict[str, Any]]) -> float:
    active = [record for record in records if record["participants"]]
    training = [record for record in active if record["method"] != closing_method().name]
    sent = [record["uplink_bytes"] for record in training or active]
    return float(np.mean(sent)) if sent else 0.0


def _total(records: Sequence[dict[str, Any]], metric: str, clients: int) -> float:
    """Mean bytes of one client over the run: its rounds, and the closing where the metric is of one."""
    way = metric.rpartition("/")[2]
    total = 0.0
    for record in records:
        if record["method"] == closing_method().name:
            total += record["uplink_bytes"] if way == "linear" else 0.0
        else:
            total += record["uplink_bytes"] * record["participants"] / clients
        total += record.get("closing_bytes", {}).get(way, 0)
    return total


def _mean_curve(curves: Sequence[dict[int, float]]) -> tuple[dict[int, float], dict[int, float]]:
    """Mean and standard deviation over seeds at the rounds that every seed has measured."""
    if not curves:
        return {}, {}
    common = sorted(set.intersection(*(set(curve) for curve in curves)))
    values = {number: [curve[number] for curve in curves] for number in common}
    spread = {number: float(np.std(points, ddof=1)) for number, points in values.items() if len(points) > 1}
    return {number: float(np.mean(points)) for number, points in values.items()}, spread
