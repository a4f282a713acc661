"""What a site is held to: the terms that are announced above, kept in its store.

`min_samples` is the larger of both and `max_samples` the smaller, the encoding and the forgotten classes are those from
above, and so are the share of devices and the deadline of rounds. Devices are never asked for more than that while
nobody above can be reached.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

from aggregator.core import Core
from aggregator.store import DurableStore
from contract.bundle import Bundle
from contract.fleet import list_digest
from contract.messages import Announcement, ClassRows, Contribution, Encoding, Standing
from contract.methods import Method

__all__ = ["ABOVE", "Site", "kept_terms"]

ABOVE = "the aggregator above"
_TERMS = "gateway terms"


class Site(Core):
    """The aggregator of a site, whichever it is; the one of sums that stand, or that of rounds, is beside it."""

    _whole: Bundle
    _own_least: int
    _own_most: int
    _terms: dict[str, Any]
    _announces: bool

    def _take_up(self, store: DurableStore) -> None:
        """Go on with the terms that are kept."""
        self._own_least, self._own_most = self._settings.min_samples, self._settings.max_samples
        self._announces = False
        self._terms = kept_terms(store) or {}
        self._hold_to_terms()

    def hold_to(self, a: Announcement, now: float) -> None:
        """From now on devices are asked for what is announced above, and for no more; durable on return.

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
                    self._tables.ask(what, ABOVE, time.time(), name)
        self._tables.set_meta(_TERMS, json.dumps(terms))
        self._terms, self._announces, self._orders_at = terms, True, now
        self._hold_to_terms()

    def _hold_to_terms(self) -> None:
        least = max(self._own_least, int(self._terms.get("min_samples", 1)))
        most = min(self._own_most, int(self._terms.get("max_samples", 0)) or self._own_most)
        encoding: Encoding = self._terms.get("encoding", self._encoding)
        about = {"min_samples": least, "max_samples": most, "encoding": encoding, "sums_encoding": encoding}
        self._settings = replace(self._settings, **about)  # type: ignore[arg-type]

    def _nothing(self, a: Announcement, found: Method, number: int, standing: Standing | None) -> Contribution:
        """A contribution that says that there are no samples.

        Args:
            a: the announcement from above.
            number: of the round, or of the generation.
        """
        m = self._whole.manifest
        stranger = bool(a.class_lists) and self._whole.sha256 not in (a.bundle, *a.others)
        zero = Contribution.of(
            found.statistic.zero(m.classes, self._width(found)),
            run=a.run,
            round=number,
            method=found.name,
            bundle=self._whole.sha256,
            extractor=self._whole.extractor(found),
            standing=standing,
            class_list=list_digest(m.labels) if stranger else b"",
        )
        return replace(zero, body=ClassRows(zero.body.classes, zero.body.rows[:, :0]), triangle=None, further=())


def kept_terms(store: DurableStore) -> dict[str, Any] | None:
    """What was announced above when a gateway of this store heard it last; None before the first time."""
    kept = store.standing.meta(_TERMS)
    return None if kept is None else dict(json.loads(kept))
