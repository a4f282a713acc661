"""The certificates of a long connection: renewed files are taken up, and a person is told in time which one expires.

A connection is made with the files as they are at that moment (`contract/mqtt/address.py`). A connection that lasts for
months never reads them again. So the link asks a `CertificateWatch` at intervals, and the watch looks at the files:

- **The files have changed, and are good.** After a delay, the link makes its connection anew at a quiet moment. The
  delay differs between the members of a fleet. So a wrong file shows while somebody is there, and not when the broker
  starts again months later.
- **The files have changed, and cannot be used.** A person is told, and the connection stays.
- **A file or the broker's certificate expires soon.** One line a day says so, and says what helps.

Of a certificate or a revocation list only the two dates are read here, from DER (RFC 5280, 4.1.2.5 and 5.1.2.4),
without a library. `cryptography` belongs to the extra `security`, and on a small device it would take more memory than
TLS does.
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

from protofleet.contract.console.durations import in_words
from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import Address

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
    """The validity of one certificate or revocation list.

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
        """Whether it ends within 30 days, or within the last sixth of a lifetime where that is less."""
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
    """The validity of the files of an address, as they are now. A file that cannot be read is left out.

    In a certificate's file the first certificate counts. In an authority's file the one that ends last counts. Of
    revocation lists the one that ends first counts.
    """
    expiring = []
    for what, name in (
        ("certificate", address.cert_file),
        ("authority", address.ca_file),
        ("revocation list", address.crl_file),
    ):
        spans = [] if name is None else validity(_read(name))
        if name is not None and spans:
            by_end = sorted(spans, key=lambda span: span[1])
            span = {"certificate": spans[0], "authority": by_end[-1], "revocation list": by_end[0]}[what]
            expiring.append(Expiry(what, name, *span))
    return expiring


def validity(pem: bytes) -> list[tuple[float, float]]:
    """Start and end of each certificate or revocation list in a PEM file, in seconds since the epoch.

    What cannot be read is left out. So is a revocation list that names no end.
    """
    periods = []
    for match in _PEM.finditer(pem):
        try:
            periods.append(_dates(binascii.a2b_base64(match[2])))
        except (ValueError, IndexError, OverflowError):
            continue
    return periods


def _read(name: str) -> bytes:
    try:
        with open(name, "rb") as file:
            return file.read(1 << 20)
    except OSError:
        return b""


def _dates(der: bytes) -> tuple[float, float]:
    """The two times in the signed part of a certificate or of a revocation list.

    In a list they stand side by side; in a certificate they have a sequence of their own.

    Raises:
        ValueError, IndexError: there are no such times, or the bytes are no DER.
    """
    ((_, start, end),) = _children(der, 0, len(der))
    _, start, end = next(iter([*_children(der, start, end)]))
    parts = list(_children(der, start, end))
    inner = [list(_children(der, start, end)) for tag, start, end in parts if tag == _SEQUENCE]
    times_of = ([part for part in candidates if part[0] in _TIMES] for candidates in (parts, *inner))
    (times,) = [times for times in times_of if times]
    since, until = (_time(tag, der[start:end]) for tag, start, end in times)
    return since, until


