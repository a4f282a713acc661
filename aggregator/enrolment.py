"""Whose message it is: a device that is enrolled is held to its key, and with `--enrolled` nobody else is heard.

    enrolled              what its key has signed for the topic that it came on is the device's; all else is not
    revoked               nothing is, until it is enrolled with another key
    never enrolled        is taken as it comes, signed or not; with `--enrolled` it is turned away

So on a broker that anyone may write to, a device's name is its own. A device is enrolled by an operator who has its
public key, or by itself with the one-time token of its invitation (`contract/signed.py`): what it sends proves that it
has the token, without showing it, and is of use for no other key.

A birth has a number above all that its key has signed before (`check_news`): one that was recorded would say again that
a bundle failed, how good a device was, that it is here.

Who is turned away is counted by device and cause, told to the operator now and then, and kept (`enrolment_store.py`).
The answer that goes out speaks of the bytes that came, by their digest, so it ends nothing of the honest device's, and
is paced apart from the answers to what is signed.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from aggregator.enrolment_store import MAX_INTRUDERS, EnrolmentTables, Intruder
from aggregator.standing_store import Order
from contract import ed25519, topics
from contract.envelopes import ENROL, KEY_BYTES
from contract.errors import SignatureError, WireError
from contract.messages import Enrolment, Message, Receipt, Signed, Status
from contract.signed import Keyring, key_id, token_proves
from contract.wire import MAX_MESSAGE_BYTES, decode

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
    """Of one aggregator.

    Args:
        tables: None where nobody can be enrolled.
        only: whether who is not enrolled is turned away.
    """

    def __init__(self, fleet: str, tables: EnrolmentTables | None, *, only: bool = False) -> None:
        self._fleet, self._tables, self._only = fleet, tables, only
        self._keys = {} if tables is None else tables.keys()
        self._rings = {device: Keyring([key]) for device, key in self._keys.items() if key is not None}
        self._noted: OrderedDict[tuple[str, str], _Noted] = OrderedDict()
        for each in reversed([] if tables is None else tables.intruders()):
            self._noted[each.device, each.cause] = _Noted(each)
        self._marks = {} if tables is None else tables.marks()
        self._unmarked: set[str] = set()  # topics
        self._unkept: set[tuple[str, str]] = set()
        self._over: set[tuple[str, str]] = set()  # what is no more, and still kept
        self._news: list[Intruder] = []
        self._kept_at = float("-inf")

    def reload(self) -> None:
        """Another process may have enrolled somebody."""
        if self._tables is None:
            return
        before, self._keys = self._keys, self._tables.keys()
        self._rings = {device: Keyring([key]) for device, key in self._keys.items() if key is not None}
        for device, key in self._keys.items():
            if before.get(device) != key:
                self._renewed(device)

    @property
    def enrolled(self) -> Collection[str]:
        """Devices whose key holds."""
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
        """What came under the device's name on this topic.

        Args:
            topic: where it came; its `up` topic when None, which is made only where a signature is checked.
            limit_bytes: a larger one is refused.
            is_ours: whether we have published it ourselves.

        Raises:
            Intrusion: it is not the device's.
            WireError: it is no message.
        """
        held = device in self._keys or self._only
        try:
            message = decode(payload, limit_bytes=limit_bytes)
        except WireError as error:
            if held and not is_ours:
                raise self._intrusion(device, None, payload, f"bytes that are no message: {error}") from None
            raise
        inner = message.payload if isinstance(message, Signed) else payload
        if held and not is_ours:
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
        """That a birth of an enrolled device is no older than the newest that its key has signed for this topic.

        Raises:
            Intrusion: it was recorded, and is sent again.
        """
        if device not in self._rings or not status.online:
            return
        newest = self._marks.get(topic, 0)
        if status.issued < newest:
            why = "recorded and sent again, or of a board whose state directory and clock were set back"
            raise Intrusion("replayed", f"birth {status.issued} after {newest}: {why}, fleet invite {device}", b"")
        if status.issued > newest:
            self._marks[topic] = status.issued
            self._unmarked.add(topic)

    # ── enrolment ───────────────────────────────────────────────────────────────────────────────────────────────────

    def enrol(self, device: str, enrolment: Enrolment, payload: bytes, run: bytes, wall: float) -> Receipt:
        """A device asks to be enrolled; it is, durably, if it proves that it was invited. What to answer.

        Args:
            payload: the bytes that it sent.
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
        found = None if self._tables is None else self._tables.invitation(device)
        if found is None:
            return self._used(device, enrolment.key)
        key, expires = found
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
        """Do what an order asks for; what became of it, None for an order of something else."""
        if order.what not in OF_ENROLMENT or self._tables is None:
            return None
        if order.what == "revoke":
            known = self._keys.get(order.device) is not None
            self._tables.revoke(order.device, wall)
            self._keys[order.device] = None
            self._rings.pop(order.device, None)
            self._unmark(order.device)
            return "done" if known else "done: no key of it was known"
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
        """A message under a device's name was turned away, or it says that it cannot take part.

        Args:
            messages: how many there were in all, where that is known.
            tells: whether it is told now; now and then when None.
            wall: seconds since the epoch.
        """
        key = (device, cause)
        noted = self._noted.pop(key, None) or _Noted(Intruder(device, cause, reason, 0, wall, wall))
        before = noted.intruder
        count = before.messages + 1 if messages is None else messages
        noted.intruder = replace(before, reason=reason[:200], messages=count, last_at=wall)
        self._noted[key] = noted
        while len(self._noted) > MAX_INTRUDERS:
            gone = next((key for key in self._noted if not self._is_known(key[0])), next(iter(self._noted)))
            del self._noted[gone]
            self._unkept.discard(gone)
        self._unkept.add(key)
        self._over.discard(key)
        if tells or (tells is None and abs(wall - noted.told_at) >= _TELL_S):
            noted.told_at = wall
            self._news.append(noted.intruder)

    def forget(self, device: str, cause: Cause) -> None:
        """It is over; durable as what was noted is."""
        key = (device, cause)
        if self._noted.pop(key, None) is not None and self._tables is not None:
            self._unkept.discard(key)
            self._over.add(key)

    def _is_known(self, device: str) -> bool:
        """Whether it is a name that nobody invented: those must not push out what is known of the others."""
        return device in self._keys or device == topics.AGGREGATOR

    def take_news(self, wall: float) -> list[Intruder]:
        """Who is to be told of now; what was noted is durable now and then.

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
        """Where a device's contributions come."""
        return topics.up(self._fleet, device)


def inner_of(payload: bytes) -> bytes:
    """The encoded message inside a signed one, whose signature is not looked at; what is given, where it is none."""
    try:
        message = decode(payload)
    except WireError:
        return payload
    return message.payload if isinstance(message, Signed) else payload


def read_enrolment(payload: bytes) -> Enrolment | None:
    """The enrolment in what a device sent; None where it is something else."""
    if len(payload) > _LONGEST_ENROLMENT:
        return None
    try:
        message = decode(payload)
    except WireError:
        return None
    return message if isinstance(message, Enrolment) else None
