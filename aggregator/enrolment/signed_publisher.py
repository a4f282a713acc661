"""The aggregator's messages, signed if it has a key, and messages of others in its place. No sockets.

With `--sign` every published message is signed for its topic. Every announcement has a number above all announced
before (`aggregator/parts/announcement_numbers.py`), so that a recorded one is recognised when it is sent again.

A store that is lost, or an older copy, knows lower numbers than devices have heard. Devices would refuse its
announcements for as long as the clock is behind. So an announcement carries the key's proof of its number, and a device
hands the proof back (`Mark`). The aggregator then numbers above what its own key has signed, whoever reports it
(`lost`). Nobody can report a number that the key has not signed.

A sender on the aggregator's own topics without its key is no aggregator. It is noted, and ends nothing here. What the
broker retains of ours is published again, now and then, since it may have been overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from protofleet.aggregator.enrolment.gate import Intrusion
from protofleet.contract.errors import SignatureError, WireError
from protofleet.contract.identity.signatures import Keyring, Signer, inside
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES, Mark
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import Announcement, Message, Signed

__all__ = ["SignedPublisher"]

_MEND_AFTER_S, _MEND_EACH_S = 0.5, 5.0


class SignedPublisher:
    """Of one aggregator.

    Args:
        signer: None where nothing is signed.
        issue: gives a number for an announcement, at so many seconds since the epoch.
    """

    def __init__(self, fleet: str, signer: Signer | None, issue: Callable[[float], int]) -> None:
        self._fleet, self._signer, self._issue = fleet, signer, issue
        self._ring = None if signer is None else Keyring([signer.public_key])
        self._announced: tuple[Announcement, bytes] | None = None
        self._parts: tuple[GlobalState, int, list[bytes]] | None = None
        self._mend_at: float | None = None
        self._mended_at = float("-inf")

    @property
    def room_bytes(self) -> int:
        """How much longer a message is for its signature."""
        return 0 if self._signer is None else ENVELOPE_BYTES

    @property
    def signs(self) -> bool:
        """Whether it does."""
        return self._signer is not None

    def sealed(self, topic: str, payload: bytes) -> bytes:
        """An encoded message as it is published on this topic."""
        return payload if self._signer is None else self._signer.sign(topic, payload)

    def announcement(self, announcement: Announcement, wall: float) -> bytes:
        """An announcement as it is published, with a number where it is signed: the same bytes as long as it says the
        same.

        Raises:
            StoreError: the disk refuses.
        """
        if self._announced is None or self._announced[0] != announcement:
            self._announced = announcement, self._numbered(announcement, wall)
        return self._announced[1]

    def _numbered(self, announcement: Announcement, wall: float) -> bytes:
        topic = topics.round_(self._fleet)
        if self._signer is None:
            return encode(announcement)
        mark = self._signer.mark(topic, self._issue(wall))
        return self.sealed(topic, encode(replace(announcement, issued=mark.issued, proof=mark.proof)))

    def marks(self, announcement: Announcement) -> tuple[Mark, ...]:
        """The number of one of our announcements, as devices report it; none without signatures."""
        is_told = self._signer is not None and announcement.issued and announcement.proof
        return (Mark(self._signer.key_id, announcement.issued, announcement.proof),) if is_told and self._signer else ()

    def lost(self, heard: Iterable[Mark], issued: int) -> int:
        """The highest number that our key has given, of those that were heard, where it is above the last that we know
        of; 0 where none is. What is announced next gets a number anew.

        Args:
            issued: the last that we know of.
        """
        if self._ring is None:
            return 0
        above = {mark for mark in heard if mark.issued > issued and mark.key_id in self._ring}
        for mark in sorted(above, key=lambda mark: mark.issued, reverse=True):
            if self._ring.gave(mark, topics.round_(self._fleet)):
                self._announced = None
                return mark.issued
        return 0

    def parts(self, state: GlobalState, limit_bytes: int) -> list[bytes]:
        """The parts of a global state as they are published."""
        if self._parts is None or self._parts[0] is not state or self._parts[1] != limit_bytes:
            encoded = [encode(part, "f32") for part in state.parts(limit_bytes - self.room_bytes)]
            sealed = [self.sealed(topics.global_part(self._fleet, index), part) for index, part in enumerate(encoded)]
            self._parts = state, limit_bytes, sealed
        return self._parts[2]

    def heard(self, topic: str, payload: bytes) -> Message:
        """What was published on a topic of the aggregator's.

        Raises:
            Intrusion: we sign, and this has another signature or none.
            WireError: it is no message.
        """
        if self._ring is None:
            return inside(payload)
        message = decode(payload)
        if not isinstance(message, Signed):
            raise Intrusion("posing", f"{type(message).__name__.lower()} on {topic} that is not signed", payload)
        try:
            return decode(self._ring.payload(message, topic))
        except SignatureError as error:
            raise Intrusion("posing", f"on {topic}: {error}", payload) from None

    def is_ours(self, topic: str, payload: bytes) -> bool:
        """Whether our key has signed this for this topic, as it signs a question whether a device is there."""
        if self._ring is None:
            return False
        try:
            self.heard(topic, payload)
        except WireError:
            return False
        return True

    # ── what was overwritten ────────────────────────────────────────────────────────────────────────────────────────

    def overwritten(self, now: float) -> None:
        """Somebody else published where we do."""
        if self.signs and self._mend_at is None:
            self._mend_at = max(now + _MEND_AFTER_S, self._mended_at + _MEND_EACH_S)

    def wait_s(self, now: float) -> float | None:
        """Seconds until something is to be published again; None when nothing is."""
        return None if self._mend_at is None else max(0.0, self._mend_at - now)

    def mends(self, now: float) -> bool:
        """Whether to publish again now; then it is counted."""
        if self._mend_at is None or now < self._mend_at:
            return False
        self._mend_at, self._mended_at = None, now
        return True
