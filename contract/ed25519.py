"""Ed25519 by `cryptography` (extra `security`), loaded when a key is used first; its absence is one line.

Keys are 32 bytes, signatures 64. With one key the same bytes have the same signature.
"""

from __future__ import annotations

from types import ModuleType

from contract.errors import UsageError

__all__ = ["SECURITY", "holds", "library", "sign"]

SECURITY = "pip install 'protofleet[security]'"


def sign(private_key: bytes, said: bytes, what: str = "signing") -> bytes:
    """64 bytes: the signature of `said`.

    Args:
        what: is done, for an error.

    Raises:
        UsageError: without the library.
    """
    return bytes(library(what).Ed25519PrivateKey.from_private_bytes(private_key).sign(said))


def holds(public_key: bytes, signature: bytes, said: bytes, what: str = "checking a signature") -> bool:
    """Whether `signature` is that key's of `said`; never for bytes that are no key.

    Raises:
        UsageError: without the library.
    """
    keys = library(what)
    from cryptography.exceptions import InvalidSignature

    try:
        keys.Ed25519PublicKey.from_public_bytes(public_key).verify(signature, said)
    except (InvalidSignature, ValueError):
        return False
    return True


def library(what: str) -> ModuleType:
    """Its module of these keys.

    Raises:
        UsageError: when it is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise UsageError(what, expected="cryptography", got="nothing", hint=SECURITY) from None
    return ed25519
