"""docs/camera.md is run: a stream of a real RTSP server, pairing and taps in Chromium, right answers on two devices."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from brokers import free_port
from browser import Page, chromium
from camera_samples import need_rtsp_server
from commands import ROOT
from PIL import Image

from protofleet.edge_client.journal.journal import read_kept
from protofleet.edge_client.photos.photo_ring import PhotosBeside

PAGE = (ROOT / "docs" / "camera.md").read_text()
BEFORE, AFTER = (
    "\n".join(re.findall(r"^```sh\n(.*?)^```", part, re.MULTILINE | re.DOTALL))
    for part in PAGE.split("\n## 5. Pair, and tap\n")
)
CLASSES, EACH = ("fist", "one", "two", "five"), 5


def test_the_blocks_are_a_shell_script_of_all_that_the_way_takes() -> None:
    script = BEFORE + AFTER
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    for command in ("export", "broker", "aggregate", "client", "labels", "predict", "inspect"):
        assert re.search(rf"protofleet {command} ", script), command
    for option in ("--camera", "--every", "--crop", "--page", "--policy", "--keep-photos"):
        assert option in PAGE


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_runs_as_it_stands_and_twenty_taps_make_two_devices_answer(tmp_path: Path) -> None:
    """But for ports that are free."""
    need_rtsp_server()
    before, after = BEFORE, AFTER
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "protofleet"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m protofleet "$@"\n')
    command.chmod(0o755)
    for port in ("1883", "8554", "8080", "8081"):
        before = before.replace(port, str(free_port()))
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = str(ROOT)
    trap = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    shell = subprocess.Popen(
        ["bash", "-euo", "pipefail"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    try:
        assert shell.stdin is not None
        shell.stdin.write(f"{trap}{before}\necho ready > ready\n")
        shell.stdin.flush()
        deadline = time.monotonic() + 120
        while not (tmp_path / "ready").exists():
            assert shell.poll() is None, shell.communicate()[0]
            assert time.monotonic() < deadline, [log.read_text() for log in tmp_path.glob("*.log")]
            time.sleep(0.1)
        door = (tmp_path / "door.log").read_text()
        url, code = re.findall(r"page at (http://[\d.]+:\d+/)|pairing code is (\S+)", door)
        with chromium() as browser:
            page = browser.open(url[0], width=400)
            _pair(page, code[1])
            _name(page, tmp_path)
            page.until("state.health.basis.includes('global version') && state.newest.every((photo) => photo.answer)")
            page.until(f"state.report.classes.every((one) => one.labels === {EACH})")
        _until_known(tmp_path)
        said, _ = shell.communicate(after)
    finally:
        shell.kill()
        shell.wait()
    assert shell.returncode == 0, said
    assert re.search(r"photos were shown on this device's page: \d+ rows?, one for each", said)
    assert "fist       5" in said
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    right = [each["label"] == Path(each["photo"]).parent.name for each in answers]
    wrong = sum(not each["unknown"] for each in answers) - sum(right)
    print(f"hall: {sum(right)} of {len(right)} right, {wrong} wrong, the others unknown")
    assert len(right) == 40
    assert np.mean(right) > 0.5  # of four classes, none of which it was ever shown with a name
    assert "Traceback" not in said + "".join(log.read_text() for log in tmp_path.glob("*.log"))


def _pair(page: Page, code: str) -> None:
    page.until("document.activeElement.id === 'code'")
    for letter in code:
        page.key(letter, letter)
    page.key("Enter", "\r")
    page.until("document.querySelectorAll('#newest button').length")


def _name(page: Page, folder: Path) -> None:
    """Tap five photos of each class as they come: the class first, then the photo."""
    shown = [
        (CLASSES[int(path.stem) % 4], _small(path.read_bytes())) for path in sorted((folder / "hands/door").iterdir())
    ]
    photos, named = PhotosBeside(folder / "door"), dict.fromkeys(CLASSES, 0)
    done: set[str] = set()
    deadline = time.monotonic() + 180
    while min(named.values()) < EACH:
        assert time.monotonic() < deadline, named
        for photo in photos.photos():
            looks = _small(photos.image(photo))
            label = min(shown, key=lambda one: float(((one[1] - looks) ** 2).mean()))[0]
            if photo.id in done or named[label] == EACH:
                continue
            tile = f'#newest button[data-id="{photo.id}"]'
            if not page.run(f"Boolean(document.querySelector('{tile}'))"):
                continue
            page.tap(f'#classes button[data-label="{label}"]')
            page.tap(tile)
            page.until(f"document.getElementById('said').textContent === '1 named {label}'")
            page.tap(f'#classes button[data-label="{label}"]')
            done.add(photo.id)
            named[label] += 1


def _small(jpeg: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB").resize((32, 32)), np.float32)


def _until_known(folder: Path) -> None:
    """Until the neighbour has the newest state, with all four classes."""
    deadline = time.monotonic() + 60
    newest = re.findall(r"global version (\d+): .* 4 classes", (folder / "aggregator.log").read_text())[-1]
    while (state := read_kept(folder / "hall").state) is None or state.version < int(newest):
        assert time.monotonic() < deadline, (folder / "hall.log").read_text()
        time.sleep(0.1)
