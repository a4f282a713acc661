"""Notices to the operator: what begins to need care, and what is over, by webhook, MQTT or e-mail.

`Notices` compares what needs care now with what each place was told. One message has all that is new. The next comes
`PACE_S` later at the earliest, so what comes and goes meanwhile is not told. A message that could not be sent is tried
again, with what is so then.

A further way is its line in `SENDERS`. A URL may hold a password: no error and no log line shows it.
"""

from __future__ import annotations

import json
import re
import smtplib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from email.message import EmailMessage
from http.client import HTTPException
from types import MappingProxyType
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from protofleet.aggregator.overview.fleet_state import RUNBOOK, Care
from protofleet.contract.errors import LinkError, ProtofleetError, UsageError
from protofleet.contract.mqtt.address import Address, topic_of
from protofleet.contract.mqtt.link import Link, client_id
from protofleet.contract.names import listed
from protofleet.contract.printable import counted, printable, undisclosed

__all__ = ["PACE_S", "SENDERS", "Notice", "Notices", "Sender", "sender_of", "senders_of"]

PACE_S = 60.0
SCHEMA = "protofleet.notice/1"
_PATIENCE_S = 10.0
_LINES = 50
_ADDRESS = re.compile(r"""[^\s@.,:;<>"()[\]\\]+(\.[^\s@.,:;<>"()[\]\\]+)*@[^\s@,:;<>"()[\]\\]+""")
_OWN = "pf"  # the topics of fleets


@dataclass(frozen=True)
class Notice:
    """One message.

    Attributes:
        at: seconds since the epoch.
        sentence: how the fleet is.
        begun, over: what needs care now and did not before, and what does not any more.
    """

    at: float
    sentence: str
    begun: Sequence[Care]
    over: Sequence[Care]

    def to_json(self) -> bytes:
        def facts(cares: Iterable[Care]) -> list[dict[str, str]]:
            return [
                {
                    "device": printable(care.device),
                    "cause": care.cause,
                    "reason": printable(care.reason),
                    "runbook": f"{RUNBOOK}#{care.cause}",
                }
                for care in cares
            ]

        content = {"schema": SCHEMA, "at": self.at, "sentence": printable(self.sentence)}
        return json.dumps(content | {"begun": facts(self.begun), "over": facts(self.over)}).encode()

    def lines(self) -> list[str]:
        """For a person."""
        found = [printable(self.sentence), ""]
        for word, cares in (("", self.begun), ("over: ", self.over)):
            found += [f"{word}{care.line}" for care in cares[:_LINES]]
            found += [f"and {len(cares) - _LINES} more"] if len(cares) > _LINES else []
        return found


Sender = Callable[[Notice], None]
"""Sends a notice, and returns when it has arrived; raises OSError or ProtofleetError when it has not."""


class Notices:
    """What was told to each place.

    Args:
        senders: by what they are called in a log line.
        failed: is told of a place that cannot be reached, once until it can.
    """

    def __init__(self, senders: Mapping[str, Sender], failed: Callable[[str], None]) -> None:
        self._senders, self._failed = senders, failed
        self._told: dict[str, dict[tuple[str, str], Care]] = {name: {} for name in senders}
        self._due_at = dict.fromkeys(senders, float("-inf"))
        self._is_down = set[str]()

    def turn(self, cares: Iterable[Care], sentence: str, now: float, at: float) -> None:
        """Tell each place what is new for it, if it is time.

        Args:
            now: seconds of a steady clock.
            at: seconds since the epoch.
        """
        present = {(care.device, care.cause): care for care in cares}
        for name, send in self._senders.items():
            told = self._told[name]
            begun = [care for key, care in present.items() if key not in told]
            over = [care for key, care in told.items() if key not in present]
            if now < self._due_at[name] or not (begun or over):
                continue
            self._due_at[name] = now + PACE_S
            try:
                send(Notice(at, sentence, begun, over))
            except (OSError, ProtofleetError) as error:
                if name not in self._is_down:
                    self._failed(f"a notice to {name} was not sent, and is tried again: {_without_address(error)}")
                self._is_down.add(name)
            else:
                self._told[name] = present
                self._is_down.discard(name)


def senders_of(urls: Iterable[str]) -> dict[str, Sender]:
    """What sends to each place, by what it is called in a log line; those that would be called the same are numbered.

    Raises:
        UsageError: one is no such URL.
    """
    found: dict[str, Sender] = {}
    for url in dict.fromkeys(urls):
        name, send = sender_of(url)
        called, number = name, 1
        while called in found:
            number += 1
            called = f"{name} ({number})"
        found[called] = send
    return found


