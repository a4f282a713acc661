"""Sends receipts, each once for a batch and refusals at a limited pace, and passes the decisions to the listener."""

from __future__ import annotations

from collections.abc import Iterable

from protofleet.aggregator.enrolment.signed_publisher import SignedPublisher
from protofleet.aggregator.ingest.ingest import Decision
from protofleet.aggregator.ingest.refusal_rate import Pace
from protofleet.aggregator.monitoring import events
from protofleet.contract.mqtt.link import Link
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Receipt

__all__ = ["Receipts"]


class Receipts:
    """Of one fleet.

    Args:
        link: to its devices.
        publisher: signs them, if the aggregator signs.
        listener: is told what was decided.
    """

    def __init__(self, fleet: str, link: Link, publisher: SignedPublisher, listener: events.Listener) -> None:
        self._fleet, self._link, self._publisher, self._listener = fleet, link, publisher, listener
        self._pace, self._intruders_pace = Pace(), Pace()

    def send(self, decisions: Iterable[Decision], now: float) -> None:
        """Answer what was decided on, which is durable."""
        sent = set()
        for decision in decisions:
            receipt, is_intruder = decision.receipt, decision.cause == "intruder"
            named = "" if receipt is None else receipt.method
            self._listener(
                events.Decided(
                    decision.device, decision.outcome, decision.round, named, decision.reason, decision.cause
                )
            )
            if decision.outcome in ("rejected", "malformed") and not is_intruder:
                self._listener(events.Refused(decision.device, decision.reason))
            if receipt is None:
                continue
            about = (receipt.run, receipt.round, receipt.method, receipt.digest)
            key = (decision.device, about, receipt.status, receipt.missing)
            if key in sent:  # many chunks of one contribution may call for the same receipt
                continue
            sent.add(key)
            self.answer(decision.device, receipt, now, is_intruder=is_intruder)

    def answer(self, device: str, receipt: Receipt, now: float, *, is_intruder: bool) -> None:
        """Send a receipt. Refusals are paced, so that an intruder does not use up the pace of the device."""
        pace = self._intruders_pace if is_intruder else self._pace
        if receipt.status != "rejected" or pace.allows(device, now):
            topic = topics.down(self._fleet, device)
            self._link.publish(topic, self._publisher.sealed(topic, encode(receipt)))
