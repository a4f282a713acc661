"""The parts of `benchmarks/attacks/identity.py`: an aggregator and devices on threads, a broker that anyone may write
to, and an attacker, who reads everything, publishes anything, and has no key.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from protofleet import Aggregator, Device
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.aggregator.store.enrolment_tables import intruders_in
from protofleet.aggregator.store.operator_orders import await_done, give
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.store.standing_tables import fleet_records
from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.errors import ProtofleetError, WireError
from protofleet.contract.files.sqlite import read_only
from protofleet.contract.identity.signatures import Signer, inside, invitation_key
from protofleet.contract.identity.tokens import draw_token, token_text
from protofleet.contract.methods import method
from protofleet.contract.mqtt.link import Address, Link, Received
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, Message
from protofleet.export.bundles.build import build_bundle

FLEET, LABELS = "pets", ("cat", "dog", "bird")
PATIENCE_S = 40.0
RUN = b"evil"
logger = logging.getLogger("protofleet")
logger.setLevel(logging.INFO)
EXPORTER = bytes(range(32))  # signs the bundle; the aggregator has a key of its own


class NotYet(AssertionError):
    """What was waited for did not happen."""


def until(what: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    """What it gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while not (found := what()):
        if time.monotonic() >= deadline:
            raise NotYet("it did not come to pass")
        time.sleep(0.02)
    return found


def happens(what: Callable[[], Any], within_s: float, again: Callable[[], None] = lambda: None) -> bool:
    """Whether it becomes true in time; `again` is done meanwhile, over and over."""

    def tried() -> Any:
        again()
        return what()

    with contextlib.suppress(NotYet):
        until(tried, within_s)
        return True
    return False


class _OfThread(logging.Handler):
    """Keeps what the present thread says."""

    def __init__(self, said: list[str]) -> None:
        super().__init__()
        self._said, self._thread = said, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._said.append(record.getMessage())


@dataclass
class Part:
    """An aggregator or a device on a thread of its own."""

    thing: Any
    said: list[str] = field(default_factory=list)
    error: ProtofleetError | None = None

    def start(self) -> Part:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        try:
            logger.addHandler(_OfThread(self.said))
            self.thing.run()
        except ProtofleetError as error:
            self.error = error

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def heard(self, words: str) -> bool:
        return any(words in line for line in self.said)

    def stop(self) -> None:
        self.thing.stop()
        self._thread.join(30.0)


@dataclass
class Attacker:
    """A client of the broker that hears all of a fleet, and publishes what it likes."""

    url: str
    heard: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = ("round", "global/+", "up/+", "down/+", "status/+")
        self._link = Link(
            Address.parse(self.url), "hostile", subscriptions=[f"{topics.PREFIX}/+/{kind}" for kind in kinds]
        ).open()
        self._link.wait_connected(20)

    def close(self) -> None:
        self._link.close()

    def listen(self) -> None:
        while (event := self._link.receive(0.0)) is not None:
            if isinstance(event, Received):
                self._link.acknowledge(event)
                self.heard.append((event.topic, event.payload))

    def all_of(self, topic: str, kind: type) -> list[tuple[bytes, Any]]:
        """The messages of this kind that were heard on a topic, and their bytes."""
        self.listen()
        found: list[tuple[bytes, Message]] = []
        for where, payload in self.heard:
            with contextlib.suppress(WireError):
                if where == topic and payload:
                    found.append((payload, inside(payload)))
        return [(payload, message) for payload, message in found if isinstance(message, kind)]

    def announcement(self, where: Callable[[Announcement], bool] = lambda a: True) -> tuple[bytes, Announcement]:
        """The newest that is such a one."""
        known = lambda: [each for each in self.all_of(topics.round_(FLEET), Announcement) if where(each[1])]  # noqa: E731
        return until(known)[-1]  # type: ignore[no-any-return]

    def publish(self, topic: str, message: Message | bytes, *, retain: bool = False) -> None:
        payload = message if isinstance(message, bytes) else encode(message)
        until(lambda: self._link.publish(topic, payload, retain=retain))


