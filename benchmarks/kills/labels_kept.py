"""Does kill -9 between a tap and its confirmation lose a label? `python -m benchmarks.kills.labels_kept --kills 200`.

A client with a camera and a page is a process. A photo is named by its page; at a random moment of the first 60 ms
after that the process is killed. A label that the page had confirmed has to be among the learned ones, with that class,
and among the samples of the next start. One that was not confirmed may be there or not.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from protofleet.edge_client.data.learned import Learned
from protofleet.edge_client.photos.photo_ring import PhotosBeside

BUNDLE = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
_CLASSES = ("Bag", "Sandal", "Coat")


class Client:
    """The process, and its page."""

    def __init__(self, folder: Path) -> None:
        words = ["--bundle", BUNDLE, "--broker", "mqtt://127.0.0.1:1", "--id", "pi-1", "--state", folder / "state"]
        words += ["--camera", f"folder:{folder / 'camera'}", "--every", "0.05", "--policy", folder / "policy.toml"]
        command = [sys.executable, "-m", "protofleet", "client", *map(str, words), "--page", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert self.process.stdout is not None
        self.samples = 0
        for line in self.process.stdout:
            if found := re.search(r"(\d+) samples? of", line):
                self.samples = int(found[1])
            if found := re.search(r"page at http://[\d.]+:(\d+)/", line):
                self._port = int(found[1])
                break
        else:
            raise SystemExit("the client did not start")
        _, heads, body = self.ask("GET", "/")
        self._cookie = heads["set-cookie"].split(";")[0]
        self._token = json.loads(re.findall(r'id="first">(.*?)</script>', body)[0])["token"]

    def ask(self, method: str, path: str, body: str = "", **heads: str) -> tuple[int, dict[str, str], str]:
        """One request."""
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=20)) as connection:
            connection.request(method, path, body, {"Host": "127.0.0.1", **heads})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()

    def tap(self, id: str, label: str) -> bool:
        """Name a photo; whether that was confirmed."""
        heads = {"Cookie": self._cookie, "X-Protofleet-Token": self._token}
        try:
            return self.ask("POST", "/name", json.dumps({"photos": [id], "label": label}), **heads)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def kill(self) -> None:
        """At once."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--within", type=float, default=0.25, help="seconds after a tap")
    given = parser.parse_args()
    kills, within_s = given.kills, given.within
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "camera").mkdir()
        (folder / "policy.toml").write_text("page = true\n")
        for number in range(40):
            image = rng.integers(0, 256, (28, 28), np.uint8)
            Image.fromarray(image).save(folder / "camera" / f"{number:03d}.png")
        client = Client(folder)
        while len(PhotosBeside(folder / "state").photos()) < 40:
            time.sleep(0.1)
        photos = PhotosBeside(folder / "state").photos()
        confirmed: dict[bytes, str] = {}
        answers = lost = 0
        for number in range(kills):
            photo = photos[int(rng.integers(len(photos)))]
            choices = [label for label in _CLASSES if label != confirmed.get(photo.pixels)]
            label = choices[int(rng.integers(len(choices)))]
            with ThreadPoolExecutor(1) as pool:
                tapping = pool.submit(client.tap, photo.id, label)
                time.sleep(float(rng.uniform(0.0, within_s)))
                client.kill()
                is_confirmed = tapping.result()
            learned = Learned(folder / "state")
            learned.look()
            learned.close()
            now = dict(zip(learned.hashes, learned.labels, strict=True))
            answers += is_confirmed
            if is_confirmed or now.get(photo.pixels) == label:
                confirmed[photo.pixels] = label
            elif photo.pixels not in confirmed:
                lost += photo.pixels in now  # as a class that nobody gave
            lost += any(now.get(pixels) != label for pixels, label in confirmed.items())
            client = Client(folder)
            lost += client.samples != len(now)
            if (number + 1) % 20 == 0:
                print(f"{number + 1} kills, {answers} taps confirmed before, {lost} losses", flush=True)
        client.kill()
    print(f"{kills} kills within {1000 * within_s:.0f} ms of a tap: {answers} were confirmed before, {lost} lost")
    sys.exit(bool(lost))


if __name__ == "__main__":
    main()
