"""Ed25519 by `cryptography` (extra `security`), loaded when a key is used first; its absence is one line.

Keys are 32 bytes, signatures 64. With one key the same bytes have the same signature. A public key of small order, as
that of 32 zeros, is none: there are signatures of everything for it that nobody had to make a key for.
"""

from __future__ import annotations

from types import ModuleType

from contract.errors import UsageError
from contract.extras import install_command

__all__ = ["holds", "is_weak", "library", "sign"]


_P = 2**255 - 19
_EIGHTH = 0x05FC536D880238B13933C6D305ACDFD5F098EFF289F4C345B027B2C28F95E826  # y of a point of order 8
# The y of the eight points whose order divides 8, and those that stand for one of them modulo p.
_SMALL = {0, 1, _P - 1, _P, _P + 1, _EIGHTH, _P - _EIGHTH}


def is_weak(public_key: bytes) -> bool:
    """Whether a public key (32 bytes) is a point of small order, for which anybody can sign."""
    return int.from_bytes(public_key, "little") & (1 << 255) - 1 in _SMALL


def sign(private_key: bytes, said: bytes, what: str = "signing") -> bytes:
    """64 bytes: the signature of `said`.

    Args:
        what: is done, for an error.

    Raises:
        UsageError: without the library.
    """
    return bytes(library(what).Ed25519PrivateKey.from_private_bytes(private_key).sign(said))


def holds(public_key: bytes, signature: bytes, said: bytes, what: str = "checking a signature") -> bool:
    """Whether `signature` is that key's of `said`; never for bytes that are no key, or a weak one.

    Raises:
        UsageError: without the library.
    """
    keys = library(what)
    if is_weak(public_key):
        return False
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
        raise UsageError(what, expected="cryptography", got="nothing", hint=install_command("security")) from None
    return ed25519
