"""Who computes: this process alone, a process for each core, or a Ray cluster; whoever it is, the numbers are the same.

Whatever a federation does for each client, and a table for each run, is a task: a function of a module, which takes

    site      what stays for a whole run: the data, the network, the clients' settings
    common    what all tasks of one call share: the global weights of a round
    item      what is one task's own: a client's number, its weights

and gives what came of it. Two things keep the numbers from depending on who computes. A task depends on nothing but
these three, so it may run anywhere and, where a worker is lost, again. And whoever asks takes results in the order of
the items, never in that in which they were done. Every process computes with the same number of threads, since sums are
split by threads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from contract.errors import UsageError

__all__ = [
    "ENGINES",
    "OneProcess",
    "Settled",
    "Task",
    "Workers",
    "cores",
    "in_order",
    "limited_threads",
    "open_workers",
]

ENGINES = {"processes": "on this machine", "ray": "on a Ray cluster, or Ray's processes on this machine"}

Task = Callable[[Any, Any, Any], Any]
Results = Iterator[tuple[int, Any]]


class Settled(Protocol):
    """Workers that have a site.

    Attributes:
        jobs: how many tasks are computed at a time.
    """

    jobs: int

    def as_done(
        self,
        task: Task,
        common: Any,
        items: Iterable[Any],
        *,
        ahead: int = 1,
        on_wait: Callable[[], None] | None = None,
    ) -> Results:
        """Each item's place and result, as they are done.

        Args:
            items: taken as workers are free, and `ahead` more.
            on_wait: called again and again while nothing is done.

        Raises:
            WorkerError: workers are lost again and again.
            Exception: what a task has raised.
        """
        ...


class Workers(Protocol):
    """Processes that compute; a context manager, at whose end they end.

    Attributes:
        engine: of `ENGINES`.
        jobs: how many.
        threads: of each, within an operator.
    """

    engine: str
    jobs: int
    threads: int

    def settle(self, site: Any) -> AbstractContextManager[Settled]:
        """Give them what stays; it must not be changed from then on, except by tasks of a single process.

        Raises:
            UsageError: where they are other processes and it cannot be sent there.
        """
        ...


class OneProcess:
    """No other process: a task is a call, made when its result is asked for."""

    engine, jobs = "processes", 1

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def settle(self, site: Any) -> AbstractContextManager[Settled]:
        """As `Workers` has it."""
        return nullcontext(_Here(site))


class _Here:
    jobs = 1

    def __init__(self, site: Any) -> None:
        self._site = site

    def as_done(
        self,
        task: Task,
        common: Any,
        items: Iterable[Any],
        *,
        ahead: int = 1,
        on_wait: Callable[[], None] | None = None,
    ) -> Results:
        for place, item in enumerate(items):
            yield place, task(self._site, common, item)


def in_order(
    at: Settled, task: Task, common: Any, items: Iterable[Any], on_done: Callable[[int], None] | None = None
) -> Iterator[Any]:
    """Each item's result, in the order of the items.

    Args:
        on_done: called with how many are done, before the first and after each.
    """
    early: dict[int, Any] = {}
    due = done = 0
    if on_done is not None:
        on_done(0)
    for place, result in at.as_done(task, common, items):
        early[place], done = result, done + 1
        if on_done is not None:
            on_done(done)
        while due in early:
            yield early.pop(due)
            due += 1


@contextmanager
def open_workers(
    engine: str = "processes", jobs: int | None = None, *, address: str | None = None, threads: int = 1
) -> Iterator[Workers]:
    """Workers, which end with the block.

    Args:
        engine: of `ENGINES`.
        jobs: one for each core where None; 1 of `processes` is this process alone.
        address: of a Ray cluster that is there already.
        threads: of each, within an operator.

    Raises:
        UsageError: an unknown engine, no jobs, Ray where it is not installed, or an address without Ray.
        WorkerError: the address does not answer.
    """
    if engine not in ENGINES:
        raise UsageError("--engine", expected=" or ".join(ENGINES), got=engine)
    for option, value in (("--jobs", jobs), ("--threads", threads)):
        if value is not None and value < 1:
            raise UsageError(option, expected="1 or more", got=value)
    if engine == "ray":
        from lab.engine.ray_workers import ray_workers

        with ray_workers(jobs, address, threads) as workers:
            yield workers
        return
    if address is not None:
        raise UsageError("--address", expected="--engine ray beside it", got="none")
    number = max(cores() // threads, 1) if jobs is None else jobs
    if number == 1:
        yield OneProcess(threads)
        return
    from lab.engine.processes import processes

    with processes(number, threads) as workers:
        yield workers


def cores() -> int:
    """How many this process may use: those it is bound to, and no more than a container's quota."""
    import joblib

    return int(joblib.cpu_count())


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Within, torch and numpy's BLAS compute on so many threads."""
    torch = sys.modules.get("torch")
    try:
        import threadpoolctl
    except ModuleNotFoundError:  # the demo's baselines run on devices' own core, which says how many threads it takes
        yield
        return
    before = torch.get_num_threads() if torch is not None else None
    with threadpoolctl.threadpool_limits(number, user_api="blas"):
        if torch is not None:
            torch.set_num_threads(number)
        try:
            yield
        finally:
            if torch is not None:
                torch.set_num_threads(before)
