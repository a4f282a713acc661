"""One aggregator, one round, 10,000 devices, over a real broker: is anything lost, and how much memory does it take?

    python -m benchmarks.server.many_devices [--devices 10000] [--broker embedded|mosquitto] [--json FILE]

`protofleet aggregate` runs as a process of its own. A second process speaks for all devices over one connection: it
says each one's birth, waits for the round, sends each one's class means (C = 10, D = 512, float32: 20 KB), and sends
again what it has no receipt for. Prints the committed contributions, the seconds from the first to the last receipt,
and the peak RSS of the aggregator beside 150 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest, StateTensor, write_bundle
from protofleet.contract.methods import method
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.sums.statistics import ClassMeans
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, Receipt, Status

CLASSES, WIDTH, FLEET, TARGET_RSS_MB = 10, 512, "many", 150
EMPTY_GRAPH = b"\x3a\x00"  # an ONNX model with a graph of nothing, in protobuf


def bundle_file(path: Path) -> None:
    """A bundle with empty graphs: an aggregator reads only the manifest."""
    row = method("fedproto")
    manifest = Manifest(
        schema=SCHEMA,
        version=1,
        protofleet="0",
        backbone="opaque",
        provenance="made for a benchmark",
        method=row.name,
        head="local",
        hyper=row.resolve({}),
        labels=tuple(str(i) for i in range(CLASSES)),
        features=WIDTH,
        input_shape=(8, 8, 1),
        mean=(0.5,),
        std=(0.5,),
        batch=8,
        opset=18,
        state=(StateTensor(name="backbone.w", shape=(1,), role="param"),),
        members={},
    )
    write_bundle(
        path, manifest, features=EMPTY_GRAPH, train_step=EMPTY_GRAPH, params={"backbone.w": np.ones(1, np.float32)}
    )


@contextlib.contextmanager
def broker(kind: str, folder: Path) -> Iterator[str]:
    if kind == "embedded":
        with EmbeddedBroker() as running:
            yield running.url
        return
    with EmbeddedBroker() as probe:  # a port that was free a moment ago
        port = probe.port
    config = folder / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nmax_queued_messages 0\n")
    process = subprocess.Popen(["mosquitto", "-c", str(config)], stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    try:
        yield f"mqtt://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


class Crowd:
    """All devices, over one link."""

    def __init__(self, url: str, devices: int) -> None:
        self.ids = [f"device-{i:06d}" for i in range(devices)]
        self._waiting = dict.fromkeys(self.ids, -1e9)
        self._receipts: dict[str, int] = {}
        self._link = Link(
            Address.parse(url), "crowd", subscriptions=[topics.round_(FLEET), topics.down(FLEET)], receive_maximum=1000
        ).open()
        self._link.wait_connected(20)

    def run(self) -> tuple[float, dict[str, int]]:
        """Seconds from the first contribution to the last receipt, and receipts by status."""
        self._wait_for("closed")  # the aggregator is here: rumqttd tells a newcomer of at most 100 retained births
        births = encode(Status(True, b"instance", 1))
        for device in self.ids:
            self._link.publish(topics.status(FLEET, device), births, retain=True)
        announcement = self._wait_for("open")
        payloads = self._payloads(announcement)
        began = time.perf_counter()
        unsent = list(self.ids)
        while self._waiting:
            for device in unsent[:200]:
                self._waiting[device] = time.monotonic()
                self._link.publish(topics.up(FLEET, device), payloads[int(device[-6:]) % len(payloads)])
            del unsent[:200]
            self._hear(0.0 if unsent else 0.1)
            while not self._link.idle and unsent:
                self._hear(0.002)
            if not unsent:
                now = time.monotonic()
                unsent = [d for d, sent_at in self._waiting.items() if now - sent_at > 10.0]
        seconds = time.perf_counter() - began
        goodbye = encode(Status(False, b"instance", 1))
        for device in self.ids:
            self._link.publish(topics.status(FLEET, device), goodbye, retain=True)
        self._link.close(30.0)
        return seconds, self._receipts

    def _wait_for(self, phase: str) -> Announcement:
        while True:
            event = self._link.receive(60)
            assert event is not None, f"no round is {phase}"
            if isinstance(event, Received):
                self._link.acknowledge(event)
                message = decode(event.payload)
                if isinstance(message, Announcement) and message.phase == phase:
                    return message

    def _hear(self, timeout_s: float) -> None:
        event = self._link.receive(timeout_s)
        while event is not None:
            if isinstance(event, Received):
                self._link.acknowledge(event)
                message = decode(event.payload)
                if isinstance(message, Receipt):
                    self._receipts[message.status] = self._receipts.get(message.status, 0) + 1
                    self._waiting.pop(topics.device_of(event.topic), None)
            event = self._link.receive(0)

    def _payloads(self, announcement: Announcement) -> list[bytes]:
        rng = np.random.default_rng(0)
        made = []
        for _ in range(32):
            statistic = ClassMeans.from_means(rng.normal(size=(CLASSES, WIDTH)), rng.integers(1, 600, CLASSES))
            keys = {"run": announcement.run, "round": announcement.round, "method": announcement.method}
            made.append(encode(Contribution.of(statistic, bundle=announcement.bundle, **keys), announcement.encoding))
        return made


def peak_rss_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    return float("nan")


def measure(devices: int, kind: str) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as name, broker(kind, Path(name)) as url:
        folder = Path(name)
        bundle_file(folder / "b.bundle")
        command = [
            sys.executable,
            "-m",
            "protofleet",
            "aggregate",
            "--bundle",
            str(folder / "b.bundle"),
            "--broker",
            url,
        ]
        command += ["--store", str(folder / "s"), "--fleet", FLEET, "--rounds", "1", "--no-calibrate", "--quiet"]
        command += ["--min-clients", str(devices), "--json", str(folder / "out.json")]
        process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            seconds, receipts = Crowd(url, devices).run()
            peak, out = 0.0, folder / "out.json"
            while process.poll() is None and not (out.exists() and msgspec.json.decode(out.read_bytes())["finished"]):
                peak = max(peak, peak_rss_mb(process.pid))
                time.sleep(0.05)
            peak = max(peak, peak_rss_mb(process.pid)) if process.poll() is None else peak
            process.wait(60)
            told = msgspec.json.decode(out.read_bytes())
        finally:
            process.kill()
    return {
        "devices": devices,
        "broker": kind,
        "committed": told["totals"]["committed"],
        "duplicates": told["totals"]["duplicates"],
        "receipts": receipts,
        "seconds": seconds,
        "peak_rss_mb": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--broker", choices=("embedded", "mosquitto"), default="embedded")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.devices, options.broker)
    print(f"{result['committed']} of {options.devices} devices committed, {result['duplicates']} duplicates refused")
    print(f"  {result['seconds']:.1f} s from the first contribution to the last receipt, {options.broker} broker")
    print(f"  peak RSS of the aggregator {result['peak_rss_mb']:.0f} MB, target at most {TARGET_RSS_MB} MB")
    if options.json:
        options.json.write_text(
            json.dumps({"schema": "protofleet.benchmark.many-devices/1", **result}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
