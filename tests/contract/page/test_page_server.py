"""The server of a page: two pages of one machine, visitors that another site sends, requests that do not end."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest
from browser import Visitor as Browser

from protofleet.contract.page import page_server
from protofleet.contract.page.page_address import read_page
from protofleet.contract.page.page_server import PageServer
from protofleet.contract.page.site import Content, Site
from protofleet.contract.page.visitors import Visitor, Visitors


class Small(Site):
    """A page with one thing to read."""

    PACKAGE: ClassVar[str] = "protofleet.aggregator.page"
    ABOUT: ClassVar[str] = "test"
    CODE_AT: ClassVar[str] = "the terminal"

    @property
    def title(self) -> str:
        return "small"

    def first(self, visitor: Visitor) -> str:
        return "{}"

    def event(self, visitor: Visitor, known: int) -> tuple[int, str]:
        return self.version, "{}"

    def get(self, visitor: Visitor, path: str, query: object) -> Content | None:
        return Content(b"it", "text/plain")


@contextmanager
def served() -> Iterator[PageServer]:
    server = PageServer(read_page("0"), Small())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def test_two_pages_of_one_machine_do_not_end_each_other_in_a_browser() -> None:
    with served() as first, served() as second:
        browsers = [Browser(first.port), Browser(second.port)]
        jar = dict[str, str]()  # a browser's, for which a port makes no difference
        for browser in browsers:
            browser.open()
            name, _, value = browser.cookie.partition("=")
            jar[name] = value
        for browser in browsers:
            browser.cookie = "; ".join(f"{name}={value}" for name, value in jar.items())
            assert browser.ask("GET", "/thing")[0] == 200


def test_browsers_that_another_site_sends_do_not_push_out_who_has_come_back() -> None:
    with served() as server:
        browser = Browser(server.port)
        browser.open()
        assert browser.ask("GET", "/thing")[0] == 200
        for _ in range(40):
            Browser(server.port).open()
        assert browser.ask("GET", "/thing")[0] == 200


def test_the_newest_visitor_has_room_where_all_others_have_come_back() -> None:
    visitors = Visitors(needs_code=False)
    for number in range(40):
        cookie = visitors.enter(f"10.0.0.{number}")
        assert cookie is not None
        visitor = visitors.known(cookie, "10.0.0.1")
        assert visitor is not None
        visitor.has_returned = True
    newest = visitors.enter("10.0.0.99")
    assert newest is not None
    assert visitors.known(newest, "10.0.0.99") is not None


def test_a_request_that_comes_letter_by_letter_has_no_more_time_than_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_server, "_TIMEOUT_S", 1.0)
    with served() as server, socket.create_connection(("127.0.0.1", server.port), timeout=30) as slow:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        is_open, deadline = True, time.monotonic() + 30
        while is_open:
            assert time.monotonic() < deadline
            time.sleep(0.1)
            try:
                slow.sendall(b"X: y\r\n")
            except OSError:
                is_open = False
        browser = Browser(server.port)
        browser.open()
        assert browser.ask("GET", "/thing")[2] == b"it"
