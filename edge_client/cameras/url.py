"""The URL of a camera, read as strictly as a broker's (`contract/mqtt/address.py`), for the same reason.

Many cameras want a password in the query (`/snap?user=me&pwd=…`). So what is shown of a URL is its scheme, host and
port, and never its path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import in_url
from protofleet.contract.names import listed
from protofleet.contract.printable import undisclosed

__all__ = ["CameraUrl", "read_url"]

_REST = re.compile(
    r"(?:(?P<user>[^:/?#\s\x00-\x1f\x7f]*)(?::(?P<password>[^/?#\s\x00-\x1f\x7f]*))?@)?"
    r"(?:\[(?P<ipv6>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<host>[\w-]{1,63}(?:\.[\w-]{1,63})*\.?))"
    r"(?::(?P<port>[0-9]{1,5}))?(?P<path>[/?][!-\"$-?A-~]*)?"  # an @ behind the / may end a password
)


@dataclass(frozen=True)
class CameraUrl:
    """`SCHEME://[user[:password]@]host[:port][/path][?query]`, in its parts."""

    scheme: str
    host: str
    port: int
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    path: str = field(default="", repr=False)

    @property
    def bare(self) -> str:
        """The URL without user and password; its query may hold another password."""
        return f"{self.scheme}://{in_url(self.host)}:{self.port}{self.path}"

    def __str__(self) -> str:
        return f"{self.scheme}://{in_url(self.host)}:{self.port}"


def read_url(text: str, ports: Mapping[str, int], example: str) -> CameraUrl:
    """A camera's URL.

    Args:
        ports: by scheme, where the URL names none.
        example: for the error.

    Raises:
        UsageError: it is none.
    """
    scheme, _, rest = text.partition("://")
    parts = _REST.fullmatch(rest)
    if scheme.lower() not in ports or parts is None or int(parts["port"] or 0) > 65_535:
        schemes = listed(f"{each}://[user:password@]host[:port]/path" for each in ports)
        raise UsageError("--camera", expected=f"{schemes}, with %2F, %3F, %23 and %40 for / ? # @ in the password, "
            "and %40 for @ in the path", got=undisclosed(text), hint=example)  # fmt: skip
    scheme = scheme.lower()
    user, password = (unquote(parts[name] or "") for name in ("user", "password"))
    host, path = (parts["ipv6"] or parts["host"]).lower(), parts["path"] or "/"
    return CameraUrl(scheme, host, int(parts["port"] or ports[scheme]), user, password, path)
