"""The lab's progress display: one line for each part of the work, and the time of each part."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

__all__ = ["Part", "Stage", "stage"]


@dataclass
class Part:
    """One line of the display."""

    _progress: Progress
    _task: TaskID

    def at(self, done: float, note: str | None = None, *, of: float | None = None) -> None:
        """Show `done` of the total, with a few words behind the bar. `of` sets the total if it was not known before."""
        self._progress.update(self._task, completed=done, **({} if of is None else {"total": of}))
        if note is not None:
            self.say(note)

    def say(self, note: str) -> None:
        """Show a few words behind the bar."""
        self._progress.update(self._task, note=note)

    def tell(self, line: str) -> None:
        """Print a permanent line."""
        self._progress.console.print(line, highlight=False, soft_wrap=True, markup=False)


@dataclass
class Stage:
    """The display as a whole.

    Attributes:
        seconds: time of the finished parts by name. Parts of one name are added up.
    """

    _progress: Progress
    seconds: dict[str, float] = field(default_factory=dict)

    def tell(self, line: str) -> None:
        """Print a permanent line."""
        self._progress.console.print(line, highlight=False, soft_wrap=True, markup=False)

    @contextmanager
    def part(self, name: str, text: str, total: float | None = None) -> Iterator[Part]:
        """Show work as a line `text`, timed under `name`. Without a total the bar only moves."""
        began = time.monotonic()
        task = self._progress.add_task(text, total=total, note="")
        yield Part(self._progress, task)
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
        self._progress.update(task, total=total or 1, completed=total or 1)


@contextmanager
def stage(console: Console) -> Iterator[Stage]:
    """A display on `console`. Without a terminal it prints the final lines only."""
    columns = (
        SpinnerColumn(finished_text="[green]✓[/green]"),
        TextColumn("{task.description}"),
        BarColumn(24),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.fields[note]}[/dim]"),
    )
    try:
        with Progress(*columns, console=console) as progress:
            yield Stage(progress)
    finally:
        console.file.flush()  # so that an error on the other stream begins a line of its own
