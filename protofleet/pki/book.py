"""What a fleet's authority has issued: `pki.json` in its directory, and who may change it at a time.

The book is the truth; the broker's files follow from it and can be made anew at any time. It is written whole or not at
all. A certificate is in the book before its file is written, so that whatever exists can be revoked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from contract.errors import InUseError, StoreError, UsageError
from contract.files import lock, own_directory, whole_file
from protofleet.pki.names import Role

__all__ = ["BOOK", "Authority", "Book", "Issued", "Member", "held", "read_book", "write_book", "write_secret"]

BOOK = "pki.json"
SCHEMA = "protofleet.pki.book/1"


class Authority(msgspec.Struct, kw_only=True):
    """An authority: `authority/ID.pem` and `authority/ID.key`.

    Attributes:
        since, until: of its certificate, in seconds since the epoch, as all times here.
        lists: how many revocation lists it has signed.
        list_since, list_until: of its newest list.
    """

    id: str
    since: int
    until: int
    lists: int = 0
    list_since: int = 0
    list_until: int = 0


class Member(msgspec.Struct, kw_only=True, frozen=True):
    """Somebody with a certificate.

    Attributes:
        fleets: whose topics it may use.
        read, write: topics of something that is no part of a fleet.
    """

    role: Role
    fleets: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


class Issued(msgspec.Struct, kw_only=True):
    """A certificate; `serial` in hex, `revoked` when."""

    name: str
    serial: str
    authority: str
    since: int
    until: int
    revoked: int | None = None


class Book(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """All of it.

    Attributes:
        hosts, port: by which devices reach the broker.
        place: the directory on the broker's machine that its files lie in.
        days, list_days: how long certificates and revocation lists are good.
        fleets: the first one's aggregator is called `aggregator`.
        authorities: one, or during a rotation two: the older first.
        issued: in order.
    """

    schema: str = SCHEMA
    hosts: tuple[str, ...]
    port: int
    place: str
    days: int
    list_days: int
    fleets: list[str]
    authorities: list[Authority]
    members: dict[str, Member] = {}
    issued: list[Issued] = []

    def newest(self, name: str) -> Issued | None:
        """The newest certificate of that name."""
        return next((each for each in reversed(self.issued) if each.name == name), None)

    def is_revoked(self, name: str) -> bool:
        """Whether nobody of that name is let in any more."""
        newest = self.newest(name)
        return newest is not None and newest.revoked is not None

    def live(self) -> dict[str, Member]:
        """Members that are not revoked."""
        return {name: member for name, member in self.members.items() if not self.is_revoked(name)}


def read_book(directory: Path) -> Book:
    """The book of a directory.

    Raises:
        UsageError: there is none, or it is something else.
    """
    try:
        raw = (directory / BOOK).read_bytes()
    except OSError as error:
        hint = f"protofleet pki init {directory} --broker HOST"
        raise UsageError(f"--dir {directory}", expected="an authority's", got=error.strerror, hint=hint) from None
    try:
        book = msgspec.json.decode(raw, type=Book)
        if book.schema != SCHEMA or not 1 <= len(book.authorities) <= 2 or not book.fleets:
            raise ValueError(f"{book.schema}")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{directory / BOOK}", expected=SCHEMA, got=error, hint="a release that knows it, or your copy"
        ) from None
    return book


def write_book(directory: Path, book: Book) -> None:
    """Put it on the disk."""
    write_secret(directory / BOOK, msgspec.json.format(msgspec.json.encode(book), indent=1) + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """A file for its owner alone, whole or not at all.

    Raises:
        StoreError: the disk refuses.
    """
    for folder in (path.parent.parent, path.parent):  # one by one: `parents` of mkdir would be open to all
        own_directory(folder, f"ls -ld {folder}")
    try:
        with whole_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
    except OSError as error:
        raise StoreError(f"cannot write {path}", expected="a disk that takes it", got=error.strerror) from None


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep others from changing the directory for as long as the block lasts.

    Raises:
        InUseError: somebody else is.
        StoreError: it cannot be written to.
    """
    try:
        descriptor = lock(directory / "pki.lock")
    except BlockingIOError:
        raise InUseError(f"--dir {directory}", expected="one command at a time", got="another process") from None
    except OSError as error:
        got = error.strerror
        raise StoreError(f"--dir {directory}", expected="a directory that can be written", got=got) from None
    try:
        yield
    finally:
        os.close(descriptor)
