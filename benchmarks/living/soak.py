"""A day of one device in an hour: does its memory stay flat, and its ring of photos within its limit?

    python -m benchmarks.living.soak [--minutes 60] [--ring 16MiB] [--disk-mib 48] [--tap 15] [--seed 0]
                                     [--keep FOLDER] [--json FILE] [--of FILE]

A camera of a picture every 5 s has 17,280 a day. Here 0.21 s stand for those 5 s. All is real: an RTSP server
(`tests/support/rtsp_server.py`) whose pictures are the shipped images, a Mosquitto, an aggregator that stays and opens
a round each minute, and `protofleet client --camera rtsp://… --page …`. A browser's part (`soak_visitor.py`) looks at
the page all the time, and taps. The client's state directory is a small file system of its own (tmpfs; needs root).

Six times an hour each of these happens: the stream is cut for 20 s, and for 5 s; the broker is away for 40 s; the disk
is full for 20 s, between two rounds. In the end it is full while a round comes: the client may end with exit code 1
then, as it may at any disk that refuses its journal, and is started again, as its service is
(`deploy/protofleet-client.service`).

Every two seconds: memory (PSS and RSS of smaps_rollup), open files, threads, the sizes of files. The exit code is 1
where one of `soak_bounds.Bounds` does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from benchmarks.device.idle_day import SHIPPED, free_port
from benchmarks.kills.faults import Part, broker_command, closed
from benchmarks.living.soak_bounds import Bounds, Sample, Soak, broken, table
from benchmarks.living.soak_visitor import Visitor
from protofleet.contract.console.sizes import read_size
from protofleet.edge_client.data.learned import Learned

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "tests" / "support" / "rtsp_server.py"
COMMAND = [sys.executable, "-m", "protofleet"]
STOPPED = 128 + signal.SIGTERM
EVERY_S = 3600 / 17_280
FRAMES, WIDTH, HEIGHT = 600, 320, 240
CROP = (40, 0, HEIGHT, HEIGHT)  # of the picture: where the image is
BROKER_AWAY = "broker away"
CYCLE_S, LOOK_S, START_S = 600.0, 2.0, 90.0
CUT_S, BLINK_S, AWAY_S, FULL_S, LAST_S = 20.0, 5.0, 40.0, 20.0, 65.0


class Client(Part):
    """The client, which is started again when it has ended, as its service is."""

    life = 0

    def start(self) -> None:
        super().start()
        self.life += 1

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def end(self) -> int:
        """Ask it to end; its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait(60.0)


