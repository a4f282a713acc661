"""What a round, a connection and a keepalive take on the wire over TLS: the table that `protofleet plan` reads.

    python -m benchmarks.device.wire_bytes --json hw_profiles/plan/wire_bytes.json

A real Mosquitto with certificates of `protofleet pki`, a real aggregator and one real client for each case, in a
network of their own (`unshare`) whose packets are 1,500 bytes as on Ethernet. The kernel's counters of the client's TCP
connection (`ss --tcp --info`) are read when nothing happens: bytes of payload, TLS included, and segments either way. A
segment takes 52 bytes more, IPv4 and TCP with timestamps.

    round       an announcement, the contribution in chunks, its receipt, the new state, the status
    connection  TCP and TLS 1.3 with both certificates, MQTT's CONNECT and subscriptions, the retained messages
    ping        a keepalive and its answer

Of each case the encoded contribution and state are known (`payload_up`, `payload_down`). Up and down are fitted by
least squares as: fixed, plus so many bytes for each byte of payload up and down (packets' and records' overhead, the
acknowledgements). Beside each counted figure stands what the fit of the other cases says of it;
the worst error of a case within their sizes is the bound that the plan gives.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.device.idle_day import COMMAND, SEGMENT_BYTES, SHIPPED, traffic
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.methods import METHODS
from protofleet.hw_profiles.plan.wire_bytes import payload_down, payload_up

PORT, INSIDE = 8883, "PROTOFLEET_WIRE_BYTES_INSIDE"
CASES = (  # bundle, method of the rounds: a payload of 1 kB to 500 kB up, of 1 kB to 230 kB down
    ("shipped", "ncm"),
    ("shipped", "fedcof"),
    ("shipped", "ffc"),
    ("small10", "fedproto"),
    ("mobile20", "ncm"),
    ("mobile100", "ncm"),
)
EXPORTS = {
    "small10": ("small_cnn", "fedproto", 10, "28x28x1"),
    "mobile20": ("torchvision:mobilenet_v3_small", "ncm", 20, "64x64x3"),
    "mobile100": ("torchvision:mobilenet_v3_small", "ncm", 100, "64x64x3"),
}
SETTLED_S = 6.0


def in_own_network() -> None:
    """Run this again where the loopback's packets are as large as Ethernet's."""
    if INSIDE not in os.environ:
        line = f'ip link set lo mtu 1500 up && exec "$0" -m {__spec__.name} "$@"'
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "-rn", "sh", "-c", line, sys.executable, *sys.argv[1:]])


def run(*words: str, cwd: Path | None = None) -> None:
    subprocess.run([*COMMAND, *words], cwd=cwd, check=True, stdout=subprocess.DEVNULL)


def photos(folder: Path, bundle: Path, each: int = 16) -> Path:
    """So many photos of noise for each label of the bundle, and the CSV that names them."""
    from PIL import Image

    manifest, rng = read_bundle(bundle).manifest, np.random.default_rng(0)
    folder.mkdir()
    height, width, channels = manifest.input_shape
    lines = ["path,label"]
    for index, label in enumerate(manifest.labels):
        for one in range(each):
            pixels = rng.integers(0, 256, (height, width, channels), np.uint8)
            Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(folder / f"{index}-{one}.png")
            lines.append(f"{index}-{one}.png,{label}")
    (folder / "photos.csv").write_text("\n".join(lines))
    return folder / "photos.csv"


class Fleet:
    """A broker with certificates, and an aggregator whose rounds are opened by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.processes = folder, []  # type: ignore[var-annotated]
        run("pki", "init", "pki", "--broker", "localhost", "--place", str(folder / "broker"), cwd=folder)
        run("pki", "device", "d", cwd=folder)
        shutil.copytree(folder / "pki" / "broker", folder / "broker")
        (folder / "data").mkdir()
        config = folder / "broker" / "mosquitto.conf"
        text = re.sub(r"(?m)^persistence_location .*$", f"persistence_location {folder}/data/", config.read_text())
        config.write_text(text + "\nuser root\n")
        self._start(shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin") or "mosquitto", "-c", str(config))
        time.sleep(1.0)

    def _start(self, *words: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(words, stderr=(self.folder / "log").open("ab"), stdout=subprocess.DEVNULL)
        self.processes.append(process)
        return process

    def aggregate(self, bundle: Path, method: str) -> None:
        own = self.folder / "pki" / "aggregator"
        words = ["aggregate", "--bundle", str(bundle), "--store", str(self.folder / "s"), "--every", "7d"]
        words += ["--window", "60s", "--max-clients", "1", "--method", method, "--sums-encoding", "f64"]
        words += ["--broker", f"mqtts://localhost:{PORT}", "--quiet"]
        certificates = ["--ca", str(own / "ca.pem"), "--cert", str(own / "aggregator.pem")]
        self._start(*COMMAND, *words, *certificates)

    def client(self, bundle: Path, data: Path, keepalive: int) -> subprocess.Popen[bytes]:
        own = self.folder / "pki" / "devices" / "d"
        words = ["client", "--bundle", str(bundle), "--id", "d", "--data", str(data), "--state", str(self.folder / "d")]
        words += ["--broker", f"mqtts://localhost:{PORT}", "--keepalive", str(keepalive), "--quiet"]
        return self._start(*COMMAND, *words, "--ca", str(own / "ca.pem"), "--cert", str(own / "d.pem"))

    def rounds(self) -> int:
        history = self.folder / "d" / "history.jsonl"
        return len(history.read_text().splitlines()) if history.exists() else 0

    def until(self, rounds: int) -> None:
        deadline = time.monotonic() + 180
        while self.rounds() < rounds:
            if time.monotonic() > deadline:
                raise SystemExit(
                    f"expected round {rounds} within 180 s, got {(self.folder / 'log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
        time.sleep(SETTLED_S)

    def until_connected(self, client: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                traffic(client.pid, PORT)
                break
            except ValueError:  # no such connection yet
                if client.poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / "log").read_text()[-2000:]
                    raise SystemExit(f"expected a connection within 60 s, got {client.poll()}: {log}") from None
                time.sleep(0.1)
        time.sleep(SETTLED_S)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        self.processes.remove(process)

    def stop(self) -> None:
        for process in reversed(list(self.processes)):
            self.end(process)


def settled(pid: int) -> dict[str, int]:
    """The counters once they stand still for two seconds."""
    last, since = traffic(pid, PORT), time.monotonic()
    while time.monotonic() - since < 2.0:
        time.sleep(0.2)
        now = traffic(pid, PORT)
        if now != last:
            last, since = now, time.monotonic()
    return last


def wire(was: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    """Bytes on the wire up and down between two readings."""
    grown = {name: now[name] - was.get(name, 0) for name in now}
    return {
        "up": grown["bytes_sent"] + SEGMENT_BYTES * grown["segs_out"],
        "down": grown["bytes_received"] + SEGMENT_BYTES * grown["segs_in"],
        "tcp_payload_up": grown["bytes_sent"],
        "tcp_payload_down": grown["bytes_received"],
        "segments_up": grown["segs_out"],
        "segments_down": grown["segs_in"],
    }


def measure(bundle: Path, method: str, idle_s: float) -> dict[str, Any]:
    """One case: a second round of a client that stays, a connection after it, and `idle_s` with a keepalive of 10 s."""
    manifest, rule = read_bundle(bundle).manifest, METHODS[method]
    with tempfile.TemporaryDirectory() as name:
        fleet = Fleet(Path(name))
        try:
            data = photos(Path(name) / "photos", bundle)
            fleet.aggregate(bundle, method)
            client = fleet.client(bundle, data, 3600)
            fleet.until(1)
            before = settled(client.pid)
            run("fleet", "open-round", "--store", str(fleet.folder / "s"))
            fleet.until(2)
            after = settled(client.pid)
            fleet.end(client)
            time.sleep(2.0)
            client = fleet.client(bundle, data, 10)
            fleet.until_connected(client)
            connected = settled(client.pid)
            idle = wire({}, dict.fromkeys(connected, 0))
            if idle_s:
                began = traffic(client.pid, PORT)
                time.sleep(idle_s)
                idle = wire(began, traffic(client.pid, PORT))
            return {
                "bundle": f"{manifest.backbone}, {manifest.classes} classes, {manifest.features} features",
                "method": method,
                "payload_up": payload_up(manifest, rule),
                "payload_down": payload_down(manifest, rule),
                "round": wire(before, after),
                "connection": wire({}, connected),
                "idle": idle,
            }
        finally:
            fleet.stop()


def fitted(cases: list[dict[str, Any]], what: str) -> dict[str, list[float]]:
    """(fixed, of a byte up, of a byte down) for each direction; a connection has no payload up."""
    ups = [0.0 if what == "connection" else float(case["payload_up"]) for case in cases]
    rows = np.array([[1.0, up, float(case["payload_down"])] for up, case in zip(ups, cases, strict=True)])
    found = {}
    for direction in ("up", "down"):
        wanted = np.array([float(case[what][direction]) for case in cases])
        weights = 1.0 / wanted  # a share of each case, not the bytes of the largest
        solved, *_ = np.linalg.lstsq(rows * weights[:, None], wanted * weights, rcond=None)
        found[direction] = [round(float(value), 6) for value in solved]
    return found


def _within(case: dict[str, Any], cases: list[dict[str, Any]]) -> bool:
    """Whether its payloads lie within 1.5 times those of the other cases, as what the plan calls counted."""
    for payload in ("payload_up", "payload_down"):
        others = [other[payload] for other in cases if other is not case]
        if not min(others) / 1.5 <= case[payload] <= max(others) * 1.5:
            return False
    return True


def table(cases: list[dict[str, Any]], pings: int) -> dict[str, Any]:
    worst: dict[str, float] = {}
    for what in ("round", "connection"):
        for case in cases:
            others = fitted([other for other in cases if other is not case], what)
            known = np.array([1.0, 0.0 if what == "connection" else case["payload_up"], case["payload_down"]])
            for direction in ("up", "down"):
                said = float(known @ others[direction])
                case[what][f"left_out_{direction}"] = round(said)
                error = abs(said / case[what][direction] - 1)
                if _within(case, cases):
                    worst[f"{what}_{direction}"] = round(max(worst.get(f"{what}_{direction}", 0.0), error), 4)
    idle = cases[0]["idle"]
    return {
        "schema": 1,
        "command": "python -m benchmarks.device.wire_bytes --json hw_profiles/plan/wire_bytes.json",
        "measured": datetime.date.today().isoformat(),
        "broker": subprocess.run(["mosquitto", "-h"], capture_output=True, text=True).stdout.splitlines()[0],
        "how": "MQTT 5 over TLS 1.3, both ends with certificates of `protofleet pki`; packets of 1,500 bytes, IPv4, "
        "52 bytes of headers a segment",
        "round": fitted(cases, "round"),
        "connection": fitted(cases, "connection"),
        "ping": {direction: round(idle[direction] / pings, 1) for direction in ("up", "down")},
        "worst_left_out": worst,
        "cases": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--idle", type=float, default=100.0, help="seconds, of the first case")
    parser.add_argument("--bundles", type=Path, help="keep the exported bundles here, and take those that lie there")
    given = parser.parse_args()
    in_own_network()
    os.environ["PATH"] += ":/usr/sbin"
    with tempfile.TemporaryDirectory() as name:
        bundles = {"shipped": SHIPPED / "fleet.bundle"}
        for key, (backbone, method, classes, shape) in EXPORTS.items():
            bundles[key] = (given.bundles or Path(name)) / f"{key}.bundle"
            if bundles[key].exists():
                continue
            words = ["--backbone", backbone, "--method", method, "--classes", str(classes), "--input", shape]
            run("export", *words, "--out", str(bundles[key]))
        cases = []
        for index, (bundle, method) in enumerate(CASES):
            cases.append(measure(bundles[bundle], method, 0.0 if index else given.idle))
            print(json.dumps(cases[-1]), flush=True)
    found = table(cases, round(given.idle / 10.0))
    print(json.dumps({key: value for key, value in found.items() if key != "cases"}, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
