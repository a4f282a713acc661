"""The file beside the helper's key: which ledger opens sums with this key, and how many sets it has opened.

A ledger that is lost, or restored from a backup, knows less than was opened. It would open a share once more in another
set. So the number of openings is written to a second file, `KEY.FLEET.opened`, before any answer is sent. A ledger with
fewer openings, or another ledger, is refused.

Key and ledger must be in different backups, or in none: if both are restored together, nobody can tell.
"""

from __future__ import annotations

from pathlib import Path

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file

__all__ = ["Witness"]


class Witness:
    """The witness of one key and fleet.

    Args:
        file: the helper's key file.
        key: its X25519 public key, 32 bytes. A witness file that was written for an earlier key says nothing.
    """

    def __init__(self, file: Path, fleet: str, key: bytes) -> None:
        self.path, self._key = file.with_name(f"{file.name}.{fleet}.opened"), key.hex()

    def check(self, ledger: bytes, opened: int, what: str) -> None:
        """Check that no other ledger, and no newer state of this one, has opened sums with the key.

        Args:
            ledger: its id; empty for a new one.
            opened: how many sets it has opened.
            what: its name in an error.

        Raises:
            StoreError: the file cannot be read.
            UsageError: another ledger or a newer state has.
        """
        try:
            fields = self.path.read_text("ascii").split()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise StoreError(f"{self.path}", expected="what the helper wrote", got=str(error)) from None
        if len(fields) != 3 or not fields[2].isdigit():
            raise StoreError(f"{self.path}", expected="what the helper wrote", got="something else")
        key, opener, times = fields
        if key != self._key or not int(times):
            return
        hint = "the ledger itself, or protofleet helper --new-key and a new --store, for devices of another list"
        if opener != ledger.hex():
            got = "another" if ledger else "a new one"
            raise UsageError(what, expected=f"the ledger that opened {times} with this key", got=got, hint=hint)
        if opened < int(times):
            raise UsageError(what, expected=f"{times} openings", got=f"{opened}: an older copy", hint=hint)

    def write(self, ledger: bytes, opened: int) -> None:
        """Record the number of openings; durable on return.

        Raises:
            StoreError: the disk refuses; no answer may be sent.
        """
        try:
            with whole_file(self.path, private=True) as file:
                file.write(f"{self._key} {ledger.hex()} {opened}\n".encode())
        except OSError as error:
            raise StoreError(f"{self.path}", expected="room beside the key", got=error.strerror or error) from None
