"""What a browser does with a page of ours, without one: `Visitor`."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import ssl
from typing import Any

__all__ = ["Visitor"]


class Visitor:
    """A browser of its own; `open` the page first."""

    def __init__(self, port: int, scheme: str = "http") -> None:
        self._port, self._scheme, self.cookie, self.token = port, scheme, "", ""
        self.host = f"127.0.0.1:{port}"

    def ask(self, method: str, path: str, body: object = None, **heads: str) -> tuple[int, dict[str, str], bytes]:
        """Code, heads and body of an answer."""
        context = ssl._create_unverified_context()
        kind = http.client.HTTPSConnection if self._scheme == "https" else http.client.HTTPConnection
        more: dict[str, Any] = {"context": context} if self._scheme == "https" else {}
        with contextlib.closing(kind("127.0.0.1", self._port, timeout=30, **more)) as connection:
            data = body if isinstance(body, bytes) else json.dumps(body).encode() if body is not None else None
            given = {"Host": self.host, "Cookie": self.cookie} | {k.replace("_", "-"): v for k, v in heads.items()}
            connection.request(method, path, data, given)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def open(self) -> dict[str, Any]:
        """Open the page; the state that it comes with."""
        code, heads, body = self.ask("GET", "/")
        assert code == 200, body
        if "set-cookie" in heads:
            self.cookie = heads["set-cookie"].split(";")[0]
        found = json.loads(re.findall(r'id="first">(.*?)</script>', body.decode())[0])
        self.token = found["token"]
        return found["state"]

    def post(self, path: str, body: object) -> dict[str, Any]:
        """What changes something, as the page's script sends it."""
        code, _, answer = self.ask("POST", path, body, X_Protofleet_Token=self.token)
        assert code == 200, answer
        return json.loads(answer)
