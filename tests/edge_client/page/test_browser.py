"""A camera's stream, a browser, thirty taps, and two devices that answer better: all of it real, none of it simulated.

Photos of hands that show digits go into a video stream of a real RTSP server. A client reads it and shows its page,
where Chromium taps. The aggregator, the broker, and a neighbour without a camera are processes. Both devices are asked
about photos that neither has seen.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from brokers import TestBroker, make_broker
from browser import Browser, Page, chromium
from camera_samples import rtsp_server
from commands import run
from PIL import Image

from protofleet.edge_client.photos.photo_ring import PhotosBeside

HANDS = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "sign_digits.zip"
CLASSES = tuple("0123456789")
TAPS, WIDTH, HEIGHT = 30, 320, 320

pytestmark = pytest.mark.slow


@dataclass
class Fleet:
    """Where everything lies, and the processes."""

    folder: Path
    broker: TestBroker
    shown: list[tuple[str, np.ndarray]] = field(default_factory=list)
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, name: str, *words: object) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-m", "protofleet", *map(str, words)]
            self.running.append(subprocess.Popen(command, stdout=log, stderr=log))

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, true: Callable[[], object], name: str, timeout_s: float = 120.0) -> object:
        deadline = time.monotonic() + timeout_s
        while not (found := true()):
            assert all(process.poll() is None for process in self.running), self.said(name)
            assert time.monotonic() < deadline, self.said(name)
            time.sleep(0.1)
        return found

    def right(self, device: str) -> float:
        """The share of unseen photos that a device answers right; 0 where it has nothing to answer with."""
        done = run("predict", self.folder / "unseen", "--state", self.folder / device, "--json", "-")
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return sum(row["label"] == Path(row["photo"]).parent.name for row in rows) / max(len(rows), 1)

    def truth_of(self, view: bytes) -> str:
        """The label of the photo that a picture of the stream is nearest to."""
        x = np.asarray(Image.open(io.BytesIO(view)).convert("RGB").resize((32, 32)), np.float32)
        return min(self.shown, key=lambda one: float(((one[1] - x) ** 2).mean()))[0]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    broker = make_broker("embedded", tmp_path)
    broker.start()
    made = Fleet(tmp_path, broker)
    yield made
    for process in made.running:
        process.kill()
        process.wait()
    broker.stop()


def _photos(fleet: Fleet) -> Path:
    """A stream's raw pictures of 5 photos a class; one a class for the neighbour, and 10 a class that nobody sees.

    Those are of the hands in the stream, the neighbour's is another hand.
    """
    frames = []
    with zipfile.ZipFile(HANDS) as archive:
        for label in CLASSES:
            names = [name for name in archive.namelist() if name.startswith(f"{label}/") and name.endswith(".JPG")]
            for row, name in enumerate([*names[:15], names[60]]):  # three photos of each hand, then another hand's
                content = archive.read(name)
                if row % 3 or row == 15:
                    place = fleet.folder / ("neighbour-photos" if row == 15 else "unseen") / label / Path(name).name
                    place.parent.mkdir(parents=True, exist_ok=True)
                    place.write_bytes(content)
                    continue
                image = Image.open(io.BytesIO(content)).convert("RGB").resize((WIDTH, HEIGHT))
                fleet.shown.append((label, np.asarray(image.resize((32, 32)), np.float32)))
                planes = np.asarray(image.convert("YCbCr"))
                frames.append(planes[..., 0].tobytes())
                frames += [planes[::2, ::2, part].tobytes() for part in (1, 2)]
    path = fleet.folder / "frames.i420"
    path.write_bytes(b"".join(frames))
    return path


def _tap_thirty(fleet: Fleet, page: Page) -> None:
    """Class by class: the class first, then each of its photos that the page shows."""
    photos = PhotosBeside(fleet.folder / "porch")
    truth: dict[str, str] = {}
    done: set[str] = set()
    deadline = time.monotonic() + 180
    while len(done) < TAPS:
        assert time.monotonic() < deadline, page.run("document.body.innerText")
        for photo in photos.photos():
            if photo.id not in truth:
                truth[photo.id] = fleet.truth_of(photos.image(photo))
        ids = page.run("[...document.querySelectorAll('#newest button, #wanted button')].map(b => b.dataset.id)")
        fresh = [one for one in dict.fromkeys(ids) if one in truth and one not in done]
        for label in CLASSES:
            mine = [one for one in fresh if truth[one] == label][
                : max(TAPS // len(CLASSES) - _named(truth, done, label), 0)
            ]
            if not mine:
                continue
            page.tap(f'#classes button[data-label="{label}"]')
            for one in mine:
                if page.run(f"!!document.querySelector('button[data-id=\"{one}\"]')"):
                    page.tap(f'button[data-id="{one}"]')
                    page.until(f"document.getElementById('said').textContent === '1 named {label}'")
                    page.run("document.getElementById('said').textContent = ''")
                    done.add(one)
            page.tap(f'#classes button[data-label="{label}"]')


def _named(truth: dict[str, str], done: set[str], label: str) -> int:
    return sum(truth[one] == label for one in done)


def test_thirty_taps_at_a_stream_make_two_devices_answer_better(fleet: Fleet) -> None:
    bundle = fleet.folder / "hands.bundle"
    words = ["--backbone", "photos", "--method", "ffc", "--classes", ",".join(CLASSES), "--out", bundle]
    assert run("export", *words).returncode == 0
    frames = _photos(fleet)
    (fleet.folder / "policy.toml").write_text("page = true\n")
    fleet.start(
        "aggregate", "aggregate", "--bundle", bundle, "--broker", fleet.broker.url,
        "--store", fleet.folder / "s.sqlite", "--standing", "--every", "2s",
    )  # fmt: skip
    with rtsp_server("--width", WIDTH, "--height", HEIGHT, "--key-s", 0.4, "--rate", 10, "--frames", frames) as port:
        fleet.start(
            "neighbour", "client", "--bundle", bundle, "--broker", fleet.broker.url, "--id", "neighbour",
            "--state", fleet.folder / "neighbour", "--data", fleet.folder / "neighbour-photos", "--hold-out", "0",
        )  # fmt: skip
        fleet.start(
            "porch", "client", "--bundle", bundle, "--broker", fleet.broker.url, "--id", "porch",
            "--state", fleet.folder / "porch", "--camera", f"rtsp://127.0.0.1:{port}/clock", "--every", "0.4",
            "--policy", fleet.folder / "policy.toml", "--page", "0",
        )  # fmt: skip
        found = fleet.until(lambda: re.search(r"page at (http://[\d.]+:\d+/)", fleet.said("porch")), "porch")
        fleet.until(lambda: fleet.right("neighbour") > 0, "neighbour")
        before = {name: fleet.right(name) for name in ("neighbour", "porch")}
        with chromium() as browser:
            page = _opened(browser, found[1])
            page.until("document.querySelectorAll('#newest button').length > 3")
            _tap_thirty(fleet, page)
            assert page.run("document.documentElement.scrollWidth <= innerWidth")
        report = json.loads(run("labels", "--state", fleet.folder / "porch", "--json", "-").stdout)
        assert {one["label"]: one["labels"] for one in report["classes"]} == dict.fromkeys(
            CLASSES, TAPS // len(CLASSES)
        )
        goal = {name: share + 0.1 for name, share in before.items()}
        fleet.until(lambda: all(fleet.right(name) > goal[name] for name in goal), "aggregate")
        print(
            "\n".join(
                f"{name}: {share:.2f} right before, {fleet.right(name):.2f} after" for name, share in before.items()
            )
        )


def _opened(browser: Browser, url: str) -> Page:
    return browser.open(url, width=400, height=900)
