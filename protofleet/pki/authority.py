"""What `protofleet pki` does with an authority's directory: issue, revoke, renew, rotate.

    DIR/pki.json                          the book: who has which certificate
    DIR/authority/ID.pem, ID.key          signs all certificates; this key never leaves the machine
    DIR/broker/                           for the broker: ca.pem, broker.pem, crl.pem, acl, mosquitto.conf
    DIR/aggregator/, helper/              for the aggregator's and the helper's machine: ca.pem, NAME.pem, crl.pem
    DIR/devices/ID/, others/NAME/         for each device or other member: ca.pem, ID.pem

`NAME.pem` is a certificate and its key in one file. `ca.pem` is the trusted authority, and during a rotation both.

Guarantees:

- A certificate and its key always match, however a command ends, since they are one file.
- One command changes the directory at a time.
- `acl`, `crl.pem`, `ca.pem` and `mosquitto.conf` follow from the book. Every command writes them, and so repairs what a
  killed command left.
- A folder that its owner deleted after copying is not made again until a new certificate is.

**A rotation** has two steps, because a device trusts the broker by the `ca.pem` that it has:

1. `rotate` makes the new authority. From then on it signs all members. The broker keeps its certificate of the old
   authority. Both authorities are trusted everywhere.
2. When all members have been renewed, `finish_rotation` gives the broker a certificate of the new authority and drops
   the old one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from protofleet.contract.console.durations import in_words
from protofleet.contract.errors import StoreError, UsageError, near_names
from protofleet.contract.files.atomic_files import own_directory
from protofleet.contract.wire.topics import check_id
from protofleet.pki import names
from protofleet.pki.broker import access_rules, configuration
from protofleet.pki.register import BOOK, Authority, Book, Issued, Member, locked, read_book, write_book, write_secret
from protofleet.pki.x509 import SKEW_S, Signer, new_authority, new_member, read_signer, revocation_list, serials

__all__ = ["AUTHORITY_DAYS", "CERTIFICATE_DAYS", "LIST_DAYS", "PLACE", "Office", "establish"]

AUTHORITY_DAYS, CERTIFICATE_DAYS, LIST_DAYS = 1_825, 365, 180
PLACE = "/etc/mosquitto/protofleet"
_EVERYBODY = ("broker", "aggregator", "helper", "device", "other")


class Office:
    """An authority's directory while it is locked.

    Attributes:
        book: the directory's book. The methods change it; it is on the disk when they return.
    """

    def __init__(self, directory: Path, book: Book, now: int) -> None:
        self.directory, self.book, self._now = directory, book, now

    @classmethod
    @contextlib.contextmanager
    def open(cls, directory: Path, now: int | None = None) -> Iterator[Office]:
        """Lock a directory, and repair what a killed command left.

        Raises:
            UsageError: it is no authority's directory, or this machine's clock is wrong.
            StoreError: it cannot be written.
            InUseError: another process has locked it.
        """
        read_book(directory)  # before a lock file is made in a directory that is none
        with locked(directory):
            office = cls(directory, read_book(directory), int(time.time()) if now is None else now)
            office._check_clock()
            office._tidy()
            office._write_rules()
            yield office

    # ── members ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def admit(self, name: str, member: Member, days: int | None = None) -> bool:
        """Give a member a certificate. For a device that has one, only change its fleets.

        Args:
            days: how long it is valid; None for as long as `pki init` said.

        Returns:
            whether a new certificate was made.

        Raises:
            UsageError: the name is another's, nothing would change, or `days` are of a certificate that is there.
        """
        for fleet in member.fleets:
            if fleet not in self.book.fleets:
                hint = f"{near_names(fleet, self.book.fleets)}, or protofleet pki aggregator --fleet {fleet}"
                raise UsageError("--fleet", expected="a fleet that has an aggregator", got=fleet, hint=hint)
        known = self.book.members.get(name)
        if known is not None and known.role != member.role:
            raise UsageError(name, expected="a name that is free", got=f"that of the {known.role}")
        has_one = known is not None and not self.book.is_revoked(name) and self._is_written(name)
        if has_one and days is not None:
            hint = f"protofleet pki renew {name} --days {days}"
            raise UsageError("--days", expected="it for a new certificate", got=f"{name}, which has one", hint=hint)
        if has_one and known == member:
            hint = f"protofleet pki renew {name}"
            raise UsageError(name, expected="one that has no certificate", got="one that has", hint=hint)
        self.book.members[name] = member
        if has_one:
            self._write_files()
        else:
            self._issue(name, days=days)
        return not has_one

    def add_fleet(self, fleet: str) -> str:
        """Add a fleet with an aggregator; returns the aggregator's name.

        Raises:
            UsageError: the fleet has an aggregator already, or its name is not valid.
        """
        name = names.of_fleet("aggregator", check_id(fleet, "--fleet"), self.book.fleets[0])
        known = fleet in self.book.fleets
        process = names.process_of(name, names.ROLLOUT)
        if not known and {name, process} & self.book.members.keys():
            raise UsageError("--fleet", expected="a name that is free", got=fleet, hint=f"{fleet}-1")
        if not known:
            self.book.fleets.append(fleet)
        self.admit(name, Member(role="aggregator", fleets=(fleet,)))
        if self.book.newest(process) is None or self.book.is_revoked(process):
            self.admit(process, Member(role="aggregator", fleets=(fleet,)))
        return name

    def add_workers(self, fleet: str, count: int) -> list[str]:
        """Make certificates for the first `count` workers of a fleet's aggregator, for those that have none.

        Raises:
            UsageError: all have one, there is no such fleet, or a name is taken.
        """
        first = names.of_fleet("aggregator", check_id(fleet, "--fleet"), self.book.fleets[0])
        member, new = Member(role="aggregator", fleets=(fleet,)), list[str]()
        for name in (names.process_of(first, f"worker-{number}") for number in range(1, count + 1)):
            known = self.book.members.get(name)
            if known is not None and known != member:
                raise UsageError(name, expected="a name that is free", got=f"that of fleet {known.fleets[0]}")
            if known is None or self.book.is_revoked(name) or not self._is_written(name):
                for member_name in (name, names.process_of(name, names.ROLLOUT)):
                    self.admit(member_name, member)
                new.append(name)
        if not new:
            hint = f"protofleet pki renew {first}.worker-1"
            raise UsageError("--workers", expected="one more", got=f"{count}, who have certificates", hint=hint)
        return new

    def revoke(self, name: str) -> None:
        """Revoke all certificates of a name and of its further processes.

        Raises:
            UsageError: the name is unknown, already revoked, or the broker.
        """
        self._known(name)
        if name == names.BROKER:
            hint = "protofleet pki rotate-ca: devices read no revocation list"
            raise UsageError(name, expected="a client", got="the broker", hint=hint)
        if self.book.is_revoked(name):
            raise UsageError(name, expected="one that is let in", got="one that was revoked before")
        revoked_names = [name, *self._processes(name)]
        for certificate in self.book.issued:
            if certificate.name in revoked_names and certificate.revoked is None:
                certificate.revoked = self._now
        self._write_files()

    def renew(self, name: str, days: int | None = None) -> None:
        """Give a member a new key and certificate. The one before stays valid until it expires.

        Args:
            days: how long it is valid; None for as long as `pki init` said.

        Raises:
            UsageError: the name is unknown or revoked.
        """
        self._known(name)
        if self.book.is_revoked(name):
            hint = "protofleet pki device, if it may come back"
            raise UsageError(name, expected="one that is let in", got="one that was revoked", hint=hint)
        processes = [process for process in self._processes(name) if process.endswith(f".{names.ROLLOUT}")]
        for member_name in (name, *processes):
            self._issue(member_name, days=days)

    def renew_lists(self) -> None:
        """Sign the revocation lists again."""
        self._write_files()

    # ── the authority ───────────────────────────────────────────────────────────────────────────────────────────────

    def rotate(self, days: int) -> None:
        """Begin a rotation of the authority.

        Raises:
            UsageError: a rotation has begun already.
        """
        if len(self.book.authorities) > 1:
            hint = "protofleet pki rotate-ca --finish, when all have been renewed"
            raise UsageError("rotate-ca", expected="one authority", got="two: a rotation has begun", hint=hint)
        self.book.authorities.append(_make_authority(self.directory, self._now, days))
        self._write_files()

    def finish_rotation(self, *, leave_behind: bool = False) -> list[str]:
        """Drop the old authority; returns the members that are shut out by that.

        Args:
            leave_behind: drop it although some members have only certificates of the old authority.

        Raises:
            UsageError: no rotation has begun, or such members are left and `leave_behind` is not set.
        """
        if len(self.book.authorities) < 2:
            hint = "protofleet pki rotate-ca"
            raise UsageError("rotate-ca --finish", expected="a rotation that has begun", got="none", hint=hint)
        left = self.left_behind()
        if left and not leave_behind:
            some = ", ".join(left[:5]) + (f" and {len(left) - 5} more" if len(left) > 5 else "")
            hint = f"protofleet pki renew {left[0]}, or --leave-behind to shut them out"
            raise UsageError("rotate-ca --finish", expected="that all have been renewed", got=f"not {some}", hint=hint)
        self._issue(names.BROKER, self.book.authorities[-1])
        self.book.authorities.pop(0)
        self._write_files()
        self._tidy()
        return left

    def left_behind(self) -> list[str]:
        """Members whose newest certificate is of the authority that is to be dropped."""
        old = self.book.authorities[0].id
        if len(self.book.authorities) < 2:
            return []
        return sorted(
            name
            for name, member in self.book.live().items()
            if member.role != "broker"
            and (newest := self.book.newest(name)) is not None
            and newest.authority == old
            and newest.until > self._now
        )

    # ── files ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def folder(self, name: str) -> Path:
        """The folder that is copied to the member's machine."""
        role = self.book.members[name].role
        if role == "device" or role == "other":
            return self.directory / f"{role}s" / name
        if role == "broker":
            return self.directory / role
        return self.directory / names.of_fleet(role, self.book.members[name].fleets[0], self.book.fleets[0])

    def file(self, name: str) -> Path:
        """The file of the member's certificate and key."""
        return self.folder(name) / f"{name}.pem"

    def _processes(self, name: str) -> list[str]:
        """Names of further processes: all that begin with a device's name and a dot; of an aggregator its rollout."""
        if self.book.members[name].role in ("aggregator", "helper"):
            return [member for member in self.book.members if member == f"{name}.{names.ROLLOUT}"]
        return [member for member in self.book.members if member.startswith(f"{name}.")]

    def _is_written(self, name: str) -> bool:
        """Whether the file of that name holds its newest certificate."""
        newest = self.book.newest(name)
        try:
            return newest is not None and int(newest.serial, 16) in serials(self.file(name).read_bytes())
        except OSError:
            return False

    def _known(self, name: str) -> Member:
        if name not in self.book.members:
            hint = near_names(name, self.book.members)
            raise UsageError(name, expected="somebody who has a certificate", got="an unknown name", hint=hint)
        return self.book.members[name]

    def _check_clock(self) -> None:
        newest = SKEW_S + max(item.since for item in (self.book.authorities[-1], *self.book.issued))
        if self._now < newest - SKEW_S:
            late = in_words(newest - self._now)
            raise UsageError(
                "this machine's clock", expected="a time after the newest certificate", got=f"{late} before"
            )

    def _tidy(self) -> None:
        """Delete the keys of authorities that are not in the book."""
        known = {path for authority in self.book.authorities for path in self._authority_files(authority.id)}
        for path in (self.directory / "authority").glob("*"):
            if path not in known:
                path.unlink()

    def _issue(self, name: str, authority: Authority | None = None, days: int | None = None) -> None:
        """Make a key and a certificate. It is in the book before it is in its file.

        During a rotation the broker's certificate is of the old authority, unless `authority` is given. All others are
        of the new one.
        """
        is_broker = name == names.BROKER
        authority = authority or self.book.authorities[0 if is_broker else -1]
        signer = self._signer(authority)
        if signer.until <= self._now:
            hint = "protofleet pki rotate-ca"
            raise UsageError("the authority", expected="one that is good", got="one that has expired", hint=hint)
        hosts = [names.check_host(host) for host in self.book.hosts] if is_broker else []
        pem, serial, until = new_member(signer, name, self._now, days or self.book.days, hosts)
        since = self._now - SKEW_S
        self.book.issued.append(
            Issued(name=name, serial=f"{serial:x}", authority=authority.id, since=since, until=until)
        )
        write_book(self.directory, self.book)
        write_secret(self.file(name), pem)
        self._write_files()

    def _write_files(self) -> None:
        """Write the revocation lists, the book, and the files that follow from it.

        The lists are written first. If the command is killed in between, the book is behind them, and the next command
        signs them again.
        """
        signers = [self._signer(authority) for authority in self.book.authorities]  # before anything is changed
        lists = b"".join(self._sign_list(*pair) for pair in zip(self.book.authorities, signers, strict=True))
        for folder in self._folders(("broker", "aggregator")):
            write_secret(folder / "crl.pem", lists)
        write_book(self.directory, self.book)
        self._write_rules()

    def _sign_list(self, authority: Authority, signer: Signer) -> bytes:
        """A revocation list, at least a second newer than the last one: of two lists Mosquitto trusts the newer."""
        revoked = {
            int(certificate.serial, 16): certificate.revoked
            for certificate in self.book.issued
            if certificate.revoked is not None
            and certificate.authority == authority.id
            and certificate.until > self._now
        }
        authority.lists += 1
        authority.list_since = max(self._now - SKEW_S, authority.list_since + 1)
        authority.list_until = self._now + self.book.list_days * 86_400
        return revocation_list(signer, revoked, authority.lists, authority.list_since, authority.list_until)

    def _write_rules(self) -> None:
        """Write the files that need no key: the broker's configuration and access rules, and every `ca.pem`."""
        certificates = [self._authority_files(authority.id)[0] for authority in reversed(self.book.authorities)]
        trusted = b"".join(map(self._read, certificates))
        broker = self.directory / "broker"
        content = {broker / "acl": access_rules(self.book), broker / "mosquitto.conf": configuration(self.book)}
        wanted = {path: text.encode() for path, text in content.items()}
        wanted |= {folder / "ca.pem": trusted for folder in self._folders(_EVERYBODY)}
        for path, wants in wanted.items():
            if not path.is_file() or path.read_bytes() != wants:
                write_secret(path, wants)

    def _folders(self, roles: Sequence[str]) -> list[Path]:
        """The existing folders of members with these roles that are not revoked."""
        folders = {self.folder(name) for name, member in self.book.live().items() if member.role in roles}
        return sorted(folder for folder in folders if folder.is_dir())

    def _authority_files(self, ident: str) -> tuple[Path, Path]:
        folder = self.directory / "authority"
        return folder / f"{ident}.pem", folder / f"{ident}.key"

    def _signer(self, authority: Authority) -> Signer:
        certificate, key = self._authority_files(authority.id)
        return read_signer(self._read(certificate), self._read(key), str(key))

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except OSError as error:
            hint = f"the copy of {path.parent} that you keep elsewhere"
            raise UsageError(f"{path}", expected="a file of the authority", got=error.strerror, hint=hint) from None


