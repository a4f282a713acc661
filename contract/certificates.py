"""Certificates of a connection that lasts: renewed ones are taken up, and who expires is told of in time.

A connection is made with the files as they are then (`contract/address.py`); one that lasts for months never reads them
again. So the link asks a `CertificateWatch` now and then, which looks at the files:

- They are others than those of this connection, and good: after a while, which differs between the members of a fleet,
  the link is to make its connection anew at a quiet moment. So a wrong file shows while somebody is there, not when the
  broker starts anew months later. Files that cannot be used are told of, and the connection stays.
- One of them, or the broker's certificate, expires soon: one line a day says so, and what helps.

Of a certificate or a revocation list only its two dates are read here (RFC 5280, 4.1.2.5 and 5.1.2.4), from DER without
a library: `cryptography` belongs to the extra `security`, and would take more of a small device's memory than TLS does.
"""

from __future__ import annotations

import binascii
import calendar
import os
import random
import re
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass

from contract.address import Address
from contract.durations import in_words
from contract.errors import UsageError

__all__ = ["CertificateWatch", "Expiry", "broker_validity", "expiries", "validity"]

LOOK_S = 60.0  # between two looks at the files
SPREAD_S = 120.0  # a whole fleet whose authority changed comes back over so long
_TOLD_EACH_S = 86_400.0
_SOON_S, _SOON_SHARE = 30 * 86_400.0, 1 / 6  # of its lifetime, where that is less
_PEM = re.compile(rb"-----BEGIN (CERTIFICATE|X509 CRL)-----(.*?)-----END \1-----", re.DOTALL)
_SEQUENCE, _TIMES = 0x30, {0x17: 12, 0x18: 14}  # tags of UTCTime and GeneralizedTime, and their digits

_HELP = {
    "certificate": "protofleet pki renew, and copying it here",
    "authority": "protofleet pki rotate-ca",
    "revocation list": "protofleet pki renew --crl, or nobody gets in any more",
    "broker's certificate": "protofleet pki renew broker, or nobody gets in any more",
}


@dataclass(frozen=True)
class Expiry:
    """Until when something is good.

    Attributes:
        what: `certificate`, `authority`, `revocation list` or `broker's certificate`.
        name: its file; the broker's address for its certificate.
        since, until: seconds since the epoch.
    """

    what: str
    name: str
    since: float
    until: float

    def is_soon(self, now: float) -> bool:
        """Whether it is time to do something: within 30 days, or the last sixth of a shorter lifetime."""
        return self.until - now < min(_SOON_S, _SOON_SHARE * (self.until - self.since))

    def words(self, now: float) -> str:
        """When it expires."""
        day = time.strftime("%Y-%m-%d", time.gmtime(self.until))
        left = self.until - now
        lasts = f"{left // 86_400:,.0f} days" if left >= 2 * 86_400 else in_words(left)
        return f"expires in {lasts}, on {day}" if left > 0 else f"expired on {day}"

    @property
    def help(self) -> str:
        """What to do about it."""
        return _HELP[self.what]

    def line(self, now: float) -> str:
        """When it expires, and what helps."""
        return f"{self.what} {self.name} {self.words(now)}: {self.help}"


# ── what the files say ──────────────────────────────────────────────────────────────────────────────────────────────


def expiries(address: Address) -> list[Expiry]:
    """What a connection hangs on, and until when, as the files are now. What cannot be read is left out.

    Of an authority's file its last certificate counts, of a certificate's its first, of revocation lists the first end.
    """
    found = []
    for what, name in (
        ("certificate", address.cert_file),
        ("authority", address.ca_file),
        ("revocation list", address.crl_file),
    ):
        spans = [] if name is None else validity(_read(name))
        if name is not None and spans:
            by_end = sorted(spans, key=lambda span: span[1])
            span = {"certificate": spans[0], "authority": by_end[-1], "revocation list": by_end[0]}[what]
            found.append(Expiry(what, name, *span))
    return found


def validity(pem: bytes) -> list[tuple[float, float]]:
    """From when until when each certificate or revocation list in a PEM file is good, in seconds since the epoch. What
    cannot be read is left out, a list that does not say until when among it."""
    found = []
    for match in _PEM.finditer(pem):
        try:
            found.append(_dates(binascii.a2b_base64(match[2])))
        except (ValueError, IndexError, OverflowError):
            continue
    return found


