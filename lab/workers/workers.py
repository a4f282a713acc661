"""Workers: this process alone, a process for each core, or a Ray cluster. The numbers are the same on all of them.

A task is a module's function. A federation has one for each client, and a table has one for each run. It takes

    site      values for a whole run: the data, the network, the clients' settings
    common    values for all tasks of one call: the global weights of a round
    item      values of one task: a client's number, its weights

and returns its result. Three rules make the numbers independent of the workers:

- A task depends on these three values alone. So it may run anywhere, and again after a worker was lost.
- Results are taken in the order of the items, not in the order of completion.
- Every process computes with the same number of threads, since threads split sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

__all__ = [
    "OneProcess",
    "SiteWorkers",
    "Task",
    "Workers",
    "cores",
    "in_order",
    "limited_threads",
]

Task = Callable[[Any, Any, Any], Any]
Results = Iterator[tuple[int, Any]]


class SiteWorkers(Protocol):
    """Workers with a site.

    Attributes:
        jobs: number of tasks at a time.
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
        """Each item's place and result, in the order of completion.

        Args:
            items: taken when workers are free, and `ahead` more.
            on_wait: called again and again while no task completes.

        Raises:
            WorkerError: workers are lost again and again.
            Exception: an error of a task.
        """
        ...


class Workers(Protocol):
    """Processes that compute. As a context manager they end with the block.

    Attributes:
        engine: a name from `ENGINES`.
        jobs: number of processes.
        threads: threads of each, within an operator.
    """

    engine: str
    jobs: int
    threads: int

    def at_site(self, site: Any) -> AbstractContextManager[SiteWorkers]:
        """Give the workers their site. It must not change from then on, except by tasks of a single process.

        Raises:
            UsageError: the site cannot be sent to other processes.
        """
        ...


class OneProcess:
    """This process alone: a task is a call, made when its result is needed."""

    engine, jobs = "processes", 1

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads

    def at_site(self, site: Any) -> AbstractContextManager[SiteWorkers]:
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
    site: SiteWorkers, task: Task, common: Any, items: Iterable[Any], on_done: Callable[[int], None] | None = None
) -> Iterator[Any]:
    """Each item's result, in the order of the items.

    Args:
        on_done: called with the number of completed tasks, before the first and after each.
    """
    early: dict[int, Any] = {}
    due = done = 0
    if on_done is not None:
        on_done(0)
    for place, result in site.as_done(task, common, items):
        early[place], done = result, done + 1
        if on_done is not None:
            on_done(done)
        while due in early:
            yield early.pop(due)
            due += 1


def cores() -> int:
    """The number of cores for this process: those it is bound to, at most a container's quota."""
    import joblib

    return int(joblib.cpu_count())


@contextmanager
def limited_threads(number: int) -> Iterator[None]:
    """Limit torch and numpy's BLAS to this number of threads within the block."""
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
