"""One run of a table: from its settings to a line of the ledger, in this process or in another.

A run writes its rounds to a file of its own, with its checkpoint beside it. A run in another process is followed by
this file, and continues from the checkpoint when that process is lost. On a cluster all machines must see the
directory.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from protofleet.contract.errors import DivergedError
from protofleet.lab.data.datasets import DataSet
from protofleet.lab.engine.checkpoint import Checkpoint
from protofleet.lab.engine.deployed import RoundRecord
from protofleet.lab.engine.evaluation import AveragingRecord
from protofleet.lab.engine.experiment import run_experiment
from protofleet.lab.paper_tables.config import Settings
from protofleet.lab.paper_tables.run_log import Finished, code_mark
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.workers import OneProcess, Workers

__all__ = ["Progress", "Run", "Watch", "WorkerOptions", "run_cell", "run_elsewhere"]


@dataclass(frozen=True)
class Run:
    """One run of a table.

    Attributes:
        data: name of the data set.
        title: the run's name for a person.
        path: file for its rounds.
    """

    key: str
    data: str
    settings: Settings
    seed: int
    title: str
    path: Path

    @property
    def rounds(self) -> int:
        """Number of rounds of the method, without FFC's."""
        return self.settings.experiment(self.data, self.seed).course.rounds


@dataclass(frozen=True)
class WorkerOptions:
    """The workers for the clients of a run in another process. With one job it is that process itself."""

    engine: str
    jobs: int
    threads: int


@dataclass(frozen=True)
class Progress:
    """Callbacks: `on_run(done, total, title)` before each run, `on_text` and `on_round` within it, and `on_line` for
    lines that a person should see."""

    on_run: Callable[[int, int, str], None]
    on_round: Callable[[str, RoundRecord], None]
    on_text: Callable[[str], None]
    on_line: Callable[[str], None] = lambda line: None


def run_cell(run: Run, data: DataSet, progress: Progress, workers: Workers) -> Finished:
    """Do a run, or continue it. A run that diverges is a result, too."""
    experiment, title = run.settings.experiment(run.data, run.seed), run.title
    checkpoint = Checkpoint(run.path.with_suffix(".checkpoint"), f"{run.key} {code_mark()}")
    failure = None
    records: list[RoundRecord] = []
    run.path.write_text("")

    def on_round(record: RoundRecord) -> None:
        with run.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_json()) + "\n")
        progress.on_round(title, record)

    try:
        records = run_experiment(
            experiment,
            data=data,
            on_round=on_round,
            on_device=lambda number, turn: progress.on_text(_at_round(title, number, experiment.course.rounds)),
            on_text=lambda text: progress.on_text(f"{title}, {text}" if text else title),
            checkpoint=checkpoint,
            workers=workers,
        )
    except DivergedError as error:
        failure = str(error)
        checkpoint.remove()
    lines = [_compact(record) for record in records]
    given = msgspec.to_builtins(run.settings)
    return Finished(run.key, run.seed, given, checkpoint.elapsed, lines, failure, code_mark())


def run_elsewhere(data: DataSet, _: None, item: tuple[Run, WorkerOptions]) -> Finished:
    """The task of a worker: a run that reports only to its file."""
    run, options = item
    silent = Progress(lambda done, total, title: None, lambda title, record: None, lambda text: None)
    if options.jobs == 1:
        return run_cell(run, data, silent, OneProcess(options.threads))
    with open_workers(options.engine, options.jobs, threads=options.threads) as workers:
        return run_cell(run, data, silent, workers)


@dataclass
class Watch:
    """Follows the runs of other processes by their files."""

    on_round: Callable[[str, RoundRecord], None]
    on_text: Callable[[str], None]
    _runs: dict[str, _Followed] = field(default_factory=dict)

    def add(self, title: str, path: Path, rounds: int) -> None:
        """Follow a run that begins."""
        self._runs[title] = _Followed(path, rounds)

    def end(self, title: str) -> None:
        """Report the last rounds of a run that has ended, and stop following it."""
        self._tell(title, self._runs[title])
        del self._runs[title]

    def look(self) -> None:
        """Report all new rounds."""
        for title, run in self._runs.items():
            self._tell(title, run)

    def _tell(self, title: str, run: _Followed) -> None:
        for record in run.new():
            self.on_round(title, record)
            others = f"; {len(self._runs)} runs under way" if len(self._runs) > 1 else ""
            self.on_text(_at_round(title, min(record.round + 1, run.rounds), run.rounds) + others)


@dataclass
class _Followed:
    path: Path
    rounds: int
    read: int = 0
    told: int = 0

    def new(self) -> list[RoundRecord]:
        """The rounds since the last call. A round that is repeated after a lost worker counts once."""
        try:
            written = self.path.read_bytes()
        except OSError:  # of another machine, perhaps; what it gives comes at the end
            return []
        self.read = self.read if self.read <= len(written) else 0
        whole = written.rfind(b"\n") + 1
        lines, self.read = written[self.read : whole].splitlines(), whole
        records = [_record(json.loads(line)) for line in lines]
        fresh = [record for record in records if record.round > self.told]
        self.told = max([self.told, *(record.round for record in fresh)])
        return fresh


def _record(fields: dict[str, Any]) -> RoundRecord:
    del fields["schema"]
    return (AveragingRecord if "spread" in fields else RoundRecord)(**fields)


def _at_round(title: str, number: int, rounds: int) -> str:
    return f"{title}, round {number} of {rounds}"


def _compact(record: RoundRecord) -> dict[str, Any]:
    """The record without its empty parts."""
    return {name: value for name, value in record.as_json().items() if value not in ({}, None) and name != "schema"}
