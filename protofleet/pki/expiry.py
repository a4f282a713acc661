"""The state of an authority: who has which certificate until when, and what to renew before it expires."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from protofleet.contract.console.durations import in_words
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.pki.register import Book, Issued

__all__ = ["Entry", "entries", "on", "warnings"]


@dataclass(frozen=True)
class Entry:
    """One line of the list.

    Attributes:
        state: `good`, `soon`, `expired` or `revoked`; `old` for a certificate of the authority that will be dropped,
            `gone` for one of an authority that was dropped.
        words: the state, for a person.
    """

    name: str
    role: str
    fleets: tuple[str, ...]
    since: int
    until: int
    state: str
    words: str
    serial: str = ""
    authority: str = ""
    revoked: int | None = None


def entries(book: Book, now: int, *, every: bool = False) -> Iterator[Entry]:
    """The authorities and their revocation lists, then the newest certificate of each name, or with `every` all."""
    for number, authority in enumerate(book.authorities):
        state, text = _state(authority.since, authority.until, now)
        if number < len(book.authorities) - 1:
            state, text = "old", "goes with rotate-ca --finish"
        span = authority.since, authority.until
        yield Entry(f"authority {authority.id}", "authority", (), *span, state, text, authority=authority.id)
    for authority in book.authorities:
        span = authority.list_since, authority.list_until
        state, text = _state(*span, now)
        yield Entry("revocation list", "revocation list", (), *span, state, text, authority=authority.id)
    for name in sorted(book.members, key=lambda name: (book.members[name].role == "device", name)):
        newest = book.newest(name)
        shown = [issued for issued in book.issued if issued.name == name] if every else [newest] if newest else []
        yield from (_entry(book, certificate, now) for certificate in shown)


def _entry(book: Book, issued: Issued, now: int) -> Entry:
    member = book.members[issued.name]
    state, text = _state(issued.since, issued.until, now)
    if issued.authority != book.authorities[-1].id and state != "expired":
        known = issued.authority in [authority.id for authority in book.authorities]
        state, text = ("old", "of the old authority: renew it") if known else ("gone", "of an authority that went")
        if known and issued.name == "broker":  # it keeps this one until the end: devices trust the old authority
            text = "of the old authority until rotate-ca --finish"
    if issued.revoked is not None:
        state, text = "revoked", f"revoked on {on(issued.revoked)}"
    return Entry(
        issued.name, member.role, member.fleets, issued.since, issued.until, state, text,
        issued.serial, issued.authority, issued.revoked,
    )  # fmt: skip


def _state(since: int, until: int, now: int) -> tuple[str, str]:
    if until <= now:
        return "expired", "expired"
    if Expiry("certificate", "", since, until).is_soon(now):
        return "soon", f"expires in {in_words(until - now)}"
    return "good", ""


def warnings(book: Book, now: int) -> list[str]:
    """One line for everything that expires soon or has expired, with the command that helps."""
    help_for = {
        "authority": "protofleet pki rotate-ca",
        "revocation list": "protofleet pki renew --crl, or nobody gets in any more",
        "broker": "protofleet pki renew broker, or nobody gets in any more",
    }
    lines = []
    for entry in entries(book, now):
        if entry.state in ("soon", "expired"):
            what = entry.name if entry.role in help_for else f"the certificate of {entry.name}"
            what = f"the certificate of the {entry.name}" if entry.role == "broker" else what
            when = "expires" if entry.state == "soon" else "expired"
            helps = help_for.get(entry.role, f"protofleet pki renew {entry.name}")
            lines.append(f"{what} {when} on {on(entry.until)}: {helps}")
    return lines


def on(seconds: int) -> str:
    """The day, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
