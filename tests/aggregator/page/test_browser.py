"""The operator's page in a real Chromium: what one sees, by mouse and by keys; hostile names are text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import make_broker
from browser import Page, chromium
from commands import run
from fleets import EVIL, Served, stocked

TOKEN = "correct-horse-battery"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    broker = make_broker("embedded", tmp_path)
    broker.start()
    tokens = tmp_path / "tokens"
    tokens.write_text(f"anna:{TOKEN}\n")
    tokens.chmod(0o600)
    found = Served.aggregator(tmp_path, broker, stocked(tmp_path / "store", 300), "--allow-control", tokens)
    yield found
    found.end()
    broker.stop()


def typed(page: Page, selector: str, text: str) -> None:
    page.run(f"document.querySelector({json.dumps(selector)}).focus()")
    for letter in text:
        page.key(letter, letter)


def test_an_operator_finds_a_device_reads_the_runbook_and_forgets_it(served: Served) -> None:
    url = f"http://127.0.0.1:{served.port}/"
    with chromium() as browser:
        for width, dark in ((1400, False), (400, True)):
            page = browser.open(url, width=width, dark=dark)
            page.until("document.querySelectorAll('#rows tr').length > 5")
            assert "need care" in page.run("document.getElementById('sentence').textContent")
            assert page.run("document.documentElement.scrollWidth") <= width
            assert page.run("document.querySelectorAll('#rows tr').length") < 100  # those that are seen
            names = page.run("[...document.querySelectorAll('#cares a')].map((link) => link.textContent)")
            assert {"d0", "d1", "d2", "d3", "gone", "slow", "old-bundle"} <= set(names)
        page = browser.open(f"{url}#filter=gone-day", width=1400)
        assert page.until("document.querySelectorAll('#rows th').length") == 1
        assert page.run("document.querySelector('#rows th').textContent") == "d2"
        page.run("location.hash = ''")
        page.until("document.querySelectorAll('#rows th').length > 5")
        page.run("document.getElementById('view').scrollTop = 1e6")
        assert page.until("[...document.querySelectorAll('#rows th')].some((cell) => cell.textContent === 'd99')")
        typed(page, "#search", "d3")
        page.until("document.getElementById('count').textContent.startsWith('11 of')")
        page.tap("#rows a[href='#runbook=left-out']")
        page.until("document.getElementById('one-body').textContent.includes('fleet suspects')")

        page.run("location.hash = '#device=d3'")
        page.until("document.getElementById('one-body').textContent.includes('it contradicts 2 of 3')")
        assert EVIL in page.run("document.getElementById('one-body').textContent")
        assert page.run("document.images.length") == 0
        assert page.run("document.querySelectorAll('button[data-order=forget]').length") == 0
        page.run("location.hash = ''")
        typed(page, "#token", TOKEN)
        page.key("Enter", "\r")
        page.until("document.getElementById('said').textContent.includes('anna')")
        assert TOKEN not in page.run("location.href")
        page.run("location.hash = '#device=d3'")
        page.until("document.querySelectorAll('button[data-order=forget]').length === 1")
        page.tap("button[data-order=forget]")
        page.until("document.getElementById('ask').open")
        assert page.run("document.getElementById('ask-yes').disabled")
        typed(page, "#typed", "d3")
        assert not page.run("document.getElementById('ask-yes').disabled")
        page.tap("#ask-yes")
        page.until("document.getElementById('said').textContent === 'forget d3: recorded'")
        page.run("location.hash = ''")
        page.until("document.getElementById('orders').textContent.includes('forget d3, asked by anna (page')")
        page.until("!document.getElementById('orders').textContent.includes('NOT yet done')")
    log = json.loads(run("fleet", "log", "--store", served.processes.folder / "store", "--json", "-").stdout)["orders"]
    assert [(each["what"], each["device"]) for each in log] == [("forget", "d3")]