class World:
    """All that runs, in a folder whose `disk` is a file system of its own."""

    def __init__(self, folder: Path, ring: str, tap_s: float, seed: int) -> None:
        self.folder, self.state = folder, folder / "disk" / "state"
        self.port, page, rtsp = free_port(), free_port(), free_port()
        (folder / "policy.toml").write_text("page = true\n")
        frames(folder / "frames.i420", np.random.default_rng(seed))
        words = ["--port", rtsp, "--width", WIDTH, "--height", HEIGHT, "--rate", 10, "--key-s", 0.1]
        words += ["--frames", folder / "frames.i420", "--noise"]
        self.stream = Part("stream", ["/usr/bin/python3", str(SERVER), *map(str, words)], folder)
        self.broker = Part("broker", broker_command("mosquitto", self.port, folder), folder)
        common = ["--bundle", SHIPPED / "fleet.bundle", "--broker", f"mqtt://127.0.0.1:{self.port}"]
        served = ["--store", folder / "store.sqlite", "--every", "60s", "--window", "10s"]
        self.aggregator = Part("aggregator", [*COMMAND, "aggregate", *map(str, [*common, *served])], folder)
        own = ["--id", "porch", "--state", self.state, "--camera", f"rtsp://127.0.0.1:{rtsp}/clock", "--every", EVERY_S]
        own += ["--crop", ",".join(map(str, CROP)), "--keep-photos", ring, "--page", page]
        own += ["--policy", folder / "policy.toml"]
        self.client = Client("client", [*COMMAND, "client", *map(str, [*common, *own])], folder)
        self.visitor = Visitor(page, tap_s, seed)
        self.samples: list[Sample] = []
        self.back_s: dict[str, list[float]] = {}
        self.ends: list[int] = []
        self.trouble, self.may_end, self.rounds_before = "", False, 0
        self._began, self._stopping = time.monotonic(), threading.Event()
        self._sampler = threading.Thread(target=self._look, daemon=True)

    def run(self, seconds: float) -> None:
        """All of it; the client has ended on return."""
        for part in (self.stream, self.broker, self.aggregator, self.client):
            part.start()
        self.visitor.start()
        self._until_pictures(START_S)
        self._sampler.start()
        until, cycle_s = self._began + seconds, min(CYCLE_S, seconds / 3)
        while time.monotonic() + cycle_s <= until + 1.0:
            self._cycle(cycle_s, min(1.0, cycle_s / 200.0))
        time.sleep(max(until - time.monotonic(), 0.0))
        self.may_end = True
        self._happens("disk full while a round comes", self._full_disk, LAST_S)
        self._stopping.set()
        self._sampler.join()
        self.visitor.stop()
        code = self.client.end()
        if code != STOPPED:
            self.ends.append(code)

    def _cycle(self, cycle_s: float, share: float) -> None:
        began = time.monotonic()
        for at, name, trouble, length_s in (
            (0.1, "stream cut", lambda: self._away(self.stream), CUT_S),
            (0.35, BROKER_AWAY, lambda: self._away(self.broker), AWAY_S),
            (0.6, "stream cut for a moment", lambda: self._away(self.stream), BLINK_S),
            (0.7, "disk full", self._full_disk, FULL_S),
        ):
            time.sleep(max(began + at * cycle_s - time.monotonic(), 0.0))
            if trouble == self._full_disk:
                self._until_a_round_has_closed()
            self._happens(name, trouble, share * length_s)
        time.sleep(max(began + cycle_s - time.monotonic(), 0.0))

    def _happens(self, name: str, trouble: Callable[[], AbstractContextManager[None]], length_s: float) -> None:
        self.trouble = name
        with trouble():
            time.sleep(length_s)
        self.trouble = ""
        if name == BROKER_AWAY:
            self.rounds_before = len(closed(self.folder))
        self.back_s.setdefault(name, []).append(self._until_pictures(300.0))
        print(f"{time.monotonic() - self._began:6.0f} s  {name}, back after {self.back_s[name][-1]:.0f} s", flush=True)

    def _until_pictures(self, patience_s: float) -> float:
        """Seconds until the client has answered about further pictures; infinity where it does not."""
        before, began = self.visitor.taken, time.monotonic()
        while time.monotonic() < began + patience_s:
            if self.visitor.taken > before:
                return time.monotonic() - began
            time.sleep(0.1)
        return float("inf")

    def _until_a_round_has_closed(self) -> None:
        before, until = len(closed(self.folder)), time.monotonic() + 120.0
        while len(closed(self.folder)) == before and time.monotonic() < until:
            time.sleep(0.2)
        time.sleep(3.0)  # its receipt has come, and its global state

    @contextlib.contextmanager
    def _away(self, part: Part) -> Iterator[None]:
        part.kill()
        try:
            yield
        finally:
            part.start()

    @contextlib.contextmanager
    def _full_disk(self) -> Iterator[None]:
        filler = self.state.parent / "filler"
        try:
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass
            yield
        finally:
            filler.unlink(missing_ok=True)

    def _look(self) -> None:
        while not self._stopping.wait(LOOK_S):
            if self.client.has_ended:
                code = self.client.wait(1.0)
                if not (self.may_end and code == 1):
                    self.ends.append(code)
                self.visitor.client_ended()
                self.client.start()
            else:
                with contextlib.suppress(OSError, KeyError):  # it has just ended, or a file has just gone
                    self.samples.append(self._sample())

    def _sample(self) -> Sample:
        process = Path(f"/proc/{self.client.pid}")
        lines = (process / "smaps_rollup").read_text().splitlines()
        memory = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith(" kB")}
        return Sample(
            at_s=round(time.monotonic() - self._began, 1),
            life=self.client.life,
            pictures=self.visitor.taken,
            rss_kb=memory["Rss:"],
            pss_kb=memory["Pss:"],
            files=len(list((process / "fd").iterdir())),
            threads=len(list((process / "task").iterdir())),
            ring_bytes=size_of(self.state / "photos.sqlite"),
            journal_bytes=size_of(self.state / "journal.sqlite"),
            ledger_bytes=size_of(self.state / "ledger.sqlite"),
            log_bytes=max((size_of(each) for each in self.state.glob("*-wal")), default=0),
            state_bytes=sum(each.stat().st_size for each in self.state.rglob("*") if each.is_file()),
            trouble=self.trouble,
        )

    def found(self) -> Soak:
        learned, visitor = Learned(self.state), self.visitor
        learned.look()
        now = {hashed.hex()[:12]: label for hashed, label in zip(learned.hashes, learned.labels, strict=True)}
        learned.close()
        sure = {id: label for id, label in visitor.confirmed.items() if id not in visitor.open}
        with contextlib.closing(sqlite3.connect(self.folder / "store.sqlite")) as db:
            rounds = [number for (number,) in db.execute("SELECT DISTINCT round FROM contribution ORDER BY round")]
        return Soak(
            seconds=time.monotonic() - self._began,
            pictures=visitor.taken,
            samples=self.samples,
            back_s=self.back_s,
            ends=self.ends,
            labels=len(sure),
            labels_lost=sum(now.get(id) != label for id, label in sure.items()),
            taps=visitor.taps,
            refused=visitor.refused,
            unanswered=visitor.unanswered,
            events=visitor.events,
            images=visitor.images,
            rounds=len(rounds),
            late_rounds=sum(number > self.rounds_before for number in rounds),
        )

    def kill(self) -> None:
        for part in (self.client, self.aggregator, self.broker, self.stream):
            with contextlib.suppress(AssertionError):  # it was not started
                part.kill()


