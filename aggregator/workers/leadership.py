"""Several processes of one fleet on one store: each leads while no other does, and works otherwise.

Each computes on one thread, because there is already a process for each core. BLAS threads of several processes that
wait for each other take most of a busy machine (docs/decisions/201).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from protofleet.aggregator.database import AnyPlace
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.workers.shared_store import SharedStore
from protofleet.aggregator.workers.worker import Worker
from protofleet.contract.errors import InUseError, StoreAwayError, StoreLostError, UsageError
from protofleet.contract.extras import install_command

__all__ = ["Leadership"]

_TRIES, _TRY_S = 60, 0.5  # while the first one makes the store


class Leadership:
    """One process among them.

    Args:
        owner: the store's place, bundle and fleet, as `SharedStore` takes them.
        extends: sha256 of bundles that it extends; all processes must extend the same.
        settings: must be those of the others. A process that has worked with them leads only while they are still in
            force: other settings that came into force meanwhile are newer.
        stopping: ends `serve` once it is set.

    Attributes:
        settings: their digest, in hex.
    """

    def __init__(
        self,
        owner: tuple[AnyPlace, bytes, str],
        extends: Collection[bytes],
        settings: Settings,
        stopping: threading.Event,
    ) -> None:
        self._owner, self._extends, self._stopping = owner, extends, stopping
        decides = repr((settings.digest(), sorted(extends)))
        self.settings = hashlib.sha256(decides.encode()).hexdigest()
        self._has_worked = False

    def serve(
        self,
        lead: Callable[[SharedStore], dict[str, Any]],
        work: Callable[[SharedStore], Worker],
        summary: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Lead or work until the plan is done or `stopping`; returns the summary of the last leader.

        Raises:
            LinkError, StoreError, UsageError: as `Service.run`.
        """
        with _one_thread():
            return self._serve(lead, work, summary)

    def _serve(
        self,
        lead: Callable[[SharedStore], dict[str, Any]],
        work: Callable[[SharedStore], Worker],
        summary: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        tries = 0
        while not self._stopping.is_set():
            try:
                with self._store(leads=True) as store:
                    return lead(store)
            except InUseError:
                pass
            try:
                with self._store(leads=False) as store:
                    tries = _TRIES
                    worker = work(store)
                    if worker.run() == "nobody leads" and worker.is_finished:
                        break
            except StoreAwayError:
                raise
            except StoreLostError:  # the first of all is making it
                tries += 1
                if tries >= _TRIES or self._stopping.wait(_TRY_S):
                    raise
        return summary()

    def _store(self, *, leads: bool) -> SharedStore:
        settings, anew = self.settings, not self._has_worked
        store = SharedStore(*self._owner, extends=self._extends, leads=leads, settings=settings, anew=anew)
        self._has_worked = True
        return store


def _one_thread() -> AbstractContextManager[object]:
    """Within, numpy's BLAS computes on one thread, unless the environment says on how many."""
    if "OMP_NUM_THREADS" in os.environ or "OPENBLAS_NUM_THREADS" in os.environ:
        return nullcontext()
    try:
        import threadpoolctl
    except ImportError:
        raise UsageError("--worker", expected="threadpoolctl", got="none", hint=install_command("scale")) from None
    return threadpoolctl.threadpool_limits(1, user_api="blas")
