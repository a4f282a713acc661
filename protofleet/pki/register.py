"""The book of an authority, `pki.json`: every certificate that it has issued. And the lock on its directory.

Guarantees:

- The book is authoritative. The broker's files follow from it and can be made again at any time.
- The book is written completely or not at all.
- A certificate is in the book before its file is written. So every certificate that exists can be revoked.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from protofleet.contract.errors import InUseError, StoreError, UsageError
from protofleet.contract.files.atomic_files import lock, own_directory, whole_file
from protofleet.pki.names import Role

__all__ = ["BOOK", "Authority", "Book", "Issued", "Member", "locked", "read_book", "write_book", "write_secret"]

BOOK = "pki.json"
SCHEMA = "protofleet.pki.book/1"


class Authority(msgspec.Struct, kw_only=True):
    """An authority: `authority/ID.pem` and `authority/ID.key`.

    Attributes:
        since, until: validity of its certificate, in seconds since the epoch, as all times here.
        lists: number of revocation lists that it has signed.
        list_since, list_until: validity of its newest list.
    """

    id: str
    since: int
    until: int
    lists: int = 0
    list_since: int = 0
    list_until: int = 0


class Member(msgspec.Struct, kw_only=True, frozen=True):
    """A holder of certificates.

    Attributes:
        fleets: the fleets whose topics it may use.
        read, write: topics that a member outside of all fleets may read and write.
    """

    role: Role
    fleets: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()


class Issued(msgspec.Struct, kw_only=True):
    """A certificate. `serial` is in hex; `revoked` is the time of its revocation."""

    name: str
    serial: str
    authority: str
    since: int
    until: int
    revoked: int | None = None


class Book(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The content of `pki.json`.

    Attributes:
        hosts, port: the broker's addresses and port for devices.
        place: the directory of the broker's files on its machine.
        days, list_days: how long certificates and revocation lists are valid.
        fleets: all fleets. The first one's aggregator is called `aggregator`.
        authorities: one, or two during a rotation, the older first.
        issued: all certificates in order of issue.
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
        return next((certificate for certificate in reversed(self.issued) if certificate.name == name), None)

    def is_revoked(self, name: str) -> bool:
        """Whether the newest certificate of that name is revoked."""
        newest = self.newest(name)
        return newest is not None and newest.revoked is not None

    def live(self) -> dict[str, Member]:
        """The members that are not revoked."""
        return {name: member for name, member in self.members.items() if not self.is_revoked(name)}


def read_book(directory: Path) -> Book:
    """Read the book of a directory.

    Raises:
        UsageError: there is none, or the file is no book.
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
    """Write the book to the disk."""
    write_secret(directory / BOOK, msgspec.json.format(msgspec.json.encode(book), indent=1) + b"\n")


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, completely or not at all.

    Raises:
        StoreError: the disk refuses.
    """
    for folder in (
        path.parent.parent,
        path.parent,
    ):  # one by one: mkdir's `parents` would make folders that others can read
        own_directory(folder, f"ls -ld {folder}")
    try:
        with whole_file(path) as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(content)
    except OSError as error:
        raise StoreError(f"cannot write {path}", expected="a disk that takes it", got=error.strerror) from None


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock the directory for the length of the block.

    Raises:
        InUseError: another process has locked it.
        StoreError: it cannot be written.
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
