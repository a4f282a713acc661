"""The device's page, of a client that is a process: who may come in, what a tap does, and what it never gives."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from browser import Visitor as Browsing
from browser import chromium
from commands import one_error_line, run
from edge_peer import Peer
from edge_samples import FASHION_LABELS
from pages.device import BUNDLE, Device, browser_at
from pages.porch import Porch

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import DataError, UsageError
from protofleet.contract.page.page_address import read_page
from protofleet.contract.page.page_server import PageServer
from protofleet.contract.page.visitors import Visitor, Visitors, is_own_host
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.answers.label_report import wilson
from protofleet.edge_client.data.learned import Learned, LearnedFile, example_of
from protofleet.edge_client.photos.kept_photo import NewPhoto
from protofleet.edge_client.photos.naming import name_photos, name_proposed
from protofleet.edge_client.photos.photo_ring import FILE, PhotosBeside
from protofleet.edge_client.privacy.elapsed_time import moment
from protofleet.edge_client.privacy.ledger import Cost, Entry, Ledger, read_ledger


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path)
    found.start()
    yield found
    found.stop()


@pytest.fixture
def device(broker: TestBroker, tmp_path: Path) -> Iterator[Device]:
    found = Device(broker, tmp_path)
    found.start()
    yield found
    found.kill()


@pytest.fixture
def porch(bundle: Bundle, tmp_path: Path) -> Iterator[Porch]:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        found = Porch(tmp_path, bundle, ledger)
        yield found
        found.ring.close()


@pytest.fixture
def served(porch: Porch) -> Iterator[Browsing]:
    """A browser at that page."""
    server = PageServer(read_page("0"), porch.page)
    server.start()
    yield Browsing(server.port)
    server.stop()


def sent_in(peer: Peer, number: int) -> Counter[str]:
    peer.announce(number, "ncm")
    sent: Contribution = peer.contribution(number)
    peer.answer(number, "ncm")
    peer.give(number, sent, head=True)
    peer.announce(number, "ncm", phase="closed")
    return Counter({FASHION_LABELS[c]: int(n) for c, n in zip(sent.body.classes, sent.counts, strict=True)})


def labels_in(state: Path) -> Counter[str]:
    learned = Learned(state)
    learned.look()
    return Counter(learned.labels)


# ── taps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_tap_is_a_label_in_the_next_round_and_is_taken_back(
    device: Device, broker: TestBroker, bundle: Bundle
) -> None:
    count = device.show(bundle, (5, 8), 10)
    browser, truth = browser_at(device), device.truth()
    first = browser.open()
    assert first["classes"] == list(FASHION_LABELS)
    assert len(first["newest"]) == count
    code, heads, image = browser.ask("GET", f"/photo/{first['newest'][0]['id']}.jpg")
    assert (code, heads["content-type"], image[:2]) == (200, "image/jpeg", b"\xff\xd8")
    with Peer(broker.url, bundle) as peer:
        for label in ("Sandal", "Bag"):
            chosen = [id for id, true in truth.items() if true == label]
            done = browser.post("/name", {"photos": chosen, "label": label})
            assert done["count"] == len(chosen)
        assert labels_in(device.state) == Counter(truth.values())
        assert {photo["label"] for photo in done["state"]["newest"]} == {"Sandal", "Bag"}
        assert done["state"]["wanted"] == []
        assert sent_in(peer, 1) == Counter(truth.values())
        taken_back = browser.post("/undo", {})
        assert taken_back["count"] == len(chosen)
        assert sent_in(peer, 2) == {label: n for label, n in Counter(truth.values()).items() if label != "Bag"}
        wrong = next(id for id, true in truth.items() if true == "Sandal")
        browser.post("/name", {"photos": [wrong], "label": "Coat"})
        assert labels_in(device.state)["Coat"] == 1
        browser.post("/undo", {})  # to the label before
        assert labels_in(device.state) == {"Sandal": Counter(truth.values())["Sandal"]}
        assert [browser.post("/undo", {})["count"] for _ in range(2)] == [Counter(truth.values())["Sandal"], 0]


def test_what_is_not_sure_or_of_no_class_is_not_asked_about_again(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (1, 9), 6)
    browser = browser_at(device)
    ids = [photo["id"] for photo in browser.open()["wanted"]]
    assert len(ids) > 2
    browser.post("/aside", {"photos": ids[:1], "why": "unsure"})
    state = browser.post("/aside", {"photos": ids[1:2], "why": "none", "proposed": "<b>Hat</b>"})["state"]
    assert not {ids[0], ids[1]} & {photo["id"] for photo in state["wanted"]}
    assert labels_in(device.state) == {}
    done = run("labels", "--state", device.state)
    assert "<b>Hat</b> was proposed for 1 photo, and is no class of the fleet" in done.stdout
    for name in ("Hat, red", "+Hat", "-Hat", "Hat\nBag", "Bag", "H" * 65):
        tap = {"photos": ids[:1], "why": "none", "proposed": name}
        code, _, body = browser.ask("POST", "/aside", tap, X_Protofleet_Token=browser.token)
        assert (code, b"the proposed class, expected " in body, body.count(b"\n") < 2) == (409, True, True)
    assert {photo.proposed for photo in PhotosBeside(device.state).photos()} == {"", "<b>Hat</b>"}
    state = browser.post("/undo", {})["state"]
    assert ids[1] in {photo["id"] for photo in state["wanted"]}


def test_undo_leaves_a_photo_as_it_was_before(porch: Porch) -> None:
    """Its label, that this is on its way to the fleet, that it was set aside, and what was proposed for it."""
    page, (id, other) = porch.page, porch.keep("Coat", "Coat")
    page.set_aside([id], "none", "Hat")
    page.name([id], "Bag")
    assert (porch.photo(id).aside, porch.photo(id).proposed, labels_in(porch.state)) == ("", "", {"Bag": 1})
    assert page.undo() == 1
    assert (porch.photo(id).aside, porch.photo(id).proposed, labels_in(porch.state)) == ("none", "Hat", {})
    assert porch.photo(id).waits == 0
    page.set_aside([id], "unsure")
    assert page.undo() == 1
    assert (porch.photo(id).aside, porch.photo(id).proposed) == ("none", "Hat")

    page.name([other], "Bag")
    page.set_aside([other], "unsure")
    assert page.undo() == 1
    assert (porch.photo(other).aside, porch.photo(other).waits > 0, labels_in(porch.state)) == ("", True, {"Bag": 1})
    page.name([other], "Coat")
    assert page.undo() == 1
    assert (porch.photo(other).waits > 0, labels_in(porch.state)) == (True, {"Bag": 1})


def test_a_photo_is_erased_with_what_was_learned_of_it(device: Device, broker: TestBroker, bundle: Bundle) -> None:
    device.show(bundle, (5, 8), 10)
    browser, truth = browser_at(device), device.truth()
    browser.open()
    with Peer(broker.url, bundle) as peer:
        for label in ("Sandal", "Bag"):
            browser.post("/name", {"photos": [id for id, true in truth.items() if true == label], "label": label})
        assert sent_in(peer, 1) == Counter(truth.values())
        gone = next(id for id, true in truth.items() if true == "Bag")
        done = browser.post("/erase", {"photos": [gone]})
        assert done["count"] == 1
        shown = [photo["id"] for part in ("newest", "wanted", "unknown") for photo in done["state"][part]]
        assert gone not in shown
        assert browser.ask("GET", f"/photo/{gone}.jpg")[0] == 404
        left = Counter(truth.values()) - Counter(["Bag"])
        assert labels_in(device.state) == left
        browser.post("/undo", {})  # of the naming: what was erased does not come back
        assert labels_in(device.state) == Counter(Sandal=left["Sandal"])
        assert sent_in(peer, 2) == Counter(Sandal=left["Sandal"])
    assert browser.post("/erase", {"photos": [gone]})["count"] == 0
    assert browser.post("/erase", {"photos": ["", "../x", "g" * 12, 7, None]})["count"] == 0
    code, _, _ = browser.ask("POST", "/erase", {"photos": list(device.truth())}, X_Protofleet_Token="another")
    assert code == 403
    assert gone not in {photo.id for photo in PhotosBeside(device.state).photos()}
    assert len(PhotosBeside(device.state).photos()) == 9


def test_what_was_learned_of_a_photo_is_erased_though_the_photo_has_left(porch: Porch) -> None:
    ids = porch.keep("Coat", "Coat", "Coat")
    porch.page.name(ids, "Bag")
    porch.ring.remove(porch.photo(ids[0]).pixels)  # as where the ring is full
    LearnedFile(porch.state, FASHION_LABELS).unlearn_hashed(porch.photo(ids[1]).pixels)  # as another process does
    assert porch.page.erase(ids) == 3
    assert (labels_in(porch.state), porch.ring.count()) == ({}, 0)
    assert porch.page.undo() == 0  # there is nothing left of the change


def test_a_photo_that_is_unlearned_while_it_is_erased_is_erased(porch: Porch, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = porch.keep("Coat", "Coat")
    porch.page.name(ids, "Bag")
    file, erase = LearnedFile(porch.state, FASHION_LABELS), LearnedFile.unlearn_hashed

    def later(self: LearnedFile, pixels: bytes, source: bytes = b"") -> str:
        erase(file, pixels)  # another process is faster
        return erase(self, pixels, source)

    monkeypatch.setattr(LearnedFile, "unlearn_hashed", later)
    assert porch.page.erase(ids) == 2
    assert (labels_in(porch.state), porch.ring.count()) == ({}, 0)


def test_undo_takes_back_what_is_left_of_a_change(porch: Porch) -> None:
    ids = porch.keep("Coat", "Coat", "Coat")
    porch.page.name(ids[:2], "Bag")
    LearnedFile(porch.state, FASHION_LABELS).unlearn_hashed(porch.photo(ids[0]).pixels)  # as a command does
    assert (porch.page.undo(), labels_in(porch.state)) == (2, {})
    for label in ("Bag", "Coat"):
        porch.page.name(ids[:2], label)
    gone = porch.photo(ids[0]).pixels
    LearnedFile(porch.state, FASHION_LABELS).unlearn_hashed(gone)
    assert porch.ring.remove(gone)  # as `unlearn` does
    assert (porch.page.undo(), labels_in(porch.state)) == (2, {"Bag": 1})
    assert (porch.page.undo(), labels_in(porch.state)) == (2, {})
    with sqlite3.connect(porch.state / FILE) as db:
        db.execute("UPDATE photo SET png = x'00' WHERE pixels = ?", (porch.photo(ids[2]).pixels,))
    with pytest.raises(DataError):
        porch.page.name([ids[1], ids[2]], "Bag")  # the first is named before the second cannot be read
    assert labels_in(porch.state) == {"Bag": 1}
    assert (porch.page.undo(), labels_in(porch.state)) == (1, {})


def test_a_label_is_compared_with_the_first_answer_though_the_head_has_learned_it_since(porch: Porch) -> None:
    (id,) = porch.keep("Coat")
    porch.page.name([id], "Bag")
    porch.ring.committed(porch.ring.namings)
    x, learned = np.zeros((1, 1, 1), np.uint8), Learned(porch.state)
    again = NewPhoto(x, x, "p", 1.0, np.ones(64, np.float32), "Bag")
    porch.ring.answered_anew(porch.photo(id), again)
    assert (porch.photo(id).answer, porch.page.undo(), learned.asked_before()) == ("Bag", 1, [])
    porch.page.name([id], "Bag")
    assert learned.asked_before() == [("Bag", "Coat")]
    assert (one := porch.page.state(Visitor("t", "x"))["report"]["classes"][FASHION_LABELS.index("Bag")])["asked"] == 1
    assert one["right"] == 0


def test_a_proposal_stands_while_its_photos_are_being_named(porch: Porch, bundle: Bundle) -> None:
    """A client that ends on the way names them all at its next start."""
    ids, file = porch.keep("Coat", "Coat"), LearnedFile(porch.state, FASHION_LABELS)
    porch.ring.set_aside([porch.photo(id) for id in ids], "none", "Bag")  # when its bundle had no such class
    naming = name_photos(porch.ring, file, bundle.manifest, [porch.photo(id) for id in ids], "Bag")
    next(naming)
    assert [porch.photo(id).proposed for id in ids] == ["Bag", "Bag"]
    assert name_proposed(porch.ring, file, bundle.manifest) == 2
    assert ([porch.photo(id).proposed for id in ids], labels_in(porch.state)) == (["", ""], {"Bag": 2})


def test_a_proposal_is_a_line_of_text(porch: Porch) -> None:
    (id,) = porch.keep("Coat")
    for name in ("bat\ntab", "\u202ebat", "bat\x1b[31m", "b" * 65):
        with pytest.raises(UsageError, match="the proposed class, expected a name of 1 to 64 characters"):
            porch.page.set_aside([id], "none", name)
    assert porch.photo(id).proposed == ""
    porch.page.set_aside([id], "none", "barn owl")
    assert porch.photo(id).proposed == "barn owl"


def test_a_browser_draws_the_page_and_a_tap_in_it_is_a_label(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (5, 8), 4)
    truth = device.truth()
    with chromium() as browser:
        page = browser.open(f"http://127.0.0.1:{device.port}/", width=400)
        page.until("document.querySelectorAll('#newest button').length > 3")
        assert page.run("document.querySelectorAll('#classes button').length") == len(FASHION_LABELS)
        id = page.run("document.querySelector('#newest button').dataset.id")
        page.tap(f'#newest button[data-id="{id}"]')
        page.tap(f'#classes button[data-label="{truth[id]}"]')
        page.until(f"document.getElementById('said').textContent === '1 named {truth[id]}'")
    learned = Learned(device.state)
    learned.look()
    learned.close()
    assert learned.labels == (truth[id],)


def test_what_is_drawn_is_what_is_known_and_what_was_not_kept_is_said(porch: Porch, served: Browsing) -> None:
    answers = ["Bag"] * 3 + ["Coat", ""]
    porch.page.name(porch.keep(*answers), "Bag")
    (odd,) = porch.keep("Sandal", is_unknown=True)
    first, second, gone = porch.keep("Coat", "Coat", "Coat")
    (alone,) = porch.keep("Shirt")
    with chromium() as browser:
        page = browser.open(f"http://{served.host}/", width=400)
        row = "[...document.querySelectorAll('#report tr')].find((row) => row.firstChild.textContent === 'Bag')"
        low, high = (round(100 * share) for share in wilson(3, 4))  # nobody asked about the fifth
        told = page.run(f"[...({row}).children].map((cell) => cell.textContent)")
        assert told == ["Bag", "5", "3 of 4", f"{low} to {high} %"]
        said = "document.querySelector('#%s button[data-id=\"%s\"] .answer').textContent"
        assert page.run(said % ("unknown", odd)) == "unknown, nearest Sandal"
        assert page.run(said % ("newest", alone)) == "Shirt 75 %"
        for id, button in ((first, "none"), (second, "unsure")):
            page.tap(f'#newest button[data-id="{id}"]')
            page.tap(f"#{button}")
            page.until("document.getElementById('said').textContent === '1 set aside'")
            page.run("document.getElementById('said').textContent = ''")
        assert [porch.photo(id).aside for id in (first, second)] == ["none", "unsure"]
        assert porch.ring.remove(porch.photo(gone).pixels)  # beside the page, which still shows it
        page.tap(f'#newest button[data-id="{gone}"]')
        page.tap('#classes button[data-label="Bag"]')
        page.until("document.getElementById('said').textContent.startsWith('not kept: the photos, expected photos')")
    assert labels_in(porch.state) == {"Bag": 5}


def test_classes_that_own_labels_made_worse_are_told_on_the_page_and_in_the_terminal(
    device: Device, bundle: Bundle
) -> None:
    device.show(bundle, (5, 8), 4)
    rare = [(label, turn) for turn in range(8) for label in ("Coat", "Bag", "Shirt")]
    before = [(label, label if number < 18 else "Sandal") for number, (label, _) in enumerate(rare)]
    after = [(label, label if number < 6 else "Sandal") for number, (label, _) in enumerate(rare)]
    file, rng = LearnedFile(device.state, FASHION_LABELS), np.random.default_rng(0)
    for label, answered in (*before, *[("Sandal", "Sandal")] * 40, *after):
        x = rng.integers(0, 256, bundle.manifest.input_shape, np.uint8)
        file.learn(example_of(x, bundle.manifest), label, answered=answered)
    words = "classes that you named less often are answered worse than before: 6 of their last 24 right, 18 of the 24"
    assert words in run("labels", "--state", device.state).stdout
    with chromium() as browser:
        page = browser.open(f"http://127.0.0.1:{device.port}/", width=400)
        page.until("document.querySelectorAll('#warnings li').length === 1")
        assert page.run("document.querySelector('#warnings li').textContent").startswith(words)
        assert page.run("document.getElementById('warnings').offsetHeight") > 0
        assert page.run("document.documentElement.scrollWidth") <= 400
        page.run("document.getElementById('warnings').scrollIntoView()")
        page.shot(device.folder / "warnings.png")


def test_a_proposed_class_that_the_fleet_takes_up_names_its_photos(
    device: Device, broker: TestBroker, bundle: Bundle, tmp_path: Path
) -> None:
    device.show(bundle, (5, 8), 4)
    browser = browser_at(device)
    first = browser.open()
    ids = [photo["id"] for photo in first["newest"]]
    browser.post("/aside", {"photos": ids[:2], "why": "none", "proposed": "Flip-flop"})
    browser.post("/aside", {"photos": ids[2:3], "why": "none", "proposed": "Flip-flop"})
    browser.post("/name", {"photos": ids[2:3], "label": "Bag"})  # which is no proposal any more
    assert "was proposed for 2 photos" in run("labels", "--state", device.state).stdout
    device.kill()
    extended = tmp_path / "extended.bundle"
    done = run("export", "--extend", BUNDLE, "--classes", "+Flip-flop", "--out", extended)
    assert done.returncode == 0, done.stderr
    grown = Device(broker, tmp_path)
    grown.take(extended)
    grown.start()
    try:
        assert "Flip-flop is a class now: the 2 photos that it was proposed for count as named" in grown.said()
        report = json.loads(run("labels", "--state", grown.state, "--bundle", extended, "--json", "-").stdout)
        found = {one["label"]: one["labels"] for one in report["classes"] if one["labels"]}
        assert found == {"Flip-flop": 2, "Bag": 1}
        assert report["proposed"] == {}
        with Peer(broker.url, read_bundle(extended)) as peer:
            peer.announce(1, "ncm")
            assert sum(peer.contribution(1).counts) == 3
        grown.kill()
        grown.start()
        again = json.loads(run("labels", "--state", grown.state, "--bundle", extended, "--json", "-").stdout)
        assert again["classes"] == report["classes"]
    finally:
        grown.kill()


def test_a_device_that_its_fleet_refuses_says_on_its_page_that_photos_stay(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (5, 8), 6)
    with chromium() as browser:
        page = browser.open(f"http://127.0.0.1:{device.port}/", width=400)
        assert page.run("document.getElementById('refused').hidden")
        PhotosBeside(device.state).refused = "it was forgotten; fleet admit pi-1 lets it in again"
        page = browser.open(f"http://127.0.0.1:{device.port}/", width=400)
        said = page.until("document.getElementById('refused').innerText")
        assert "nothing more of this device (it was forgotten; fleet admit pi-1 lets it in again). Its photos" in said
        assert page.run("document.documentElement.scrollWidth") <= 400
        page.shot(device.folder / "refused.png")


def test_a_kill_between_taps_loses_no_confirmed_label(device: Device, broker: TestBroker, bundle: Bundle) -> None:
    device.show(bundle, (1, 7), 12)
    truth, confirmed = device.truth(), Counter[str]()
    with Peer(broker.url, bundle) as peer:
        for number, (id, label) in enumerate(list(truth.items())[:6], 1):
            browser = browser_at(device)
            browser.open()
            browser.post("/name", {"photos": [id], "label": label})
            device.kill()
            confirmed[label] += 1
            device.start()
            if number % 3 == 0:
                assert sent_in(peer, number) == confirmed
        assert labels_in(device.state) == confirmed


def test_a_photo_that_is_seen_again_is_the_newest(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (5, 8), 4)
    browser = browser_at(device)
    oldest = browser.open()["newest"][-1]["id"]
    seen = next(photo for photo in PhotosBeside(device.state).photos() if photo.id == oldest)
    (device.folder / "camera" / "again.png").write_bytes(Path(seen.name).read_bytes())
    deadline = time.monotonic() + 60
    while browser.open()["newest"][0]["id"] != oldest:
        assert time.monotonic() < deadline, device.said()
        time.sleep(0.05)


def test_events_come_when_a_photo_does(device: Device, bundle: Bundle) -> None:
    browser = browser_at(device)
    browser.open()
    with socket.create_connection(("127.0.0.1", device.port), timeout=30) as stream:
        stream.sendall(f"GET /events HTTP/1.1\r\nHost: {browser.host}\r\nCookie: {browser.cookie}\r\n\r\n".encode())
        device.show(bundle, (4,), 2)
        lines = stream.makefile("rb")
        for line in lines:
            if line.startswith(b"data: ") and json.loads(line[6:])["newest"]:
                break
        else:
            pytest.fail("no event has the photo")


def test_the_ledger_says_to_whom_photos_were_shown_and_no_budget_is_spent(device: Device, bundle: Bundle) -> None:
    count = device.show(bundle, (1, 2), 5)
    browser = browser_at(device)
    browser.open()
    browser.open()  # the same photos, the same visitor
    entries, spent, _ = read_ledger(device.state / "ledger.sqlite")
    shown = [entry for entry in entries if entry.what == "shown"]
    assert [entry.statistic for entry in shown] == [f"{count} photos to 127.0.0.1"]
    assert abs(shown[0].at - time.time()) < 300
    assert (spent.releases, spent.bare_add_remove) == (0, 0)
    device.show(bundle, (3,), 9)
    browser.open()
    shown = [entry for entry in read_ledger(device.state / "ledger.sqlite")[0] if entry.what == "shown"]
    assert sum(int(entry.statistic.split()[0]) for entry in shown) > count
    assert len(shown) == 1 or int(shown[0].at // 3600) < int(time.time() // 3600)  # one row for each hour
    browser_at(device).open()
    assert (
        len([entry for entry in read_ledger(device.state / "ledger.sqlite")[0] if entry.what == "shown"])
        == len(shown) + 1
    )
    done = run("inspect", device.state)
    assert "0 releases, 0 bytes" in done.stdout
    assert f"shown on this device's page: {len(shown) + 1} rows, one for each browser, address and hour" in done.stdout


def test_the_page_counts_what_went_to_the_fleet_and_nothing_else(porch: Porch) -> None:
    sent = [("round", "", 1000), ("shown", "", 77), ("standing", "ncm", 500), ("answer", "", 9)]
    for number, (what, method, payload_bytes) in enumerate(sent):
        digest = bytes([number]) * 32
        entry = Entry(what, "fleet", b"", 0, method, "3 photos to x", "f32", 1, payload_bytes, digest, Cost())  # type: ignore[arg-type]
        porch.ledger.record(entry, moment())
    left = porch.page.state(Visitor("t", "127.0.0.1"))["left"]
    assert (left["releases"], left["bytes"], porch.page.left_bytes()) == (2, 1500, 1500)
    assert porch.ledger.spent().releases == 2
    assert porch.ledger.free_in_s(3, 86_400.0, moment()) == 0.0  # of three a day one is left
    assert [(one["what"], one["bytes"]) for one in left["last"]] == [("standing ncm", 500), ("round", 1000)]
    assert [one["what"] for one in left["shown"]] == ["3 photos to x"]


# ── who may come in ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_change_needs_the_token_of_this_page_and_comes_from_it(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (1,), 2)
    browser = browser_at(device)
    id = browser.open()["newest"][0]["id"]
    tap, good = {"photos": [id], "label": "Bag"}, {"X_Protofleet_Token": browser.token}
    assert browser.ask("POST", "/name", tap)[0] == 403
    assert browser.ask("POST", "/name", tap, X_Protofleet_Token="x" * 43)[0] == 403
    assert browser.ask("POST", "/name", tap, Origin="http://evil.example", **good)[0] == 403
    assert browser.ask("POST", "/name", tap, Origin="null", **good)[0] == 403
    stranger = browser_at(device)
    assert stranger.ask("POST", "/name", tap, **good)[0] == 403
    other = browser_at(device)
    other.open()
    assert other.ask("POST", "/name", tap, **good)[0] == 403  # the token of another visitor
    assert labels_in(device.state) == {}
    assert browser.ask("POST", "/name", tap, Origin=f"http://{browser.host}", **good)[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "localhost@x"])
def test_a_name_that_leads_here_is_refused(device: Device, host: str) -> None:
    browser = browser_at(device)
    browser.open()
    browser.host = host
    for path in ("/", "/events", "/page.js"):
        assert browser.ask("GET", path)[0] == 421
    assert browser.ask("POST", "/undo", {}, X_Protofleet_Token=browser.token)[0] == 421


def test_an_address_is_a_host_of_ours_and_a_name_is_not() -> None:
    assert all(map(is_own_host, ("127.0.0.1", "192.168.1.9:8080", "[::1]:80", "[fe80::1]", "localhost:1", "LOCALHOST")))
    assert not any(map(is_own_host, ("", "pi.local", "a:80", "127.0.0.1:x", "[::1", "1.2.3", "localhost.evil")))


def test_no_path_leads_to_a_file(device: Device, bundle: Bundle) -> None:
    device.show(bundle, (1,), 1)
    browser = browser_at(device)
    browser.open()
    for path in (
        *("/../../../../etc/passwd", "/photo/../../ledger.sqlite", "/photo/..%2f..%2fledger.sqlite", "//etc/passwd"),
        *("/page.js/../page_server.py", "/page_server.py", "/%2e%2e/", "/photo/000000000000.jpg", "/photo/.jpg"),
        *("http://127.0.0.1/etc/passwd", "/photo/' OR 1=1.jpg".replace(" ", "+"), "/page.html", "/learned.sqlite"),
    ):
        code, _, body = browser.ask("GET", path)
        assert (code, b"root:" in body, b"SQLite" in body) == (404, False, False), path


def test_a_photo_that_was_not_shown_to_this_visitor_is_not_given(device: Device, bundle: Bundle) -> None:
    first, second = browser_at(device), browser_at(device)
    first.open()
    device.show(bundle, (1,), 1)
    (photo,) = PhotosBeside(device.state).photos()
    path = f"/photo/{photo.id}.jpg"
    assert [browser.ask("GET", path)[0] for browser in (first, second)] == [404, 403]
    second.open()
    assert [browser.ask("GET", path)[0] for browser in (first, second)] == [404, 200]


def test_who_was_shown_some_photos_is_given_no_other_ones(porch: Porch, served: Browsing) -> None:
    (shown,) = porch.keep("Coat")
    served.open()
    (other,) = porch.keep("Coat")
    assert [served.ask("GET", f"/photo/{id}.jpg")[0] for id in (shown, other)] == [200, 404]
    served.open()
    assert served.ask("GET", f"/photo/{other}.jpg")[0] == 200


def test_script_in_a_name_is_text(broker: TestBroker, bundle: Bundle, tmp_path: Path) -> None:
    device = Device(broker, tmp_path)
    device.start()
    try:
        device.show(bundle, (1,), 1, name="<script>alert(1)<")
        browser = browser_at(device)
        browser.open()
        id = PhotosBeside(device.state).photos()[0].id
        evil = "</script><img src=x onerror=alert(1)>"
        browser.post("/aside", {"photos": [id], "why": "none", "proposed": evil})
        _, heads, body = browser.ask("GET", "/")
        assert b"alert(1)" not in body or b"<img src=x" not in body
        assert body.count(b"</script>") == 3
        policy = heads["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        parts = ("edge_client/page/page.js", "contract/page/shared.js")
        script = "".join((BUNDLE.parents[3] / part).read_text() for part in parts)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
        assert "://" not in script + body.decode()  # nothing from elsewhere
    finally:
        device.kill()


def test_all_that_is_answered_says_that_it_is_of_this_page_alone_and_is_kept_nowhere(
    porch: Porch, served: Browsing
) -> None:
    (id,) = porch.keep("Coat")
    served.open()
    answers = [served.ask("GET", path) for path in ("/", "/page.js", "/shared.css", f"/photo/{id}.jpg", "/nowhere")]
    answers += [served.ask("POST", "/undo", {}), served.ask("POST", "/undo", {}, X_Protofleet_Token=served.token)]
    assert [code for code, _, _ in answers] == [200, 200, 200, 200, 404, 403, 200]
    for _, heads, _ in answers:
        policy = dict(part.split(maxsplit=1) for part in heads["content-security-policy"].split(";"))
        assert policy == {
            **dict.fromkeys(("default-src", "base-uri", "frame-ancestors"), "'none'"),
            **dict.fromkeys(("img-src", "style-src", "script-src", "connect-src", "form-action"), "'self'"),
        }
        assert (heads["cache-control"], heads["x-content-type-options"]) == ("no-store", "nosniff")
        assert (heads["referrer-policy"], heads["cross-origin-resource-policy"]) == ("same-origin", "same-origin")


def test_a_browser_has_four_streams_and_those_that_it_closes_make_room(porch: Porch, served: Browsing) -> None:
    served.open()
    ask = f"GET /events HTTP/1.1\r\nHost: {served.host}\r\nCookie: {served.cookie}\r\n\r\n".encode()

    def begun() -> tuple[socket.socket, bytes]:
        stream = socket.create_connection(("127.0.0.1", int(served.host.split(":")[1])), timeout=30)
        stream.sendall(ask)
        return stream, stream.recv(12)

    streams = [begun() for _ in range(5)]
    assert [head for _, head in streams] == [b"HTTP/1.1 200"] * 4 + [b"HTTP/1.1 503"]
    for stream, _ in streams:
        stream.close()
    deadline = time.monotonic() + 60
    while True:  # the next events find that nobody listens
        porch.page.came()
        stream, code = begun()
        stream.close()
        if code == b"HTTP/1.1 200":
            break
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_flood_of_streams_is_refused_and_the_page_still_answers(device: Device) -> None:
    browsers = [browser_at(device) for _ in range(8)]
    for browser in browsers:
        browser.open()
    with contextlib.ExitStack() as streams:
        began: list[bytes] = []
        for browser in browsers:
            for _ in range(5):
                stream = streams.enter_context(socket.create_connection(("127.0.0.1", device.port), timeout=30))
                ask = f"GET /events HTTP/1.1\r\nHost: {browser.host}\r\nCookie: {browser.cookie}\r\n\r\n"
                stream.sendall(ask.encode())
                began.append(stream.recv(12))
        codes = Counter(began)
        assert codes[b"HTTP/1.1 200"] == 8
        assert codes[b"HTTP/1.1 503"] == 32
        assert browser_at(device).ask("GET", "/page.js")[0] == 200
    idle = [socket.create_connection(("127.0.0.1", device.port), timeout=30) for _ in range(60)]  # that say nothing
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if browser_at(device).ask("GET", "/page.css")[0] == 200:
                break
        assert time.monotonic() < deadline
        time.sleep(0.2)
    for stream in idle:
        stream.close()
    assert device.process is not None
    assert device.process.poll() is None


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/name", b"no json", 400),
        ("/name", b"[1]", 400),
        ("/name", b'{"photos": 3}', 400),
        ("/name", b"[" * 60_000, 400),
        ("/name", b'{"photos": [], "label": "Bag"}', 409),
        ("/name", b'{"photos": ["0123456789ab"], "label": "Bag"}', 409),
        ("/name", b'{"photos": [], "label": "Bagg"}', 409),
        ("/aside", b'{"photos": [], "why": "x"}', 409),
        ("/else", b"{}", 404),
        ("/name", b"x" * 70_000, 413),
    ],
)
def test_what_is_no_tap_is_refused_with_a_code(device: Device, path: str, body: bytes, code: int) -> None:
    browser = browser_at(device)
    browser.open()
    assert browser.ask("POST", path, body, X_Protofleet_Token=browser.token)[0] == code
    assert browser.ask("GET", "/")[0] == 200


def test_in_a_network_a_browser_is_paired_by_the_code_at_the_terminal(
    broker: TestBroker, bundle: Bundle, tmp_path: Path
) -> None:
    device = Device(broker, tmp_path, page="0.0.0.0:0")
    device.start()
    try:
        deadline = time.monotonic() + 60
        while (found := re.search(r"pairing code is ([A-Z0-9]{4}-[A-Z0-9]{4})", device.said())) is None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        device.show(bundle, (1,), 1)
        browser = browser_at(device)
        code, heads, body = browser.ask("GET", "/")
        assert code == 200
        assert b"Pairing code" in body
        assert b"first" not in body
        assert "set-cookie" not in heads
        assert [browser.ask("GET", path)[0] for path in ("/events", "/photo/000000000000.jpg")] == [403, 403]
        assert browser.ask("POST", "/pair", b"code=AAAA-AAAA")[0] == 403
        assert browser.ask("POST", "/pair", f"code={found[1]}".encode())[0] == 403  # at once after a wrong one
        time.sleep(1.1)
        code, heads, _ = browser.ask("POST", "/pair", f"code={found[1].lower()}".encode())
        assert (code, heads["location"]) == (303, "/")
        assert "HttpOnly" in heads["set-cookie"]
        assert "SameSite=Strict" in heads["set-cookie"]
        browser.cookie = heads["set-cookie"].split(";")[0]
        assert len(browser.open()["newest"]) == 1
    finally:
        device.kill()


def test_after_ten_wrong_codes_there_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    visitors = Visitors(needs_code=True)
    code = visitors.code
    for _ in range(10):
        assert visitors.enter("10.0.0.9", "AAAA-AAAA") is None
        now[0] += 2.0
    assert visitors.enter("10.0.0.9", code) is None
    now[0] += 2.0
    assert visitors.code != code
    cookie = visitors.enter("10.0.0.9", visitors.code)
    assert cookie is not None
    assert visitors.known(cookie, "10.0.0.9") is not None
    assert visitors.known("x", "10.0.0.9") is None


@pytest.mark.parametrize("part", ["", "-", "the first letters", "all but the last", "one more"])
def test_a_part_of_the_code_is_not_the_code(part: str) -> None:
    visitors = Visitors(needs_code=True)
    letters = visitors.code.replace("-", "")
    given = {"the first letters": letters[:4], "all but the last": letters[:-1], "one more": f"{letters}A"}
    assert visitors.enter("10.0.0.9", given.get(part, part)) is None


def test_at_most_so_many_browsers_are_known_and_who_has_not_come_for_longest_is_forgotten() -> None:
    visitors = Visitors(needs_code=False)
    cookies = [visitors.enter("10.0.0.9") or "" for _ in range(32)]
    assert visitors.known(cookies[0], "10.0.0.9") is not None  # who came last just now
    newest = visitors.enter("10.0.0.9") or ""
    known = [visitors.known(cookie, "10.0.0.9") is not None for cookie in (cookies[0], newest, *cookies[1:])]
    assert known == [True, True, False, *[True] * 30]


def test_over_tls_the_cookie_is_of_https_alone(broker: TestBroker, tmp_path: Path) -> None:
    cert, key = tmp_path / "page.crt", tmp_path / "page.key"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    made = subprocess.run([*make, "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=pi"], capture_output=True)
    if made.returncode:
        pytest.skip("no openssl")
    device = Device(broker, tmp_path, "--page-cert", cert, "--page-key", key)
    device.start()
    try:
        assert device.scheme == "https"
        code, heads, _ = browser_at(device).ask("GET", "/")
        assert (code, "; Secure" in heads["set-cookie"]) == (200, True)
        with socket.create_connection(("127.0.0.1", device.port), timeout=30) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert b"200" not in plain.recv(100)
        assert browser_at(device).ask("GET", "/page.js")[0] == 200
    finally:
        device.kill()


def test_the_policy_has_to_allow_it_and_mistakes_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "camera").mkdir()
    (tmp_path / "policy.toml").write_text("page = true\n")
    words = ["client", "--bundle", BUNDLE, "--broker", "mqtt://127.0.0.1:1", "--id", "pi-1", "--state", tmp_path / "s"]
    camera = ["--camera", f"folder:{tmp_path / 'camera'}"]
    for more, said in (
        ([*camera, "--page", "8080"], "--page, expected a --policy with page = true, got none"),
        ([*camera, "--page", "pi:8080"], "--page, expected [ADDRESS:]PORT, got pi:8080, try --page 8080"),
        ([*camera, "--page", "99999"], "--page, expected [ADDRESS:]PORT"),
        (["--data", "d", "--page", "8080"], "--page, expected --camera"),
        ([*camera, "--page", "0", "--page-cert", "a"], "--page-cert, expected --page and --page-key beside it"),
    ):
        done = run(*words, *more)
        assert said in one_error_line(done)
        assert done.returncode == 2
    assert not (tmp_path / "s").exists()


def test_at_a_signal_the_client_ends_though_a_browser_is_there(device: Device) -> None:
    browser = browser_at(device)
    browser.open()
    with socket.create_connection(("127.0.0.1", device.port), timeout=30) as stream:
        stream.sendall(f"GET /events HTTP/1.1\r\nHost: {browser.host}\r\nCookie: {browser.cookie}\r\n\r\n".encode())
        stream.recv(10)
        assert device.process is not None
        os.kill(device.process.pid, signal.SIGTERM)
        assert device.process.wait(30) == 143


def test_photos_are_named_on_after_another_process_has_unlearned_some(device: Device, bundle: Bundle) -> None:
    """`protofleet unlearn` closes the file last, unless the client's own locks on it hold."""
    device.show(bundle, (5, 8), 12)
    browser, truth = browser_at(device), device.truth()
    browser.open()
    ids = list(truth)
    for turn in range(4):
        mine = ids[3 * turn : 3 * turn + 3]
        for id in mine:
            assert browser.post("/name", {"photos": [id], "label": truth[id]})["count"] == 1
        done = run("unlearn", mine[0], "--state", device.state)
        assert done.returncode == 0, done.stderr
        browser.open()
        assert device.process is not None
        opened = [os.readlink(link) for link in Path(f"/proc/{device.process.pid}/fd").iterdir()]
        assert not [name for name in opened if name.endswith("(deleted)") and "learned" in name]
    assert "disk" not in device.said()
