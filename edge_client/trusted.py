"""What a device believes: with `--trust`, only what a trusted key has signed for the topic on which it came.

    announcement            also newer than, or the same as, the newest that this key has signed before (`issued.py`):
                            one that was recorded and is sent again opens no round and brings back no bundle. The
                            number may also be old since the aggregator has lost its store: it is told ours then, with
                            the key's own word for it (`heard`), and goes on above it
    global state, receipt,
    piece                   signed
    own status              what this device has signed itself, or a trusted key; a birth that this key signed at an
                            earlier start is no second process

Without `--trust` signatures are not looked at, but for the device's own status where it has a key: on a broker that
anyone may write to, anyone could else end it as a second process of its id.

What is refused is counted, and told in one line for each kind, which says what helps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from contract import topics
from contract.envelopes import Mark
from contract.errors import SignatureError, WireError
from contract.link import Received
from contract.messages import Announcement, Message, Signed, Status
from contract.signed import Keyring, key_id
from contract.wire import decode
from edge_client.identity import Identity
from edge_client.issued import IssuedMarks

__all__ = ["Trust"]

_LINES = 20  # for a person; what is refused after these is only counted
_TELL_S = 600.0  # between two times that the operator is told of more


class Trust:
    """Of one device in one fleet.

    Args:
        keys: 32 bytes each, of whoever is trusted; none where signatures are not looked at.
        identity: the device's own.
        marks: how new the newest announcement was.
        log: takes one line for a person.

    Attributes:
        refused: how many messages were.
    """

    def __init__(
        self,
        keys: Collection[bytes],
        identity: Identity,
        marks: IssuedMarks,
        *,
        fleet: str,
        device_id: str,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._keys = Keyring(keys) if keys else None
        self._own = None if identity.signer is None else Keyring([identity.signer.public_key])
        self._marks, self._log = marks, log
        self._status, self._round = topics.status(fleet, device_id), topics.round_(fleet)
        self._told: set[tuple[str, str]] = set()
        self._reported, self._report_at_s = 0, float("-inf")
        self._old, self._told_old = 0, 0  # announcements below our mark, and as of the last birth
        self._told_heard: tuple[Mark, ...] = ()
        self.refused = 0

    def opened(self, received: Received) -> Message | None:
        """The message that came; None for one that is refused, of which a person is then told.

        Raises:
            WireError: it is no message.
            StoreError: the disk refused.
        """
        try:
            return self._opened(received.topic, received.payload)
        except SignatureError as error:
            self.refused += 1
            kind = received.topic.split("/")[3], str(error.got).split(" ")[0]
            if kind not in self._told and len(self._told) < _LINES:
                self._told.add(kind)
                self._log(f"refused a message on {received.topic}: {error}{_help(error)}")
            return None

    def to_report(self, now_s: float) -> int | None:
        """How many were refused in all that no trusted key has signed, when it is time to tell the operator; None when
        not."""
        strange = self.refused - self._old
        if strange == self._reported or now_s < self._report_at_s:
            return None
        self._reported, self._report_at_s = strange, now_s + _TELL_S
        return strange

    def heard(self) -> tuple[Mark, ...]:
        """The highest number of each trusted key, for our birth; the next one is due when it is not known there."""
        self._told_old, self._told_heard = self._old, self._marks_heard()
        return self._told_heard

    @property
    def has_to_tell(self) -> bool:
        """Whether an announcement was old, and the aggregator has not been told what we have heard since."""
        return self._old != self._told_old and self._marks_heard() != self._told_heard

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
            return self._of_own_status(message)
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

    def _of_own_status(self, message: Message) -> Message:
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
