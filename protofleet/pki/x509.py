"""Certificates and revocation lists: standard X.509 (RFC 5280) on P-256, made with `cryptography`.

- An authority signs certificates and revocation lists and nothing else. There is no authority below it.
- A member's certificate cannot sign others. It is valid for one side of a connection only: the broker's for a server
  with the names in it, every other for a client. So no device can act as the broker.
- Serial numbers are random.
- A certificate is valid from five minutes ago, for devices whose clock is late. It does not outlive the authority that
  signed it.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from protofleet.contract.errors import UsageError

__all__ = ["SKEW_S", "Signer", "new_authority", "new_member", "read_signer", "revocation_list", "serials"]

SKEW_S = 300  # how far another clock may be behind
_PEM = serialization.Encoding.PEM


@dataclass(frozen=True)
class Signer:
    """An authority with its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def until(self) -> int:
        """The end of its validity, in seconds since the epoch."""
        return int(self.certificate.not_valid_after_utc.timestamp())

    @property
    def pem(self) -> bytes:
        """The certificate in PEM."""
        return self.certificate.public_bytes(_PEM)

    @property
    def key_pem(self) -> bytes:
        """The key in PEM, not encrypted."""
        return _key_pem(self.key)


def new_authority(name: str, now: int, days: int) -> Signer:
    """Make an authority, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject, until = _name(name), now + days * 86_400
    builder = (
        _builder(subject, subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage("key_cert_sign", "crl_sign"), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return Signer(builder.sign(key, hashes.SHA256()), key)


def new_member(
    signer: Signer, name: str, now: int, days: int, hosts: Sequence[ipaddress._BaseAddress | str] = ()
) -> tuple[bytes, int, int]:
    """Make a certificate and its key.

    Args:
        hosts: host names and addresses of a server; empty for a client.

    Returns:
        one PEM file of both, the serial number, and the end of its validity.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + days * 86_400, signer.until)
    side = ExtendedKeyUsageOID.SERVER_AUTH if hosts else ExtendedKeyUsageOID.CLIENT_AUTH
    issuer = signer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        _builder(_name(name), signer.certificate.subject, key.public_key(), now, until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([side]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    if hosts:
        names = [x509.DNSName(host) if isinstance(host, str) else x509.IPAddress(host) for host in hosts]  # type: ignore[arg-type]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    certificate = builder.sign(signer.key, hashes.SHA256())
    return certificate.public_bytes(_PEM) + _key_pem(key), certificate.serial_number, until


def revocation_list(signer: Signer, revoked: Mapping[int, int], number: int, since: int, until: int) -> bytes:
    """A revocation list in PEM.

    Args:
        revoked: serial number → when it was revoked.
        number: a number that grows with each list.
    """
    issuer = signer.certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(signer.certificate.subject)
        .last_update(_time(since))
        .next_update(_time(until))
        .add_extension(x509.CRLNumber(number), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
    )
    for serial, revoked_at in sorted(revoked.items()):
        entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(_time(revoked_at)).build()
        builder = builder.add_revoked_certificate(entry)
    return builder.sign(signer.key, hashes.SHA256()).public_bytes(_PEM)


def read_signer(certificate: bytes, key: bytes, what: str) -> Signer:
    """Read an authority from its two PEM files.

    Raises:
        UsageError: they are not the certificate and the key of one authority.
    """
    try:
        signer = Signer(x509.load_pem_x509_certificate(certificate), _p256(key))
        signer.certificate.verify_directly_issued_by(signer.certificate)
        if signer.key.public_key() != signer.certificate.public_key():
            raise ValueError("the key of another certificate")
    except (TypeError, ValueError, InvalidSignature, UnsupportedAlgorithm) as error:
        raise UsageError(what, expected="an authority's certificate and its key", got=str(error) or "others") from None
    return signer


def serials(pem: bytes) -> list[int]:
    """Serial numbers of the certificates in a PEM file; empty where none can be read."""
    try:
        return [certificate.serial_number for certificate in x509.load_pem_x509_certificates(pem)]
    except (ValueError, UnsupportedAlgorithm):
        return []


def _p256(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("a key of another kind")
    return key


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: int, until: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_time(now - SKEW_S))
        .not_valid_after(_time(until))
    )


def _name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _time(seconds: int) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _usage(*allowed: str) -> x509.KeyUsage:
    every = ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"]
    every += ["key_cert_sign", "crl_sign", "encipher_only", "decipher_only"]
    return x509.KeyUsage(**{name: name in allowed for name in every})
