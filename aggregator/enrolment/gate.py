"""Whose message it is: an enrolled device must sign with its key, and with `--enrolled` no other device is heard.

    enrolled              only what the device's key has signed for the topic that it came on is the device's
    revoked               nothing is taken, until the device is enrolled with another key
    never enrolled        everything is taken, signed or not; with `--enrolled` it is turned away

So on a broker that anyone may write to, nobody can use an enrolled device's name. An operator with its public key
enrols a device, or the device enrols itself with the one-time token of its invitation
(`contract/identity/signatures.py`). Its message proves that it has the token, without showing it, and is of use for no
other key.

A birth has a number above all that its key has signed before (`check_news`). Otherwise a recorded birth could report
again that a bundle failed, how good a device was, or that it is here.

Turned-away messages are counted by device and cause, reported to the operator now and then, and kept
(`enrolment_tables.py`). The answer names the received bytes by their digest, so it ends no contribution of the honest
device. It is paced apart from the answers to signed messages.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from protofleet.aggregator.store.enrolment_tables import MAX_INTRUDERS, EnrolmentTables, Intruder
from protofleet.aggregator.store.order_table import Order
from protofleet.contract.errors import SignatureError, WireError
from protofleet.contract.identity import ed25519
from protofleet.contract.identity.signatures import Keyring, key_id, token_proves
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import MAX_MESSAGE_BYTES, decode
from protofleet.contract.wire.envelopes import ENROL, KEY_BYTES
from protofleet.contract.wire.messages import Enrolment, Message, Receipt, Signed, Status

__all__ = ["INTRUSIONS", "OF_ENROLMENT", "OF_THE_DEVICE", "Gate", "Intrusion", "inner_of", "read_enrolment"]

Cause = Literal[
    "unsigned",
    "other-key",
    "forged",
    "not-enrolled",
    "revoked",
    "token",
    "posing",
    "refuses",
    "replayed",
    "apart",
    "second-process",
]
INTRUSIONS: Final = get_args(Cause)
OF_THE_DEVICE: Final = ("refuses", "apart", "second-process")  # said by itself: no intruder
OF_ENROLMENT = ("invite", "enrol", "revoke")
_LONGEST_ENROLMENT = 160
_TELL_S = 600.0  # between two lines of one device and cause
_KEEP_S = 5.0  # between two times that it is made durable


class Intrusion(WireError):
    """A message is not of the device whose name it came under.

    Attributes:
        cause: in one word.
        inner: the message inside, as far as there is one.
    """

    def __init__(self, cause: Cause, reason: str, inner: bytes) -> None:
        super().__init__(reason)
        self.cause, self.inner = cause, inner


@dataclass
class _Noted:
    intruder: Intruder
    told_at: float = float("-inf")


class Gate:
    """The gate of one aggregator.

    Args:
        tables: None where no device can be enrolled.
        only: whether devices that are not enrolled are turned away.
    """

    def __init__(self, fleet: str, tables: EnrolmentTables | None, *, only: bool = False) -> None:
        self._fleet, self._tables, self._only = fleet, tables, only
        self._keys = {} if tables is None else tables.keys()
        self._rings = {device: Keyring([key]) for device, key in self._keys.items() if key is not None}
        self._noted: OrderedDict[tuple[str, str], _Noted] = OrderedDict()
        for intruder in reversed([] if tables is None else tables.intruders()):
            self._noted[intruder.device, intruder.cause] = _Noted(intruder)
        self._marks = {} if tables is None else tables.marks()
        self._unmarked: set[str] = set()  # topics
        self._unkept: set[tuple[str, str]] = set()
        self._over: set[tuple[str, str]] = set()  # what is no more, and still kept
        self._news: list[Intruder] = []
        self._kept_at = float("-inf")

    def reload(self) -> None:
        """Read the keys again: another process may have enrolled a device."""
        if self._tables is None:
            return
        before, self._keys = self._keys, self._tables.keys()
        self._rings = {device: Keyring([key]) for device, key in self._keys.items() if key is not None}
        for device, key in self._keys.items():
            if before.get(device) != key:
                self._renewed(device)

    @property
    def enrolled(self) -> Collection[str]:
        """The devices with a valid key."""
        return self._rings.keys()

    def key(self, device: str) -> bytes | None:
        """The public key of an enrolled device."""
        return self._keys.get(device)

    def opened(
        self,
        device: str,
        topic: str | None,
        payload: bytes,
        *,
        limit_bytes: int = MAX_MESSAGE_BYTES,
        is_ours: bool = False,
    ) -> Message:
        """Decode a message that came under the device's name on this topic.

        Args:
            topic: where it came; None for the device's `up` topic, which is then made only if a signature is checked.
            limit_bytes: a larger message is refused.
            is_ours: whether we have published it ourselves.

        Raises:
            Intrusion: the message is not the device's.
            WireError: the bytes are no message.
        """
        must_sign = device in self._keys or self._only
        try:
            message = decode(payload, limit_bytes=limit_bytes)
        except WireError as error:
            if must_sign and not is_ours:
                raise self._intrusion(device, None, payload, f"bytes that are no message: {error}") from None
            raise
        inner = message.payload if isinstance(message, Signed) else payload
        if must_sign and not is_ours:
            self._check(device, self.topic(device) if topic is None else topic, message, inner)
        return decode(inner) if isinstance(message, Signed) else message

    def _check(self, device: str, topic: str, message: Message, inner: bytes) -> None:
        ring = self._rings.get(device)
        if ring is None or not isinstance(message, Signed):
            raise self._intrusion(device, message, inner)
        try:
            ring.payload(message, topic)
        except SignatureError as error:
            if error.known:
                reason = f"signed with the key of {device}, but altered or for another topic"
                raise Intrusion("forged", reason, inner) from None
            raise self._intrusion(device, message, inner) from None

    def _intrusion(self, device: str, message: Message | None, inner: bytes, what: str = "") -> Intrusion:
        if device not in self._keys:
            return Intrusion("not-enrolled", f"{device} is not enrolled, fleet invite {device} gives a token", inner)
        if self._keys[device] is None:
            return Intrusion("revoked", f"the key of {device} was revoked, fleet invite {device} takes another", inner)
        if isinstance(message, Signed):
            return Intrusion("other-key", f"signed with key {message.key_id.hex()}, not that of {device}", inner)
        return Intrusion("unsigned", what or f"not signed, and {device} is enrolled with a key", inner)

    def check_news(self, device: str, topic: str, status: Status) -> None:
        """Check that a birth of an enrolled device is no older than the newest its key has signed for this topic.

        Raises:
            Intrusion: it was recorded, and is sent again.
        """
        if device not in self._rings or not status.online:
            return
        newest = self._marks.get(topic, 0)
        if status.issued < newest:
            causes = "recorded and sent again, or of a board whose state directory and clock were set back"
            raise Intrusion("replayed", f"birth {status.issued} after {newest}: {causes}, fleet invite {device}", b"")
        if status.issued > newest:
            self._marks[topic] = status.issued
            self._unmarked.add(topic)

    # ── enrolment ───────────────────────────────────────────────────────────────────────────────────────────────────

    def enrol(self, device: str, enrolment: Enrolment, payload: bytes, run: bytes, wall: float) -> Receipt:
        """Enrol a device, durably, if it proves that it was invited; returns the answer.

        Args:
            payload: the bytes that the device sent.
            wall: seconds since the epoch.

        Raises:
            StoreError: the disk refused.
        """
        reason = self._why_not(device, enrolment, wall)
        if not reason and self._keys.get(device) != enrolment.key:
            taken = self._take(device, enrolment.key, wall, by_token=True)
            reason = "" if taken else self._used(device, enrolment.key)
        digest = hashlib.sha256(payload).digest()[:8]
        return Receipt(run, 1, ENROL, "rejected" if reason else "committed", reason[:200], digest=digest)

    def _why_not(self, device: str, enrolment: Enrolment, wall: float) -> str:
        if self._keys.get(device) == enrolment.key:
            return ""  # it asks again, for an answer that was lost
        invitation = None if self._tables is None else self._tables.invitation(device)
        if invitation is None:
            return self._used(device, enrolment.key)
        key, expires = invitation
        if wall > expires:
            return f"the token of {device} has expired, fleet invite {device} gives another"
        if not token_proves(enrolment, self._fleet, device, key):
            return f"not the token of {device}'s invitation"
        if ed25519.is_weak(enrolment.key):
            return "a key for which anybody can sign"
        return ""

    def _used(self, device: str, key: bytes) -> str:
        """Why no invitation is open; empty where another process has just taken it for this key."""
        self.reload()
        return (
            ""
            if self._keys.get(device) == key
            else f"no invitation of {device} is open, fleet invite {device} gives a token"
        )

    def _take(self, device: str, key: bytes, wall: float, *, by_token: bool = False) -> bool:
        """Whether it was there to be taken: a token is used once, by whichever process."""
        assert self._tables is not None
        if not self._tables.enrol(device, key, wall, by_token=by_token):
            return False
        self._keys[device], self._rings[device] = key, Keyring([key])
        self._renewed(device)
        return True

    def _renewed(self, device: str) -> None:
        """It has another key: nothing of the one before holds."""
        self._unmark(device)
        for cause in INTRUSIONS:
            self._noted.pop((device, cause), None)
            self._unkept.discard((device, cause))

    def _unmark(self, device: str) -> None:
        """Another key has numbers of its own."""
        for topic in [topic for topic in self._marks if topic.endswith(f"/{device}")]:
            del self._marks[topic]
            self._unmarked.discard(topic)

    def obey(self, order: Order, wall: float) -> str | None:
        """Carry out an order about keys; returns its outcome, None for another order."""
        if order.what not in OF_ENROLMENT or self._tables is None:
            return None
        if order.what == "revoke":
            had_key = self._keys.get(order.device) is not None
            self._tables.revoke(order.device, wall)
            self._keys[order.device] = None
            self._rings.pop(order.device, None)
            self._unmark(order.device)
            return "done" if had_key else "done: no key of it was known"
        key, _, expires = order.detail.partition(" ")
        try:
            raw = bytes.fromhex(key)
            until = float(expires or 0)
        except ValueError:
            raw, until = b"", 0.0
        if len(raw) != KEY_BYTES or ed25519.is_weak(raw) or not abs(until) < 1e12:
            return "refused: that is no key"
        if order.what == "enrol":
            self._take(order.device, raw, wall)
            return f"done: key {key_id(raw).hex()}"
        self._tables.invite(order.device, raw, until)
        return "done"

    # ── who was turned away ─────────────────────────────────────────────────────────────────────────────────────────

    def note(
        self,
        device: str,
        cause: Cause,
        reason: str,
        wall: float,
        *,
        messages: int | None = None,
        tells: bool | None = None,
    ) -> None:
        """Note that a message under a device's name was turned away, or that the device reports it cannot take part.

        Args:
            messages: how many there were in all, if that is known.
            tells: whether the operator is told now; None for now and then.
            wall: seconds since the epoch.
        """
        key = (device, cause)
        noted = self._noted.pop(key, None) or _Noted(Intruder(device, cause, reason, 0, wall, wall))
        before = noted.intruder
        count = before.messages + 1 if messages is None else messages
        noted.intruder = replace(before, reason=reason[:200], messages=count, last_at=wall)
        self._noted[key] = noted
        while len(self._noted) > MAX_INTRUDERS:
            evicted = next((key for key in self._noted if not self._is_known(key[0])), next(iter(self._noted)))
            del self._noted[evicted]
            self._unkept.discard(evicted)
        self._unkept.add(key)
        self._over.discard(key)
        if tells or (tells is None and abs(wall - noted.told_at) >= _TELL_S):
            noted.told_at = wall
            self._news.append(noted.intruder)

    def forget(self, device: str, cause: Cause) -> None:
        """Drop a note that no longer holds; this becomes durable as notes do."""
        key = (device, cause)
        if self._noted.pop(key, None) is not None and self._tables is not None:
            self._unkept.discard(key)
            self._over.add(key)

    def _is_known(self, device: str) -> bool:
        """Whether it is a name that nobody invented: those must not push out what is known of the others."""
        return device in self._keys or device == topics.AGGREGATOR

    def take_news(self, wall: float) -> list[Intruder]:
        """The notes to report to the operator now; notes become durable now and then.

        Raises:
            StoreError: the disk refused.
        """
        waits = self._unkept or self._unmarked or self._over
        if waits and self._tables is not None and abs(wall - self._kept_at) >= _KEEP_S:
            self._kept_at = wall
            for device, cause in self._over:
                self._tables.forget(device, cause)
            self._over.clear()
            marks = {topic: self._marks[topic] for topic in self._unmarked}
            self._tables.keep([self._noted[key].intruder for key in self._unkept], marks)
            self._unkept.clear()
            self._unmarked.clear()
        news, self._news = self._news, []
        return news

    def topic(self, device: str) -> str:
        """The topic of a device's contributions."""
        return topics.up(self._fleet, device)


def inner_of(payload: bytes) -> bytes:
    """The encoded message inside a signed one, without a check of the signature; other bytes as they are."""
    try:
        message = decode(payload)
    except WireError:
        return payload
    return message.payload if isinstance(message, Signed) else payload


def read_enrolment(payload: bytes) -> Enrolment | None:
    """The enrolment in a device's message; None for any other message."""
    if len(payload) > _LONGEST_ENROLMENT:
        return None
    try:
        message = decode(payload)
    except WireError:
        return None
    return message if isinstance(message, Enrolment) else None
