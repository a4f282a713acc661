"""Messages about identity: a signed message, and a device's request to be enrolled with its key.

- A signed message is another encoded message, with an Ed25519 signature over it and over the topic on which it is
  published. So it cannot be moved to another fleet, device or direction. The message inside is never itself signed.
- A device that was invited sends its public key, with a proof that it has the one-time token of the invitation.

Every value is validated when it is built, so a value that exists has the right form. Whether its signature holds is
checked in `contract/identity/signatures.py`. See docs/wire.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from protofleet.contract.errors import WireError
from protofleet.contract.wire.fields import Key, Limits, Message, Part

__all__ = [
    "ENROL",
    "ENVELOPE_BYTES",
    "KEY_BYTES",
    "KEY_ID_BYTES",
    "REFUSED",
    "SIGNATURE_BYTES",
    "Enrolment",
    "Mark",
    "Signed",
]

ENROL: Final = "enrol"  # stands for the method in the receipt of an enrolment
REFUSED: Final = "refused_messages"  # among the figures of a status: came, and were signed by no trusted key
KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8  # of the SHA-256 of a public key
SIGNATURE_BYTES: Final = 64
ENVELOPE_BYTES: Final = 96  # that a signed message is longer than what is inside, at most

_require = WireError.unless

KeyId = Annotated[bytes, Limits(KEY_ID_BYTES, KEY_ID_BYTES)]
Signature = Annotated[bytes, Limits(SIGNATURE_BYTES, SIGNATURE_BYTES)]
Issued = Annotated[int, Limits(1, 2**63 - 1)]


@dataclass(frozen=True)
class Signed(Message, number=9):
    """An encoded message and whose it is said to be.

    Attributes:
        key_id: 8 bytes: which key it is signed with, the first of the SHA-256 of the public key.
        payload: another message, encoded.
        signature: 64 bytes: of Ed25519, over the topic and the payload.
    """

    key_id: Annotated[KeyId, Key(2)]
    payload: Annotated[bytes, Limits(0), Key(3)]
    signature: Annotated[Signature, Key(4)]

    def check_together(self) -> None:
        kind = _type_of(self.payload)
        _require(kind not in (None, self.number), "a signed message", "a message that is not signed", kind)


@dataclass(frozen=True)
class Enrolment(Message, number=10):
    """A device's public key, with a proof that its sender holds the one-time token of the invitation.

    Attributes:
        key: 32 bytes, the device's own Ed25519 public key.
        proof: 64 bytes: a signature with the key that is made of the token, over fleet, device and `key`.
    """

    key: Annotated[bytes, Limits(KEY_BYTES, KEY_BYTES), Key(2)]
    proof: Annotated[Signature, Key(3)]


@dataclass(frozen=True)
class Mark(Part):
    """The highest announcement number that somebody has heard from one key, with the key's own signature of it.

    Attributes:
        key_id: 8 bytes: the key of the announcement, as in `Signed`.
        issued: the number of the announcement, 1 to 2^63 - 1.
        proof: 64 bytes: the key's signature over the fleet's topic and this number
            (`contract/identity/signatures.py`), as the announcement had it. So nobody can invent a number.
    """

    key_id: Annotated[KeyId, Key(None)]
    issued: Annotated[Issued, Key(0)]
    proof: Annotated[Signature, Key(1)]


def _type_of(payload: bytes) -> int | None:
    """The message type of an encoded message, from its first bytes; None where they are not those of one.

    A message is a map of fewer than 24 entries, or of fewer than 256, whose first key is 0 and whose value there is the
    type: the deterministic encoding leaves nothing else.
    """
    head = 2 if payload[:1] == b"\xb8" else 1
    is_map = payload[:1] == b"\xb8" or 0xA0 < (payload or b"\x00")[0] < 0xB8
    if not is_map or len(payload) < head + 2 or payload[head] != 0 or payload[head + 1] >= 24:
        return None
    return payload[head + 1]
