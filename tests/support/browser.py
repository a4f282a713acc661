"""A real Chromium without a window, driven by its DevTools protocol over a pipe: no driver, no package.

`Visitor` is what a browser asks of a page of ours, without one.

with chromium() as browser:
    page = browser.open("http://127.0.0.1:8080/", width=400)
    page.run("document.title")
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import ssl
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# how Chromium says that a page has gone
_LEFT = ("navigated or closed", "context was destroyed", "Cannot find context")
_NAMES = ("chromium", "chromium-browser", "google-chrome")


class PageLeftError(AssertionError):
    """The page that was asked has gone to another address meanwhile."""


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def ask(self, method: str, **given: Any) -> dict[str, Any]:
        """A call of the protocol for this tab."""
        return self._browser.ask(method, given, self._session)

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, script: str, timeout_s: float = 60.0) -> Any:
        """The expression's value, once it is true; asked again where the page goes to another address meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(PageLeftError):
                if found := self.run(script):
                    return found
            assert time.monotonic() < deadline, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def tap(self, selector: str) -> None:
        """A press of the mouse's button in the middle of an element, which is brought into view.

        A device's page takes no tap on a photo that has just moved: it is waited for.
        """
        named = f"document.querySelector({json.dumps(selector)})"
        self.until(f"typeof justNow === 'undefined' || !justNow({named}?.parentNode?.moved)")
        script = f"""(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;
            e.scrollIntoView({{block: "center"}}); const r = e.getBoundingClientRect();
            return [r.x + r.width / 2, r.y + r.height / 2]; }})()"""
        place = self.run(script)
        assert place, f"nothing is {selector}"
        for kind in ("mousePressed", "mouseReleased"):
            self.ask("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def key(self, name: str, text: str = "", *, shift: bool = False) -> None:
        """A key, pressed and released: Tab, Enter, or a letter with its text."""
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}
        given = {"key": name, "windowsVirtualKeyCode": codes.get(name, 0), "modifiers": 8 * shift}
        given |= {"text": text} if text else {}
        for kind in ("keyDown", "keyUp"):
            self.ask("Input.dispatchKeyEvent", type=kind, **given)

    def close(self) -> None:
        """Close the tab, and with it its connections."""
        self.ask("Page.close")

    def shot(self, path: Path) -> None:
        """A picture of what is seen."""
        path.write_bytes(base64.b64decode(self.ask("Page.captureScreenshot", format="png")["data"]))


class Browser:
    """A process of Chromium."""

    def __init__(self, name: str, profile: str) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        words = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run"]
        words += ["--disable-gpu", "--disable-dev-shm-usage", "--no-sandbox", "--disable-background-networking"]
        shell = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "bash", name, *words, "about:blank"],
            pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._next, self._rest = 0, b""

    def ask(self, method: str, given: dict[str, Any] | None = None, session: str = "") -> dict[str, Any]:
        """A call of the protocol, and its result; what Chromium tells on the way is passed over."""
        self._next += 1
        message = {"id": self._next, "method": method, "params": given or {}, "sessionId": session}
        if not session:
            del message["sessionId"]
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            found = self._message()
            if found.get("id") == self._next:
                why = found.get("error", {})
                if any(each in why.get("message", "") for each in _LEFT):
                    raise PageLeftError(method, why)
                assert not why, (method, why)
                return found["result"]

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from, 1 << 20)
            assert read, "Chromium has ended"
            self._rest += read
        first, _, self._rest = self._rest.partition(b"\0")
        return json.loads(first)

    def open(self, url: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> Page:
        """A tab with this address in it."""
        target = self.ask("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.ask("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session)
        page.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        if dark:
            page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        page.ask("Page.enable")
        page.ask("Page.navigate", url=url)
        page.until("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page

    def end(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser of this machine's; skips where there is none, fails in CI."""
    name = next((found for each in _NAMES if (found := shutil.which(each))), None)
    if name is None:
        why = "no Chromium, try apt install chromium"
        pytest.fail(why) if os.environ.get("PROTOFLEET_CI") else pytest.skip(why)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(str(name), profile)
        try:
            yield browser
        finally:
            browser.end()


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
