"""Orders from the operator's page: who may give which, and how they reach the aggregator.

A file has a line `NAME:TOKEN` for each operator. Who gives a token, may give orders in that name until the browser was
idle for `_IDLE_S`. A wrong token is followed by a pause, which doubles with each further one. No token is logged,
shown, or part of an address.

An order is the row that the commands write (`aggregator/store/operator_orders.py`): the aggregator does not know
from where it came, and the log has it as `NAME (page, ADDRESS)`. What cannot be undone has to be typed out.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import logging
import os
import secrets
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from protofleet.aggregator.database import Place
from protofleet.aggregator.store.operator_orders import record
from protofleet.contract.errors import UsageError
from protofleet.contract.files.passwords import read_passwords
from protofleet.contract.page.visitors import Visitor
from protofleet.contract.printable import printable

__all__ = ["ORDERS", "PageOrders", "tokens_of"]

logger = logging.getLogger(__name__)

ORDERS: Mapping[str, str] = {  # what they are about
    "forget": "device", "admit": "device", "remove": "device",
    "pause": "", "resume": "", "close-round": "", "rollback": "",
    "rollout-halt": "", "rollout-resume": "", "rollout-stage": "share",
}  # fmt: skip
TO_TYPE: Mapping[str, str] = {"forget": "", "rollback": "rollback"}  # empty: the device's name
_LEAST = 16  # characters of a token
_IDLE_S = 900.0
_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_DOUBLINGS = 6  # by then a pause is `_MOST_PAUSE_S`
_NETWORKS = 1_000  # whose wrong tokens are counted; then those that waited longest begin anew
_HOUSE_BITS = 64  # of an IPv6 address: one machine has all addresses that begin with these


def tokens_of(path: Path, name: str) -> dict[str, str]:
    """The operators' tokens, by name; a file that is not there is made, for its owner alone, with one for `name`.

    Raises:
        UsageError: it cannot be made or read, others may read it, or a token is too short to be one.
    """
    label = f"--allow-control {path}"
    if not path.exists():
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(f"{name.replace(':', '')}:{secrets.token_urlsafe(24)}\n")
        except OSError as error:
            raise UsageError(label, expected="a file that can be made", got=error.strerror) from None
        logger.warning(f"orders from the page: a token was made, it stands in {printable(str(path))}")
    found = read_passwords(path, "--allow-control", of="NAME:TOKEN")
    if any(len(token) < _LEAST for token in found.values()):
        raise UsageError(label, expected=f"tokens of {_LEAST} characters or more", got="a shorter one")
    return found


class PageOrders:
    """Who may give orders, and giving them; from any thread."""

    def __init__(self, store: Place, tokens: Mapping[str, str]) -> None:
        self._store, self._tokens = store, dict(tokens)
        self._lock = threading.Lock()
        self._entered: dict[str, tuple[str, float]] = {}  # by the visitor's own token: name, and until when
        self._wrong: dict[str, tuple[int, float]] = {}  # by network: wrong tokens in a row, and until when it waits

    def enter(self, visitor: Visitor, token: str) -> str:
        """Whose token this is; from then on the visitor may give orders.

        Who guesses holds up who is in the same network, and nobody else.

        Raises:
            UsageError: it is nobody's, or the last wrong one from there was just now.
        """
        network = _network(visitor.who)
        with self._lock:
            now_s = time.monotonic()
            wrong, free_at_s = self._wrong.get(network, (0, 0.0))
            if now_s < free_at_s:
                raise UsageError("the token", expected=f"{free_at_s - now_s:.0f} s of patience", got="none")
            names = [n for n, t in self._tokens.items() if hmac.compare_digest(t.encode(), token.encode())]
            if not names:
                pause_s = min(_MOST_PAUSE_S, _PAUSE_S * 2 ** min(wrong, _DOUBLINGS))
                if network not in self._wrong and len(self._wrong) >= _NETWORKS:
                    del self._wrong[min(self._wrong, key=lambda each: self._wrong[each][1])]
                self._wrong[network] = (wrong + 1, now_s + pause_s)
                logger.warning(f"a wrong control token from {visitor.who}, the {wrong + 1}. in a row")
                raise UsageError("the token", expected="one of the file of --allow-control", got="another")
            self._wrong.pop(network, None)
            self._entered = {key: each for key, each in self._entered.items() if each[1] > now_s}
            self._entered[visitor.token] = (names[0], now_s + _IDLE_S)
            return names[0]

    def leave(self, visitor: Visitor) -> None:
        """It gives no more orders."""
        with self._lock:
            self._entered.pop(visitor.token, None)

    def give(self, visitor: Visitor, given: Mapping[str, Any], known: Collection[str]) -> str:
        """Record an order; it is durable then. Gives what to say.

        Args:
            given: `what`, and where it is about one `device` or `share`; and what was `typed`.
            known: the devices that the store knows.

        Raises:
            UsageError: this visitor may give none, there is no such order or device, or it was not typed out.
        """
        who, what = self._name_of(visitor), str(given["what"])
        if what not in ORDERS:
            raise UsageError("the order", expected=", ".join(ORDERS), got=what)
        device = detail = ""
        if ORDERS[what] == "device":
            device = str(given["device"])
            if device not in known:
                raise UsageError("the device", expected="one that the store knows", got=device[:80])
        elif ORDERS[what] == "share":
            detail = repr(_share(given["share"]))
        elif what == "rollback":
            detail = "1"
        if what in TO_TYPE and str(given.get("typed", "")) != (TO_TYPE[what] or device):
            raise UsageError(f"{what}, which cannot be undone", expected="its name typed out", got="another text")
        record(self._store, what, device, f"{who} (page, {visitor.who})", detail=detail)
        logger.info(f"{what}{' ' * bool(device)}{device}: ordered on the page by {who} from {visitor.who}")
        return f"{what}{' ' * bool(device)}{device}: recorded"

    def _name_of(self, visitor: Visitor) -> str:
        with self._lock:
            name, until = self._entered.get(visitor.token, ("", 0.0))
            if not name or time.monotonic() >= until:
                raise UsageError("orders", expected="a token first", got="none")
            self._entered[visitor.token] = (name, time.monotonic() + _IDLE_S)
            return name


def _network(who: str) -> str:
    """From where a visitor comes: an IPv4 address, or the network of an IPv6 address."""
    address = ipaddress.ip_address(who.partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(ipaddress.ip_network((address, _HOUSE_BITS), strict=False))


def _share(given: object) -> float:
    share = 0.0
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        share = float(given)  # type: ignore[arg-type]
    if not 0.0 < share <= 1.0:
        raise UsageError("the stage", expected="above 0, up to 1", got=str(given)[:20])
    return share
