"""Bytes on the link above a site: its devices direct, through a bridge of the site's broker, and through a gateway.

    python -m benchmarks.server.gateway --devices 10 --method ffc

An aggregator whose sums stand, a Mosquitto for it, real clients with the shipped photos. The link is a TCP relay that
counts what passes, each way, without headers of TCP and IP and without TLS:

    direct    every device connects through it
    bridge    the devices have a Mosquitto of their own, which passes on every topic both ways (`topic # both 1`)
    gateway   the devices have a Mosquitto of their own, and `protofleet gateway` connects through it

Counted is from the first connection until the aggregator has made a head of all devices and ten quiet seconds are over,
and then for `--idle` seconds. One line of JSON for each way: whether the sums above are the same integers in all three
is in its last field (a digest of the total).
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import numpy as np

from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import method

SHIPPED = Path(__file__).parents[2] / "lab" / "demo" / "shipped"
COMMAND = [sys.executable, "-m", "protofleet"]
BRIDGE = "connection up\naddress 127.0.0.1:{}\ntopic # both 1\nbridge_protocol_version mqttv50\nnotifications false\n"


class Link:
    """A relay in front of a port that counts bytes, up and down, and can be cut."""

    def __init__(self, port: int) -> None:
        self._port, self.up, self.down = port, 0, 0
        self._ends: set[socket.socket] = set()
        self._down_until_s = 0.0
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            try:
                there = socket.create_connection(("127.0.0.1", self._port))
            except OSError:
                here.close()
                continue
            if time.monotonic() < self._down_until_s:
                here.close()
                there.close()
                continue
            self._ends |= {here, there}
            threading.Thread(target=self._pass, args=(here, there, "up"), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, "down"), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, way: str) -> None:
        try:
            while data := one.recv(65_536):
                setattr(self, way, getattr(self, way) + len(data))
                other.sendall(data)
        except OSError:
            pass
        for each in (one, other):
            self._ends.discard(each)
            each.close()

    def cut(self, for_s: float = 0.0) -> None:
        """End every connection, and take no other for so long."""
        self._down_until_s = time.monotonic() + for_s
        for each in list(self._ends):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._server.close()
        self.cut()


class Way:
    """One way of connecting a site, from its brokers to its end."""

    def __init__(self, name: str, folder: Path, devices: int, method: str, stack: ExitStack) -> None:
        self.name, self.folder, self.count, self.method, self._stack = name, folder, devices, method, stack
        folder.mkdir()
        above = self._broker("above")
        self.link = stack.enter_context(closing(Link(above)))
        options = ("--store", folder / "above.sqlite", "--standing", "--every", "5s", "--gateway", "site")
        self._start("aggregate", above, "--method", method, *options)
        port = self.link.port
        if name == "bridge":
            port = self._broker("site", BRIDGE.format(port))
        elif name == "gateway":
            port = self._broker("site")
            told = ("--above", f"mqtt://127.0.0.1:{self.link.port}", "--id", "site", "--state", folder / "up")
            self._start("gateway", port, "--method", method, "--store", folder / "site.sqlite", "--every", "5s", *told)
        for number in range(devices):
            own = ("--data", self._photos(number), "--hold-out", "0", "--state", folder / f"device-{number}")
            self._start("client", port, "--id", f"device-{number}", *own)

    def result(self, idle_s: float) -> dict[str, object]:
        while self._devices() < self.count:
            time.sleep(0.5)
        time.sleep(10.0)
        until_head = {"up_bytes": self.link.up, "down_bytes": self.link.down}
        time.sleep(idle_s)
        idle = {"idle_up_bytes": self.link.up - until_head["up_bytes"]}
        idle |= {"idle_down_bytes": self.link.down - until_head["down_bytes"]}
        self._stack.close()
        head = {"way": self.name, "method": self.method, "devices": self.count}
        return {**head, **until_head, "idle_s": idle_s, **idle, "sums": self._sums()}

    def _devices(self) -> int:
        """Of how many devices the newest head above is made."""
        said = (self.folder / "aggregate.log").read_text() if (self.folder / "aggregate.log").exists() else ""
        heads = [line for line in said.splitlines() if line.strip().startswith("global version")]
        return int(heads[-1].split(" samples of ")[1].split(" ")[0]) if heads else 0

    def _sums(self) -> str:
        bundle, kind = read_bundle(SHIPPED / "fleet.bundle"), method(self.method).statistic
        classes, width = bundle.manifest.classes, bundle.manifest.features
        total = ExactSum.zero(kind, classes, width)
        with DurableStore(self.folder / "above.sqlite", bundle.sha256, "fleet") as store:
            for _, payload in store.standing.payloads():
                total = total.add(ExactSum.sent_in(held_by(payload), kind, classes, width))
        return total.digest()[:16]

    def _photos(self, number: int) -> Path:
        path = self.folder / f"{number}.npz"
        with np.load(SHIPPED / "images.npz") as images:
            np.savez(path, x=images["dealt_x"][number :: self.count], y=images["dealt_y"][number :: self.count])
        return path

    def _broker(self, name: str, extra: str = "") -> int:
        port, config = free_port(), self.folder / f"{name}.conf"
        config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n{extra}")
        self._run(name, [shutil.which("mosquitto", path="/usr/sbin:/usr/bin") or "mosquitto", "-c", str(config)])
        time.sleep(1.0)
        return port

    def _start(self, command: str, port: int, *words: object) -> None:
        common = ("--bundle", SHIPPED / "fleet.bundle", "--broker", f"mqtt://127.0.0.1:{port}")
        self._run(command, [*COMMAND, command, *map(str, (*common, *words))])

    def _run(self, name: str, command: list[str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        self._stack.callback(lambda: (process.terminate(), process.wait(30)))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--method", default="ffc", choices=["ffc", "ncm"])
    parser.add_argument("--idle", type=float, default=120.0, help="seconds in which nothing happens")
    parser.add_argument("--ways", nargs="+", default=["direct", "bridge", "gateway"])
    given = parser.parse_args()
    for way in given.ways:
        with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
            made = Way(way, Path(name) / way, given.devices, given.method, stack)
            print(json.dumps(made.result(given.idle)), flush=True)


if __name__ == "__main__":
    main()
