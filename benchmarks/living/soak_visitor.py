"""The browser of a soak: it follows the page's events, fetches the photos that it has not got, and taps now and then.

A tap that the page confirmed is kept in `confirmed`. So is what `undo` took back. Where no answer came, or the page
refused, either is right, and the photo is in `open`.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import threading
import time
from collections import deque
from typing import Any

__all__ = ["Visitor"]

_PATIENCE_S = 20.0
_UNDOES = 50  # that the page remembers
_LEAVES_S = 120.0  # a browser stays so long; then another one comes, with a cookie of its own


class Visitor:
    """Threads that look and tap until `stop`.

    Args:
        tap_s: between two taps.

    Attributes:
        port: of the page; changes when the client is started again.
        confirmed: label by photo id, of what the page confirmed and did not take back.
        open: ids of photos whose last tap got no answer, or none that confirms.
        taps, refused, unanswered, events, images: how many there were.
        taken: pictures that the client says it has answered about, over all its lives.
    """

    def __init__(self, port: int, tap_s: float, seed: int) -> None:
        self.port, self._tap_s, self._draw = port, tap_s, random.Random(seed)
        self.confirmed: dict[str, str] = {}
        self.open: set[str] = set()
        self.taps = self.refused = self.unanswered = self.events = self.images = self.taken = 0
        self._cookie = self._token = ""
        self._state: dict[str, Any] = {}
        self._undo: deque[tuple[str, str | None]] = deque(maxlen=_UNDOES)
        self._before = 0  # pictures of earlier lives
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._look, self._tap)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(_PATIENCE_S + 5.0)

    def client_ended(self) -> None:
        """Its counts begin anew, and it remembers nothing to undo."""
        self._before = self.taken
        self._undo.clear()

    def _look(self) -> None:
        while not self._stopping.is_set():
            with contextlib.suppress(OSError, http.client.HTTPException, ValueError, IndexError, KeyError):
                self._stay()
            self._stopping.wait(1.0)

    def _stay(self) -> None:
        """As one browser: the page, then its events and their photos, until it is closed."""
        _, heads, body = self._ask("GET", "/", cookie="")
        first = json.loads(re.findall(r'id="first">(.*?)</script>', body.decode())[0])
        self._cookie, self._token = heads["set-cookie"].split(";")[0], first["token"]
        self._saw(first["state"])
        until, got = time.monotonic() + _LEAVES_S, set[str]()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)) as connection:
            connection.request("GET", "/events", headers={"Host": "127.0.0.1", "Cookie": self._cookie})
            stream = connection.getresponse()
            while time.monotonic() < until and not self._stopping.is_set():
                line = stream.readline()
                if not line:
                    return
                if line.startswith(b"data: "):
                    self.events += 1
                    self._saw(json.loads(line[6:]))
                    got = self._fetch(got)

    def _saw(self, state: dict[str, Any]) -> None:
        self._state = state
        self.taken = self._before + state["health"]["taken"]

    def _fetch(self, got: set[str]) -> set[str]:
        shown = {one["id"] for row in ("newest", "wanted", "unknown") for one in self._state[row]}
        for id in shown - got:
            status, _, image = self._ask("GET", f"/photo/{id}.jpg", cookie=self._cookie)
            self.images += status == 200 and image[:2] == b"\xff\xd8"
        return shown

    def _tap(self) -> None:
        while not self._stopping.wait(self._tap_s):
            with contextlib.suppress(IndexError, KeyError):  # nothing has come yet
                what = self._draw.choices(("name", "aside", "undo"), (8, 1, 1))[0]
                if what == "undo":
                    self._take_back()
                else:
                    row = self._draw.choice(("newest", "wanted", "unknown"))
                    one = self._draw.choice(self._state[row] or self._state["newest"])
                    self._set_aside(one["id"]) if what == "aside" else self._name(one["id"])

    def _name(self, id: str) -> None:
        label = self._draw.choice(self._state["classes"])
        if self._post("/name", photos=[id], label=label):
            self._undo.append((id, self.confirmed.get(id)))
            self.confirmed[id] = label
            self.open.discard(id)
        else:
            self._is_unclear(id)

    def _set_aside(self, id: str) -> None:
        if self._post("/aside", photos=[id], why="unsure"):
            self._undo.append((id, self.confirmed.get(id)))
        else:
            self._is_unclear(id)

    def _take_back(self) -> None:
        if not self._undo:
            return
        id, before = self._undo.pop()
        if not self._post("/undo"):
            self._is_unclear(id)
        elif before is None:
            self.confirmed.pop(id, None)
        else:
            self.confirmed[id] = before

    def _is_unclear(self, id: str) -> None:
        """What the page did, and what it would take back next."""
        self.open.add(id)
        self._undo.clear()

    def _post(self, path: str, **given: object) -> bool:
        """Whether that was confirmed."""
        self.taps += 1
        try:
            status, _, _ = self._ask("POST", path, json.dumps(given), self._cookie, self._token)
        except (OSError, http.client.HTTPException):
            self.unanswered += 1
            return False
        self.refused += status != 200
        return status == 200

    def _ask(
        self, method: str, path: str, body: str = "", cookie: str = "", token: str = ""
    ) -> tuple[int, dict[str, str], bytes]:
        heads = {"Host": "127.0.0.1", "Cookie": cookie, "X-Protofleet-Token": token}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=_PATIENCE_S)) as connection:
            connection.request(method, path, body, {name: value for name, value in heads.items() if value})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
