"""A process for each core of this machine: the standard library's pool, which is made anew when a worker is lost.

Workers are forked from a process that has loaded the modules and nothing else (multiprocessing's fork server), so they
share torch's memory, and no lock of ours is copied in the middle of something. They hear of Ctrl-C from here only: each
watches a pipe that nobody writes to, and ends when this process lets go of it or is gone.

A pool that loses one worker gives all its tasks back (`BrokenProcessPool`); they are computed again by a new one. What
is sent and what comes of it lies in shared memory (`shared.py`); only paths go through the pool's pipes, in writes so
short that a worker cannot be killed in the middle of one, which would leave everyone else waiting for the rest.
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

from contract.errors import ProtofleetError, UsageError, WorkerError
from contract.interrupt import hold_back, let_through
from lab.engine.shared import Box, Handle, Shared, pack, replace, sendable, unpack
from lab.engine.workers import Results, Settled, Task

__all__ = ["processes"]

_LOADED = ["lab.engine.preloaded"]  # by the fork server, once for all workers
_LOST_IN_A_ROW = 3
_TICK_S = 0.2


@contextmanager
def processes(jobs: int, threads: int) -> Iterator[Processes]:
    """So many workers, which begin when there is something to do and end with the block."""
    workers = Processes(jobs, threads)
    try:
        yield workers
    finally:
        workers.end()


class Processes:
    """As `lab.engine.workers.Workers` has it."""

    engine = "processes"

    def __init__(self, jobs: int, threads: int) -> None:
        self.jobs, self.threads = jobs, threads
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload(_LOADED)
        _start_server()
        self._pool: ProcessPoolExecutor | None = None
        self._held: Connection | None = None

    def pool(self) -> ProcessPoolExecutor:
        """Of workers that live, as far as anybody knows."""
        if self._pool is None:
            watched, self._held = self._context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(
                self.jobs, mp_context=self._context, initializer=_begin, initargs=(watched, self.threads)
            )
        return self._pool

    def end(self) -> None:
        """Every worker ends, whatever it does."""
        pool, held, self._pool, self._held = self._pool, self._held, None, None
        if held is not None:
            held.close()
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    @contextmanager
    def settle(self, site: Any) -> Iterator[Settled]:
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
                    while len(under_way) < self.jobs + ahead and (found := _next(again, todo)) is not None:
                        box = Box(found[1])
                        under_way[self._submit(task, shared.handle, box)] = (*found, box)
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
        """No worker lives any more; only then are boxes let go of, whose places others' files may take."""
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
    found = next(todo, None)
    return None if found is None else (found[0], pack(found[1]))


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
    """The fork server, which never hears of Ctrl-C, nor does whoever it forks."""
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


def _begin(watched: Connection, threads: int) -> None:
    from lab.engine.preloaded import limit_threads

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()
    limit_threads(threads)


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
    """The value, loaded once for all tasks that have it in common."""
    if kind not in _here or _here[kind][0] != handle.key:
        _here.pop(kind, None)
        _here[kind] = (handle.key, handle.load())
    return _here[kind][1]
