"""The reports' pages as they are read: on a phone, by keys, by touch, in the dark, on paper; and what answers first."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, Page, chromium
from page_checks import PHONE_PX
from pages.access import check_axe, check_width, tree

from protofleet.cli import main
from protofleet.hw_profiles.plan.fleet_file import example
from protofleet.hw_profiles.reports.which_board import what_it_takes, which_board

SHIPPED = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"
NAMES = ("profile", "cost", "sweep", "plan")
BOARDS = "raspberry-pi-zero-2w,raspberry-pi-4,raspberry-pi-5,jetson-agx-xavier,fpga-kv260"
Opened = Callable[..., Page]


@pytest.fixture(scope="module")
def pages(mnist_like_bundle: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of each command; its report lies beside it."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "fleet.toml").write_text(example())
    (folder / "fleet.bundle").write_bytes(SHIPPED.read_bytes())
    axes = ["--rows", "8,16", "--cols", "8", "--batch", "4", "--mhz", "100"]
    commands = {
        "profile": ["profile", str(mnist_like_bundle()), "--devices", BOARDS],
        "cost": ["cost", "spherefed_convnet"],
        "sweep": ["cost", "sweep", "spherefed_convnet", *axes],
        "plan": ["plan", str(folder / "fleet.toml")],
    }
    for name, words in commands.items():
        assert main([*words, "--html", str(folder / f"{name}.html"), "--json", str(folder / f"{name}.json")]) == 0
    return {name: folder / f"{name}.html" for name in commands}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@pytest.fixture
def opened(browser: Browser, pages: dict[str, Path]) -> Iterator[Opened]:
    """Opens a page by its name, with all that is folded unfolded."""
    tabs = []

    def opens(name: str, **given: Any) -> Page:
        tab = browser.open(pages[name].as_uri(), **given)
        tabs.append(tab)
        tab.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        return tab

    yield opens
    for tab in tabs:
        tab.close()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("width", [PHONE_PX, 360, 768, 1024, 1400])
def test_nothing_is_cut_off(opened: Opened, name: str, width: int) -> None:
    page = opened(name, width=width)
    check_width(page)
    within = """[...document.querySelectorAll(".scroll")].filter((e) => e.scrollWidth > e.clientWidth)
        .map((e) => e.getAttribute("aria-label"))"""
    assert page.run(within) == [], "a box that scrolls from side to side"
    wide = """[...document.querySelectorAll("body *")].filter((e) => e.checkVisibility() && !e.closest("svg *, thead"))
        .filter((e) => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < 0)
        .map((e) => e.outerHTML.slice(0, 100))"""
    assert page.run(wide) == []


@pytest.mark.parametrize("name", NAMES)
def test_on_a_phone_each_row_is_a_block_with_each_value_beside_its_columns_name(opened: Opened, name: str) -> None:
    page = opened(name, width=PHONE_PX)
    tables = page.run("""[...document.querySelectorAll("table.rows")].filter((table) => table.checkVisibility())
        .map((table) => ({
        heads: [...table.querySelectorAll("thead th")].map((th) => th.textContent),
        rows: [...table.querySelectorAll("tbody tr")].map((row) => [...row.querySelectorAll("td")].map((td) => ({
            before: getComputedStyle(td, "::before").content, text: td.textContent,
            left: td.getBoundingClientRect().left, row: row.getBoundingClientRect().left,
            shown: getComputedStyle(td).display }))) }))""")
    assert tables
    assert any(table["rows"] for table in tables)
    for table in tables:
        assert all(table["heads"])
        for row in table["rows"]:
            for head, cell in zip(table["heads"][1:], row, strict=True):
                assert json.loads(cell["before"].split(" / ")[0]) == head
                assert (cell["shown"] == "none") == (cell["text"] == "")
                if cell["text"]:
                    assert cell["left"] == pytest.approx(cell["row"], abs=1), "below each other, not side by side"


def test_to_a_screen_reader_blocks_are_still_a_table(opened: Opened) -> None:
    roles = [node["role"] for node in tree(opened("plan", width=PHONE_PX))]
    for role in ("table", "row", "columnheader", "rowheader", "cell"):
        assert role in roles, role


@pytest.mark.parametrize("name", NAMES)
def test_axe_finds_nothing_on_a_phone_and_on_a_screen_in_the_dark(opened: Opened, name: str) -> None:
    check_axe(opened(name, width=PHONE_PX))
    check_axe(opened(name, dark=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_screen_answers(opened: Opened, pages: dict[str, Path], name: str) -> None:
    page = opened(name, width=PHONE_PX, height=800)
    report = json.loads(pages[name].with_suffix(".json").read_text())
    assert page.run("document.querySelector('.answer').textContent") == report["sentence"]
    assert page.run("document.querySelector('.answer').getBoundingClientRect().bottom") < 800
    assert re.search("extrapolated|interpolated|simulated", report["sentence"])


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_of_a_chart_is_told_by_keys(opened: Opened, pages: dict[str, Path], name: str) -> None:
    page = opened(name)
    chart = next(each for each in re.findall(r"<svg.*?</svg>", pages[name].read_text()) if "<title>" in each)
    chart = html.unescape(chart)
    label = re.findall('aria-label="([^"]*)"', chart)[0]
    titles = set(re.findall("<title>([^<]*)</title>", chart))
    for _ in range(200):
        page.key("Tab")
        if page.run("document.activeElement.getAttribute('aria-label')") == label:
            break
    else:
        raise AssertionError(f"Tab does not come to {label}")
    assert page.run("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    told = []
    page.key("ArrowDown")
    while not told or page.run(_TIP) != told[-1]:
        told.append(page.run(_TIP))
        page.key("ArrowRight")
    assert titles <= set(told)
    page.key("Home")
    assert page.run(_TIP) == told[0]
    page.key("Escape")
    assert page.run(_TIP) == ""


_TIP = "(() => { const tip = document.getElementById('tip'); return tip.hidden ? '' : tip.textContent; })()"


@pytest.mark.parametrize("touch", [False, True])
def test_a_mark_tells_its_figure_on_hover_and_on_a_tap_near_it(opened: Opened, touch: bool) -> None:
    page = opened("profile", width=PHONE_PX)
    mark = "document.querySelector('svg circle[data-says]')"
    x, y = (
        page.run(f"""(() => {{ {mark}.scrollIntoView({{block: "center"}}); const box = {mark}.getBoundingClientRect();
        return [box.left + box.width / 2, box.top + box.height / 2]; }})()""")
    )
    if touch:
        point = {"x": x + 7, "y": y + 7}  # a finger is no needle
        page.ask("Emulation.setTouchEmulationEnabled", enabled=True)
        page.ask("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
        page.ask("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    else:
        page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x - 40, y=y)  # a pointer that comes from beside it
        page.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    told = page.until(_TIP)
    assert " G/s at " in told
    box = page.run(
        "(() => { const b = document.getElementById('tip').getBoundingClientRect(); return [b.left, b.right]; })()"
    )
    assert 0 <= box[0] < box[1] <= PHONE_PX
    assert page.run("document.querySelectorAll('svg title').length") == 0, "or a browser shows it twice"
    page.ask("Input.dispatchMouseEvent", type="mousePressed", x=5, y=5, button="left", clickCount=1)
    assert page.run(_TIP) == ""


def test_enter_keeps_the_point_at_which_the_arrows_are(opened: Opened) -> None:
    page = opened("sweep")
    page.run("document.querySelector('.of-method:not([hidden]) svg').focus()")
    page.key("End")
    number = page.run("document.querySelector('.at').dataset.n")
    page.key("Enter")
    assert f"at={number}" in page.run("location.href")
    told = page.run(
        "[...document.querySelectorAll('.of-method:not([hidden]) .here-figures dd')].map((e) => e.textContent)"
    )
    assert page.run(_TIP) == ", ".join(text for text in told if text != "unknown")


@pytest.mark.parametrize("name", NAMES)
def test_paper_has_tables_all_unfolded_and_no_controls(browser: Browser, pages: dict[str, Path], name: str) -> None:
    page = browser.open(pages[name].as_uri(), width=720, dark=True)
    page.ask("Emulation.setEmulatedMedia", media="print")
    shown = "getComputedStyle(document.querySelector('{}')).display"
    assert page.run(shown.format("table.rows")) == "table"
    assert page.run(shown.format("#tip")) == "none"
    assert page.run("getComputedStyle(document.body).color") == "rgb(27, 31, 36)", "ink"
    if name == "sweep":
        assert page.run(shown.format("#filters")) == "none"
    folded = page.run("[...document.querySelectorAll('details table')].filter((t) => t.offsetHeight === 0).length")
    assert folded == 0
    page.close()


def _device(title: str, ms: float, **given: Any) -> dict[str, Any]:
    memory = {
        "fits": True, "inference_fits": True, "training_fits": True, "extrapolated": [],
        "peak_bytes_at_most": 100e6, "usable_bytes": 400e6, **given.pop("memory", {}),
    }  # fmt: skip
    entry = {"latency_ms": ms, "low_ms": 0.5 * ms, "high_ms": 2 * ms, "support": "extrapolated", "kind": "predicted"}
    return {"title": title, "inference": [entry | given], "training_step": None, "memory": memory}


def _answer(*devices: dict[str, Any]) -> str:
    return which_board({"subject": {"training_step_macs": None}, "samples": 10, "devices": list(devices)})


def test_which_board_is_the_slowest_that_fits_with_its_interval_and_support() -> None:
    small = _device("A, 1 GB", 90.0, memory={"fits": False, "inference_fits": False, "peak_bytes_at_most": 500e6})
    groundless = _device("B", 80.0, support="no ground", low_ms=None, high_ms=None)
    array = _device("C", 40.0, support=None, low_ms=None, high_ms=None, kind="simulated")
    said = _answer(small, groundless, array, _device("D", 60.0), _device("E", 2.0))
    assert said == (
        "The slowest that fits is D: an inference takes 60 ms (30 ms to 120 ms, extrapolated); memory at most 100 MB "
        "of 400 MB. Perhaps slower, by the intervals: C. The fastest is E: 2 ms (1 ms to 4 ms, extrapolated). Too "
        "little memory: A (at most 500 MB of 400 MB). Not compared: B (no ground). Prices are yours: protofleet plan "
        "takes the cheapest by them."
    )
    assert _answer(array) == "C fits: an inference takes 40 ms (simulated); memory at most 100 MB of 400 MB."
    assert _answer(groundless) == "B: no time to go by, no ground; memory at most 100 MB of 400 MB."
    assert _answer(small).startswith("This board does not do. Too little memory: A ")
    many = _answer(*(_device(f"S{n}", 1.0, memory={"fits": False}) for n in range(5)))
    assert "S0 (at most 100 MB of 400 MB), " in many
    assert many.endswith(" and 2 more.")


def _cost(saved_percent: float) -> dict[str, Any]:
    rows = [
        {"method": name, "step_ms": ms, "round_s": 1.0, "saved_percent": {"latency": saved}}
        for name, ms, saved in (("fedavg", 10.0, 0.0), ("fedpr", 9.9, saved_percent))
    ]
    subject, memory = {"batch": 4}, {"largest_batch": {"training": 8, "inference": 9}, "capacity_bytes": 1e9}
    able = {"array": {"precision": "fp32"}, "buildable": ["fp32"]}
    return able | {"subject": subject, "memory": memory, "device": "D", "methods": rows}


def test_a_method_that_is_no_quicker_is_not_called_the_quickest() -> None:
    assert "The quickest is fedpr: 9.9 ms, 1.0 % less." in what_it_takes(_cost(1.0))
    assert "quickest" not in what_it_takes(_cost(0.04))


def test_a_round_is_compared_where_the_bundle_trains(pages: dict[str, Path]) -> None:
    report = json.loads(pages["profile"].with_suffix(".json").read_text())
    rounds = {d["title"].split(",")[0]: d["training_step"]["round_s"] for d in report["devices"] if d["training_step"]}
    slowest = max(rounds, key=lambda title: rounds[title])
    assert report["sentence"].startswith(f"The slowest that fits is {slowest}: a round of 1,000 photos takes ")
    assert "Not compared: Jetson AGX Xavier (32 GB) (no training predicted)." in report["sentence"]
