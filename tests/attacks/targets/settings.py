"""Files that a person, or whoever is at the machine, puts before a command: they are read, or refused in one line.

`policy.toml`, the client's settings, lists of devices, keys in hex and PEM, tokens, certificates and revocation lists,
and the record of a measured board. The first byte says which; a good one is changed in places, or other bytes stand
there.
"""

from __future__ import annotations

import datetime
import functools
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from aggregator_samples import BUNDLE
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from protofleet.contract.errors import UsageError
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signing_keys import read_private_key, read_public_keys
from protofleet.contract.identity.tokens import draw_token, read_token, token_text
from protofleet.contract.mqtt.certificates import validity
from protofleet.contract.privacy.sealing import read_helper_key, read_helper_public
from protofleet.contract.settings.sources import read_settings
from protofleet.contract.wire.messages import Status
from protofleet.edge_client.hardware.profile_record import PROFILE_FILE, measured_metrics
from protofleet.edge_client.privacy.policy import read_policy
from protofleet.edge_client.settings import ClientSettings
from tests.attacks.choices import Choices
from tests.attacks.guard import scratch
from tests.attacks.promises import is_one_line

LONGEST_BYTES = 2048


def run(data: bytes) -> None:
    choices = Choices(data)
    good, read = choices.one_of(_KINDS)
    blob = choices.rest() if choices.below(4) == 0 else _spliced(good(), choices)
    with scratch() as folder:
        (folder / PROFILE_FILE).write_bytes(blob)
        try:
            read(folder / PROFILE_FILE, blob)
        except UsageError as error:
            is_one_line(error)


def _spliced(data: bytes, choices: Choices) -> bytes:
    for _ in range(1 + choices.below(3)):
        at, cut, put = choices.below(len(data) + 1), choices.below(40), choices.take(choices.below(40))
        data = data[:at] + put + data[at + cut :]
    return data


# ── each kind: a good file, and what is asked of any ────────────────────────────────────────────────────────────────


def _policy(path: Path, blob: bytes) -> None:
    policy = read_policy(str(path))
    assert policy.most >= 1
    assert policy.window_s is None or policy.window_s > 0
    assert policy.epsilon is None or (0 < policy.epsilon < math.inf and policy.delta is not None)
    assert policy.min_samples >= 1


def _config(path: Path, blob: bytes) -> None:
    config = read_settings(ClientSettings, {}, file=str(path))
    assert config.id
    assert config.bundle is not None


def _listed(path: Path, blob: bytes) -> None:
    keys = read_allowlist(path)
    assert all(len(key) == 32 for key in keys.values())
    assert len(set(keys.values())) == len(keys)


def _keys(path: Path, blob: bytes) -> None:
    for read in (read_private_key, lambda name: b"".join(read_public_keys(name))):
        try:
            assert len(read(str(path))) % 32 == 0
        except UsageError as error:
            is_one_line(error)


def _helper(path: Path, blob: bytes) -> None:
    for read in (read_helper_key, lambda name: read_helper_public(name, "--helper")):
        try:
            found = read(path)
            assert len(found.seal) == len(found.sign) == 32
        except UsageError as error:
            is_one_line(error)


def _token(path: Path, blob: bytes) -> None:
    text = blob.decode("utf-8", "replace")
    token = read_token(text)
    assert read_token(token_text(token)) == token


def _certificates(path: Path, blob: bytes) -> None:
    for since, until in validity(blob):
        assert math.isfinite(since)
        assert math.isfinite(until)


def _profile(path: Path, blob: bytes) -> None:
    found = measured_metrics(path.parent, BUNDLE)
    Status(True, b"instance", 1, metrics=found)


_POLICY = b"""methods = ["ncm", "ffc"]
statistics = ["unit-means"]
encodings = ["f32", "f16"]
min_samples = 5
releases_per_day = 0.25
figures = []
epsilon = 4.0
delta = 1e-6
neighbours = "replace"
ledger = "a.sqlite"
"""
_CONFIG = b"""bundle = "a.bundle"
broker = "mqtts://broker.example:8883"
id = "pi-3"
data = "photos"
state = "state"
fleet = "pets"
hold_out = 0.2
threads = 2
patience = 3.5
provider = "cpu"
keepalive = 60
trust = ["a.pub", "b.pub"]
quiet = true
"""


@functools.cache
def _signing_keys() -> bytes:
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


@functools.cache
def _public_keys() -> bytes:
    keys = [Ed25519PrivateKey.from_private_bytes(bytes([n]) * 32).public_key() for n in (1, 2)]
    return b"".join(key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo) for key in keys)


@functools.cache
def _certificate_and_list() -> bytes:
    key, name = Ed25519PrivateKey.from_private_bytes(bytes(32)), x509.Name([])
    since, until = datetime.datetime(2026, 1, 1), datetime.datetime(2060, 1, 1)
    made = x509.CertificateBuilder(name, name, key.public_key(), 7, since, until).sign(key, None)
    revoked = x509.CertificateRevocationListBuilder(name, since, until).sign(key, None)
    return made.public_bytes(Encoding.PEM) + revoked.public_bytes(Encoding.PEM)


def _record() -> bytes:
    told = {"bundle": {"sha256": BUNDLE.hex()}, "status_metrics": {"cycles": 1.5, "peak_bytes": 10}}
    return json.dumps({"measured": told}).encode()


def _devices() -> bytes:
    return b"[devices]\n" + b"".join(b'cam-%d = "%s"\n' % (n, bytes([n]).hex().encode() * 32) for n in range(3))


_KINDS: tuple[tuple[Callable[[], bytes], Callable[[Path, bytes], None]], ...] = (
    (lambda: _POLICY, _policy),
    (lambda: _CONFIG, _config),
    (_devices, _listed),
    (_signing_keys, _keys),
    (_public_keys, _keys),
    (lambda: bytes(range(32)).hex().encode(), _keys),
    (lambda: bytes(range(64)).hex().encode(), _helper),
    (lambda: bytes(range(32)).hex().encode(), _helper),
    (lambda: token_text(bytes(range(20))).encode(), _token),
    (_certificate_and_list, _certificates),
    (_record, _profile),
)


def seeds() -> Iterable[bytes]:
    assert len(draw_token()) == 20
    for kind, (good, _) in enumerate(_KINDS):
        blob = good()
        yield bytes([kind, 0]) + blob
        for at in range(0, len(blob), max(1, len(blob) // 8)):
            yield bytes([kind, 1, 0, *_place(at, blob), 3, 4]) + b"x\n=9"
            yield bytes([kind, 1, 0, *_place(at, blob), 0, 2]) + b'",'
        yield bytes([kind, 1, 0, *_place(len(blob), blob), 0, 39]) + b"[" * 39


def _place(at: int, blob: bytes) -> bytes:
    """As `Choices.below` of the file's length reads it."""
    return at.to_bytes(1 if len(blob) + 1 <= 256 else 2, "little")
