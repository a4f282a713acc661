"""Several processes of one fleet on one store: each leads while nobody else does, and works otherwise.

Each computes on one thread: there is a process for each core already, and BLAS threads of several processes that wait
for each other's take most of a busy machine (docs/decisions/201).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from aggregator.database import AnyPlace
from aggregator.settings import Settings
from aggregator.shared_store import SharedStore
from aggregator.worker import Worker
from contract.errors import InUseError, StoreLostError, UsageError

__all__ = ["Crew"]

_SETTINGS = "settings of the leader"  # in `meta`
_TRIES, _TRY_S = 60, 0.5  # while the first one makes the store


class Crew:
    """One process among them.

    Args:
        whose: the store's place, bundle and fleet, as `SharedStore` takes them.
        extends: sha256 of bundles that it extends.
        settings: must be those of the others.
        stopping: ends `serve` once it is set.
    """

    def __init__(
        self,
        whose: tuple[AnyPlace, bytes, str],
        extends: Collection[bytes],
        settings: Settings,
        stopping: threading.Event,
    ) -> None:
        self._whose, self._extends, self._stopping = whose, extends, stopping
        self._settings = hashlib.sha256(repr(settings).encode()).hexdigest()[:16]

    def serve(
        self,
        lead: Callable[[SharedStore], dict[str, Any]],
        work: Callable[[SharedStore], Worker],
        told: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Lead or work until the plan is done or `stopping`; the summary of who has led last.

        Raises:
            LinkError, StoreError, UsageError: as `Service.run`.
        """
        with _one_thread():
            return self._serve(lead, work, told)

    def _serve(
        self,
        lead: Callable[[SharedStore], dict[str, Any]],
        work: Callable[[SharedStore], Worker],
        told: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        tries = 0
        while not self._stopping.is_set():
            try:
                with SharedStore(*self._whose, extends=self._extends, leads=True) as store:
                    store.standing.set_meta(_SETTINGS, self._settings)
                    return lead(store)
            except InUseError:
                pass
            try:
                with SharedStore(*self._whose, extends=self._extends, leads=False) as store:
                    tries = _TRIES
                    self._check_settings(store)
                    worker = work(store)
                    if worker.run() == "nobody leads" and worker.is_finished:
                        break
            except StoreLostError:  # the first of all is making it
                tries += 1
                if tries >= _TRIES or self._stopping.wait(_TRY_S):
                    raise
        return told()

    def _check_settings(self, store: SharedStore) -> None:
        known = store.standing.meta(_SETTINGS)
        if known not in (None, self._settings):
            raise UsageError(
                "--worker", expected="the options of the process that leads", got="others", hint="the same for all"
            )


def _one_thread() -> AbstractContextManager[object]:
    """Within, numpy's BLAS computes on one thread, unless the environment says on how many."""
    if "OMP_NUM_THREADS" in os.environ or "OPENBLAS_NUM_THREADS" in os.environ:
        return nullcontext()
    try:
        import threadpoolctl
    except ImportError:
        raise UsageError(
            "--worker", expected="threadpoolctl", got="none", hint='pip install "protofleet[scale]"'
        ) from None
    return threadpoolctl.threadpool_limits(1, user_api="blas")
