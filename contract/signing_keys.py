"""Ed25519 keys as files: 32 bytes, their hex digits, or PEM, which needs the extra `security`.

A private key signs a bundle when it is exported, the public one is what a device trusts (`contract/bundle.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from contract.errors import UsageError

__all__ = ["read_private_key", "read_public_key"]

KEY_BYTES = 32
_PRIVATE, _PUBLIC = b"-----BEGIN", b"-----BEGIN PUBLIC KEY"


def read_private_key(path: str) -> bytes:
    """The 32 bytes of the private key that `--sign` names.

    Raises:
        UsageError: when it is none, or PEM without `cryptography`.
    """
    what = f"--sign {path}"
    raw, key = _read(path, what, "a key file", _PRIVATE, _private_from_pem)
    if key is None:
        raise UsageError(
            what,
            expected="an Ed25519 private key: raw, hex or PEM",
            got=f"{len(raw)} bytes of something else",
            hint=f"openssl genpkey -algorithm ed25519 -out {path}",
        )
    return key


def read_public_key(path: str) -> bytes:
    """The 32 bytes of the public key that `--trust` names.

    Raises:
        UsageError: when it is none, or PEM without `cryptography`.
    """
    what = f"--trust {path}"
    _, key = _read(path, what, "a public key file", _PUBLIC, _public_from_pem)
    if key is None:
        raise UsageError(what, expected="an Ed25519 public key: raw, hex or PEM", got="something else")
    return key


def _read(
    path: str, what: str, expected: str, pem: bytes, from_pem: Callable[[bytes, str], bytes]
) -> tuple[bytes, bytes | None]:
    """What stands in a file, and the key that it is; None where it is none."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(what, expected=expected, got=error.strerror) from None
    if len(raw) == KEY_BYTES:
        return raw, raw
    if raw.startswith(pem):
        try:
            return raw, from_pem(raw, what)
        except ModuleNotFoundError:
            hint = "pip install 'protofleet[security]'"
            raise UsageError(what, expected="cryptography", got="nothing", hint=hint) from None
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        return raw, None
    return raw, key if len(key) == KEY_BYTES else None


def _private_from_pem(raw: bytes, what: str) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(raw, None)
    except (TypeError, ValueError) as error:
        raise UsageError(what, expected="a PEM private key without a password", got=error) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(what, expected="an Ed25519 private key", got=type(key).__name__)
    return key.private_bytes_raw()


def _public_from_pem(raw: bytes, what: str) -> bytes:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(raw)
    except ValueError as error:
        raise UsageError(what, expected="a PEM public key", got=error) from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(what, expected="an Ed25519 key", got=type(key).__name__)
    return key.public_bytes_raw()
