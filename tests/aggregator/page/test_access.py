"""The operator's page and the pairing form for everybody: by keys alone, in the dark, on a phone, by a screen reader.

Aggregator, broker and Chromium are processes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, Page
from fleets import TOKEN, Served, stocked
from pages.access import PHONE_PX, Opened, check_axe, check_contrast, check_names, check_width, tabbed, tabs, tree


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served.with_control(tmp_path_factory.mktemp("orchard"), 120) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, served: Served) -> Iterator[Opened]:
    """Opens the page: `opened("#device=d3", width=…, dark=…)`."""
    url = f"http://127.0.0.1:{served.port}/"
    with tabs(browser, url, "document.querySelectorAll('#rows tr, #one-body dl, #one-body p').length") as opened:
        yield opened


def typed(page: Page, text: str) -> None:
    for letter in text:
        page.key(letter, letter)


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until this has the focus."""
    for _ in range(2):  # from where it is, and once more from the top
        for _ in tabbed(page):
            if page.run(f"document.activeElement.matches({json.dumps(selector)})"):
                return
    raise AssertionError(f"Tab never comes to {selector}")


# ── what is seen and said ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, PHONE_PX])
@pytest.mark.parametrize("at", ["", "#device=d3", "#runbook=left-out"])
def test_every_text_can_be_read_and_nothing_scrolls_sideways(opened: Opened, at: str, width: int, dark: bool) -> None:
    page = opened(at, width=width, dark=dark)
    assert (page.run("getComputedStyle(document.body).backgroundColor") != "rgb(255, 255, 255)") == dark
    check_contrast(page)
    check_width(page)
    check_axe(page)


def test_a_screen_reader_is_told_what_each_control_is(opened: Opened) -> None:
    page = opened()
    check_names(page)
    said = {(node["role"], node["name"]) for node in tree(page)}
    for role, names in {
        "region": (
            *("Who needs care", "Devices", "Table of devices", "Rounds", "Table of rounds", "Roll-out"),
            *("Named devices, and why", "Classes", "Orders, and who gave them", "What expires", "What happened last"),
        ),
        "navigation": ("Filters",),
        "searchbox": ("Name, board or bundle",),
        "textbox": ("Control token",),
        "button": ("Enter", "Device", "State", "Care ↑", "Accuracy"),
        "image": ("Accuracy by round",),
        "columnheader": ("Device", "Round"),
        "link": ("d0", "d3", "left-out"),
    }.items():
        assert {(role, name) for name in names} <= said, role
    assert {"banner", "main", "search", "status", "table", "rowheader"} <= {role for role, _ in said}
    page = opened("#device=d3")
    check_names(page)
    assert {("heading", "d3"), ("link", "Back to the fleet")} <= {(node["role"], node["name"]) for node in tree(page)}


# ── by keys alone ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("width", [1400, PHONE_PX])
def test_the_key_tab_goes_through_every_row_of_the_table_and_shows_where_it_is(opened: Opened, width: int) -> None:
    page = opened("#sort=name", width=width)
    parts: list[str] = []
    names: list[str] = []
    for stop in tabbed(page):
        part = stop["in"]
        parts += [part] if part not in parts[-1:] else []
        if part == "rows" and stop["href"].startswith("#device="):
            names.append(stop["text"])
    back = [stop["text"] for stop in tabbed(page, back=True) if stop["in"] == "rows" and "#device=" in stop["href"]]
    assert parts[1:7] == ["cares", "filters", "search", "view", "heads", "rows"]
    assert names == page.run("shown.map((one) => one.name)")
    assert len(names) == 121
    assert parts.count("rows") == 1
    assert back == names[::-1]


def test_an_operator_gives_an_order_by_keys_alone(opened: Opened) -> None:
    page = opened()
    tab_to(page, "#token")
    typed(page, TOKEN)
    page.key("Enter", "\r")
    page.until("document.getElementById('said').textContent.includes('anna')")
    page.run("location.hash = '#find=d5'")
    page.until("document.getElementById('count').textContent.startsWith('11 of')")
    tab_to(page, "#rows a[href='#device=d5']")
    page.key("Enter", "\r")
    page.until("document.activeElement.id === 'one-title'")
    tab_to(page, "button[data-order=forget]")
    page.key(" ", " ")
    page.until("document.getElementById('ask').open")
    assert page.run("document.activeElement.id") == "typed"
    check_axe(page)
    check_contrast(page)
    dialog = next(node for node in tree(page) if node["role"] == "dialog")
    assert dialog["name"] == "d5: Take out all that came from this device, for good, and take nothing more of it?"
    page.key("Escape")
    page.until("!document.getElementById('ask').open")
    assert page.run("document.activeElement.dataset.order") == "forget"
    page.key("Enter", "\r")
    page.until("document.getElementById('ask').open")
    typed(page, "d5")
    page.key("Enter", "\r")
    page.until("document.getElementById('said').textContent === 'forget d5: recorded'")
    page.key("Tab", shift=True)  # back to the top, and to the fleet
    for _ in range(10):
        if page.run("document.activeElement.textContent") == "Back to the fleet":
            break
        page.key("Tab", shift=True)
    page.key("Enter", "\r")
    page.until("!document.getElementById('fleet').hidden")
    assert page.run("Boolean(document.activeElement.closest('#view'))")  # the table that led to the device


# ── the pairing form ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_who_types_a_wrong_code_is_told_so_and_gets_in_by_the_right_one(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    served = Served(tmp_path, "watch", "watch", "--page", "0.0.0.0:0", "--store", stocked(tmp_path / "store", 3))
    try:
        served.processes.wait_for(served.name, "pairing code is")  # it is said after the page's address
        right = re.findall(r"pairing code is ([A-Z0-9]{4}-[A-Z0-9]{4})", served.said())[0]
        page = browser.open(f"http://127.0.0.1:{served.port}/", width=PHONE_PX, dark=dark)
        for code in ("AAAA-AAAA", right):
            check_contrast(page)
            check_width(page)
            check_axe(page)
            assert ("textbox", "Pairing code") in {(node["role"], node["name"]) for node in tree(page)}
            page.until("document.activeElement.id === 'code'")  # which has the focus once the page was drawn
            typed(page, code)
            page.run("document.title = 'asked'")
            page.run("new Promise((done) => setTimeout(done, 1100))")  # the pause after a wrong one
            page.key("Enter", "\r")
            page.until("document.title !== 'asked' && document.readyState === 'complete'")
            if code == "AAAA-AAAA":
                alerts = [node for node in tree(page) if node["role"] == "alert"]
                assert alerts
                assert "That is not the code" in page.run("document.body.innerText")
        page.until("document.querySelectorAll('#rows tr').length")
    finally:
        served.end()
