"""Reasons for a failed TLS connection, for a person: openssl's own message names a constant and a line of C."""

from __future__ import annotations

import ssl

__all__ = ["tls_words"]

_CLOCK = "or this machine's clock is wrong"
_THEIRS = {  # X509_V_ERR_…: why the broker's certificate is not believed here
    2: "the broker's certificate is of another authority than --ca",
    9: f"the broker's certificate is not valid yet, {_CLOCK}",
    10: f"the broker's certificate, or its authority's, has expired, {_CLOCK}",
    18: "the broker's certificate is of another authority than --ca",
    19: "the broker's certificate is of another authority than --ca",
    20: "the broker's certificate is of another authority than --ca",
}
_OURS = {  # ends of the alerts with which the broker says why ours is not believed there
    "CERTIFICATE_REVOKED": "the broker refuses our certificate: it is revoked",
    "CERTIFICATE_EXPIRED": "the broker refuses our certificate: it has expired, or the broker's revocation list has: "
    "protofleet pki renew --crl",
    "UNKNOWN_CA": "the broker refuses our certificate: it is of an authority that the broker does not know",
    "CERTIFICATE_REQUIRED": "the broker asks for a certificate: --cert",
}


def tls_words(error: ssl.SSLError) -> str:
    """The meaning of `error` for the person who wants a connection."""
    if isinstance(error, ssl.SSLCertVerificationError):
        message = str(error.verify_message).rstrip(".")
        return _THEIRS.get(error.verify_code, f"the broker's certificate is not believed: {message}")
    reason = error.reason or ""
    alert = next((words for end, words in _OURS.items() if reason.endswith(end)), None)
    return alert or f"TLS: {reason.replace('_', ' ').lower() or 'the peer hung up'}"
