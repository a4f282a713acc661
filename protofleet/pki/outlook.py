"""How an authority stands: who has which certificate until when, and what to see to before it expires."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from contract.certificates import Expiry
from contract.durations import in_words
from protofleet.pki.book import Book, Issued

__all__ = ["Entry", "entries", "on", "warnings"]


@dataclass(frozen=True)
class Entry:
    """One line of the list.

    Attributes:
        state: `good`, `soon`, `expired`, `revoked`, `old` for one of the authority that is to go, `gone` for one of an
            authority that went.
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
    """The authority and its revocation list, then the newest certificate of each name; or every one that is kept."""
    for number, each in enumerate(book.authorities):
        state, words = _state(each.since, each.until, now)
        if number < len(book.authorities) - 1:
            state, words = "old", "goes with rotate-ca --finish"
        yield Entry(f"authority {each.id}", "authority", (), each.since, each.until, state, words, authority=each.id)
    for each in book.authorities:
        state, words = _state(each.list_since, each.list_until, now)
        span = each.list_since, each.list_until
        yield Entry("revocation list", "revocation list", (), *span, state, words, authority=each.id)
    for name in sorted(book.members, key=lambda name: (book.members[name].role == "device", name)):
        newest = book.newest(name)
        shown = [each for each in book.issued if each.name == name] if every else [newest] if newest else []
        yield from (_entry(book, each, now) for each in shown)


def _entry(book: Book, issued: Issued, now: int) -> Entry:
    member = book.members[issued.name]
    state, words = _state(issued.since, issued.until, now)
    if issued.authority != book.authorities[-1].id and state != "expired":
        known = issued.authority in [each.id for each in book.authorities]
        state, words = ("old", "of the old authority: renew it") if known else ("gone", "of an authority that went")
        if known and issued.name == "broker":  # which keeps it until the end, since devices know the old one
            words = "of the old authority until rotate-ca --finish"
    if issued.revoked is not None:
        state, words = "revoked", f"revoked on {on(issued.revoked)}"
    return Entry(
        issued.name, member.role, member.fleets, issued.since, issued.until, state, words,
        issued.serial, issued.authority, issued.revoked,
    )  # fmt: skip


def _state(since: int, until: int, now: int) -> tuple[str, str]:
    if until <= now:
        return "expired", "expired"
    if Expiry("certificate", "", since, until).is_soon(now):
        return "soon", f"expires in {in_words(until - now)}"
    return "good", ""


def warnings(book: Book, now: int) -> list[str]:
    """What is to be done soon, or should have been: one line for each thing."""
    help_for = {
        "authority": "protofleet pki rotate-ca",
        "revocation list": "protofleet pki renew --crl, or nobody gets in any more",
        "broker": "protofleet pki renew broker, or nobody gets in any more",
    }
    lines = []
    for each in entries(book, now):
        if each.state in ("soon", "expired"):
            what = each.name if each.role in help_for else f"the certificate of {each.name}"
            what = f"the certificate of the {each.name}" if each.role == "broker" else what
            when = "expires" if each.state == "soon" else "expired"
            helps = help_for.get(each.role, f"protofleet pki renew {each.name}")
            lines.append(f"{what} {when} on {on(each.until)}: {helps}")
    return lines


def on(seconds: int) -> str:
    """The day, in UTC."""
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))
