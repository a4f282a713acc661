"""What devices are told of their own sums unasked: that these are gone, or that newer ones are held."""

from __future__ import annotations

from collections.abc import Callable

from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.parts.common_parts import Parts
from protofleet.aggregator.store.records import StandingMark
from protofleet.contract.wire.messages import MAX_ROUND, Receipt

__all__ = ["StandingNotices"]


class StandingNotices:
    """Of one run.

    Args:
        method: the name of the one whose sums stand.
        mark_of: gives what is held of a device.
    """

    def __init__(self, parts: Parts, method: str, mark_of: Callable[[str], StandingMark]) -> None:
        self._exclusions, self._run, self._method, self._mark_of = parts.exclusions, parts.run, method, mark_of
        self._untold: list[Decision] = []

    def add(self, decision: Decision) -> None:
        """Tell a device this with the next ones."""
        self._untold.append(decision)

    def take(self) -> list[Decision]:
        """What is to be told, since the last call."""
        untold, self._untold = self._untold, []
        return untold

    def tell_held(self, device: str) -> None:
        """Tell a device with an older copy of its state directory that newer sums are held.

        This helps also when its samples are those of the older copy. The receipt's round is no generation, so for any
        other device it means nothing.
        """
        mark = self._mark_of(device)
        if mark.digest and not self._exclusions.refusal(device):
            receipt = Receipt(self._run, MAX_ROUND, self._method, "late", held=mark.generation)
            self.add(Decision(device, receipt.status, 0, receipt))

    def tell(self, device: str) -> None:
        """See to it that a device of which nothing stands any more learns it, and whether it may send again: what it
        sent last had a receipt, so it would wait for photos to change."""
        mark = self._mark_of(device)
        lacks = self._exclusions.taken.get("", {}).get(device) == mark.generation  # rows of a class admitted again
        if not mark.generation or (mark.digest and not lacks):
            return
        refusal = self._exclusions.refusal(device)
        receipt = Receipt(
            self._run,
            mark.generation,
            self._method,
            "rejected" if refusal else "late",
            refusal[:200],
            held=0 if refusal else mark.generation,
        )
        self.add(Decision(device, receipt.status, 0, receipt, reason=refusal))
