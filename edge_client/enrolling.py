"""A device with a one-time token enrols its key before it says anything else. No I/O.

What it sends is of use for this key, device and fleet alone (`contract/signed.py`), again with each connection and
every few seconds, each time waiting longer, until the aggregator has answered. Until then neither a birth nor a
contribution goes out: of a device that is not enrolled they would be refused. Once answered, whatever the answer, it
goes on: a token that is used up is no obstacle for a device that was enrolled with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from contract.envelopes import ENROL
from contract.messages import Receipt
from contract.signed import Signer, enrolment_of
from contract.wire import encode

__all__ = ["Enrolling"]

_FIRST_S, _LONGEST_S = 5.0, 600.0


class Enrolling:
    """Of one process of a device.

    Args:
        signer: of the key that is enrolled.
        token: None where nothing is to be done.
        log: takes one line for a person.
    """

    def __init__(
        self, fleet: str, device_id: str, signer: Signer | None, token: bytes | None, log: Callable[[str], None]
    ) -> None:
        self._device_id, self._log = device_id, log
        self._payload = b""
        if signer is not None and token is not None:
            self._payload = encode(enrolment_of(fleet, device_id, signer.public_key, token))
        self._wait_s, self._due_s = _FIRST_S, float("-inf")
        self._is_connected = self._is_refused = False

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited."""
        return bool(self._payload) and not self._is_refused

    def connected(self) -> None:
        """A connection is up; who was refused asks again."""
        self._is_refused = False
        self._is_connected, self._wait_s, self._due_s = True, _FIRST_S, float("-inf")

    def disconnected(self) -> None:
        """The connection is gone."""
        self._is_connected = False

    def due(self, now_s: float) -> bytes | None:
        """What to publish now, if anything."""
        if not (self.is_open and self._is_connected and now_s >= self._due_s):
            return None
        self._due_s, self._wait_s = now_s + self._wait_s, min(2.0 * self._wait_s, _LONGEST_S)
        return self._payload

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None where nothing will be."""
        return max(0.0, self._due_s - now_s) if self.is_open and self._is_connected else None

    def heard(self, receipt: Receipt) -> None:
        """An answer to an enrolment; of no effect unless it is to this one."""
        if not self.is_open or receipt.method != ENROL:
            return
        if receipt.digest != hashlib.sha256(self._payload).digest()[:8]:
            return
        if receipt.status == "committed":
            self._log(f"enrolled as {self._device_id}: what this device sends is signed with its own key")
            self._payload = b""
        else:
            self._log(f"not enrolled by --token: {receipt.reason}")
            self._is_refused = True