def size_of(path: Path) -> int:
    """Bytes of a file; 0 before it is there."""
    return path.stat().st_size if path.exists() else 0


def frames(path: Path, rng: np.random.Generator) -> None:
    """Raw I420 pictures, grey, of the shipped images; the server adds noise of colour."""
    from PIL import Image

    with np.load(SHIPPED / "images.npz") as images:
        x = images["dealt_x"][..., 0]
    with path.open("wb") as file:
        for number in rng.permutation(len(x))[:FRAMES]:
            small = Image.fromarray(x[number]).resize((HEIGHT, HEIGHT), Image.Resampling.BICUBIC)
            luma = np.full((HEIGHT, WIDTH), 16, np.uint8)
            luma[:, CROP[0] : CROP[0] + HEIGHT] = 16 + np.asarray(small).astype(np.uint16) * 219 // 255
            file.write(luma.tobytes() + bytes([128]) * (WIDTH * HEIGHT // 2))


@contextlib.contextmanager
def small_disk(at: Path, mib: int) -> Iterator[None]:
    """A file system of so many MiB there."""
    at.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", at], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: a small disk, expected mount of a tmpfs, got {done.stderr.strip()}, try as root")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--ring", default="16MiB", help="client --keep-photos")
    parser.add_argument("--disk-mib", type=int, default=48)
    parser.add_argument("--tap", type=float, default=15.0, help="seconds between two taps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for logs and store; a temporary one otherwise")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--of", type=Path, help="the --json of an earlier soak: judge it, and run none")
    given = parser.parse_args()
    bounds = Bounds(ring_bytes=read_size(given.ring, "--ring"))
    soak = run(given) if given.of is None else Soak.read(given.of.read_text())
    print(table(soak, bounds))
    if given.json:
        given.json.write_text(soak.json() + "\n")
    lines = broken(soak, bounds)
    print("\n".join(f"result: {line}" for line in lines) or "result: every bound holds")
    sys.exit(bool(lines))


def run(given: argparse.Namespace) -> Soak:
    """A soak with these options."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        with small_disk(folder / "disk", given.disk_mib):
            world = World(folder, given.ring, given.tap, given.seed)
            try:
                world.run(given.minutes * 60.0)
                return world.found()
            finally:
                world.kill()


if __name__ == "__main__":
    main()
