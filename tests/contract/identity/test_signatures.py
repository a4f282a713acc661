"""Signed messages: nothing that was changed, moved to another topic or signed by another key is taken for one."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest
from contract_samples import SIGNER, plain_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from protofleet.aggregator.settings import Settings
from protofleet.contract.errors import SignatureError, UsageError, WireError
from protofleet.contract.extras import install_command
from protofleet.contract.identity import ed25519
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import Keyring, Signer, enrolment_of, invitation_key, key_id, token_proves
from protofleet.contract.identity.signing_keys import read_private_key, read_public_keys
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.envelopes import ENVELOPE_BYTES, Enrolment, Signed
from protofleet.contract.wire.messages import Receipt

GOLDEN = Path(__file__).parents[2] / "golden" / "wire_v2.json"
TOPIC = topics.down("pets", "cam-3")
RING = Keyring([SIGNER.public_key])
PLAIN = encode(Receipt(b"run1", 3, "ncm", "committed"))
OTHER = Signer(bytes(32))


def opened(payload: bytes, topic: str = TOPIC, ring: Keyring = RING) -> bytes:
    message = decode(payload)
    assert isinstance(message, Signed)
    return ring.payload(message, topic)


@settings(max_examples=60, deadline=None)
@given(message=plain_messages)
def test_a_signed_message_gives_back_its_bytes_and_has_one_form(message):
    plain = encode(message, "f64")
    signed = SIGNER.sign(TOPIC, plain)
    assert opened(signed) == plain
    assert SIGNER.sign(TOPIC, plain) == signed
    assert len(signed) - len(plain) < 100


def test_no_bit_of_it_can_be_flipped():
    signed = SIGNER.sign(TOPIC, PLAIN)
    for at in range(8 * len(signed)):
        changed = bytearray(signed)
        changed[at // 8] ^= 1 << at % 8
        with pytest.raises(WireError):
            opened(bytes(changed))


@settings(max_examples=60, deadline=None)
@given(fleet=st.sampled_from(["pets", "pets2"]), device=st.sampled_from(["cam-3", "cam-4"]), kind=st.integers(0, 2))
def test_it_holds_on_its_own_topic_alone(fleet, device, kind):
    topic = (topics.down, topics.up, topics.status)[kind](fleet, device)
    signed = SIGNER.sign(topic, PLAIN)
    if topic == TOPIC:
        assert opened(signed) == PLAIN
    else:
        with pytest.raises(SignatureError, match=f"for {TOPIC}") as caught:
            opened(signed)
        assert caught.value.known


def test_another_key_is_named_and_refused():
    with pytest.raises(SignatureError, match=f"got key {OTHER.key_id.hex()}") as caught:
        opened(OTHER.sign(TOPIC, PLAIN))
    assert not caught.value.known
    posing = encode(Signed(SIGNER.key_id, PLAIN, OTHER.signature(TOPIC, PLAIN)))
    with pytest.raises(SignatureError, match="got another"):
        opened(posing)
    assert opened(OTHER.sign(TOPIC, PLAIN), ring=Keyring([SIGNER.public_key, OTHER.public_key])) == PLAIN


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xa0",
        b"\xa0\x00\x01",
        b"\xa1\x00",
        SIGNER.sign(TOPIC, PLAIN),
        b"\xb8\x18\x01\x02",
        b"\xb8",
        b"text",
        b"\xa5\x00\x18\x09",
    ],
)
def test_what_is_inside_begins_as_a_message_and_is_never_signed_again(payload):
    with pytest.raises(WireError, match="a message that is not signed"):
        Signed(SIGNER.key_id, payload, bytes(64))


@pytest.mark.parametrize("size", [1, 30, 300, 70_000])
def test_an_envelope_takes_no_more_than_is_reckoned_with(size):
    inside = b"\xa1\x00\x01" + bytes(size)
    assert len(SIGNER.sign(TOPIC, inside)) - len(inside) <= ENVELOPE_BYTES


def test_what_is_no_key_verifies_nothing():
    assert not ed25519.holds(bytes(31), bytes(64), b"")
    assert not ed25519.holds(SIGNER.public_key, bytes(63), b"")


def test_a_key_that_is_no_point_verifies_nothing():
    bad = bytes([2]) + bytes(31)
    with pytest.raises(SignatureError):
        Keyring([bad]).payload(Signed(key_id(bad), PLAIN, bytes(64)), TOPIC)


_P, _D = 2**255 - 19, -121665 * pow(121666, -1, 2**255 - 19)


def _point(encoded: bytes) -> tuple[int, int] | None:
    """RFC 8032, 5.1.3, but that y may be p or more, as verifiers take it."""
    number = int.from_bytes(encoded, "little")
    y = (number & (1 << 255) - 1) % _P
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    x = x if x * x % _P == square else x * pow(2, (_P - 1) // 4, _P) % _P
    if x * x % _P != square:
        return None
    return (x if x & 1 == number >> 255 else -x % _P), y


def _doubled(point: tuple[int, int]) -> tuple[int, int]:
    """RFC 8032, 5.1.4, in affine numbers."""
    x, y = point
    both = _D * x * x * y * y
    return 2 * x * y * pow(1 + both, -1, _P) % _P, (y * y + x * x) * pow(1 - both, -1, _P) % _P


def _is_of_small_order(encoded: bytes) -> bool:
    point = _point(encoded)
    for _ in range(3):
        point = point and _doubled(point)
    return point == (0, 1)


WEAK = [
    (y | sign << 255).to_bytes(32, "little") for y in sorted(ed25519._SMALL) for sign in (0, 1) if y < 2**255
]  # fmt: skip


def test_keys_for_which_anybody_can_sign_are_the_points_whose_order_divides_8():
    assert len(WEAK) == 14
    assert all(_is_of_small_order(key) and ed25519.is_weak(key) for key in WEAK)
    orders = {point for key in WEAK if (point := _point(key))}
    assert len(orders) >= 8
    for key in (SIGNER.public_key, OTHER.public_key, bytes([2]) + bytes(31), bytes([4]) + bytes(31)):
        assert not ed25519.is_weak(key)
        assert not _is_of_small_order(key)


def test_a_weak_key_verifies_nothing_though_the_library_says_it_does():
    """R of small order and S = 0 are a signature of one message in a few, by nobody."""
    signature, forged = bytes([1]) + bytes(63), 0
    for key in WEAK:
        for number in range(16):
            said = bytes([number])
            assert not ed25519.holds(key, signature, said)
            try:
                ed25519.library("").Ed25519PublicKey.from_public_bytes(key).verify(signature, said)
            except Exception:
                continue
            forged += 1
    assert forged


@pytest.mark.parametrize("key", WEAK)
def test_a_weak_key_is_in_no_file_of_keys(tmp_path, key):
    path = tmp_path / "keys"
    for written in (key, key.hex().encode(), f"{SIGNER.public_key.hex()}\n{key.hex()}\n".encode()):
        path.write_bytes(written)
        with pytest.raises(
            UsageError, match="keys, expected a public key that has a private one, got a point for which"
        ):
            read_public_keys(str(path))
    path.write_text(f'[devices]\ncam = "{key.hex()}"\n')
    with pytest.raises(UsageError, match="expected a public key, 64 hex digits"):
        read_allowlist(path)


@pytest.mark.parametrize(("left", "got"), [(b"", "an empty file"), (bytes(32), "32 bytes, all of them zero")])
def test_a_private_key_that_a_disk_has_lost_is_none(tmp_path, left, got):
    (tmp_path / "key").write_bytes(left)
    with pytest.raises(UsageError, match=f"got {got}, try a copy of it; a new one .* has to be trusted, or enrolled"):
        read_private_key(str(tmp_path / "key"))


def test_a_file_of_several_keys_holds_nothing_else(tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    keys = (SIGNER.public_key, OTHER.public_key)
    form = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    pems = [Ed25519PublicKey.from_public_bytes(key).public_bytes(*form) for key in keys]
    hexes = [key.hex().encode() for key in keys]
    path = tmp_path / "keys"
    for good in (b"".join(pems), b"\n".join(hexes), b"\n".join(hexes * 2)):
        path.write_bytes(good)
        assert read_public_keys(str(path)) == keys
    mixed = [b"words\n".join(pems), pems[0] + hexes[1], pems[0] + b"words\n"]
    for size in (31, 33):
        path.write_bytes(bytes(size).hex().encode())
        with pytest.raises(UsageError, match="keys"):
            read_public_keys(str(path))
    for bad in (*mixed, b"\n".join([*hexes, b"words"]), b"\n".join([hexes[0], hexes[1][2:]])):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match="keys"):
            read_public_keys(str(path))


def test_a_signature_has_64_bytes():
    for size in (0, 63, 65):
        with pytest.raises(WireError, match="64 bytes"):
            Signed(SIGNER.key_id, PLAIN, bytes(size))


def test_the_golden_signature_is_ours():
    golden = json.loads(GOLDEN.read_text())["signatures"]
    for row in golden:
        signer = Signer(bytes.fromhex(row["private_key"]))
        assert signer.public_key.hex() == row["public_key"]
        assert signer.sign(row["topic"], bytes.fromhex(row["payload"])).hex() == row["signed"]


# ── one-time tokens ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_proof_is_of_its_token_key_device_and_fleet_alone():
    token, key = bytes(range(20)), SIGNER.public_key
    invitation = invitation_key(token)
    proof = enrolment_of("pets", "cam-3", key, token)
    assert decode(encode(proof)) == proof
    assert token_proves(proof, "pets", "cam-3", invitation)
    assert not token_proves(proof, "pets", "cam-4", invitation)
    assert not token_proves(proof, "pets2", "cam-3", invitation)
    assert not token_proves(Enrolment(OTHER.public_key, proof.proof), "pets", "cam-3", invitation)
    assert not token_proves(enrolment_of("pets", "cam-3", key, b"another"), "pets", "cam-3", invitation)
    assert not token_proves(enrolment_of("pet", "scam-3", key, token), "pets", "cam-3", invitation)
    assert token not in encode(proof)


def test_an_invitation_of_an_earlier_release_still_holds():
    key = "3daac2d01eedb3a4a538142d3262b71332a080d34e8c42b0dd72682a58a23f64"
    assert invitation_key(bytes(range(20))).hex() == key


def test_a_key_and_a_proof_have_their_lengths():
    for key, proof in ((bytes(31), bytes(64)), (bytes(32), bytes(63)), (bytes(32), bytes(65))):
        with pytest.raises(WireError, match="bytes"):
            Enrolment(key, proof)


def test_without_the_library_it_is_one_line(monkeypatch):
    real = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("cryptography"):
            raise ModuleNotFoundError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    for use in (lambda: Signer(bytes(32)), lambda: Keyring([bytes(32)]), lambda: Settings(enrolled=True)):
        with pytest.raises(UsageError, match=re.escape(install_command("security"))):
            use()
