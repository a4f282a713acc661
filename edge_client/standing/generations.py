"""What receipts say of sums that stand: whether those that were sent last count, and when to send again.

committed, duplicate    they stand
late                    the aggregator holds a newer generation of this device (which has then lost its state), or
                        nothing any more: the device sends again at once, numbered above that. At its birth a
                        device is told which generation is held. So an older copy of a state directory is noticed
                        also where its photos are those of then
rejected                nothing of this device counts; it tries again after `REFUSED_WAIT_S`, or when it starts anew
"""

from __future__ import annotations

from protofleet.contract.wire.messages import MAX_ROUND, Receipt
from protofleet.edge_client.journal.standing_journal import StandingMarks

__all__ = ["REFUSED_WAIT_S", "Generations"]

REFUSED_WAIT_S = 3600.0


class Generations:
    """The generations of one device, or gateway.

    Args:
        marks: of its journal.
        refused_wait_s: how long nothing is sent after a refusal; None for `REFUSED_WAIT_S`.

    Attributes:
        again_at_s: nothing is sent before, in seconds of a steady clock.
    """

    def __init__(self, marks: StandingMarks, refused_wait_s: float | None = None) -> None:
        self._marks, self._refused_wait_s = marks, refused_wait_s
        self.again_at_s = float("-inf")

    def take_receipt(self, receipt: Receipt, now_s: float) -> None:
        """Take a receipt in. It has an effect if it is for the newest generation, or ends the wait of a refused one."""
        generation, counts = self._marks.newest(receipt.run)
        if not counts and receipt.status == "late":
            self._marks.unsent(receipt.run, receipt.held)
            self.again_at_s = float("-inf")
        if counts and receipt.status == "late" and receipt.round == MAX_ROUND and receipt.held > generation:
            self._marks.unsent(receipt.run, receipt.held)  # this state directory is an older copy
        if not counts or receipt.round != generation:
            return
        if receipt.status == "late":
            self._marks.unsent(receipt.run, receipt.held)
        elif receipt.status == "rejected":
            self._marks.unsent(receipt.run, generation)
            self.again_at_s = now_s + (REFUSED_WAIT_S if self._refused_wait_s is None else self._refused_wait_s)
