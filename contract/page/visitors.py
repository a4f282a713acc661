"""Who may see the page: a browser with a cookie that this process gave, and no other site through that browser.

- A visitor is a random cookie, HttpOnly and SameSite=Strict. On the loopback whoever comes is given one; elsewhere it
  takes the pairing code, which stands at the command's terminal. After `_MOST_WRONG` wrong codes there is another one.
- A request has to name an address as its Host: a name of somebody's domain that leads here (DNS rebinding) is refused.
- What changes anything has to carry the visitor's token in a header, which no other site can read or set, and comes
  from this page (Origin, where a browser says it).
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

__all__ = ["COOKIE", "Visitor", "Visitors", "is_own_host", "is_own_origin"]

logger = logging.getLogger(__name__)

COOKIE = "protofleet-visitor"
_LETTERS = "23456789ABCDEFGHJKLMNPQRSTUVWXYZ"  # that nobody mistakes for another
_MOST_WRONG, _MOST_VISITORS = 10, 32
_PAUSE_S = 1.0  # after a wrong code


@dataclass(eq=False)
class Visitor:
    """One browser.

    Attributes:
        token: that its changes carry.
        who: its network address.
        shown: hashes of what it may look at, for a page that keeps account of it.
        has_returned: whether it has shown its cookie. Another site can make a browser come, but never with it.
        operator: as whom it gives orders, where it may.
    """

    token: str
    who: str
    shown: set[bytes] = field(default_factory=set)
    has_returned: bool = False
    operator: str = ""


class Visitors:
    """All browsers of one process; from any thread.

    Args:
        needs_code: whether a visitor has to give the pairing code.
    """

    def __init__(self, *, needs_code: bool) -> None:
        self.needs_code = needs_code
        self._lock = threading.Lock()
        self._known: OrderedDict[str, Visitor] = OrderedDict()
        self._wrong, self._free_at_s = 0, 0.0
        self.code = self._new_code()

    def known(self, cookie: str, who: str) -> Visitor | None:
        """The visitor with this cookie."""
        with self._lock:
            visitor = self._known.get(cookie)
            if visitor is not None:
                self._known.move_to_end(cookie)
                visitor.who = who
            return visitor

    def enter(self, who: str, code: str = "") -> str | None:
        """Let a browser in; gives its cookie, or None where the code is wrong or was tried too often."""
        with self._lock:
            if self.needs_code:
                now_s = time.monotonic()
                if now_s < self._free_at_s:
                    return None
                given = "".join(letter for letter in code.upper() if letter.isalnum())
                if not hmac.compare_digest(given.encode(), self.code.replace("-", "").encode()):
                    self._wrong, self._free_at_s = self._wrong + 1, now_s + _PAUSE_S
                    if self._wrong >= _MOST_WRONG:
                        self._wrong, self.code = 0, self._new_code()
                        self.tell(f"{_MOST_WRONG} wrong pairing codes, the last from {who}; ")
                    return None
                self._wrong = 0
            cookie = secrets.token_urlsafe(32)
            self._known[cookie] = Visitor(secrets.token_urlsafe(32), who)
            while len(self._known) > _MOST_VISITORS:
                strangers = (
                    each for each, visitor in self._known.items() if not visitor.has_returned and each != cookie
                )
                del self._known[next(strangers, next(iter(self._known)))]
            return cookie

    def tell(self, before: str = "") -> None:
        """Say the pairing code at the terminal."""
        if self.needs_code:
            logger.warning(f"{before}the page's pairing code is {self.code}")

    @staticmethod
    def _new_code() -> str:
        letters = "".join(secrets.choice(_LETTERS) for _ in range(8))
        return f"{letters[:4]}-{letters[4:]}"


def is_own_host(host: str) -> bool:
    """Whether a Host header names this machine by an address, or as localhost."""
    name = host.strip().lower()
    if name.startswith("["):
        name, end, port = name[1:].partition("]")
        if not end:
            return False
        port = port.removeprefix(":")
    else:
        name, _, port = name.partition(":")
    if port and not port.isdecimal():
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost"
    return True


def is_own_origin(origin: str | None, host: str) -> bool:
    """Whether a page of this server asks, as far as the browser says."""
    return origin is None or origin in (f"http://{host}", f"https://{host}")