def sender_of(url: str) -> tuple[str, Sender]:
    """What a place is called in a log line, without a password, and what sends to it.

    Raises:
        UsageError: it is no such URL.
    """
    make = SENDERS.get(url.partition(":")[0].lower())
    if make is None:
        schemes = listed(f"{scheme}:" for scheme in SENDERS)
        raise UsageError("--notify", expected=f"a URL with {schemes}", got=undisclosed(url))
    return make(url)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is redirected did not arrive: the other address would be asked for a page, without the notice."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _is_host(name: str) -> bool:
    """Whether a name can be looked up."""
    try:
        return bool(name.encode("idna"))
    except UnicodeError:
        return False


def _webhook(url: str) -> tuple[str, Sender]:
    try:
        parts = urlsplit(url)
        name, is_whole = f"{parts.scheme}://{parts.hostname}", _is_host(parts.hostname or "") and parts.username is None
        _ = parts.port
    except ValueError:
        name, is_whole = "", False
    if not is_whole or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError("--notify", expected="https://HOST[:PORT]/PATH, without a user", got=undisclosed(url))

    opener = urllib.request.build_opener(_NoRedirect)

    def send(notice: Notice) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "protofleet"}
        request = urllib.request.Request(url, data=notice.to_json(), headers=headers, method="POST")
        try:
            with opener.open(request, timeout=_PATIENCE_S) as answer:
                answer.read(1)
        except HTTPException as error:
            raise OSError(f"no HTTP: {type(error).__name__}") from None

    return printable(name), send


def _mqtt(url: str) -> tuple[str, Sender]:
    found = topic_of(url)
    if found is None:
        expected, hint = "mqtts://[user[:password]@]HOST[:PORT]/TOPIC", "mqtt://127.0.0.1/house/alerts"
        raise UsageError("--notify", expected=expected, got=undisclosed(url), hint=hint)
    address, topic = Address.parse(found[0]), found[1]
    if topic.split("/")[0] == _OWN or set(topic) & {"+", "#", "\0"} or topic.startswith("$"):
        raise UsageError("--notify", expected=f"a topic that is no fleet's, without + and #, not {_OWN}/…", got=topic)

    def send(notice: Notice) -> None:
        link = Link(address, client_id("notices", "operator"), subscriptions=[], content_type="application/json")
        link.open()
        try:
            link.wait_connected(_PATIENCE_S)
            sent, until_s = link.publish(topic, notice.to_json()), time.monotonic() + _PATIENCE_S
            while sent and not link.idle and time.monotonic() < until_s:
                link.receive(0.05)
            if not sent or not link.idle:
                raise LinkError(f"broker {address}", expected="to take a notice", got="no acknowledgement")
        finally:
            link.close()

    return f"{printable(topic)} at {address}", send


def _mail(url: str) -> tuple[str, Sender]:
    parts = urlsplit(url)
    to, given = unquote(parts.path), {name: values[-1] for name, values in parse_qs(parts.query).items()}
    host, _, port = given.pop("server", "localhost").partition(":")
    sender = given.pop("from", f"protofleet@{socket.gethostname()}")
    is_whole = all(map(_ADDRESS.fullmatch, (to, sender))) and f"{to}{sender}".isprintable() and _is_host(host)
    if not is_whole or given or not (port or "25").isdecimal() or int(port or 25) > 65_535:
        expected = "mailto:NAME@HOST[?server=HOST[:PORT]&from=NAME@HOST]"
        raise UsageError("--notify", expected=expected, got=undisclosed(url))

    def send(notice: Notice) -> None:
        message = EmailMessage()
        begun, over = counted(len(notice.begun), "thing"), counted(len(notice.over), "thing")
        message["From"], message["To"] = sender, to
        message["Subject"] = f"protofleet: {begun} to look at" if notice.begun else f"protofleet: {over} over"
        message.set_content("\n".join(notice.lines()) + "\n")
        with smtplib.SMTP(host, int(port or 25), timeout=_PATIENCE_S) as server:
            server.ehlo()
            if server.has_extn("starttls"):
                server.starttls()
            server.send_message(message)

    return f"{to} by {host}", send


SENDERS: Mapping[str, Callable[[str], tuple[str, Sender]]] = MappingProxyType(  # by the scheme of the URL
    {"https": _webhook, "http": _webhook, "mqtts": _mqtt, "mqtt": _mqtt, "mailto": _mail}
)


def _without_address(error: Any) -> str:
    """What went wrong, without a URL that it may cite."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    if isinstance(error, urllib.error.URLError):
        return printable(str(error.reason))
    if isinstance(error, smtplib.SMTPException):
        return type(error).__name__
    return printable(str(error))
