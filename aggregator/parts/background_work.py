"""Long work beside the loop: a round's end, a new head of standing sums, a blinded round's sum.

    begin     the work may run from here: in its own thread where a loop must not stand still, else in the thread that
              calls `step`
    step      called in the loop's thread: records the result of the work in one short transaction; None while the work
              lasts
    abandon   ends the work; nothing of it is recorded

The work reads the store on its own connection (`Store.snapshot`). It changes neither the store nor the loop's data. The
caller of `begin` makes sure that what the work reads does not change. The work returns a function, its last part, which
does change them. That function may find that the result is no longer valid, and begin the work again. `step` raises
what the work raises. So the result is the same with and without a thread. See docs/decisions/166.

A program waits for the thread before it ends: leaving a thread in the middle of linear algebra may block for ever,
because OpenBLAS ends its own threads then. The work checks between contributions whether it is abandoned; a solve that
has begun ends first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

__all__ = ["Abandoned", "Closing"]

T = TypeVar("T")
Recorded = Callable[[], T | None]
"""Records what was made, and says what step that was; None where the work has to be done again, and is begun again."""


class Abandoned(Exception):
    """The work was abandoned."""


class Closing(Generic[T]):
    """One piece of work at a time.

    Attributes:
        patience_s: how long `step` waits after `begin`, for work that is short; None for as long as it takes, without
            a thread.
        wake: called in the thread once the work is done.
    """

    def __init__(self) -> None:
        self.patience_s: float | None = None
        self.wake: Callable[[], None] = lambda: None
        self._work: Callable[[], Recorded[T]] | None = None
        self._result: Future[Recorded[T]] | None = None
        self._thread: threading.Thread | None = None
        self._began_at = 0.0
        self._abandoned = threading.Event()

    @property
    def has_work(self) -> bool:
        """Whether work was begun whose end is not recorded."""
        return self._work is not None

    def begin(self, work: Callable[[], Recorded[T]]) -> None:
        """Let `work` run; no other work runs."""
        self._work = work
        if self.patience_s is None:
            return
        self._result, self._began_at = Future(), time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work, self._result), name="closing")
        self._thread.start()

    def step(self) -> T | None:
        """Record the result of the work and return its step; None while the work lasts, and without work.

        Raises:
            what the work or the recording raises.
        """
        while self._work is not None:
            recorded = self._end(self._work)
            if recorded is None:
                return None
            self._work = None
            step = recorded()
            if step is not None:
                return step
        return None

    def go_on(self) -> None:
        """Called by the work now and then: returns while it is still wanted.

        Raises:
            Abandoned: it is not wanted any more.
        """
        if self._abandoned.is_set():
            raise Abandoned

    def abandon(self) -> None:
        """End the work, and wait until it has ended."""
        self._abandoned.set()
        if self._thread is not None:
            self._thread.join()
        self._work = None

    def _end(self, work: Callable[[], Recorded[T]]) -> Recorded[T] | None:
        if self.patience_s is None or self._result is None:
            return work()
        wait([self._result], max(0.0, self._began_at + self.patience_s - time.monotonic()))
        return self._result.result() if self._result.done() else None

    def _run(self, work: Callable[[], Recorded[T]], result: Future[Recorded[T]]) -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # whoever asks for the end gets it
            result.set_exception(error)
        self.wake()
