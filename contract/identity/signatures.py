"""Signing messages and checking their signatures: Ed25519, by `cryptography` (extra `security`).

- The signed bytes are `protofleet signed v2`, a zero byte, the topic, a zero byte, and the encoded message.
- The topic names the fleet, the device and the direction. So a signature holds only where the message was published.
- A signature has a fixed length. With one key, the same message on the same topic gives the same bytes again.
- The number of an announcement has a signature of its own, so a device can hand the number back without the
  announcement.

The library is loaded when a key is first used. If it is absent, that is one line.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

from protofleet.contract.errors import SignatureError
from protofleet.contract.identity import ed25519
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import KEY_ID_BYTES, Enrolment, Mark, Signed
from protofleet.contract.wire.messages import Message

__all__ = ["Keyring", "Signer", "enrolment_of", "inside", "invitation_key", "key_id", "token_proves"]

_SIGNED: Final = b"protofleet signed v2\0"
_INVITED: Final = b"protofleet invitation v2\0"
_NUMBERED: Final = b"protofleet number v2\0"
_ENROLS: Final = b"protofleet enrolment v2\0"


def key_id(public_key: bytes) -> bytes:
    """8 bytes that name a public key in a signed message."""
    return hashlib.sha256(public_key).digest()[:KEY_ID_BYTES]


class Signer:
    """A private key that signs messages.

    Args:
        private_key: 32 bytes, an Ed25519 seed.

    Raises:
        UsageError: without `cryptography`.
    """

    def __init__(self, private_key: bytes) -> None:
        self._key = ed25519.library("signing").Ed25519PrivateKey.from_private_bytes(private_key)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.key_id = key_id(self.public_key)

    def sign(self, topic: str, payload: bytes) -> bytes:
        """The bytes of a signed message that holds `payload`, an encoded message, and is valid on this topic only."""
        return encode(Signed(self.key_id, payload, self.signature(topic, payload)))

    def signature(self, topic: str, payload: bytes) -> bytes:
        """64 bytes: the signature of `payload` on this topic."""
        return self.raw(_signed_bytes(topic, payload))

    def mark(self, topic: str, issued: int) -> Mark:
        """The proof that this key has given the number `issued` to an announcement on this topic."""
        return Mark(self.key_id, issued, self.raw(_numbered(topic, issued)))

    def raw(self, message: bytes) -> bytes:
        """64 bytes: the signature of these very bytes."""
        return bytes(self._key.sign(message))


class Keyring:
    """Public keys that are trusted.

    Args:
        keys: 32 bytes each.

    Raises:
        UsageError: without `cryptography`.
    """

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._keys = {key_id(key): key for key in keys}
        ed25519.library("checking a signature")

    def __contains__(self, key_id: bytes) -> bool:
        """Whether a key of this name is here."""
        return key_id in self._keys

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._keys.values())

    def __len__(self) -> int:
        return len(self._keys)

    def payload(self, signed: Signed, topic: str) -> bytes:
        """The encoded message inside, which one of these keys has signed for this topic.

        Raises:
            SignatureError: when none has.
        """
        key = self._keys.get(signed.key_id)
        if key is None:
            raise SignatureError("signature", expected="that of a trusted key", got=f"key {signed.key_id.hex()}")
        if not ed25519.holds(key, signed.signature, _signed_bytes(topic, signed.payload)):
            expected = f"one of key {signed.key_id.hex()} for {topic}"
            raise SignatureError("signature", expected=expected, got="another", known=True)
        return signed.payload

    def gave(self, mark: Mark, topic: str) -> bool:
        """Whether one of these keys has given an announcement on this topic that number."""
        key = self._keys.get(mark.key_id)
        return key is not None and ed25519.holds(key, mark.proof, _numbered(topic, mark.issued))


def inside(payload: bytes) -> Message:
    """The message in `payload`, or inside the signed message in `payload`.

    The signature is not checked: this is for messages whose signature was checked when they came.

    Raises:
        WireError: as `decode`.
    """
    message = decode(payload)
    return decode(message.payload) if isinstance(message, Signed) else message


# ── enrolment with a one-time token ─────────────────────────────────────────────────────────────────────────────────


def invitation_key(token: bytes) -> bytes:
    """32 bytes: the public key made of a token. It identifies the token's holder, and does not reveal the token."""
    return _invited(token).public_key


def enrolment_of(fleet: str, device: str, public_key: bytes, token: bytes) -> Enrolment:
    """The message with which a device enrols. It is valid for this key, device and fleet only, whoever reads it."""
    return Enrolment(public_key, _invited(token).raw(_enrols(fleet, device, public_key)))


def token_proves(enrolment: Enrolment, fleet: str, device: str, invitation: bytes) -> bool:
    """Whether the sender of an enrolment holds the token that `invitation` (`invitation_key`) is made of."""
    return ed25519.holds(invitation, enrolment.proof, _enrols(fleet, device, enrolment.key))


def _invited(token: bytes) -> Signer:
    return Signer(hashlib.sha256(_INVITED + token).digest())


def _enrols(fleet: str, device: str, public_key: bytes) -> bytes:
    return _ENROLS + fleet.encode() + b"\0" + device.encode() + b"\0" + public_key


def _signed_bytes(topic: str, payload: bytes) -> bytes:
    return _SIGNED + topic.encode() + b"\0" + payload


def _numbered(topic: str, issued: int) -> bytes:
    return _NUMBERED + topic.encode() + b"\0" + issued.to_bytes(8, "big")
