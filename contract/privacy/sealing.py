"""Seeds that only the helper can read, and the helper's keys.

**Sealing.** HPKE seals a device's seed to the helper's X25519 key (RFC 9180, base mode, one message; DHKEM(X25519,
HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305). The result has 80 bytes: 32 of the ephemeral key, then the seed and its
tag. HPKE's `info` holds what the seed is for: fleet, run, round, method, device, the share's words and their digest,
the least number of devices, and what the device was told to sum. If any of these differs, the seed does not open.

**Keys.** The helper's key file is 32 random bytes, in hex. HKDF-SHA256 makes two keys of it: one opens seeds, and an
Ed25519 key signs answers. The public file has both public keys, 64 bytes in hex. The aggregator and every device need
it.
"""

from __future__ import annotations

import errno
import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cbor2

from protofleet.contract.errors import UsageError, WireError
from protofleet.contract.extras import install_command
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.identity import ed25519
from protofleet.contract.privacy.blinding import MOST_DEVICES
from protofleet.contract.wire.helper_messages import SealedSeed
from protofleet.contract.wire.messages import Announcement

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.hpke import Suite

__all__ = [
    "HelperKey",
    "HelperPublic",
    "check_least",
    "make_helper_key",
    "read_helper_key",
    "read_helper_public",
    "round_terms",
    "seal",
    "unseal",
]

_KEY_BYTES = 32


@dataclass(frozen=True)
class HelperPublic:
    """The public keys of a helper.

    Attributes:
        seal: its X25519 public key, 32 bytes.
        sign: its Ed25519 public key, 32 bytes.
    """

    seal: bytes
    sign: bytes


@dataclass(frozen=True)
class HelperKey:
    """A helper's two private keys, 32 bytes each."""

    seal: bytes
    sign: bytes

    @property
    def public(self) -> HelperPublic:
        needed()
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

        sealing = X25519PrivateKey.from_private_bytes(self.seal).public_key().public_bytes_raw()
        return HelperPublic(sealing, Ed25519PrivateKey.from_private_bytes(self.sign).public_key().public_bytes_raw())


def seal(seed: bytes, key: bytes, fleet: str, device: str, bound: SealedSeed) -> bytes:
    """Seal a seed so that only the holder of the private key can open it; 80 bytes.

    Args:
        bound: what the seed is for. Its field `sealed` is not read.

    Raises:
        UsageError: without `cryptography`, or with one that has no HPKE.
    """
    suite = needed()
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    return bytes(suite.encrypt(seed, X25519PublicKey.from_public_bytes(key), info=_info(fleet, device, bound)))


def unseal(key: HelperKey, fleet: str, device: str, bound: SealedSeed) -> bytes:
    """The seed in `bound`.

    Raises:
        WireError: the seed was sealed for another helper, or for another purpose than `bound` says.
    """
    suite = needed()
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    private = X25519PrivateKey.from_private_bytes(key.seal)
    try:
        seed = bytes(suite.decrypt(bound.sealed, private, info=_info(fleet, device, bound)))
    except (InvalidTag, ValueError):
        raise WireError(
            "its seed", expected="one that was sealed for this helper and this share", got="another"
        ) from None
    if len(seed) != _KEY_BYTES:
        raise WireError("its seed", expected=f"{_KEY_BYTES} bytes", got=len(seed))
    return seed


def round_terms(announcement: Announcement) -> bytes:
    """The digest of all that an announcement tells a device about what to sum: 32 bytes.

    The helper adds up only shares with the same digest. Otherwise an aggregator could tell all devices but one to leave
    out their samples.
    """
    a, helper = announcement, announcement.helper
    assert helper is not None
    listed = a.class_lists[0] if a.class_lists else b""
    terms = [a.method, a.extractor, listed, list(a.withheld), a.min_samples, helper.scale_bits]
    return hashlib.sha256(b"protofleet round terms v2\0" + cbor2.dumps(terms, canonical=True)).digest()


