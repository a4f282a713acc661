"""Where the page is: `8080` for this machine alone, `0.0.0.0:8080` for its network."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from protofleet.contract.errors import UsageError

__all__ = ["PageAddress", "check_page_files", "checked_page", "read_page"]

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

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


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
