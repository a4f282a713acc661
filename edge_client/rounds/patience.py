"""How long a client waits: for its first connection, and, where it ends with its run, for the last receipts. No I/O."""

from __future__ import annotations

from protofleet.contract.errors import LinkError
from protofleet.contract.mqtt.address import Address

__all__ = ["Patience"]


class Patience:
    """The patience of one client.

    Args:
        address: of the broker, for the error.
        limit_s: how long to wait; None for ever.
        until_finished: whether the client ends with its run.
        now_s: on a monotonic clock.

    Attributes:
        connections: how many there have been.
        progress_s: when a message or a connection came last.
    """

    def __init__(self, address: Address, limit_s: float | None, *, until_finished: bool, now_s: float) -> None:
        self._address, self._limit_s, self._until_finished = address, limit_s, until_finished
        self.connections, self.progress_s = 0, now_s

    @property
    def is_timed(self) -> bool:
        """Whether something is waited for that has a time limit."""
        return self._until_finished or (self._limit_s is not None and not self.connections)

    def check(self, now_s: float, *, finished: bool, waiting: int, reason: str) -> None:
        """See whether it is over.

        Args:
            finished: whether the run of this client is over.
            waiting: contributions without a receipt.
            reason: what was heard of the broker last.

        Raises:
            LinkError: it is.
        """
        if self._limit_s is None or (self.connections and not (self._until_finished and finished)):
            return
        if now_s - self.progress_s < self._limit_s:
            return
        if not self.connections:
            raise LinkError(
                f"no broker at {self._address} within {self._limit_s:g} s",
                expected="an MQTT 5 broker",
                got=reason or "no answer",
                hint=self._address.remedy(reason),
            )
        raise LinkError(
            f"the run is over, contributions without a receipt: {waiting}",
            expected=f"an answer within {self._limit_s:g} s",
            got="none; nothing is lost, they stay in the state directory",
            hint="starting this client again when the aggregator runs",
        )

    def check_trust(self, now_s: float, *, refused: int) -> None:
        """See whether a client that ends with its run has waited long enough for an aggregator that it trusts.

        Args:
            refused: how many messages no trusted key has signed.

        Raises:
            LinkError: it has.
        """
        if not (refused and self._until_finished and self._limit_s is not None):
            return
        if now_s - self.progress_s >= self._limit_s:
            raise LinkError(
                "--trust",
                expected=f"an announcement of a trusted key within {self._limit_s:g} s",
                got=f"{refused} messages that none has signed",
                hint="protofleet aggregate --sign KEY, or no --trust",
            )
