"""Where the page is: `8080` for this machine alone, `0.0.0.0:8080` for its network."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
import struct
from dataclasses import dataclass

from protofleet.contract.errors import UsageError

__all__ = ["PageAddress", "check_page_files", "checked_page", "read_page"]

_SIOCGIFADDR = 0x8915  # of Linux
_FORM = re.compile(r"(?:(?P<host>[0-9.]+|\[[0-9a-fA-F:]+\]|localhost):)?(?P<port>[0-9]{1,5})")


@dataclass(frozen=True)
class PageAddress:
    """An address of this machine, and a port; 0 for any free one."""

    host: str
    port: int

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.host).is_loopback

    @property
    def reached_at(self) -> str:
        """The host as others write it: of all addresses of this machine, the one that its network knows it by."""
        host = self.host
        if ipaddress.ip_address(host).is_unspecified:
            family, far = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
            try:
                with socket.socket(family, socket.SOCK_DGRAM) as asked:
                    asked.connect((far, 9))  # chooses an address, and sends nothing
                    host = str(asked.getsockname()[0])
            except OSError:  # a network without a way out, as cameras have
                host = next(iter(_interface_addresses()), host)
        return f"[{host}]" if ":" in host else host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _interface_addresses() -> list[str]:
    """The IPv4 addresses of this machine's interfaces but loopback's, on Linux; elsewhere none."""
    try:
        import fcntl
    except ImportError:
        return []
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(answer[20:24]))
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def read_page(text: str, option: str = "--page") -> PageAddress:
    """The address in a text.

    Raises:
        UsageError: it is none.
    """
    found = _FORM.fullmatch(text)
    try:
        if found is None or int(found["port"]) > 65_535:
            raise ValueError
        host = (found["host"] or "127.0.0.1").strip("[]")
        host = "127.0.0.1" if host == "localhost" else host
        return PageAddress(str(ipaddress.ip_address(host)), int(found["port"]))
    except ValueError:
        hint = f"{option} 8080, or {option} 0.0.0.0:8080 for your network"
        raise UsageError(option, expected="[ADDRESS:]PORT", got=text[:60], hint=hint) from None


def checked_page(option: str, text: str) -> str:
    """The text, if it is where a page can be.

    Raises:
        UsageError: it is not.
    """
    read_page(text, option)
    return text


def check_page_files(page: str | None, cert: str | None, key: str | None) -> None:
    """That the page's certificate has its key, and a page.

    Raises:
        UsageError: one of them is missing.
    """
    if (cert is None) != (key is None) or (cert is not None and page is None):
        raise UsageError("--page-cert", expected="--page and --page-key beside it", got="not both")
