"""The device's page for everybody: by keys alone, in the dark, on a narrow phone, by a screen reader.

Client, aggregator, broker and Chromium are processes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from brokers import make_broker
from browser import Browser
from edge_samples import FASHION_LABELS, fashion
from fleets import Processes
from pages.access import (
    PHONE_PX,
    Opened,
    check_axe,
    check_contrast,
    check_names,
    check_width,
    focused,
    tabbed,
    tabs,
    tree,
)
from pages.device import BUNDLE, Device, browser_at
from PIL import Image

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.photo_ring import PhotosBeside


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    """A client that answers, so that every part of its page is shown: two classes are named, others look unknown."""
    folder, bundle = tmp_path_factory.mktemp("door"), read_bundle(BUNDLE)
    broker, fleet = make_broker("embedded", folder), Processes(folder)
    broker.start()
    found = Device(broker, folder)
    found.start()
    words = ("--bundle", BUNDLE, "--method", "ncm", "--broker", broker.url, "--store", folder / "s.sqlite")
    fleet.start("aggregator", "aggregate", *words, "--standing", "--every", "1s")
    found.show(bundle, (5, 8), 16)
    visitor = browser_at(found)
    visitor.open()
    for label in ("Sandal", "Bag"):
        photos = [id for id, true in found.truth().items() if true == label][:6]
        visitor.post("/name", {"photos": photos, "label": label})
    fleet.wait_for("aggregator", "2 classes")
    _more(found, (1, 7, 9), 12)
    deadline = time.monotonic() + 60
    while not (visitor.open()["unknown"] and visitor.open()["newest"][0]["answer"]):
        assert time.monotonic() < deadline, found.said()
        time.sleep(0.1)
    yield found
    found.kill()
    fleet.end()
    broker.stop()


def _more(device: Device, classes: tuple[int, ...], count: int, seed: int = 9) -> None:
    for row, image in enumerate(fashion(read_bundle(BUNDLE), count, classes, seed=seed).x):
        Image.fromarray(image[..., 0]).save(device.folder / "camera" / f"more-{seed}-{row}.png")


@pytest.fixture
def opened(browser: Browser, device: Device) -> Iterator[Opened]:
    """Opens the page: `opened(width=…, dark=…)`."""
    url = f"http://127.0.0.1:{device.port}/"
    with tabs(browser, url, "document.querySelectorAll('#newest button').length > 3") as opened:
        yield opened


def labels_in(device: Device) -> dict[bytes, str]:
    learned = Learned(device.state)
    learned.look()
    found = dict(zip(learned.hashes, learned.labels, strict=True))
    learned.close()
    return found


# ── what is seen and said ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, PHONE_PX])
def test_every_text_can_be_read_and_nothing_scrolls_sideways(opened: Opened, width: int, dark: bool) -> None:
    page = opened(width=width, dark=dark)
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground != "rgb(255, 255, 255)") == dark
    page.run("document.querySelector('#newest button').click()")
    page.run("document.querySelector('#unknown button').click()")
    check_contrast(page)
    check_width(page)
    check_axe(page)


def test_a_screen_reader_is_told_what_each_control_is(device: Device, opened: Opened) -> None:
    page = opened()
    check_names(page)
    said = {(node["role"], node["name"]) for node in tree(page)}
    regions = ("Newest", "Name these next", "Unlike all that the fleet knows: a new class?", "Have I done enough?")
    for role, names in {
        "region": (*regions, "What has left this device", "Labels by class"),
        "group": ("Classes", "Other"),
        "button": (*FASHION_LABELS, "None of these", "Not sure", "Undo", "Erase", "Propose"),
        "textbox": ("They are",),
        "columnheader": ("Class", "Labels", "Right before", "95 % interval"),
        "rowheader": FASHION_LABELS,
        "link": ("To the classes",),
    }.items():
        assert {(role, name) for name in names} <= said
    assert {"banner", "main", "contentinfo", "status", "table"} <= {role for role, _ in said}
    photos = [node for node in tree(page) if _is_photo(node)]
    assert len(photos) == page.run("document.querySelectorAll('.photos button').length")
    assert {node["pressed"] for node in photos} == {"false"}
    page.run("document.querySelector('#newest button').click()")
    assert "true" in {node["pressed"] for node in tree(page) if _is_photo(node)}


def _is_photo(node: dict[str, Any]) -> bool:
    return bool(node["role"] == "button" and node["name"].startswith("Photo"))


# ── by keys alone ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_key_tab_reaches_all_in_the_order_of_the_page_and_shows_where_it_is(device: Device, opened: Opened) -> None:
    page = opened(width=PHONE_PX)
    page.run("document.querySelector('#newest button').click()")  # so that no button is disabled
    page.run("document.activeElement.blur()")
    stops = list(tabbed(page))
    parts = list(dict.fromkeys(stop["in"] for stop in stops))
    assert stops[0]["text"] == "To the classes"
    assert parts[1:4] == ["newest", "wanted", "unknown"]
    assert parts[-1] == "erase"
    reachable = page.run("""[...document.querySelectorAll("a[href], button:not(:disabled), input, [tabindex='0']")]
        .filter((e) => e.checkVisibility()).length""")
    assert len(stops) == reachable


def test_photos_are_named_by_enter_and_space_and_the_focus_is_not_lost(device: Device, opened: Opened) -> None:
    page = opened()
    before = labels_in(device)
    page.key("Tab")
    page.key("Enter", "\r")  # the link to the classes
    page.key("Tab")
    first = focused(page)
    assert first is not None
    assert first["data"]["label"] == FASHION_LABELS[0]
    page.key("Tab")
    page.key(" ", " ")  # each tap names the second class from now on
    assert page.run("document.getElementById('said').textContent") == f"each tap names {FASHION_LABELS[1]}"
    for section in ("unknown", "wanted"):
        for key, text in ((" ", " "), ("Enter", "\r")):
            page.run(f"document.querySelector('#{section} button').focus()")
            id = page.run("document.activeElement.dataset.id")
            count = len(labels_in(device))
            page.run("document.getElementById('said').textContent = ''")
            page.key(key, text)
            page.until(f"document.getElementById('said').textContent === '1 named {FASHION_LABELS[1]}'")
            assert len(labels_in(device)) == count + 1
            page.until(f"!document.querySelector('#{section} button[data-id=\"{id}\"]')")
            stop = focused(page)  # the photo is not asked about any more: its neighbour has the focus
            assert stop is not None
            assert stop["in"] == section
    named = labels_in(device)
    assert [named[each] for each in named if each not in before] == [FASHION_LABELS[1]] * 4


def test_a_photo_that_comes_takes_the_focus_from_none(device: Device, opened: Opened) -> None:
    page = opened()
    page.run("document.querySelectorAll('#newest button')[2].focus()")
    id = page.run("document.activeElement.dataset.id")
    newest = page.run("document.querySelector('#newest button').dataset.id")
    _more(device, (3,), 1, seed=21)
    page.until(f"document.querySelector('#newest button').dataset.id !== '{newest}'")
    time.sleep(0.2)
    assert page.run("document.activeElement.dataset.id") == id
    page.run("[...document.querySelectorAll('#newest button')].at(-1).focus()")  # the oldest, which leaves next
    newest = page.run("document.querySelector('#newest button').dataset.id")
    _more(device, (4,), 1, seed=22)
    page.until(f"document.querySelector('#newest button').dataset.id !== '{newest}'")
    time.sleep(0.2)
    stop = focused(page)
    assert stop is not None
    assert stop["in"] == "newest"


NEWEST = "[...document.querySelectorAll('#newest button')].map((e) => e.dataset.id)"


def test_photos_stay_in_their_places_while_some_are_chosen(device: Device, opened: Opened) -> None:
    page = opened()
    ids = page.run(NEWEST)
    page.run("document.querySelectorAll('#newest button')[1].click()")
    assert page.run("document.getElementById('said').textContent") == f"1 chosen: photo {ids[1]}"
    _more(device, (3,), 1, seed=23)
    page.until(f"state.newest[0].id !== '{ids[0]}'")
    assert page.run(NEWEST) == ids
    page.run("document.querySelectorAll('#newest button')[1].click()")
    page.until(f"document.querySelector('#newest button').dataset.id !== '{ids[0]}'")


def test_a_tap_in_the_moment_after_the_photos_moved_is_not_taken(device: Device, opened: Opened) -> None:
    page = opened()
    tap = (
        "document.querySelector('#newest button').dispatchEvent(new MouseEvent('click', { bubbles: true, detail: 1 }))"
    )
    page.run(f"at('newest').moved = performance.now(); {tap}")
    assert page.run("[document.getElementById('said').textContent, chosen.size]") == [
        "The photos moved just now: tap again.", 0,
    ]  # fmt: skip
    page.run(f"at('newest').moved = performance.now() - 1000; {tap}")
    assert page.run("chosen.size") == 1


def test_photos_that_move_take_no_tap_for_a_moment(device: Device, opened: Opened) -> None:
    page = opened()
    page.run("delete at('newest').moved; delete at('wanted').moved")
    id = page.run("document.querySelector('#newest button').dataset.id")
    _more(device, (2,), 1, seed=24)
    page.until(f"document.querySelector('#newest button').dataset.id !== '{id}'")
    assert page.run("at('newest').moved > 0")
    line = "{ ...state, health: { ...state.health, refused: 'its run is over' } }"  # above them, it moves them, too
    assert page.run(f"delete at('wanted').moved; state = {line}; draw(); justNow(at('wanted').moved)")


def test_what_was_named_a_moment_ago_keeps_its_name_while_others_are_chosen(device: Device, opened: Opened) -> None:
    page = opened()
    page.until("document.querySelectorAll('#unknown button').length > 1")
    id = page.run("document.querySelector('#unknown button').dataset.id")
    page.run("document.querySelector('#unknown button').click()")
    page.run(f"document.querySelector(`[data-label='{FASHION_LABELS[7]}']`).click()")
    page.until(f"at('said').textContent === '1 named {FASHION_LABELS[7]}'")
    page.run("document.querySelectorAll('#unknown button')[1].click()")
    time.sleep(2.0)  # longer than photos stay after a tap
    shown = f"document.querySelector('#unknown button[data-id=\"{id}\"] .label').textContent"
    alone = "state = { ...state, newest: [], wanted: [], unknown: [] }; draw()"  # an event that has it no more
    assert page.run(f"{alone}; {shown}") == f"✓ {FASHION_LABELS[7]}"
    page.run("document.querySelectorAll('#unknown button')[1].click()")
    page.until(f"!document.querySelector('#unknown button[data-id=\"{id}\"]')")


def test_the_part_of_a_chosen_photo_stays_though_it_is_unknown_no_more(opened: Opened) -> None:
    page = opened()
    page.run("document.querySelector('#unknown button').click()")
    page.run("state = { ...state, unknown: [], proposed: {} }; draw()")
    assert page.run("[at('unknown-part').hidden, at('unknown').children.length > 0]") == [False, True]
    page.run(
        "document.querySelector('#unknown button').click(); state = { ...state, unknown: [], proposed: {} }; draw()"
    )
    page.until("at('unknown-part').hidden || state.unknown.length > 0")


def test_where_there_is_nothing_to_name_next_that_is_said(opened: Opened) -> None:
    page = opened()
    assert page.run("[at('nothing').hidden, at('wanted').children.length > 0]") == [True, True]
    assert page.run("state = { ...state, wanted: [] }; draw(); at('nothing').checkVisibility()")


@pytest.mark.parametrize("width", [1400, 400])
def test_a_double_tap_does_not_erase_and_nothing_moves_under_it(device: Device, opened: Opened, width: int) -> None:
    page = opened(width=width)
    id = page.run("document.querySelector('#newest button').dataset.id")
    page.run("document.querySelector('#newest button').click()")
    places = "['none', 'unsure', 'undo', 'erase'].flatMap((id) => [at(id).offsetLeft, at(id).offsetTop])"
    before = page.run(places)
    tap = "at('erase').dispatchEvent(new MouseEvent('click', { bubbles: true, detail: 1 }))"
    page.run(f"{tap}; {tap}")
    assert page.run("at('erase').textContent") == "Erase 1 for good?"
    assert page.run(places) == before
    assert id in {photo.id for photo in PhotosBeside(device.state).photos()}
    page.run("document.querySelectorAll('#newest button')[1].click()")  # another choice is another question
    assert page.run("at('erase').textContent") == "Erase"
    page.run(f"at('erase').click(); surelySince -= 1000; {tap}")
    page.until("at('said').textContent.startsWith('2 erased')")
    assert id not in {photo.id for photo in PhotosBeside(device.state).photos()}


def test_what_is_chosen_is_erased_at_the_second_tap(device: Device, opened: Opened) -> None:
    page = opened()
    id = page.run("document.querySelector('#newest button').dataset.id")
    page.run("document.querySelector('#newest button').click()")
    page.run("document.getElementById('erase').click()")
    assert page.run("document.getElementById('erase').textContent") == "Erase 1 for good?"
    time.sleep(1.0)  # what the first tap would send has come by then
    assert id in {photo.id for photo in PhotosBeside(device.state).photos()}
    page.run("document.getElementById('erase').click()")
    page.until("document.getElementById('said').textContent === '1 erased for good, with what was learned of them'")
    assert id not in {photo.id for photo in PhotosBeside(device.state).photos()}
    page.until(f"!document.querySelector('button[data-id=\"{id}\"]')")
    assert page.run("document.getElementById('erase').textContent") == "Erase"


def test_a_class_is_proposed_by_keys_alone(device: Device, opened: Opened) -> None:
    page = opened()
    _more(device, (0, 2), 6, seed=31)  # the tests before may have named or erased all that was unknown
    page.until("document.querySelector('#unknown button') !== null")
    page.run("document.querySelector('#unknown button').focus()")
    page.key("Enter", "\r")
    page.run("document.getElementById('proposed').focus()")
    for letter in "Hat":
        page.key(letter, letter)
    page.key("Enter", "\r")
    page.until("document.getElementById('said').textContent === '1 proposed as Hat'")
    for _ in range(20):
        page.key("Tab")
        if page.run("document.activeElement.id") == "undo":
            break
    page.key(" ", " ")
    page.until("document.getElementById('said').textContent === '1 taken back'")
    stop = focused(page)
    assert stop is not None
