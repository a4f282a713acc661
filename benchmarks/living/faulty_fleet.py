"""The fleet of `six_faults.py`: a Mosquitto with certificates, an aggregator with its page, nine devices, six faults.

Every part is a process of its own. A device that has ended is started again after five seconds, as its service does it
(`deploy/protofleet-client.service`), unless it was killed by a fault. Each fault is made as it happens:

    gone         kill -9, and nothing starts it again
    wrong bundle started with --no-rollout: it stays on the bundle of before, while the others go over to the next
    wrong clock  Python's clock of its processes is three days ahead: a file `sitecustomize.py` shifts `time.time`. The
                 clock by which OpenSSL judges certificates is not shifted by it
    liar         started with photos that each have the label of another class: its sums say so
    certificate  it was valid for less than a minute when the device connected; it expires, and the device starts again
    disk full    its state directory is a file system of its own (tmpfs; needs root), on which no byte is free
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from benchmarks.device.idle_day import SHIPPED, free_port
from benchmarks.living.parts import COMMAND, ENVIRONMENT, Process, StalledError, command, mosquitto
from benchmarks.living.soak import small_disk
from protofleet.aggregator.database import place_of
from protofleet.aggregator.overview.fleet_state import read_state
from protofleet.contract.conditions import CERTIFICATE_UNTIL
from protofleet.pki.authority import Office, establish
from protofleet.pki.register import Member, read_book, write_secret
from protofleet.pki.x509 import new_member

FAULTS = ("gone", "wrong bundle", "wrong clock", "liar", "certificate", "disk full")
NAMES = ("attic", "barn", "cellar", "door", "garage", "hall", "kitchen", "porch", "shed")
FLEET = "house"
EXPIRES_S, AGAIN_S, DISK_MIB, AHEAD_S = 60, 5.0, 64, 3 * 86_400
_DAYS = 365
_AHEAD = f"""import time
_true = time.time
time.time = lambda: _true() + {AHEAD_S}
"""


class FaultyFleet:
    """All of it, in a folder.

    Args:
        seed: which device has which fault.

    Attributes:
        faulty: the device of each fault.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        drawn = random.Random(seed).sample(NAMES, len(FAULTS))
        self.faulty = dict(zip(FAULTS, drawn, strict=True))
        self.page, self._port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.page}/"
        self._given: dict[str, list[str]] = {}  # options of a device beside those that all have
        self._environment: dict[str, dict[str, str]] = {}
        self._stays_away: set[str] = set()
        self._over = threading.Event()
        self._lock = threading.Lock()
        (folder / "logs").mkdir()
        self._keys()
        self._authority()
        self._photos()
        self.broker = Process("broker", [mosquitto() or "mosquitto", "-c", str(self._broker_files())], folder / "logs")
        self.aggregator = Process("aggregator", self._aggregate(), folder / "logs")
        self.devices = {name: Process(name, [], folder / "logs") for name in NAMES}

    @property
    def store(self) -> Path:
        return self.folder / "store.sqlite"

    # ── what it begins with ─────────────────────────────────────────────────────────────────────────────────────────

    def _keys(self) -> None:
        """The key that signs, and two signed bundles: the shipped one with a class more, and with two."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        private = Ed25519PrivateKey.from_private_bytes(os.urandom(32))
        self._secret, self._public = self.folder / "fleet.key", self.folder / "fleet.pub"
        self._secret.write_bytes(private.private_bytes_raw())
        self._public.write_bytes(private.public_key().public_bytes_raw())
        self.old, self.new = self.folder / "first.bundle", self.folder / "next.bundle"
        for before, label, after in ((SHIPPED / "fleet.bundle", "Scarf", self.old), (self.old, "Glove", self.new)):
            words = ("--classes", f"+{label}", "--sign", self._secret, "--out", after, "--quiet")
            command("export", "--extend", before, *words)

    def _authority(self) -> None:
        place = self.folder / "broker"
        establish(self.folder / "pki", ("127.0.0.1",), (FLEET,), port=self._port, place=str(place))
        with Office.open(self.folder / "pki") as office:
            for name in NAMES:
                office.admit(name, Member(role="device", fleets=(FLEET,)))

    def _own_key(self, device: str) -> Path:
        """What a device signs with."""
        path = self.folder / f"{device}.key"
        if not path.exists():
            path.write_bytes(os.urandom(32))
        return path

    def _broker_files(self) -> Path:
        """The broker's folder as `pki` wrote it; its configuration, which listens on this machine alone."""
        place, data = self.folder / "broker", self.folder / "broker-data"
        data.mkdir()
        (self.folder / "pki" / "broker").rename(place)
        text = (place / "mosquitto.conf").read_text()
        text = text.replace(f"listener {self._port}", f"listener {self._port} 127.0.0.1")
        text = text.replace("persistence_location /var/lib/mosquitto/", f"persistence_location {data}/")
        (place / "mosquitto.conf").write_text(text + ("user root\n" if os.geteuid() == 0 else ""))
        return place / "mosquitto.conf"

    def _certificate(self, device: str) -> Path:
        office = Office(self.folder / "pki", read_book(self.folder / "pki"), 0)
        return office.file(device)

    def _photos(self) -> None:
        """Each device's share of the shipped photos, and the liar's: every photo is said to be of the next class."""
        with np.load(SHIPPED / "images.npz") as images:
            x, y = images["dealt_x"], images["dealt_y"].astype(np.int64)
        for index, name in enumerate(NAMES):
            mine = slice(index, None, len(NAMES))
            labels = (y[mine] + 1) % (int(y.max()) + 1)
            np.savez(self.folder / f"{name}.npz", x=x[mine], y=y[mine])
            np.savez(self.folder / f"{name}-wrong.npz", x=x[mine], y=labels)

    def _aggregate(self) -> list[str]:
        pki = self.folder / "pki" / "aggregator"
        told: list[object] = ["--bundle", self.new, "--fleet", FLEET, "--store", self.store, "--page", self.page]
        told += ["--broker", f"mqtts://127.0.0.1:{self._port}", "--ca", pki / "ca.pem", "--crl", pki / "crl.pem"]
        told += ["--cert", pki / "aggregator.pem", "--sign", self._secret, "--every", "20s", "--window", "20s"]
        return [*COMMAND, "aggregate", *map(str, [*told, "--min-clients", 5, "--max-clients", len(NAMES)])]

    # ── devices and their service ───────────────────────────────────────────────────────────────────────────────────

    def _client(self, name: str) -> list[str]:
        told: list[object] = ["--bundle", self.old, "--fleet", FLEET, "--id", name, "--state", self.state(name)]
        told += ["--broker", f"mqtts://127.0.0.1:{self._port}", "--ca", self.folder / "pki/devices" / name / "ca.pem"]
        told += ["--cert", self._certificate(name), "--trust", self._public, "--activations", 4]
        told += ["--identity", self._own_key(name)]
        given = self._given.get(name, [])
        data = [] if "--data" in given else ["--data", self.folder / f"{name}.npz"]
        return [*COMMAND, "client", *map(str, [*told, *data, *given])]

    def state(self, name: str) -> Path:
        place = "disk" if name == self.faulty["disk full"] else "states"
        return self.folder / place / name

    def start_device(self, name: str) -> None:
        """Start it, with the options that it has by now."""
        device = self.devices[name]
        device.runs_as(self._client(name))
        device.environment = {**ENVIRONMENT, **self._environment.get(name, {})}
        device.start()

    def _serve(self) -> None:
        """What systemd does: start again what has ended."""
        ended: dict[str, float] = {}
        while not self._over.wait(0.2):
            with self._lock:
                for name, device in self.devices.items():
                    if name in self._stays_away or not device.has_ended:
                        ended.pop(name, None)
                    elif time.monotonic() - ended.setdefault(name, time.monotonic()) >= AGAIN_S:
                        self.start_device(name)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """All of it, until the block is left."""
        with small_disk(self.folder / "disk", DISK_MIB):
            try:
                self.broker.start()
                self._wait_for_broker()
                self.aggregator.start()
                self._given[self.faulty["wrong bundle"]] = ["--no-rollout"]
                for name in NAMES:
                    self.start_device(name)
                service = threading.Thread(target=self._serve, daemon=True)
                service.start()
                yield
            finally:
                self._over.set()
                for part in (*self.devices.values(), self.aggregator, self.broker):
                    with contextlib.suppress(AssertionError):  # it was not started
                        part.kill()

    def _wait_for_broker(self) -> None:
        import socket

        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1.0):
                return
            time.sleep(0.05)
        raise StalledError(f"no broker: {self.broker.tail()}")

    # ── what happens to it ──────────────────────────────────────────────────────────────────────────────────────────

    def roll_out(self) -> None:
        """The bundle with one class more, in two stages, for who goes along."""
        stages = ("--stage", "50%", "--stage", "100%", "--soak", "1s", "--healthy", "50%")
        command("rollout", self.new, *stages, "--store", self.store, "--wait", "60")

    def make(self, fault: str) -> None:
        """This fault, now; the wrong bundle is one as soon as the others have the next one."""
        name = self.faulty[fault]
        if fault == "gone":
            with self._lock:
                self._stays_away.add(name)
                self.devices[name].kill()
        elif fault == "wrong clock":
            board = self.folder / "clock"
            board.mkdir()
            (board / "sitecustomize.py").write_text(_AHEAD)
            path = [os.fspath(board), *filter(None, [os.environ.get("PYTHONPATH")])]
            self._environment[name] = {"PYTHONPATH": os.pathsep.join(path)}
            self._again(name)
        elif fault == "liar":
            self._given[name] = [*self._given.get(name, []), "--data", str(self.folder / f"{name}-wrong.npz")]
            self._again(name)
        elif fault == "certificate":
            self._expire(name)
        elif fault == "disk full":
            with (self.folder / "disk" / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(4096)):
                    pass

    def mend_certificate(self) -> None:
        """What the runbook says: a new one, in the place of the old."""
        with Office.open(self.folder / "pki") as office:
            office.renew(self.faulty["certificate"])

    def free_disk(self) -> None:
        """What the runbook says: what is not the state directory's is deleted."""
        (self.folder / "disk" / "filler").unlink()

    def _again(self, name: str) -> None:
        with self._lock:
            self.devices[name].kill()
            self.start_device(name)

    def _expire(self, name: str) -> None:
        """It connects with a certificate that is still good; that expires, and then its board starts again."""
        office = Office(self.folder / "pki", read_book(self.folder / "pki"), 0)
        began = int(time.time()) - _DAYS * 86_400 + EXPIRES_S
        pem, _, until = new_member(office._signer(office.book.authorities[-1]), name, began, _DAYS)
        write_secret(self._certificate(name), pem)
        self._again(name)
        while self._told(name).get(CERTIFICATE_UNTIL) != until:
            if time.time() >= until:
                raise StalledError(f"{name} did not connect within {EXPIRES_S} s: {self.devices[name].tail()}")
            time.sleep(0.5)
        time.sleep(max(until - time.time(), 0.0) + 1.0)
        self._again(name)

    def _told(self, name: str) -> Mapping[str, float]:
        """What the aggregator has of a device's figures."""
        return read_state(place_of(str(self.store))).devices[name].figures

    def restart_aggregator(self, away_s: float) -> None:
        """kill -9, and after some seconds its service starts it again."""
        self.aggregator.kill()
        time.sleep(away_s)
        self.aggregator.start()


def until_interrupted() -> None:
    """Until Ctrl-C, or SIGTERM."""
    over = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    over.wait()


def needs() -> str:
    """Why it cannot run here; empty where it can."""
    if os.geteuid():
        return "a small disk is mounted, expected root, try as root"
    if mosquitto() is None:
        return "expected mosquitto, got none, try apt install mosquitto"
    tried = subprocess.run(["mount", "--version"], capture_output=True)
    return "expected mount, got none" if tried.returncode else ""
