"""The key that a device signs with: given by `--identity`, or its own, made when a token enrols it.

- Its own key lies in the state directory, readable for the owner alone. Whoever has the file can speak for the device.
- Where there is no key, nothing is signed.
- A key file without its key ends the device with code 1. A service manager then starts it again. It goes on once the
  file is put back, or a token enrols another key. It never goes on without.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from protofleet.contract.errors import StoreError
from protofleet.contract.files.atomic_files import own_directory, whole_file
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.identity.signing_keys import read_private_key
from protofleet.contract.printable import counted
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Signed, Status
from protofleet.edge_client.journal.issued_marks import IssuedMarks
from protofleet.edge_client.journal.journal import Pending
from protofleet.edge_client.settings import ClientSettings

__all__ = ["FILE", "Identity", "identity_of"]

FILE = "identity.key"  # of a state directory
_KEY_BYTES = 32


class Identity:
    """Signs for a device. Without a key, messages pass through unchanged.

    Args:
        signer: None where the device has no key.
    """

    def __init__(self, signer: Signer | None = None) -> None:
        self.signer = signer

    def sealed(self, topic: str, payload: bytes) -> bytes:
        """An encoded message as it is published on this topic: the same bytes each time."""
        return payload if self.signer is None else self.signer.sign(topic, payload)

    def numbered(self, birth: Status, marks: IssuedMarks, wall: float) -> Status:
        """A birth with a higher number than any that this key has signed, so that an older birth is recognised.

        Args:
            wall: seconds since the epoch, as far as this device knows.

        Raises:
            StoreError: the disk refused.
        """
        return birth if self.signer is None else replace(birth, issued=marks.next(self.signer.key_id, wall))

    def signed_anew(self, topic: str, pending: Pending) -> Pending:
        """A contribution that an earlier process left, signed with the present key: it may have had none."""
        if self.signer is None:
            return pending
        message = decode(pending.payload)
        if isinstance(message, Signed):
            if message.key_id == self.signer.key_id:
                return pending
            return replace(pending, payload=self.sealed(topic, message.payload))
        return replace(pending, payload=self.sealed(topic, pending.payload))


def identity_of(settings: ClientSettings) -> Identity:
    """The device's identity. Its key is made where `--token` asks for one.

    Raises:
        UsageError: `--identity` names no key, or `cryptography` is missing.
        StoreError: the state directory cannot be written, or its own key is lost.
    """
    own = Path(settings.state) / FILE
    if settings.identity is not None:
        return Identity(Signer(read_private_key(settings.identity, "--identity")))
    if settings.token is not None and not own.exists():
        _make(own)
    return Identity(Signer(_read(own, settings.id)) if own.exists() else None)


def _read(own: Path, device: str) -> bytes:
    """The device's own key, which is not replaced: the fleet knows no other of it."""
    try:
        raw = own.read_bytes()
    except OSError as error:
        raise StoreError(f"{own}", expected="this device's key", got=error.strerror, hint=f"ls -l {own}") from None
    if len(raw) != _KEY_BYTES or not any(raw):
        got = f"{counted(len(raw), 'byte')}{' of zeros' * (bool(raw) and not any(raw))}: the key is lost"
        anew = f"protofleet fleet invite {device} --store STORE, rm {own}, and client --token with its token"
        raise StoreError(f"{own}", expected=f"the {_KEY_BYTES} bytes of this device's key", got=got,
            hint=f"a copy of that file; without one, {anew}")  # fmt: skip
    return raw


def _make(path: Path) -> None:
    Signer(bytes(32))  # without the library nothing is written
    own_directory(path.parent, "another --state")
    try:
        with whole_file(path, private=True) as file:
            file.write(os.urandom(_KEY_BYTES))
    except OSError as error:
        raise StoreError(
            f"cannot write {path}", expected="a writable directory", got=error.strerror, hint="another --state"
        ) from None
