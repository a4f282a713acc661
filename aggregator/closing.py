"""Long work that nobody waits for: a round's end, a new head of sums that stand, a blinded round's sum.

    begin     from here the work may run: in a thread of its own where there is a loop that is not to stand still, else
              in the thread that asks for its end
    step      its end, in the thread that asks: what the work has made is recorded, in one short transaction; None while
              the work lasts
    abandon   it is not wanted any more, and nothing of it is recorded

The work reads the store on a connection of its own (`Store.snapshot`), and changes neither the store nor what belongs
to the loop; whoever begins it sees to it that what it reads stays as it is. Its last part, which does change them, is a
function that it returns. That may find that the work was for nothing, and begin it again. What the work raises, `step`
raises. So the result is the same whether there is a thread or not. See docs/decisions/166.

The thread is waited for when a program ends: whoever leaves one in the middle of linear algebra may never get out, as
OpenBLAS takes its own threads down then. It looks between contributions whether it is abandoned; a solve that has begun
ends first.
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
    """The work is not wanted any more."""


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
        self._made: Future[Recorded[T]] | None = None
        self._thread: threading.Thread | None = None
        self._began_at = 0.0
        self._left = threading.Event()

    @property
    def has_work(self) -> bool:
        """Whether something was begun whose end is not recorded."""
        return self._work is not None

    def begin(self, work: Callable[[], Recorded[T]]) -> None:
        """Let `work` run; nothing else does."""
        self._work = work
        if self.patience_s is None:
            return
        self._made, self._began_at = Future(), time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(work, self._made), name="closing")
        self._thread.start()

    def step(self) -> T | None:
        """What the work came to, recorded; None while it lasts, and where there is none.

        Raises:
            what the work raises, and recording it.
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
        """The work asks now and then whether it is still wanted.

        Raises:
            Abandoned: it is not.
        """
        if self._left.is_set():
            raise Abandoned

    def abandon(self) -> None:
        """End the work, and wait until it has ended."""
        self._left.set()
        if self._thread is not None:
            self._thread.join()
        self._work = None

    def _end(self, work: Callable[[], Recorded[T]]) -> Recorded[T] | None:
        if self.patience_s is None or self._made is None:
            return work()
        wait([self._made], max(0.0, self._began_at + self.patience_s - time.monotonic()))
        return self._made.result() if self._made.done() else None

    def _run(self, work: Callable[[], Recorded[T]], made: Future[Recorded[T]]) -> None:
        try:
            made.set_result(work())
        except BaseException as error:  # whoever asks for the end gets it
            made.set_exception(error)
        self.wake()
