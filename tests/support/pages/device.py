"""A client with a camera and a page, as a process; and a browser that has not been at it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

from brokers import TestBroker
from browser import Visitor
from edge_samples import FASHION_LABELS, fashion
from PIL import Image

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.edge_client.photos.photo_ring import PhotosBeside

BUNDLE = Path(__file__).parents[3] / "lab" / "demo" / "shipped" / "fleet.bundle"


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
