"""Receipts on their way out: each once for a batch, refusals at a pace; and who follows is told what was decided."""

from __future__ import annotations

from collections.abc import Iterable

from aggregator import events
from aggregator.ingest import Decision
from aggregator.refusal_rate import Pace
from aggregator.voice import Voice
from contract import topics
from contract.link import Link
from contract.messages import Receipt
from contract.wire import encode

__all__ = ["Receipts"]


class Receipts:
    """Of one fleet.

    Args:
        link: to its devices.
        voice: signs them, if the aggregator signs.
        listener: is told what was decided.
    """

    def __init__(self, fleet: str, link: Link, voice: Voice, listener: events.Listener) -> None:
        self._fleet, self._link, self._voice, self._listener = fleet, link, voice, listener
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
        """Send a receipt; refusals at a pace that who poses as a device does not take from the device."""
        pace = self._intruders_pace if is_intruder else self._pace
        if receipt.status != "rejected" or pace.allows(device, now):
            topic = topics.down(self._fleet, device)
            self._link.publish(topic, self._voice.sealed(topic, encode(receipt)))