def _children(der: bytes, position: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Of each DER element between two positions: its tag, and the start and end of its content."""
    while position < end:
        tag, length, position = der[position], der[position + 1], position + 2
        if length & 0x80:
            octets = length & 0x7F
            length, position = int.from_bytes(der[position : position + octets], "big"), position + octets
        if position + length > end:
            raise ValueError("an element that is longer than what it stands in")
        yield tag, position, position + length
        position += length


def _time(tag: int, text: bytes) -> float:
    if not re.fullmatch(rb"\d{%d}Z" % _TIMES[tag], text):
        raise ValueError("another form of time than RFC 5280's")
    century = b"" if tag == 0x18 else b"19" if text >= b"50" else b"20"
    return float(calendar.timegm(time.strptime((century + text).decode(), "%Y%m%d%H%M%SZ")))


# ── while a connection lasts ────────────────────────────────────────────────────────────────────────────────────────


class CertificateWatch:
    """Watches the certificate files of an address. It has no thread; the caller passes the time of two clocks.

    Args:
        rng: draws the delay before a renewed certificate is taken up.

    Attributes:
        broker: the validity of the certificate that the broker showed last; None before it has shown one.
    """

    def __init__(self, address: Address, rng: random.Random) -> None:
        self._address, self._rng = address, rng
        self._stamps: list[object] = []  # of the files that this connection was made with
        self._last_stamps: list[object] = []  # of the files at the last look
        self._look_at = float("-inf")
        self._read_at: list[object] | None = None  # the stamps of the files that `_file_expiries` is from
        self._file_expiries: list[Expiry] = []
        self._told_at: dict[str, float] = {}  # `Expiry.what` → when a person was last told of it
        self._renew_at: float | None = None
        self.broker: Expiry | None = None

    def dialling(self, now: float) -> None:
        """Note that a connection is being made with the files as they are now."""
        self._stamps = self._last_stamps = self._stamp()
        self._renew_at = None
        self._look_at = min(self._look_at, now)

    def look(self, now: float, wall: float, peer: object = None) -> list[str]:
        """Look at the files, at most once in `LOOK_S`; the lines that a person is to be told now.

        Args:
            now: seconds of a steady clock.
            wall: seconds since the epoch, by this machine's clock.
            peer: the socket of the connection, which knows the broker's certificate.
        """
        if not self._address.tls or now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        lines, stamp = [], self._stamp()
        if stamp != self._last_stamps:
            self._last_stamps = stamp
            lines = self._changed(now)
        shown = broker_validity(peer)
        self.broker = self.broker if shown is None else Expiry("broker's certificate", str(self._address), *shown)
        for expiry in self._expiries():
            if expiry.is_soon(wall) and now - self._told_at.get(expiry.what, float("-inf")) >= _TOLD_EACH_S:
                lines.append(expiry.line(wall))
                self._told_at[expiry.what] = now
        return lines

    def renews(self, now: float) -> bool:
        """Whether the connection is to be made anew with changed files. True only once for each change."""
        due = self._renew_at is not None and now >= self._renew_at
        self._renew_at = None if due else self._renew_at
        return due

    def _expiries(self) -> list[Expiry]:
        """The validity of all files, and of the broker's certificate. Files are read again only when they have changed,
        because they may hold every authority of a system."""
        stamp = [*self._last_stamps, None if self._address.crl_file is None else _of_file(self._address.crl_file)]
        if self._read_at != stamp:
            self._read_at, self._file_expiries = stamp, expiries(self._address)
        return self._file_expiries if self.broker is None else [*self._file_expiries, self.broker]

    def _changed(self, now: float) -> list[str]:
        """Check files that have changed: nothing to do where they are those of the connection again; else they are
        tried, and the lines for a person are returned."""
        self._renew_at = None
        if self._last_stamps == self._stamps:
            return []
        try:
            self._address.tls_context()
        except UsageError as error:
            return [f"certificate files have changed, but cannot be used: {error}"]
        self._renew_at = now + self._rng.uniform(0.0, SPREAD_S)
        self._told_at.clear()  # the new ones may be no better
        return []

    def _stamp(self) -> list[object]:
        """A value for each file that differs where the file has changed."""
        names = (self._address.ca_file, self._address.cert_file, self._address.key_file)
        return [_of_file(name) for name in names if name is not None]


def _of_file(name: str) -> object:
    try:
        status = os.stat(name)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def broker_validity(sock: object) -> tuple[float, float] | None:
    """Start and end of the certificate that the peer of a TLS connection has shown; None where there is none."""
    try:
        shown = sock.getpeercert() if isinstance(sock, ssl.SSLSocket) else None
        since, until = (str((shown or {})[name]) for name in ("notBefore", "notAfter"))
        return float(ssl.cert_time_to_seconds(since)), float(ssl.cert_time_to_seconds(until))
    except (KeyError, OSError, ValueError):  # none was shown, or the handshake is not done
        return None
