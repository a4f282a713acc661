"""The devices that a party enrols, as a file: names and Ed25519 public keys.

[devices]
cam-1 = "64 hex digits"
"""

from __future__ import annotations

import os

from protofleet.contract.errors import UsageError
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.identity.ed25519 import is_weak
from protofleet.contract.wire.topics import check_device

__all__ = ["read_allowlist"]


def read_allowlist(path: str | os.PathLike[str], option: str = "--devices") -> dict[str, bytes]:
    """The public keys, 32 bytes each, by device.

    Raises:
        UsageError: the file cannot be read, or is none.
    """
    subject = f"{option} {os.fspath(path)}"
    table = read_toml(path, subject)
    rows = table.get("devices")
    if not isinstance(rows, dict) or set(table) != {"devices"}:
        raise UsageError(subject, expected="a table [devices]", got=", ".join(table) or "nothing")
    keys: dict[str, bytes] = {}
    for device, value in rows.items():
        check_device(device, f"{subject}: device")
        try:
            key = bytes.fromhex(value)
        except (TypeError, ValueError):
            key = b""
        if len(key) != 32 or is_weak(key):
            raise UsageError(f"{subject}: {device}", expected="a public key, 64 hex digits", got=str(value)[:80])
        keys[device] = key
    doubled = len(keys) - len(set(keys.values()))
    if doubled:
        raise UsageError(subject, expected="a key of its own for each device", got=f"{doubled} of another device")
    return keys
