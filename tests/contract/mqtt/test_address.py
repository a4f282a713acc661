"""Where the broker is: URLs and certificate files, and what is wrong with them in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from certificates import issue
from cryptography.hazmat.primitives import serialization

from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.link import Address


def test_an_address_is_read_from_its_url():
    assert Address.parse("mqtt://broker") == Address("broker", 1883)
    assert Address.parse("mqtts://broker") == Address("broker", 8883, "mqtts")
    assert Address.parse("mqtt://10.0.0.1:99/") == Address("10.0.0.1", 99)
    assert Address.parse("mqtt://[::1]:99") == Address("::1", 99)
    assert Address.parse("mqtt://me:p%40ss@h") == Address("h", 1883, user="me", password="p@ss")


def test_a_password_is_not_in_the_address_that_is_shown():
    assert "secret" not in str(Address.parse("mqtt://me:secret@h:1"))


@pytest.mark.parametrize(
    "url", ["", "broker", "http://broker", "mqtt://", "mqtt://h:0x1", "mqtt://h:99999", "mqtt://h/topic", "mqtt://h:-1"]
)
def test_what_is_no_broker_url_is_refused(url):
    with pytest.raises(UsageError, match="broker, expected mqtt://host"):
        Address.parse(url)


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    authority = issue(tmp_path, "ca")
    issue(tmp_path, "d1", authority)
    issue(tmp_path, "d2", authority)
    (tmp_path / "half.pem").write_bytes((tmp_path / "ca.pem").read_bytes()[:200])
    (tmp_path / "text.pem").write_text("no certificate\n")
    (tmp_path / "both.pem").write_bytes((tmp_path / "d1.pem").read_bytes() + (tmp_path / "d1.key").read_bytes())
    key = serialization.load_pem_private_key((tmp_path / "d1.key").read_bytes(), None)
    sealed = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    (tmp_path / "sealed.key").write_bytes(key.private_bytes(pem, pkcs8, sealed))
    return tmp_path


def files(folder: Path, ca: str | None = None, cert: str | None = None, key: str | None = None) -> dict[str, str]:
    given = {"ca_file": ca, "cert_file": cert, "key_file": key}
    return {name: str(folder / file) for name, file in given.items() if file is not None}


def test_good_files_are_read(pem):
    assert Address.parse("mqtts://h", **files(pem, "ca.pem", "d1.pem", "d1.key")).tls_context().get_ca_certs()
    Address.parse("mqtts://h", **files(pem, "ca.pem", "both.pem"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("missing.pem",), "expected a PEM file, got No such file or directory"),
        (("half.pem",), "half.pem, expected certificates of an authority in PEM, got"),
        (("text.pem",), "text.pem, expected certificates of an authority in PEM, got no certificate or crl found"),
        (("ca.pem", "text.pem", "d1.key"), "text.pem, expected a certificate in PEM and its key"),
        (("ca.pem", "d1.pem", "d2.key"), "d1.pem, expected a certificate in PEM and its key .* key values mismatch"),
        (("ca.pem", "d1.pem", "sealed.key"), "a certificate in PEM and its key without a password in"),
        (("ca.pem", "d1.pem"), "expected a certificate in PEM and its key"),
        (("ca.pem", None, "d1.key"), "expected its certificate, too, got .*d1.key alone, try --cert"),
    ],
)
def test_a_certificate_file_that_cannot_be_used_is_one_line(pem, given, said):
    with pytest.raises(UsageError, match=said):
        Address.parse("mqtts://h", **files(pem, *given))


@pytest.mark.parametrize("given", [("ca.pem",), (None, "d1.pem", "d1.key"), (None, None, "d1.key")])
def test_certificates_for_a_connection_without_tls_are_refused(pem, given):
    """They were dropped without a word, and everything went over the wire in the clear."""
    said = "a certificate file, expected mqtts://, got mqtt://h:1883, try mqtts://h"
    with pytest.raises(UsageError, match=said):
        Address.parse("mqtt://h", **files(pem, *given))


@pytest.mark.parametrize(("url", "heard", "said"), [
    ("mqtts://b", "[Errno 111] Connection refused", "starting the broker there, or another port"),
    ("mqtts://b", "the broker refuses our certificate: it is revoked", "protofleet pki list"),
    ("mqtts://b", "no answer", "protofleet pki list"),
    ("mqtt://b", "[Errno 111] Connection refused", "protofleet broker"),
])  # fmt: skip
def test_certificates_are_looked_at_only_where_somebody_listens(url: str, heard: str, said: str):
    assert Address.parse(url).remedy(heard) == said
