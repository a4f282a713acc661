"""A process for each core of this machine: the standard library's pool, which is made anew when a worker is lost.

- Workers are forked from a process that has only loaded the modules (multiprocessing's fork server). So they share
  torch's memory, and no lock of ours is copied while it is held.
- Workers do not receive Ctrl-C. Each watches a pipe that nobody writes to, and ends when this process closes it or
  ends.
- A pool that loses one worker gives all its tasks back (`BrokenProcessPool`). A new pool computes them again.
- Items and results lie in shared memory (`shared_arrays.py`). Only paths go through the pool's pipes. These writes are
  so short that a worker cannot be killed in the middle of one, which would block all others.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver, get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from protofleet.contract.console.interrupt import hold_back, let_through
from protofleet.contract.errors import ProtofleetError, UsageError, WorkerError
from protofleet.contract.methods import METHODS, load_method
from protofleet.lab.workers.shared_arrays import Box, Handle, Shared, pack, replace, sendable, unpack
from protofleet.lab.workers.workers import Results, SiteWorkers, Task

__all__ = ["processes"]

_LOADED = ["protofleet.lab.engine.worker_preload"]  # by the fork server, once for all workers
_LOST_IN_A_ROW = 3
_TICK_S = 0.2


@contextmanager
def processes(jobs: int, threads: int) -> Iterator[Processes]:
    """Open `jobs` workers. They start with the first task, and end with the block."""
    workers = Processes(jobs, threads)
    try:
        yield workers
    finally:
        workers.end()


class Processes:
    """`protofleet.lab.workers.workers.Workers` as processes of this machine."""

    engine = "processes"

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs, self.threads = jobs, threads
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_LOADED)
        _start_server()
        self._pool: ProcessPoolExecutor | None = None
        self._held: Connection | None = None

    def pool(self) -> ProcessPoolExecutor:
        """The pool, made again after a worker was lost."""
        if self._pool is None:
            watched, self._held = self._context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.jobs,
                mp_context=self._context,
                initializer=_begin,
                initargs=(watched, self.threads, METHODS.of_others()),
            )
        return self._pool

    def end(self) -> None:
        """End every worker, also in the middle of a task."""
        pool, held, self._pool, self._held = self._pool, self._held, None, None
        if held is not None:
            held.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    @contextmanager
    def at_site(self, site: Any) -> Iterator[SiteWorkers]:
        """As `Workers` has it."""
        with _shared(site) as shared:
            yield _AtSite(self, shared.handle)


@dataclass(frozen=True)
class _AtSite:
    workers: Processes
    site: Handle

    @property
    def jobs(self) -> int:
        return self.workers.jobs

    def as_done(
        self,
        task: Task,
        common: Any,
        items: Iterable[Any],
        *,
        ahead: int = 1,
        on_wait: Callable[[], None] | None = None,
    ) -> Results:
        todo, again = enumerate(items), list[tuple[int, bytes]]()  # `again`: what lost workers left
        under_way, lost = dict[Future[Any], tuple[int, bytes, Box]](), 0
        with _shared(common) as shared:
            try:
                while True:
                    while len(under_way) < self.jobs + ahead and (entry := _next(again, todo)) is not None:
                        box = Box(entry[1])
                        under_way[self._submit(task, shared.handle, box)] = (*entry, box)
                    if not under_way:
                        return
                    done, _ = wait(under_way, None if on_wait is None else _TICK_S, FIRST_COMPLETED)
                    if on_wait is not None:
                        on_wait()
                    if any(_is_lost(future) for future in done):
                        done, _ = wait(under_way)  # a pool that has lost a worker gives everything back
                    for future in [each for each in done if not _is_lost(each)]:
                        place, _, box = under_way.pop(future)
                        lost = 0
                        yield place, _result(future, box)
                    if left := [under_way[future] for future in done if _is_lost(future)]:
                        lost += 1
                        self._give_up(under_way)
                        _check_lost(lost)
                        again = sorted(((place, item) for place, item, _ in left), reverse=True) + again
            finally:
                if under_way:
                    self._give_up(under_way)

    def _give_up(self, under_way: dict[Future[Any], tuple[int, bytes, Box]]) -> None:
        """End all workers, and then close the boxes: other files may take their places."""
        self.workers.end()
        for _, _, box in under_way.values():
            box.close()
        under_way.clear()

    def _submit(self, task: Task, common: Handle, box: Box) -> Future[Any]:
        try:
            return self.workers.pool().submit(_perform, task, self.site, common, box.path)
        except BrokenProcessPool as error:  # nobody has noticed yet
            future: Future[Any] = Future()
            future.set_exception(error)
            return future


def _is_lost(future: Future[Any]) -> bool:
    return isinstance(future.exception(), BrokenProcessPool)


def _next(again: list[tuple[int, bytes]], todo: Iterator[tuple[int, Any]]) -> tuple[int, bytes] | None:
    if again:
        return again.pop()
    entry = next(todo, None)
    return None if entry is None else (entry[0], pack(entry[1]))


def _result(future: Future[Any], box: Box) -> Any:
    error = future.exception()
    if error is not None:  # not of the task, whose own come in the box
        box.close()
        raise error
    value = unpack(box.take())
    if isinstance(value, Exception):
        raise value
    return value


def _check_lost(lost: int) -> None:
    if lost >= _LOST_IN_A_ROW:
        raise WorkerError(
            "worker processes",
            expected="some that live until a task is done",
            got=f"killed {lost} times in a row",
            hint="fewer --jobs, if memory is short; in a script of your own, if __name__ == '__main__': around it",
        )


@contextmanager
def _shared(value: Any) -> Iterator[Shared]:
    try:
        shared = Shared(value)
    except ProtofleetError:
        raise
    except (TypeError, AttributeError, ValueError, RuntimeError, ImportError) as error:
        raise _unsendable(error) from None
    except Exception as error:
        if type(error).__name__ != "PicklingError":
            raise
        raise _unsendable(error) from None
    with shared:
        yield shared


def _unsendable(error: Exception) -> UsageError:
    return UsageError(
        "--jobs above 1",
        expected="a network and a method that can be sent to another process",
        got=f"{error}",
        hint="--jobs 1, or classes at the top of a module",
    )


def _start_server() -> None:
    """Start the fork server. It and the processes that it forks do not receive Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        forkserver.ensure_running()
        return
    resource_tracker.ensure_running()  # it lets signals through behind itself
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    hold_back()
    try:
        forkserver.ensure_running()
    finally:
        if signal.SIGINT not in before:
            let_through()


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────

_here: dict[str, tuple[str, Any]] = {}


def _begin(watched: Connection, threads: int, methods: Iterable[str]) -> None:
    from protofleet.lab.workers.threads import limit_threads

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    limit_threads(threads)
    for place in methods:  # which a run names by their names
        load_method(place)


def _end_with(watched: Connection) -> None:
    try:
        watched.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)


def _perform(task: Task, site: Handle, common: Handle, path: str) -> None:
    with open(path, "rb") as file:
        item = unpack(file.read())
    try:
        packed = pack(task(_loaded("site", site), _loaded("common", common), item))
    except Exception as error:
        packed = pack(sendable(error))
    replace(path, packed)


def _loaded(kind: str, handle: Handle) -> Any:
    """A common value, loaded once for all its tasks."""
    if kind not in _here or _here[kind][0] != handle.key:
        _here.pop(kind, None)
        _here[kind] = (handle.key, handle.load())
    return _here[kind][1]