def _read(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


def _dates(der: bytes) -> tuple[float, float]:
    """The two times in the signed part: side by side in a list, in a sequence of their own in a certificate.

    Raises:
        ValueError, IndexError: there are none, or it is no DER.
    """
    ((_, start, end),) = _children(der, 0, len(der))
    _, start, end = next(iter([*_children(der, start, end)]))
    parts = list(_children(der, start, end))
    inner = [list(_children(der, start, end)) for tag, start, end in parts if tag == _SEQUENCE]
    (times,) = [found for each in (parts, *inner) if (found := [part for part in each if part[0] in _TIMES])]
    since, until = (_time(tag, der[start:end]) for tag, start, end in times)
    return since, until


def _children(der: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Tag, and start and end of the content, of each element between two places."""
    while at < end:
        tag, length, at = der[at], der[at + 1], at + 2
        if length & 0x80:
            octets = length & 0x7F
            length, at = int.from_bytes(der[at : at + octets], "big"), at + octets
        if at + length > end:
            raise ValueError("an element that is longer than what it stands in")
        yield tag, at, at + length
        at += length


def _time(tag: int, text: bytes) -> float:
    if not re.fullmatch(rb"\d{%d}Z" % _TIMES[tag], text):
        raise ValueError("another form of time than RFC 5280's")
    century = b"" if tag == 0x18 else b"19" if text >= b"50" else b"20"
    return float(calendar.timegm(time.strptime((century + text).decode(), "%Y%m%d%H%M%SZ")))


# ── while a connection lasts ────────────────────────────────────────────────────────────────────────────────────────


class CertificateWatch:
    """Looks after the files of an address; no thread, and two clocks from outside.

    Args:
        rng: for the time after which a renewed certificate is taken up.

    Attributes:
        broker: until when the certificate is good that the broker has shown last; None before it has.
    """

    def __init__(self, address: Address, rng: random.Random) -> None:
        self._address, self._rng = address, rng
        self._stamps: list[object] = []  # of the files that this connection was made with
        self._seen: list[object] = []  # that were last looked into
        self._look_at = float("-inf")
        self._read_at: list[object] | None = None
        self._found: list[Expiry] = []  # in the files as they were then
        self._told: dict[str, float] = {}  # what, and when it was last told of
        self._renew_at: float | None = None
        self.broker: Expiry | None = None

    def dialling(self, now: float) -> None:
        """A connection is being made, with the files as they are."""
        self._stamps = self._seen = self._stamp()
        self._renew_at = None
        self._look_at = min(self._look_at, now)

    def look(self, now: float, wall: float, peer: object = None) -> list[str]:
        """What a person is to be told now.

        Args:
            now: of a steady clock.
            wall: seconds since the epoch, as far as this machine knows.
            peer: the socket of the connection, which has the broker's certificate.
        """
        if not self._address.tls or now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        lines, stamp = [], self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            lines = self._changed(now)
        shown = broker_validity(peer)
        self.broker = self.broker if shown is None else Expiry("broker's certificate", str(self._address), *shown)
        for expiry in self._expiries():
            if expiry.is_soon(wall) and now - self._told.get(expiry.what, float("-inf")) >= _TOLD_EACH_S:
                lines.append(expiry.line(wall))
                self._told[expiry.what] = now
        return lines

    def renews(self, now: float) -> bool:
        """Whether the connection is to be made anew, with other files; told once."""
        due = self._renew_at is not None and now >= self._renew_at
        self._renew_at = None if due else self._renew_at
        return due

    def _expiries(self) -> list[Expiry]:
        """The files are read when they are others; they may hold every authority of a system."""
        stamp = [*self._seen, None if self._address.crl_file is None else _of_file(self._address.crl_file)]
        if self._read_at != stamp:
            self._read_at, self._found = stamp, expiries(self._address)
        return self._found if self.broker is None else [*self._found, self.broker]

    def _changed(self, now: float) -> list[str]:
        """Other files than before: are they those of the connection again, and if not, can they be used?"""
        self._renew_at = None
        if self._seen == self._stamps:
            return []
        try:
            self._address.tls_context()
        except UsageError as error:
            return [f"certificate files have changed, but cannot be used: {error}"]
        self._renew_at = now + self._rng.uniform(0.0, SPREAD_S)
        self._told.clear()  # the new ones may be no better
        return []

    def _stamp(self) -> list[object]:
        """What tells one state of the files from another."""
        names = (self._address.ca_file, self._address.cert_file, self._address.key_file)
        return [_of_file(name) for name in names if name is not None]


def _of_file(name: str) -> object:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def broker_validity(sock: object) -> tuple[float, float] | None:
    """From when until when the certificate is good that the peer of a TLS connection has shown."""
    try:
        shown = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
        since, until = (str((shown or {})[name]) for name in ("notBefore", "notAfter"))
        return float(ssl.cert_time_to_seconds(since)), float(ssl.cert_time_to_seconds(until))
    except (KeyError, OSError, ValueError):  # none was shown, or the handshake is not done
        return None