def check_least(least: int) -> int:
    """Return k if it is a valid least number of devices.

    Raises:
        UsageError: when it is not.
    """
    if not 2 <= least <= MOST_DEVICES:
        expected = f"2 to {MOST_DEVICES:,}, the most devices that a sum has"
        raise UsageError("--least", expected=expected, got=least)
    return least


def make_helper_key(path: Path) -> None:
    """Draw a helper's key into a new file that only its owner can read. The public key goes beside it, as `.pub`.

    Raises:
        UsageError: the file exists already, or cannot be written.
    """
    secret = os.urandom(_KEY_BYTES)
    public = _keys_of(secret).public
    try:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        with whole_file(path.with_name(path.name + ".pub")) as file:
            file.write((public.seal + public.sign).hex().encode() + b"\n")
        with whole_file(path, private=True) as file:
            file.write(secret.hex().encode() + b"\n")
    except OSError as error:
        raise UsageError(f"--key {path}", expected="a path for a new file", got=error.strerror) from None


def read_helper_key(path: str | os.PathLike[str], option: str = "--key") -> HelperKey:
    """The private keys in a helper's key file.

    Raises:
        UsageError: there is no such file, or it holds no key.
    """
    expected, hint = "a helper's key: 32 bytes in hex", "protofleet helper --new-key, which makes one"
    raw = _read(path, option, _KEY_BYTES, expected, hint)
    if not any(raw):
        got = f"{_KEY_BYTES} bytes, all of them zero, which everybody has"
        raise UsageError(f"{option} {os.fspath(path)}", expected=expected, got=got, hint=hint)
    return _keys_of(raw)


def read_helper_public(path: str | os.PathLike[str], option: str) -> HelperPublic:
    """The public keys in the file `.pub` beside a helper's key.

    Raises:
        UsageError: there is no such file, or it holds no keys.
    """
    expected = "a helper's public key: 64 bytes in hex"
    hint = "the .pub file beside the helper's key"
    raw = _read(path, option, 2 * _KEY_BYTES, expected, hint)
    public = HelperPublic(raw[:_KEY_BYTES], raw[_KEY_BYTES:])
    if _is_weak(public.seal) or ed25519.is_weak(public.sign):
        got = "a point for which everybody has the other half"
        raise UsageError(f"{option} {os.fspath(path)}", expected=expected, got=got, hint=hint)
    return public


def _is_weak(key: bytes) -> bool:
    """Whether the secret that is agreed with an X25519 key does not depend on the other side's key (RFC 7748, 6.1)."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    needed()
    try:
        X25519PrivateKey.generate().exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError:
        return True
    return False


def _read(path: str | os.PathLike[str], option: str, size: int, expected: str, hint: str) -> bytes:
    subject = f"{option} {os.fspath(path)}"
    try:
        raw = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(subject, expected=expected, got=error.strerror, hint=hint) from None
    try:
        key = bytes.fromhex(raw.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != size:
        raise UsageError(subject, expected=expected, got="something else", hint=hint)
    return key


def _keys_of(secret: bytes) -> HelperKey:
    needed()
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    seal, sign = (
        HKDF(hashes.SHA256(), 32, None, b"protofleet helper " + use).derive(secret) for use in (b"seal", b"sign")
    )
    return HelperKey(seal, sign)


def _info(fleet: str, device: str, bound: SealedSeed) -> bytes:
    b = bound
    parts = [fleet, b.run, b.round, b.method, device, b.words, b.share, b.least, b.terms]
    return b"protofleet sealed seed v2\0" + cbor2.dumps(parts, canonical=True)


def needed() -> Suite:
    """HPKE's suite.

    Raises:
        UsageError: where `cryptography` is not installed, or too old.
    """
    try:
        from cryptography.hazmat.primitives import hpke
    except ImportError:
        hint = install_command("security", "--upgrade", "cryptography")
        raise UsageError(
            "blinded rounds", expected="cryptography with HPKE, 50 or newer", got="none", hint=hint
        ) from None
    suite: Any = hpke.Suite(hpke.KEM.X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.CHACHA20_POLY1305)
    return suite
