"""Who contradicts the others where sums stand, for the operator's page: compared now and then, in a thread.

Comparing reads what stands of every device a few times, so it is no part of a look. It is done where other sums stand
than at the last comparison, and is followed by a rest `_REST` times as long as it took of the processor, a minute at
least: like looking, it costs at most 1 % of a core. `protofleet fleet suspects` does the same at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from protofleet.aggregator.database import Place, read_only
from protofleet.aggregator.overview.standing_suspects import Compared, mark_of_sums, standing_suspects
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.errors import ProtofleetError

__all__ = ["StandingComparison"]

logger = logging.getLogger(__name__)

LEAST_REST_S = 60.0
_PATIENCE_S = 5.0
_REST = 99.0  # times as long as comparing took


class StandingComparison:
    """The comparison of one store's standing sums, again and again.

    Args:
        on_news: is called when there is a result.

    Attributes:
        newest: the last result; None before the first, and where no sums stand.
        took_s: of the processor, in all.
    """

    def __init__(self, store: Place, on_news: Callable[[], None]) -> None:
        self._store, self._on_news = store, on_news
        self._mark: object = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._compare_again, name="standing comparison", daemon=True)
        self.newest: Compared | None = None
        self.took_s = 0.0

    def start(self) -> None:
        """Compare, from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Compare no more; a comparison that runs has some seconds to end."""
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def compare(self) -> None:
        """Compare once, unless what stands is what was compared last.

        Raises:
            StoreError, UsageError: as `read_only`.
        """
        began = time.thread_time()
        with read_only(self._store, KIND) as db, as_written(self._store):
            at, mark = time.time(), mark_of_sums(db)
            if mark is None or mark == self._mark:
                return
            devices, suspects = standing_suspects(db)
        self._mark, self.newest = mark, Compared(at, devices, suspects)
        self.took_s += time.thread_time() - began
        self._on_news()

    def _compare_again(self) -> None:
        while not self._over.is_set():
            before = self.took_s
            try:
                self.compare()
            except ProtofleetError:  # a server that restarts; the page says so
                pass
            except Exception:  # the next one tries again
                logger.exception("comparing the standing sums")
            self._over.wait(max(LEAST_REST_S, _REST * (self.took_s - before)))