def establish(
    directory: Path,
    hosts: Sequence[str],
    fleets: Sequence[str],
    *,
    port: int = 8883,
    place: str = PLACE,
    days: int = CERTIFICATE_DAYS,
    list_days: int = LIST_DAYS,
    authority_days: int = AUTHORITY_DAYS,
    now: int | None = None,
) -> Book:
    """Make a new authority, with certificates for the broker and for each fleet's aggregator.

    It is made in a directory beside `directory`, and renamed when it is complete.

    Raises:
        UsageError: the directory is not empty, or a name is not valid.
        StoreError: the disk refuses.
    """
    now = int(time.time()) if now is None else now
    for host in hosts:
        names.check_host(host)
    for fleet in fleets:
        check_id(fleet, "--fleet")
    _check_free(directory)
    target = Path(os.path.abspath(directory))
    partial = target.with_name(f".{target.name}.partial")
    own_directory(partial, "another DIR")
    with locked(partial):
        for left in partial.iterdir():  # from a command that was killed
            if left.is_dir():
                shutil.rmtree(left)
        book = Book(
            hosts=tuple(dict.fromkeys(hosts)),
            port=port,
            place=place,
            days=days,
            list_days=list_days,
            fleets=[fleets[0]],
            authorities=[_make_authority(partial, now, authority_days)],
        )
        office = Office(partial, book, now)
        office.admit(names.BROKER, Member(role="broker"))
        for fleet in dict.fromkeys(fleets):
            office.add_fleet(fleet)
        try:
            os.rename(partial, target)
        except OSError as error:
            shutil.rmtree(partial)
            raise StoreError(f"cannot make {target}", expected="a new directory", got=error.strerror) from None
    return book


def _check_free(directory: Path) -> None:
    if (directory / BOOK).exists():
        hint = "another DIR, or protofleet pki rotate-ca to replace it"
        raise UsageError(f"init {directory}", expected="a new directory", got="an authority", hint=hint)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UsageError(f"init {directory}", expected="a new directory", got="something else", hint="another DIR")


def _make_authority(directory: Path, now: int, days: int) -> Authority:
    """Make an authority's key and certificate on the disk."""
    ident = secrets.token_hex(4)
    signer = new_authority(f"Protofleet authority {ident}", now, days)
    write_secret(directory / "authority" / f"{ident}.key", signer.key_pem)
    write_secret(directory / "authority" / f"{ident}.pem", signer.pem)
    return Authority(id=ident, since=now - SKEW_S, until=signer.until)
