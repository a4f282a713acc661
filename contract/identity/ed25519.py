"""Ed25519 by `cryptography` (extra `security`), loaded when a key is first used. If it is absent, that is one line.

- Keys have 32 bytes, signatures 64.
- With one key, the same bytes have the same signature.
- A public key of small order, such as 32 zeros, is not accepted: everybody can make signatures for it, without a
  private key.
"""

from __future__ import annotations

from types import ModuleType

from protofleet.contract.errors import UsageError
from protofleet.contract.extras import install_command

__all__ = ["holds", "is_weak", "library", "sign"]


_P = 2**255 - 19
_EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of a point of order 8
# The y of the eight points whose order divides 8, and those that stand for one of them modulo p.
_SMALL = {0, 1, _P - 1, _P, _P + 1, _EIGHTH, _P - _EIGHTH}


def is_weak(public_key: bytes) -> bool:
    """Whether a public key (32 bytes) is a point of small order, for which anybody can sign."""
    return int.from_bytes(public_key, "little") & (1 << 255) - 1 in _SMALL


def sign(private_key: bytes, message: bytes, purpose: str = "signing") -> bytes:
    """Sign `message`; the signature has 64 bytes.

    Args:
        purpose: what is done, for an error.

    Raises:
        UsageError: without the library.
    """
    return bytes(library(purpose).Ed25519PrivateKey.from_private_bytes(private_key).sign(message))


def holds(public_key: bytes, signature: bytes, message: bytes, purpose: str = "checking a signature") -> bool:
    """Whether `signature` is that key's signature of `message`. False for bytes that are no key, and for a weak key.

    Raises:
        UsageError: without the library.
    """
    keys = library(purpose)
    if is_weak(public_key):
        return False
    from cryptography.exceptions import InvalidSignature

    try:
        keys.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def library(purpose: str) -> ModuleType:
    """Its module of these keys.

    Raises:
        UsageError: when it is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise UsageError(purpose, expected="cryptography", got="nothing", hint=install_command("security")) from None
    return ed25519
