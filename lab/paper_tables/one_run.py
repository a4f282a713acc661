"""One run of a table: from its settings to a line of the ledger, in this process or in another.

A run writes its rounds to a file of its own, and beside it lies its checkpoint. That is also how a run in another
process is followed, and how it goes on where that process is lost. On a cluster the directory must be one that all
machines see.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from contract.errors import DivergedError
from lab.data.datasets import DataSet
from lab.engine.checkpoint import Checkpoint
from lab.engine.deployed import RoundRecord
from lab.engine.evaluation import AveragingRecord
from lab.engine.experiment import run_experiment
from lab.engine.workers import OneProcess, Workers, open_workers
from lab.paper_tables.config import Settings
from lab.paper_tables.run_log import Finished, code_mark

__all__ = ["Crew", "Progress", "Run", "Watch", "run_cell", "run_elsewhere"]


@dataclass(frozen=True)
class Run:
    """What is run.

    Attributes:
        data: its name.
        words: which run this is, for a person.
        path: where its rounds are written.
    """

    key: str
    data: str
    settings: Settings
    seed: int
    words: str
    path: Path

    @property
    def rounds(self) -> int:
        """How many its method has, FFC's not among them."""
        return self.settings.experiment(self.data, self.seed).course.rounds


@dataclass(frozen=True)
class Crew:
    """The workers that a run in another process has for its clients; with one job it is that process."""

    engine: str
    jobs: int
    threads: int


@dataclass(frozen=True)
class Progress:
    """Who wants to know: `on_run(done, of, words)` before each run, `on_text` and `on_round` within it; `on_line` takes
    what a person should see."""

    on_run: Callable[[int, int, str], None]
    on_round: Callable[[str, RoundRecord], None]
    on_text: Callable[[str], None]
    on_line: Callable[[str], None] = lambda line: None


def run_cell(run: Run, data: DataSet, progress: Progress, workers: Workers) -> Finished:
    """Run it, or go on with it; one that diverges is a result, too."""
    experiment, words = run.settings.experiment(run.data, run.seed), run.words
    checkpoint = Checkpoint(run.path.with_suffix(".checkpoint"), f"{run.key} {code_mark()}")
    failure = None
    records: list[RoundRecord] = []
    run.path.write_text("")

    def on_round(record: RoundRecord) -> None:
        with run.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record.as_json()) + "\n")
        progress.on_round(words, record)

    try:
        records = run_experiment(
            experiment,
            data=data,
            on_round=on_round,
            on_device=lambda number, turn: progress.on_text(_at_round(words, number, experiment.course.rounds)),
            on_text=lambda text: progress.on_text(f"{words}, {text}" if text else words),
            checkpoint=checkpoint,
            workers=workers,
        )
    except DivergedError as error:
        failure = str(error)
        checkpoint.remove()
    lines = [_compact(record) for record in records]
    given = msgspec.to_builtins(run.settings)
    return Finished(run.key, run.seed, given, checkpoint.elapsed, lines, failure, code_mark())


def run_elsewhere(data: DataSet, _: None, item: tuple[Run, Crew]) -> Finished:
    """The task: a run in a worker, which tells nobody but its file."""
    run, crew = item
    silent = Progress(lambda done, of, words: None, lambda words, record: None, lambda text: None)
    if crew.jobs == 1:
        return run_cell(run, data, silent, OneProcess(crew.threads))
    with open_workers(crew.engine, crew.jobs, threads=crew.threads) as workers:
        return run_cell(run, data, silent, workers)


@dataclass
class Watch:
    """Follows runs of other processes by the files that they write."""

    on_round: Callable[[str, RoundRecord], None]
    on_text: Callable[[str], None]
    _runs: dict[str, _Followed] = field(default_factory=dict)

    def add(self, words: str, path: Path, rounds: int) -> None:
        """A run begins."""
        self._runs[words] = _Followed(path, rounds)

    def end(self, words: str) -> None:
        """It has ended."""
        self._tell(words, self._runs[words])
        del self._runs[words]

    def look(self) -> None:
        """Tell what is new."""
        for words, run in self._runs.items():
            self._tell(words, run)

    def _tell(self, words: str, run: _Followed) -> None:
        for record in run.new():
            self.on_round(words, record)
            others = f"; {len(self._runs)} runs under way" if len(self._runs) > 1 else ""
            self.on_text(_at_round(words, min(record.round + 1, run.rounds), run.rounds) + others)


@dataclass
class _Followed:
    path: Path
    rounds: int
    read: int = 0
    told: int = 0

    def new(self) -> list[RoundRecord]:
        """Rounds that were not there before; one that is run again after its worker was lost is told once."""
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


def _at_round(words: str, number: int, rounds: int) -> str:
    return f"{words}, round {number} of {rounds}"


def _compact(record: RoundRecord) -> dict[str, Any]:
    """A record without its empty parts."""
    return {name: value for name, value in record.as_json().items() if value not in ({}, None) and name != "schema"}
