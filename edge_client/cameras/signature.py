"""A user and a password, given to a camera as it asks: Digest (RFC 7616) where it may be, else Basic (RFC 7617)."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any
from urllib.request import AbstractDigestAuthHandler, parse_http_list, parse_keqv_list

from protofleet.edge_client.cameras.camera import CameraGoneError
from protofleet.edge_client.cameras.url import CameraUrl

__all__ = ["Signature", "signature"]

Signature = Callable[[str, str], str]
"""Takes method and target of a request, and gives the value of its header Authorization."""


def signature(challenges: Iterable[str], url: CameraUrl) -> Signature:
    """What signs each request, after the values of a refusal's headers WWW-Authenticate.

    Raises:
        CameraGoneError: on use, where it asks in a way that nobody knows.
    """
    for challenge in challenges:
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "digest":
            passwords: Any = SimpleNamespace(
                add_password=None, find_user_password=lambda realm, target: (url.user, url.password)
            )
            signer = AbstractDigestAuthHandler(passwords)
            return lambda method, target: f"Digest {_digest(signer, rest, method, target)}"
    basic = base64.b64encode(f"{url.user}:{url.password}".encode()).decode()
    return lambda method, target: f"Basic {basic}"


def _digest(signer: Any, challenge: str, method: str, target: str) -> str:
    request = SimpleNamespace(full_url=target, selector=target, data=None, get_method=lambda: method)
    try:
        signed = signer.get_authorization(request, parse_keqv_list(parse_http_list(challenge)))
    except Exception:  # an algorithm that nobody has, or a challenge that is none
        signed = None
    if not signed:
        raise CameraGoneError("it asks for the password in a way that is not known")
    return str(signed)
