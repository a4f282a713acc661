"""What a device believes: with `--trust`, only what a trusted key has signed for the topic on which it came.

    announcement            signed, and as new as the newest one that this key has signed before, or newer
    (`issued_marks.py`):    So a recorded announcement that is sent again opens no round and brings back no bundle. The
                            number may also be old because the aggregator has lost its store. Then the device tells it
                            our number, with the key's own signed proof of it (`heard`), and it goes on above that
    global state, receipt,
    piece                   signed
    own status              signed by this device itself, or by a trusted key; a birth that this key signed at an
                            earlier start is no second process

Without `--trust` signatures are not checked. The exception is the device's own status, where the device has a key:
else, on a broker that anyone may write to, anyone could end the device as a second process of its id.

What is refused is counted, and told in one line for each kind, which says what helps.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from protofleet.contract.errors import SignatureError, WireError
from protofleet.contract.identity.signatures import Keyring, key_id
from protofleet.contract.mqtt.link import Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.envelopes import Mark
from protofleet.contract.wire.messages import Announcement, Message, Signed, Status
from protofleet.edge_client.identity.signing_identity import Identity
from protofleet.edge_client.journal.issued_marks import IssuedMarks

__all__ = ["Trust"]

logger = logging.getLogger(__name__)

_LINES = 20  # for a person; what is refused after these is only counted
_TELL_S = 600.0  # between two times that the operator is told of more


class Trust:
    """What one device in one fleet believes.

    Args:
        keys: the trusted public keys, 32 bytes each; none where signatures are not checked.
        identity: the device's own.
        marks: the newest number of each key's announcements.

    Attributes:
        refused: how many messages were refused.
    """

    def __init__(
        self,
        keys: Collection[bytes],
        identity: Identity,
        marks: IssuedMarks,
        *,
        fleet: str,
        device_id: str,
    ) -> None:
        self._keys = Keyring(keys) if keys else None
        self._own = None if identity.signer is None else Keyring([identity.signer.public_key])
        self._marks = marks
        self._status, self._round = topics.status(fleet, device_id), topics.round_(fleet)
        self._logged_kinds: set[tuple[str, str]] = set()
        self._reported, self._report_at_s = 0, float("-inf")
        self._old, self._old_at_birth = 0, 0  # announcements below our mark, and as of the last birth
        self._heard_at_birth: tuple[Mark, ...] = ()
        self.refused = 0

    def opened(self, received: Received) -> Message | None:
        """The message in what was received; None for one that is refused, which is logged.

        Raises:
            WireError: it is no message.
            StoreError: the disk refused.
        """
        try:
            return self._opened(received.topic, received.payload)
        except SignatureError as error:
            self.refused += 1
            kind = received.topic.split("/")[3], str(error.got).split(" ")[0]
            if kind not in self._logged_kinds and len(self._logged_kinds) < _LINES:
                self._logged_kinds.add(kind)
                logger.warning(f"refused a message on {received.topic}: {error}{_help(error)}")
            return None

    def to_report(self, now_s: float) -> int | None:
        """How many messages no trusted key has signed, when it is time to tell the operator; None when it is not."""
        strange = self.refused - self._old
        if strange == self._reported or now_s < self._report_at_s:
            return None
        self._reported, self._report_at_s = strange, now_s + _TELL_S
        return strange

    def heard(self) -> tuple[Mark, ...]:
        """The highest number of each trusted key, for our birth.

        Another birth is due when the aggregator does not know the newest number (`has_to_tell`).
        """
        self._old_at_birth, self._heard_at_birth = self._old, self._marks_heard()
        return self._heard_at_birth

    @property
    def has_to_tell(self) -> bool:
        """Whether an announcement was old, and the aggregator has not been told our numbers since."""
        return self._old != self._old_at_birth and self._marks_heard() != self._heard_at_birth

    def _marks_heard(self) -> tuple[Mark, ...]:
        return () if self._keys is None else self._marks.heard(map(key_id, self._keys))

    def _opened(self, topic: str, payload: bytes) -> Message:
        try:
            message = decode(payload)
        except WireError as error:
            if self._keys is None:
                raise
            raise SignatureError("message", expected="a signed one", got=f"bytes that are none: {error}") from None
        if topic == self._status:
            return self._opened_own_status(message)
        if self._keys is None:
            return decode(message.payload) if isinstance(message, Signed) else message
        if not isinstance(message, Signed):
            raise SignatureError("message", expected="one that a trusted key has signed", got="unsigned")
        plain = decode(self._keys.payload(message, topic))
        if isinstance(plain, Announcement) and topic == self._round:
            self._check_issued(message.key_id, plain)
        return plain

    def _check_issued(self, signer: bytes, announcement: Announcement) -> None:
        newest = self._marks.newest(signer)
        if announcement.issued < max(newest, 1):
            self._old += 1
            raise SignatureError(
                "announcement",
                expected=f"number {newest} or a later one",
                got=f"old {announcement.issued}: recorded and sent again, or the aggregator lost its store, or has an "
                "older copy, and its clock is behind",
            )
        if announcement.issued > newest:
            self._marks.saw(signer, announcement.issued, announcement.proof)

    def _opened_own_status(self, message: Message) -> Message:
        """What stands on the device's own status topic: its own word, or that of who asks whether it is there."""
        if not isinstance(message, Signed):
            asks = isinstance(message, Status) and not message.online
            if self._keys is not None or (self._own is not None and not asks):
                raise SignatureError("status", expected="one that this device has signed", got="unsigned")
            return message
        for ring in (self._own, self._keys):
            if ring is not None and message.key_id in ring:
                return decode(ring.payload(message, self._status))
        if self._own is None and self._keys is None:
            return decode(message.payload)
        raise SignatureError("status", expected="one of this device's key", got=f"key {message.key_id.hex()}")


def _help(error: SignatureError) -> str:
    if str(error.got).startswith("old "):
        return "; an aggregator is told this number now, and goes on above it"
    if str(error.got) == "unsigned" and error.message != "status":
        return "; protofleet aggregate --sign KEY signs, or leave --trust out"
    if str(error.got).startswith("key ") and error.message != "status":
        return "; --trust has to name the aggregator's key, too"
    return ""
