"""The device's page, of a client that is a process: who may come in, what a tap does, and what it never gives."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from brokers import TestBroker, make_broker
from browser import Visitor, chromium
from commands import one_error_line, run
from edge_peer import Peer
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.page.visitors import Visitors, is_own_host
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.photo_ring import PhotosBeside
from protofleet.edge_client.privacy.ledger import read_ledger

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return read_bundle(BUNDLE)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[TestBroker]:
    found = make_broker("embedded", tmp_path)
    found.start()
    yield found
    found.stop()


class Device:
    """A client with a camera and a page, as a process."""

    def __init__(self, broker: TestBroker, folder: Path, *more: object, page: str = "0", name: str = "pi-1") -> None:
        self.folder, self.state, self.log = folder, folder / "state", folder / "client.log"
        (folder / "camera").mkdir(exist_ok=True)
        (folder / "policy.toml").write_text("page = true\n")
        words = ["--bundle", BUNDLE, "--broker", broker.url, "--id", name, "--state", self.state, "--every", "0.1"]
        words += ["--camera", f"folder:{folder / 'camera'}", "--policy", folder / "policy.toml", "--page", page, *more]
        self._command = [sys.executable, "-m", "protofleet", "client", *map(str, words)]
        self.process: subprocess.Popen[bytes] | None = None

    def take(self, bundle: Path) -> None:
        """Start with this bundle from now on."""
        self._command[self._command.index(str(BUNDLE))] = str(bundle)

    def start(self) -> None:
        before = len(self.said())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        found = None
        deadline = time.monotonic() + 60
        while found is None:
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            found = re.search(r"page at (https?)://([\d.]+):(\d+)/", self.said()[before:])
            time.sleep(0.02)
        self.scheme, self.port = found[1], int(found[3])

    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def show(self, bundle: Bundle, classes: tuple[int, ...], count: int, seed: int = 3, name: str = "") -> int:
        """Put photos before the camera, and wait until they are kept."""
        data = fashion(bundle, count, classes, seed=seed)
        for row, image in enumerate(data.x):
            label = FASHION_LABELS[data.y[row]]
            Image.fromarray(image[..., 0]).save(self.folder / "camera" / f"{label}-{name}{seed}-{row}.png")
        photos, deadline = PhotosBeside(self.state), time.monotonic() + 60
        different = len({image.tobytes() for image in data.x})
        while not photos.is_there or len(photos.photos()) < different:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)
        return different

    def truth(self) -> dict[str, str]:
        """The true label of each kept photo."""
        return {photo.id: Path(photo.name).name.split("-")[0] for photo in PhotosBeside(self.state).photos()}


def browser_at(device: Device) -> Visitor:
    """A browser that has not been here."""
    return Visitor(device.port, device.scheme)


@pytest.fixture
def device(broker: TestBroker, tmp_path: Path) -> Iterator[Device]:
    found = Device(broker, tmp_path)
    found.start()
    yield found
    found.kill()


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
    state = browser.post("/undo", {})["state"]
    assert ids[1] in {photo["id"] for photo in state["wanted"]}


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
    browser_at(device).open()
    assert len([entry for entry in read_ledger(device.state / "ledger.sqlite")[0] if entry.what == "shown"]) == 2
    done = run("inspect", device.state)
    assert "0 releases, 0 bytes" in done.stdout
    assert "photos were shown on this device's page 2 times" in done.stdout


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
        deadline = time.monotonic() + 30
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
