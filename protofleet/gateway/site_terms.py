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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.store.durable_store import Store
from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.bundle.fleet_compatibility import list_digest
from protofleet.contract.methods import Method
from protofleet.contract.wire.encodings import SUMS_ENCODINGS
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, Encoding, Standing

__all__ = ["ABOVE", "SiteTerms", "kept_terms"]

ABOVE = "the aggregator above"
_TERMS = "gateway terms"


class SiteTerms:
    """Of one site.

    Args:
        parts: of its coordinator, whose settings change with the terms.
        bundle: the fleet's whole bundle.
        method: gives the one whose statistic is gathered now.

    Attributes:
        newest: what was announced last, as kept in the store; empty before the first announcement.
        is_news: whether devices have not been announced them yet.
    """

    def __init__(self, parts: Parts, bundle: Bundle, method: Callable[[], Method]) -> None:
        self._parts, self._bundle, self._method = parts, bundle, method
        self._own_least, self._own_most = parts.terms.settings.min_samples, parts.terms.settings.max_samples
        self.newest: dict[str, Any] = kept_terms(parts.store) or {}
        self.is_news = False
        self._hold()

    def hold_to(self, a: Announcement, now: float) -> bool:
        """Hold the site to the announcement from above from now on; returns whether that changes its terms.

        They are durable on return.

        Raises:
            StoreError: when the disk refuses.
        """
        m, store = self._parts.terms.manifest, self._parts.store
        names = [m.labels[number] for number in a.withheld if number < m.classes]
        terms: dict[str, Any] = {"min_samples": a.min_samples, "encoding": a.encoding, "withheld": names}
        terms |= {"max_samples": a.max_samples, "factors": a.factors}
        if a.phase != "standing":
            terms |= {"fraction": a.fraction, "deadline_s": a.deadline_s}
        if terms == self.newest:
            return False
        before, forgotten = self.newest.get("withheld", []), self._parts.exclusions.forgotten
        for what, which in (("forget class", set(names) - set(before)), ("admit class", set(before) - set(names))):
            for name in sorted(which):
                if (name in forgotten) == (what == "admit class"):
                    store.orders.ask(what, ABOVE, time.time(), name)
        store.meta.put(_TERMS, json.dumps(terms))
        self.newest, self.is_news, self._parts.orders.look_at = terms, True, now
        self._hold()
        return True

    def _hold(self) -> None:
        terms, newest = self._parts.terms, self.newest
        least = max(self._own_least, int(newest.get("min_samples", 1)))
        most = min(self._own_most, int(newest.get("max_samples", 0)) or self._own_most)
        encoding: Encoding = newest.get("encoding", terms.encoding(self._method()))
        sums_encoding: str = encoding if encoding in SUMS_ENCODINGS else terms.settings.sums_encoding
        if newest.get("factors"):  # of its devices: what the site sends up is a triangle of exact sums
            sums_encoding = "factor"
        about = {"min_samples": least, "max_samples": most, "encoding": encoding, "sums_encoding": sums_encoding}
        terms.settings = replace(terms.settings, **about)  # type: ignore[arg-type]

    def nothing(self, a: Announcement, method: Method, number: int, standing: Standing | None) -> Contribution:
        """A contribution of zero samples, to be filled with a sum.

        Args:
            a: the announcement from above.
            number: the round, or the generation.
        """
        m = self._bundle.manifest
        stranger = bool(a.class_lists) and self._bundle.sha256 not in (a.bundle, *a.others)
        zero = Contribution.of(
            method.statistic.zero(m.classes, self._parts.terms.width(method)),
            run=a.run,
            round=number,
            method=method.name,
            bundle=self._bundle.sha256,
            extractor=self._bundle.extractor(method),
            standing=standing,
            class_list=list_digest(m.labels) if stranger else b"",
        )
        return replace(zero, body=ClassRows(zero.body.classes, zero.body.rows[:, :0]), triangle=None, further=())


def kept_terms(store: Store) -> dict[str, Any] | None:
    """The newest terms from above that a gateway of this store has received; None before the first."""
    kept = store.meta.get(_TERMS)
    return None if kept is None else dict(json.loads(kept))
