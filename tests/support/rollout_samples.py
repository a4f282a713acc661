"""Bundles that are rolled out, and a device that gets one by its own hands."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import numpy as np
from aggregator_samples import manifest
from contract_samples import empty_graph

from protofleet.contract.bundle.bundle_file import write_bundle
from protofleet.contract.errors import WireError
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Status
from protofleet.contract.wire.rollout_messages import Offer, Piece, Request
from protofleet.export.bundles.extend import extend_bundle

KEY = b"k" * 32


def old_bundle(path: Path, *, version: int = 1, sign: bytes | None = KEY, pad: int = 0) -> Path:
    """A bundle of NCM whose graph is opaque, some kilobytes long where it is padded."""
    made = msgspec.structs.replace(manifest(name="ncm"), version=version, extractor="11" * 32)
    params = {"backbone.weight": np.random.default_rng(version).normal(size=(2, 2 + pad)).astype(np.float32)}
    state = (msgspec.structs.replace(made.state[0], shape=(2, 2 + pad)),)
    made = msgspec.structs.replace(made, state=state)
    write_bundle(path, made, features=empty_graph(), train_step=None, params=params, private_key=sign)
    return path


def new_bundle(path: Path, old: Path, *added: str, sign: bytes | None = KEY) -> Path:
    """One that extends it."""
    extend_bundle(old, added or ("hamster",), path, private_key=sign)
    return path


class Fetcher:
    """A device that says what it is told to, and gets what is offered piece by piece.

    Attributes:
        announced: the newest announcement.
        got: the bytes of the offered bundle that have come in order.
    """

    def __init__(self, url: str, fleet: str, device: str) -> None:
        self.device, self._fleet, self._instance = device, fleet, os.urandom(8)
        self.announced: Announcement | None = None
        self.got, self.pieces = b"", 0
        down, status = topics.down(fleet, device), topics.status(fleet, device)
        self.link = Link(
            Address.parse(url),
            f"pf-{fleet}-{device}-{self._instance.hex()}",
            subscriptions=[topics.round_(fleet), down],
            will=(status, encode(Status(False, self._instance, 1))),
        ).open()
        self.link.wait_connected(60)

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()

    def say(self, bundle: str, rollout: str = "") -> None:
        versions = {"bundle": bundle} | ({"rollout": rollout} if rollout else {})
        told = Status(True, self._instance, 1, versions=versions)
        self.link.publish(topics.status(self._fleet, self.device), encode(told), retain=True)

    def publish(self, payload: bytes) -> None:
        self.link.publish(topics.up(self._fleet, self.device), payload)

    def ask(self, offset: int | None = None, wanted: int = 2**32 - 1, **changes: bytes) -> None:
        """Ask for what comes next, or from there on."""
        assert self.announced is not None
        digest = b"" if self.announced.offer is None else self.announced.offer.digest
        key = {"run": self.announced.run, "bundle": digest} | changes
        self.publish(encode(Request(**key, offset=len(self.got) if offset is None else offset, wanted_bytes=wanted)))

    def hear(self, timeout_s: float = 0.1) -> object:
        """The next message, taken to heart."""
        event = self.link.receive(timeout_s)
        if not isinstance(event, Received):
            return None
        self.link.acknowledge(event)
        try:
            message = decode(event.payload)
        except WireError:
            return None
        if isinstance(message, Announcement):
            self.announced = message
        elif isinstance(message, Piece):
            self.pieces += 1
            if message.offset == len(self.got):
                self.got += message.data
        return message

    def until_offered(self, timeout_s: float = 60.0) -> Offer:
        deadline = time.monotonic() + timeout_s
        while self.announced is None or self.announced.offer is None:
            assert time.monotonic() < deadline, "nothing was offered"
            self.hear()
        return self.announced.offer

    def fetch(self, up_to: int, timeout_s: float = 60.0) -> None:
        """Ask until so many bytes are here."""
        deadline, before = time.monotonic() + timeout_s, -1
        while len(self.got) < up_to:
            assert time.monotonic() < deadline, f"{len(self.got)} of {up_to} bytes"
            if len(self.got) == before:
                self.hear()
            else:
                before = len(self.got)
                self.ask()
                for _ in range(16):
                    if not isinstance(self.hear(1.0), Piece) or len(self.got) >= up_to:
                        break
