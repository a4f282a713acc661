"""A device with a one-time token enrols its key before it says anything else. No I/O.

- Its request is of use for this key, device and fleet alone (`contract/identity/signatures.py`).
- It sends the request with each connection and every few seconds, each time waiting longer, until the aggregator has
  answered.
- Until then neither a birth nor a contribution goes out, because those of a device that is not enrolled are refused.
- After an answer it goes on, whatever the answer is. A used token does not stop a device that was enrolled with it.
"""

from __future__ import annotations

import hashlib
import logging

from protofleet.contract.identity.signatures import Signer, enrolment_of
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.envelopes import ENROL
from protofleet.contract.wire.messages import Receipt

__all__ = ["Enrolling"]

logger = logging.getLogger(__name__)

_FIRST_S, _LONGEST_S = 5.0, 600.0


class Enrolling:
    """The enrolment of one process of a device.

    Args:
        signer: of the key that is enrolled.
        token: None where nothing is to be done.
    """

    def __init__(self, fleet: str, device_id: str, signer: Signer | None, token: bytes | None) -> None:
        self._device_id = device_id
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
        """A connection is up. A device that was refused asks again."""
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
        """Take an answer to an enrolment. It has no effect unless it is the answer to this one."""
        if not self.is_open or receipt.method != ENROL:
            return
        if receipt.digest != hashlib.sha256(self._payload).digest()[:8]:
            return
        if receipt.status == "committed":
            logger.info(f"enrolled as {self._device_id}: what this device sends is signed with its own key")
            self._payload = b""
        else:
            logger.warning(f"not enrolled by --token: {receipt.reason}")
            self._is_refused = True
