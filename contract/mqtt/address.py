"""The address of the broker, and the certificate files that belong to it.

- Every error in them is found when a command starts, and is reported in one line.
- The files are read again for each connection, so a certificate can be renewed while a process runs.
- A URL is read by one strict pattern. User and password stand before the last @. They hold no / ? # and no white space,
  except as %XX. Otherwise a part of a password could be read as a host or a port, looked up in the DNS, and printed.
- Of a text that does not match, an error tells only the length.

A further transport is its line in `TRANSPORTS`.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import unquote

from protofleet.contract.errors import UsageError
from protofleet.contract.names import known, listed
from protofleet.contract.printable import undisclosed

__all__ = ["EVERYWHERE", "LOOPBACK", "TRANSPORTS", "Address", "Transport", "in_url", "parse_listen", "topic_of"]

LOOPBACK = ("127.0.0.1", "::1", "localhost")  # this machine alone
EVERYWHERE = ("0.0.0.0", "::")  # every address of this machine


@dataclass(frozen=True)
class Transport:
    """How the bytes of a connection travel.

    Attributes:
        port: where the URL names none.
        tls: whether they are encrypted, and the certificate files of use.
    """

    port: int
    tls: bool


TRANSPORTS: Mapping[str, Transport] = MappingProxyType(  # by the scheme of the URL
    {"mqtt": Transport(1883, tls=False), "mqtts": Transport(8883, tls=True)}
)
_URL = re.compile(
    rf"(?i:(?P<scheme>{'|'.join(TRANSPORTS)}))://"
    r"(?:(?P<user>[^:/?#\s\x00-\x1f\x7f]*)(?::(?P<password>[^/?#\s\x00-\x1f\x7f]*))?@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63})*\.?))"
    r"(?::(?P<port>[0-9]{0,5}))?/?"
)
_WITH_TOPIC = re.compile(  # an @ behind the / may end a password
    rf"(?P<broker>(?i:{'|'.join(TRANSPORTS)})://[^/?#]+)/(?P<topic>[^?#@]+)"
)
_EXPECTED = f"{listed(f'{scheme}://host[:port]' for scheme in TRANSPORTS)}, in user and password / ? # as %XX"


@dataclass(frozen=True)
class Address:
    """Where the broker is, from `mqtt://[user[:password]@]host[:port]` or `mqtts://…`.

    Attributes:
        scheme: of `TRANSPORTS`.
        ca_file, cert_file, key_file: PEM files for TLS; the system's authorities when ca_file is None. The key may
            stand in cert_file.
        crl_file: PEM file of the broker's revocation list. Only the end of its validity is read.
    """

    host: str
    port: int
    scheme: str = "mqtt"
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    crl_file: str | None = None

    def __post_init__(self) -> None:
        known(TRANSPORTS, self.scheme, "broker")

    @property
    def tls(self) -> bool:
        """Whether the connection is encrypted."""
        return TRANSPORTS[self.scheme].tls

    def remedy(self, reason: str) -> str:
        """What to try where no broker answers here, after what was heard of it last."""
        if not self.tls:
            return "protofleet broker"
        if "Connection refused" in reason:  # nothing listens: no certificate has been looked at
            return "starting the broker there, or another port"
        return "protofleet pki list"

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        ca_file: str | None = None,
        cert_file: str | None = None,
        key_file: str | None = None,
        crl_file: str | None = None,
    ) -> Address:
        """The address that `url` names.

        Raises:
            UsageError: when it is not such a URL, or a certificate file is missing, unreadable, of no use without
                another, or given for a connection that is not encrypted.
        """
        parts = _URL.fullmatch(url)
        if parts is None or int(parts["port"] or 0) > 65_535:
            raise UsageError("broker", expected=_EXPECTED, got=undisclosed(url), hint="mqtt://127.0.0.1:1883")
        scheme, host = parts["scheme"].lower(), (parts["ipv6"] or parts["host"]).lower()
        user, password = (unquote(text) if text else None for text in (parts["user"], parts["password"]))
        port = int(parts["port"] or 0) or TRANSPORTS[scheme].port
        address = cls(host, port, scheme, user, password, ca_file, cert_file, key_file, crl_file)
        if address.tls:
            address.tls_context()
        elif ca_file or cert_file or key_file or crl_file:
            raise UsageError("a certificate file", expected="mqtts://", got=str(address), hint=f"mqtts://{host}")
        return address

    def tls_context(self) -> ssl.SSLContext:
        """The context of a TLS connection to this address, made from its files as they are now.

        Raises:
            UsageError: when a file is missing or not what it should be.
        """
        for name in (self.ca_file, self.cert_file, self.key_file, self.crl_file):
            if name is not None:
                _check_readable(name)
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise _unusable("CA", "certificates of an authority in PEM", self.ca_file, error) from None
        if self.cert_file is not None:
            key_file = self.key_file or self.cert_file
            try:  # without a password, openssl would ask the terminal for that of an encrypted key
                context.load_cert_chain(self.cert_file, key_file, password="")
            except OSError as error:
                expected = f"a certificate in PEM and its key without a password in {key_file}"
                raise _unusable("certificate", expected, self.cert_file, error) from None
        elif self.key_file is not None:
            raise UsageError("TLS key", expected="its certificate, too", got=f"{self.key_file} alone", hint="--cert")
        return context

    def of_process(self, process: str) -> Address:
        """The address for a second connection of the same owner.

        Its certificate is `NAME.PROCESS.pem` where such a file lies beside the certificate `NAME.pem`. The file holds
        certificate and key. A broker that binds client ids to certificates allows one session for each certificate.
        """
        if self.cert_file is None:
            return self
        stem, suffix = os.path.splitext(self.cert_file)
        own = f"{stem}.{process}{suffix}"
        return replace(self, cert_file=own, key_file=None) if os.path.isfile(own) else self

    def __str__(self) -> str:
        return f"{self.scheme}://{self.host}:{self.port}"


def _check_readable(name: str) -> None:
    got: str | None = None
    try:
        if not os.path.isdir(name):
            os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        got = error.strerror
    if got is not None or not os.path.isfile(name):
        raise UsageError(f"TLS file {name}", expected="a PEM file", got=got or "something else", hint=f"ls -l {name}")


def _unusable(what: str, expected: str, name: str | None, error: OSError) -> UsageError:
    """The error of a certificate file in one line. The message of ssl itself names a line of openssl's source."""
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "what openssl cannot read").replace("_", " ").lower()
    else:
        reason = error.strerror or type(error).__name__
    return UsageError(f"TLS {what} {name}", expected=expected, got=reason)


def parse_listen(text: str, option: str = "--listen", hint: str = "127.0.0.1:1883") -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Args:
        option, hint: for the error.

    Raises:
        UsageError: when it is no such text.
    """
    match = re.fullmatch(r"\[?([^\[\]\s\"]+)\]?:(\d{1,5})", text)
    if match is None or not 0 <= int(match[2]) <= 65_535:
        raise UsageError(option, expected="HOST:PORT", got=text, hint=hint)
    return match[1], int(match[2])


def in_url(host: str) -> str:
    """A host as it stands in a URL: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def topic_of(url: str) -> tuple[str, str] | None:
    """The broker's URL and the topic, unquoted, of `mqtt://BROKER/TOPIC`; None where it is no such text."""
    parts = _WITH_TOPIC.fullmatch(url)
    return None if parts is None else (parts["broker"], unquote(parts["topic"]))
