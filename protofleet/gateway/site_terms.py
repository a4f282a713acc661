"""The terms of a site: what the aggregator above announces, kept in the site's store.

    min_samples           the larger of the site's own and the one above
    max_samples           the smaller of the two
    encoding              from above
    forgotten classes     from above
    fraction, deadline    of rounds: from above

Guarantee: devices are never asked for more than that, also while nobody above can be reached.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from protofleet.aggregator.coordinators.coordinator_core import Core
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.methods import Method
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, Encoding, Standing

__all__ = ["ABOVE", "Site", "kept_terms"]

ABOVE = "the aggregator above"
_TERMS = "gateway terms"


class Site(Core):
    """What both aggregators of a site share: the one with standing sums and the one with rounds."""

    _whole: Bundle
    _own_least: int
    _own_most: int
    _terms: dict[str, Any]
    _announces: bool

    def _take_up(self, store: DurableStore) -> None:
        """Continue with the terms in the store."""
        self._own_least, self._own_most = self._settings.min_samples, self._settings.max_samples
        self._announces = False
        self._terms = kept_terms(store) or {}
        self._hold_to_terms()

    def hold_to(self, a: Announcement, now: float) -> None:
        """Hold the site to the announcement from above from now on. Its terms are durable on return.

        Raises:
            StoreError: when the disk refuses.
        """
        names = [self._manifest.labels[number] for number in a.withheld if number < self._manifest.classes]
        terms = {"min_samples": a.min_samples, "encoding": a.encoding, "withheld": names, "max_samples": a.max_samples}
        if a.phase != "standing":
            terms |= {"fraction": a.fraction, "deadline_s": a.deadline_s}
        if terms == self._terms:
            return
        before = self._terms.get("withheld", [])
        for what, which in (("forget class", set(names) - set(before)), ("admit class", set(before) - set(names))):
            for name in sorted(which):
                if (name in self._forgotten) == (what == "admit class"):
                    self._store.orders.ask(what, ABOVE, time.time(), name)
        self._store.meta.put(_TERMS, json.dumps(terms))
        self._terms, self._announces, self._orders_at = terms, True, now
        self._hold_to_terms()

    def _hold_to_terms(self) -> None:
        least = max(self._own_least, int(self._terms.get("min_samples", 1)))
        most = min(self._own_most, int(self._terms.get("max_samples", 0)) or self._own_most)
        encoding: Encoding = self._terms.get("encoding", self._encoding)
        about = {"min_samples": least, "max_samples": most, "encoding": encoding, "sums_encoding": encoding}
        self._settings = replace(self._settings, **about)  # type: ignore[arg-type]

    def _nothing(self, a: Announcement, method: Method, number: int, standing: Standing | None) -> Contribution:
        """A contribution of zero samples, to be filled with a sum.

        Args:
            a: the announcement from above.
            number: the round, or the generation.
        """
        m = self._whole.manifest
        stranger = bool(a.class_lists) and self._whole.sha256 not in (a.bundle, *a.others)
        zero = Contribution.of(
            method.statistic.zero(m.classes, self._width(method)),
            run=a.run,
            round=number,
            method=method.name,
            bundle=self._whole.sha256,
            extractor=self._whole.extractor(method),
            standing=standing,
            class_list=list_digest(m.labels) if stranger else b"",
        )
        return replace(zero, body=ClassRows(zero.body.classes, zero.body.rows[:, :0]), triangle=None, further=())


def kept_terms(store: DurableStore) -> dict[str, Any] | None:
    """The newest terms from above that a gateway of this store has received; None before the first."""
    kept = store.meta.get(_TERMS)
    return None if kept is None else dict(json.loads(kept))
