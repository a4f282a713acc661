"""The operator's page in a real Chromium: what one sees, by mouse and by keys; hostile names are text."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import free_port
from browser import Page, chromium
from commands import run
from fleets import EVIL, TOKEN, Served, stocked


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served.with_control(tmp_path, 300) as found:
        yield found


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
            classes = page.run("document.getElementById('classes').textContent")
            assert "proposed: barn owl, 9 photos of 2 devices: d4 (7), d3 (2)" in classes
            assert f"proposed: {EVIL}, 3 photos of 1 device: d3 (3)" in classes
            assert "many photos unlike all classes: 1 device" in classes
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
        typed(page, "#typed", "d")
        assert page.run("document.getElementById('ask-yes').disabled")  # not before the whole name is there
        typed(page, "#typed", "3")
        assert not page.run("document.getElementById('ask-yes').disabled")
        page.tap("#ask-yes")
        page.until("document.getElementById('said').textContent === 'forget d3: recorded'")
        page.run("location.hash = ''")
        page.until("document.getElementById('orders').textContent.includes('forget d3, asked by anna (page')")
        page.until("!document.getElementById('orders').textContent.includes('NOT yet done')")
        page.until("devices.has('d5') && !devices.has('d3')")  # who is forgotten is in no row any more
    log = json.loads(run("fleet", "log", "--store", served.processes.folder / "store", "--json", "-").stdout)["orders"]
    assert [(each["what"], each["device"]) for each in log] == [("forget", "d3")]


def test_the_table_is_sorted_a_clock_set_back_is_said_and_a_roll_out_widens_to_its_next_stage(served: Served) -> None:
    with chromium() as browser:
        page = browser.open(f"http://127.0.0.1:{served.port}/#sort=heard", width=1400)
        first = "document.querySelector('#rows th').textContent"
        page.until(f"{first} === 'd3'")  # who was heard last
        page.run("location.hash = '#sort=-heard'")
        page.until(f"{first} !== 'd3'")
        assert page.run("shown[shown.length - 1].name") == "d3"
        assert page.run("[lasts(-3600), lasts(-5), lasts(30)]") == ["an unknown time", "0 s", "30 s"]
        page.run("""(() => { window.sent = [];
            window.post = async (path, body) => { sent.push(body); return { said: "" }; }; })()""")
        for stages, share in (([0.25, 1], 0.25), ([], 1)):
            page.run(f"parts.rollout = {{stages: {stages}}}; give('rollout-stage', '', '')")
            assert page.run("sent.pop()") == {"what": "rollout-stage", "device": "", "typed": "", "share": share}
        page.run("parts.top = {...parts.top, leaving: [['d5', now() - 40]], away: 1235}; drawTop()")
        lines = page.run("[...document.querySelectorAll('#cares li')].slice(-2).map((line) => line.textContent)")
        assert lines == ["d5: gone for 40 s, and needs care after 10 min (gone)", "and 1,234 more: gone"]


def test_a_page_that_is_open_recovers_when_what_serves_it_was_killed(tmp_path: Path) -> None:
    """The new process knows no browser of before, so the page loads itself again, where one was."""
    store, words = stocked(tmp_path / "store"), ("--page", free_port())
    with chromium() as browser:
        first = Served(tmp_path, "first", "watch", *words, "--store", store)
        page = browser.open(f"http://127.0.0.1:{first.port}/#filter=old-bundle", width=1400)
        page.until("document.querySelectorAll('#rows th').length === 1")
        first.end()
        page.until("!document.getElementById('alone').hidden")
        second = Served(tmp_path, "second", "watch", *words, "--store", store)
        recovered = """document.readyState === 'complete' && document.getElementById('alone').hidden
            && document.querySelectorAll('#rows th').length === 1 && location.hash"""
        deadline, found = time.monotonic() + 60, None
        while not found:
            assert time.monotonic() < deadline
            with contextlib.suppress(AssertionError):  # it is being loaded
                found = page.run(recovered)
            time.sleep(0.05)
        assert found == "#filter=old-bundle"
        assert run("fleet", "remove", "d2", "--store", store).returncode == 0
        page.until("document.getElementById('orders').textContent.includes('remove d2')")  # and it hears what is new
        second.end()
