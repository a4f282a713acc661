"""Ed25519 keys as files: 32 bytes, their hex digits, or PEM, which needs the extra `security`.

- A private key signs a bundle at its export (`contract/bundle/bundle_file.py`), or what an aggregator or a device
  publishes (`contract/identity/signatures.py`).
- A public key is what the other end trusts. A file may hold several public keys, one after the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command
from protofleet.contract.identity.ed25519 import is_weak

__all__ = ["read_private_key", "read_public_key", "read_public_keys"]

KEY_BYTES = 32
_PRIVATE, _PUBLIC = b"-----BEGIN", b"-----BEGIN PUBLIC KEY"


def read_private_key(path: str, option: str = "--sign") -> bytes:
    """The 32 bytes of a private key.

    Args:
        option: of the command line, that names the file in an error.

    Raises:
        UsageError: when it is none, or PEM without `cryptography`.
    """
    subject = f"{option} {path}"
    raw, key = _read(path, subject, "a key file", _PRIVATE, _private_from_pem)
    if key is None or not any(key):  # a power cut may leave a file of zeros
        got = f"{len(raw)} bytes of something else" if raw.strip(b"\0") else f"{len(raw)} bytes, all of them zero"
        raise UsageError(
            subject,
            expected="an Ed25519 private key: raw, hex or PEM",
            got=got if raw else "an empty file",
            hint="a copy of it; a new one (openssl genpkey -algorithm ed25519) has to be trusted, or enrolled, first",
        )
    return key


def read_public_key(path: str, option: str = "--trust") -> bytes:
    """The 32 bytes of a public key.

    Args:
        option: of the command line, that names the file in an error.

    Raises:
        UsageError: when it is none, or PEM without `cryptography`.
    """
    subject = f"{option} {path}"
    _, key = _read(path, subject, "a public key file", _PUBLIC, _public_from_pem)
    if key is None:
        raise UsageError(subject, expected="an Ed25519 public key: raw, hex or PEM", got="something else")
    return _strong(key, subject)


def read_public_keys(paths: str | Iterable[str], option: str = "--trust") -> tuple[bytes, ...]:
    """The public keys of one file or several, 32 bytes each, every one once.

    Raises:
        UsageError: when a file holds something else, or PEM without `cryptography`.
    """
    files = [paths] if isinstance(paths, str) else paths
    return tuple(dict.fromkeys(key for path in files for key in _public_keys(path, option)))


def _public_keys(path: str, option: str) -> list[bytes]:
    subject = f"{option} {path}"
    try:
        raw = Path(path).read_bytes()
    except OSError:
        raw = b""
    blocks = re.findall(rb"-----BEGIN PUBLIC KEY.*?-----END PUBLIC KEY-----\s*", raw, re.DOTALL)
    if blocks and b"".join(blocks) != raw:
        raise UsageError(subject, expected="public keys one after the other", got="something else beside them")
    if len(blocks) > 1:
        return [_strong(_from_pem(block, subject, _public_from_pem), subject) for block in blocks]
    lines = raw.split()
    if len(lines) > 1 and all(re.fullmatch(rb"[0-9a-fA-F]{64}", line) for line in lines):
        return [_strong(bytes.fromhex(line.decode("ascii")), subject) for line in lines]
    return [read_public_key(path, option)]


def _strong(key: bytes, subject: str) -> bytes:
    if is_weak(key):
        raise UsageError(
            subject, expected="a public key that has a private one", got="a point for which anybody can sign"
        )
    return key


def _from_pem(raw: bytes, subject: str, reader: Callable[[bytes, str], bytes]) -> bytes:
    try:
        return reader(raw, subject)
    except ModuleNotFoundError:
        raise UsageError(subject, expected="cryptography", got="nothing", hint=install_command("security")) from None


def _read(
    path: str, subject: str, expected: str, pem: bytes, from_pem: Callable[[bytes, str], bytes]
) -> tuple[bytes, bytes | None]:
    """The content of a file, and the key in it; None for the key where there is none."""
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(subject, expected=expected, got=error.strerror) from None
    if len(raw) == KEY_BYTES:
        return raw, raw
    if raw.startswith(pem):
        return raw, _from_pem(raw, subject, from_pem)
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        return raw, None
    return raw, key if len(key) == KEY_BYTES else None


def _private_from_pem(raw: bytes, subject: str) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    try:
        key = serialization.load_pem_private_key(raw, None)
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(subject, expected="a PEM private key without a password", got=error) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(subject, expected="an Ed25519 private key", got=type(key).__name__)
    return key.private_bytes_raw()


def _public_from_pem(raw: bytes, subject: str) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        key = serialization.load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(subject, expected="a PEM public key", got=error) from None
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(subject, expected="an Ed25519 key", got=type(key).__name__)
    return key.public_bytes_raw()