@dataclass
class World:
    """One fleet of real parts, with or without defence."""

    folder: Path
    url: str
    bundle: Path
    defended: bool
    parts: list[Part] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.key, self.public = self.folder / "fleet.key", self.folder / "fleet.pub"
        seed = os.urandom(32)
        self.key.write_bytes(seed)
        self.signer = Signer(seed)
        self.exporter = self.folder / "exporter.pub"
        self.exporter.write_bytes(Signer(EXPORTER).public_key)
        self.public.write_bytes(self.signer.public_key)
        self.store = self.folder / "store.sqlite"
        self.attacker = Attacker(self.url)

    def aggregator(self, **options: Any) -> Part:
        told = {"rounds": 1, "calibrate": False} if not options.get("standing") else {}
        told |= {"sign": str(self.key), "enrolled": True} if self.defended else {}
        made = Aggregator(self.bundle, broker=self.url, store=self.store, fleet=FLEET, **told, **options)
        part = Part(made).start()
        self.parts.append(part)
        until(lambda: self.attacker.all_of(topics.round_(FLEET), Announcement) or part.ended)
        return part

    def device(self, name: str = "a", *, photos: int = 0, **options: Any) -> Part:
        """One with photos of its own; of another number it has others."""
        told: dict[str, Any] = {}
        if self.defended:
            told = {"trust": (str(self.exporter), str(self.public)), **self.own(name)}
        rng = np.random.default_rng(sum(name.encode()) + 1000 * photos)
        data = rng.integers(0, 256, (30, 28, 28, 1), dtype=np.uint8), np.arange(30) % 3
        state = self.folder / name
        made = Device(self.bundle, broker=self.url, id=name, data=data, state=state, fleet=FLEET, **told, **options)
        part = Part(made).start()
        self.parts.append(part)
        return part

    def own(self, name: str) -> dict[str, str]:
        """How a device comes to its key: one that an operator has enrolled, or its own, by a token."""
        key = self.folder / f"{name}.key"
        if key.exists():
            return {"identity": str(key)}
        token = draw_token()
        self.order("invite", name, f"{invitation_key(token).hex()} {2**33}")
        return {"token": token_text(token)}

    def enrol(self, name: str) -> None:
        """A device whose key an operator has."""
        if self.defended:
            key = self.folder / f"{name}.key"
            key.write_bytes(os.urandom(32))
            self.order("enrol", name, Signer(key.read_bytes()).public_key.hex())

    def order(self, what: str, device: str, detail: str) -> None:
        """What an operator asks for, done."""
        order, running = give(self.store, what, device, "operator", detail=detail)
        done = await_done(self.store, order, PATIENCE_S if running else 0.0)
        assert not running or (done.outcome or "").startswith("done"), done

    def read(self) -> Bundle:
        return read_bundle(self.bundle)

    def held(self, name: str) -> Any:
        """What the store knows of a device."""
        with read_only(self.store, KIND) as db:
            return fleet_records(db).get(name)

    def intruders(self) -> list[str]:
        with read_only(self.store, KIND) as db:
            return [f"{each.device}: {each.cause}" for each in intruders_in(db)]

    def lie(self, announcement: Announcement, **fields: Any) -> Contribution:
        """A contribution of an attacker's own: three rows of its choice."""
        found, bundle = method("ncm"), self.read()
        width = bundle.manifest.features
        rows = np.eye(3, width)
        body, counts = ClassRows(np.arange(3, dtype=np.uint16), rows), np.full(3, 7, np.uint64)
        return Contribution(
            announcement.run, fields.pop("round", announcement.round), found.name, bundle.sha256[:4], body, counts,
            extractor=bundle.extractor(found)[:4], **fields,
        )  # fmt: skip

    def close(self) -> None:
        for part in self.parts:
            part.stop()
        self.attacker.close()


@contextlib.contextmanager
def world(bundle: Path, *, defended: bool) -> Iterator[World]:
    """A broker of its own, and what runs over it."""
    with TemporaryDirectory() as name, EmbeddedBroker() as broker:
        made = World(Path(name), broker.url, bundle, defended)
        try:
            yield made
        finally:
            made.close()


def small_bundle(path: Path) -> Path:
    """Of an untrained network with three classes, for nearest class means."""
    build_bundle(
        method_name="ncm", out=path, backbone="small_cnn", labels=LABELS, input_shape=(28, 28, 1), private_key=EXPORTER
    )
    return path
