"""A bundle handed out to many devices at once: how long a receipt takes meanwhile, and how fast the bundle goes out.

    python -m benchmarks.server.rollout [--devices 20] [--megabytes 10] [--broker embedded|mosquitto]

`protofleet aggregate --standing` and the broker run as processes of their own, and `protofleet rollout` gives the
bundle, as an operator does. One device sends the same sums again and again, and each time waits for its receipt
(`duplicate`): first alone, then while the others fetch the bundle, one connection each, from this process. What they
got is compared with the file. Prints the receipts' median, 95th percentile and worst time, and the megabytes a second.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from benchmarks.server.many_devices import broker
from protofleet.contract.bundle.bundle_file import (
    SCHEMA,
    Manifest,
    StateTensor,
    extractor_of,
    read_bundle,
    write_bundle,
)
from protofleet.contract.methods import method
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, Piece, Receipt, Request
from protofleet.export.bundles.extend import extend_bundle

FLEET, WIDTH, REPEATS = "pets", 128, 200
ASKED_BYTES = 16 * 65_000  # in one request, which at most 16 pieces answer
EMPTY_GRAPH = b"\x3a\x00"  # an ONNX model with a graph of nothing, in protobuf


def bundle_file(path: Path, megabytes: float) -> None:
    """A signed bundle of NCM with an empty graph, and weights of that size."""
    numbers = int(megabytes * 250_000)
    manifest = Manifest(
        schema=SCHEMA,
        version=1,
        protofleet="0",
        backbone="opaque",
        provenance="made for a benchmark",
        method="ncm",
        head="none",
        hyper=method("ncm").resolve({}),
        labels=("cat", "dog"),
        features=WIDTH,
        input_shape=(8, 8, 1),
        mean=(0.5,),
        std=(0.5,),
        batch=8,
        opset=18,
        state=(StateTensor(name="backbone.w", shape=(numbers,), role="param"),),
        members={},
        extractor="11" * 32,
    )
    weights = {"backbone.w": np.random.default_rng(0).normal(size=numbers).astype(np.float32)}
    write_bundle(path, manifest, features=EMPTY_GRAPH, train_step=None, params=weights, private_key=bytes(32))


class Client:
    """One device's connection."""

    def __init__(self, url: str, device: str) -> None:
        self._up = topics.up(FLEET, device)
        named = [topics.round_(FLEET), topics.down(FLEET, device)]
        self._link = Link(Address.parse(url), f"bench-{device}", subscriptions=named).open()
        self._link.wait_connected(30)
        self.announced: Announcement = self.until(lambda m: isinstance(m, Announcement) and m.offer is not None)

    def until(self, holds: Callable[[object], bool], timeout_s: float = 60.0) -> object:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            event = self._link.receive(1.0)
            if isinstance(event, Received):
                self._link.acknowledge(event)
                message = decode(event.payload)
                if holds(message):
                    return message
        raise SystemExit("nothing came for a minute")

    def send(self, message: Contribution | Request) -> None:
        self._link.publish(self._up, encode(message))

    def fetch(self) -> bytes:
        """The offered bundle."""
        offer, at = self.announced.offer, 0
        pieces: list[bytes] = []
        while at < offer.size_bytes:
            until = min(offer.size_bytes, at + ASKED_BYTES)
            self.send(Request(self.announced.run, offer.digest, at, until - at))
            while at < until:
                piece = self.until(lambda message: isinstance(message, Piece))
                pieces += [piece.data] if piece.offset == at else []
                at += len(piece.data) if piece.offset == at else 0
        return b"".join(pieces)

    def close(self) -> None:
        self._link.close()


def sums(announced: Announcement, bundle: Path) -> Contribution:
    """Standing sums of one device: class means of unit features."""
    found = read_bundle(bundle)
    means = np.eye(2, WIDTH) * 0.5
    made = method("ncm").statistic.from_means(np.vstack([means, np.zeros((1, WIDTH))]), [5, 5, 0])  # type: ignore[attr-defined]
    key = {"run": announced.run, "round": 1, "method": "ncm", "bundle": found.sha256}
    extractor = extractor_of(found.manifest, found.sha256, method("ncm"))
    return Contribution.of(made, **key, extractor=extractor, standing="present")


def receipts(client: Client, contribution: Contribution) -> str:
    times = []
    for _ in range(REPEATS):
        began = time.monotonic()
        client.send(contribution)
        client.until(lambda m: isinstance(m, Receipt))
        times.append(1e3 * (time.monotonic() - began))
    middle, late, worst = np.percentile(times, [50, 95, 100])
    return f"median {middle:.1f} ms, 95 % {late:.1f} ms, worst {worst:.1f} ms"


@contextlib.contextmanager
def fleet(kind: str, folder: Path, megabytes: float) -> Iterator[tuple[str, Path]]:
    """A broker, an aggregator, and a roll-out to all devices; the broker's address and the bundle."""
    old, new, store = folder / "old.bundle", folder / "new.bundle", folder / "s.sqlite"
    bundle_file(old, megabytes)
    extend_bundle(old, ["hamster"], new, private_key=bytes(32))
    with broker(kind, folder) as url:
        base = [sys.executable, "-m", "protofleet"]
        told = ["--bundle", new, "--broker", url, "--fleet", FLEET, "--store", store, "--standing", "--quiet"]
        aggregator = subprocess.Popen([*base, "aggregate", *map(str, told)])
        try:
            while not store.exists() or not store.stat().st_size:
                time.sleep(0.1)
            time.sleep(2.0)
            words = ["rollout", new, "--store", store, "--stage", "100%"]
            subprocess.run([*base, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
            yield url, new
        finally:
            aggregator.terminate()
            aggregator.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=20)
    parser.add_argument("--megabytes", type=float, default=10.0)
    parser.add_argument("--broker", choices=("embedded", "mosquitto"), default="embedded")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, fleet(chosen.broker, Path(place), chosen.megabytes) as (url, path):
        whole, sender = path.read_bytes(), Client(url, "sender")
        contribution = sums(sender.announced, path)
        receipts(sender, contribution)
        print(f"receipts alone: {receipts(sender, contribution)}")
        wrong: list[str] = []

        def get(device: str) -> None:
            client = Client(url, device)
            wrong.extend([device] * (client.fetch() != whole))
            client.close()

        threads = [threading.Thread(target=get, args=(f"d{n}",)) for n in range(chosen.devices)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        print(f"receipts while {chosen.devices} devices fetch: {receipts(sender, contribution)}")
        for thread in threads:
            thread.join()
        took = time.monotonic() - began
        total = chosen.devices * len(whole) / 1e6
        print(
            f"{total:.0f} MB to {chosen.devices} devices in {took:.1f} s, {total / took:.1f} MB/s; {len(wrong)} wrong"
        )
        sender.close()
        print(f"load {os.getloadavg()[0]:.0f}")


if __name__ == "__main__":
    main()
