"""What a hostile client does on a broker that anyone may write to, without signatures and with them.

    python benchmarks/identity.py [--only NAME] [--json FILE]
    python benchmarks/identity.py --cost [--repeats 2000]

Each attack meets a real aggregator and real devices (`protofleet.Aggregator`, `protofleet.Device`) over the embedded
broker, which has no password and no ACL, twice: as they are without options, and with `aggregate --sign --enrolled` and
`client --trust --token`. The attacker reads everything and publishes anything, and has no key. Printed is whether it
got what it wanted. The bundle is an untrained `small_cnn` of three classes; what is attacked is no accuracy.

`--cost` prints what a signature costs a device, beside what it does anyway: the encoding of a contribution, and the
features of one photo. Processor time of this machine; the ratios are what carries over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from aggregator.broken_message import digest_of
from aggregator.broker import EmbeddedBroker
from aggregator.enrolment_store import intruders_in, keys_in
from aggregator.orders import await_done, give
from aggregator.standing_store import fleet_records
from aggregator.store_schema import KIND
from contract import topics
from contract.bundle import Bundle, read_bundle
from contract.errors import ProtofleetError, WireError
from contract.link import Address, Link, Received
from contract.messages import Announcement, ClassRows, Contribution, GlobalPart, Message, Receipt, Status
from contract.methods import method
from contract.signed import Keyring, Signer, inside, invitation_key
from contract.sqlite import read_only
from contract.tokens import draw_token, token_text
from contract.wire import decode, encode
from edge_client.journal import FILE, read_kept
from export.build import build_bundle
from protofleet import Aggregator, Device

FLEET, LABELS = "pets", ("cat", "dog", "bird")
PATIENCE_S = 40.0
RUN = b"evil"
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
            self.thing.run(lambda said: self.said.append(str(said)))
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

    def device(self, name: str = "a", **options: Any) -> Part:
        told: dict[str, Any] = {}
        if self.defended:
            told = {"trust": (str(self.exporter), str(self.public)), **self.own(name)}
        rng = np.random.default_rng(sum(name.encode()))
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

    def is_enrolled(self, name: str = "a") -> bool:
        with read_only(self.store, KIND) as db:
            return not self.defended or name in keys_in(db)

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


# ── the attacks: each gives whether it succeeded ────────────────────────────────────────────────────────────────────


def _left_alone(w: World) -> Part:
    """A device that waits for a round, and whose aggregator, which would contradict at once, is away."""
    aggregator = w.aggregator(min_clients=2)
    device = w.device()
    until(lambda: device.heard("waiting for round"))
    aggregator.stop()
    return device


def forged_finished(w: World) -> bool:
    """A device that waits for its round is told that the run is finished, and goes."""
    device = _left_alone(w)
    forged = Announcement(RUN, 1, "closed", "ncm", w.read().sha256)
    for phase in ("closed", "finished"):
        w.attacker.publish(topics.round_(FLEET), replace(forged, phase=phase))  # type: ignore[arg-type]
    return happens(lambda: device.ended, 5.0)


def forged_round(w: World) -> bool:
    """A round of the attacker's own: the device sends it what its photos add up to."""
    _left_alone(w)
    b = w.read()
    opened = Announcement(RUN, 1, "open", "ncm", b.sha256, extractor=b.extractor(method("ncm")))
    sent = lambda: [m for _, m in w.attacker.all_of(topics.up(FLEET, "a"), Contribution) if m.run == RUN]  # noqa: E731
    w.attacker.publish(topics.round_(FLEET), opened)
    return happens(sent, 5.0)


def other_fleets_round(w: World) -> bool:
    """The same with a message that the very same aggregator's key has signed, for another fleet."""
    _left_alone(w)
    b = w.read()
    opened = Announcement(
        RUN, 1, "open", "ncm", b.sha256, extractor=b.extractor(method("ncm")), issued=2**62 if w.defended else 0
    )
    said = encode(opened)
    w.attacker.publish(topics.round_(FLEET), w.signer.sign(topics.round_("other"), said) if w.defended else said)
    sent = lambda: [m for _, m in w.attacker.all_of(topics.up(FLEET, "a"), Contribution) if m.run == RUN]  # noqa: E731
    return happens(sent, 5.0)


def _standing(w: World) -> tuple[Part, Part, Announcement]:
    """A device whose sums stand, and are in a global state that it has."""
    aggregator = w.aggregator(standing=True, every="0s")
    device = w.device(until_finished=False)
    until(lambda: (record := w.held("a")) is not None and record.present)
    _, announced = w.attacker.announcement(lambda a: a.global_version > 0)
    until(lambda: _kept(w) >= announced.global_version)
    return aggregator, device, announced


def _kept(w: World) -> int:
    if not (w.folder / "a" / FILE).exists():
        return 0
    state = read_kept(w.folder / "a").state
    return 0 if state is None else state.version


def _forged_state(w: World, version: int, rows: np.ndarray[Any, Any] | None = None) -> bool:
    _, _, announced = _standing(w)
    rows = np.eye(3, w.read().manifest.features) if rows is None else rows
    part = GlobalPart(announced.run, version or announced.global_version + 1, 1, 0, 1, "means", _rows(rows))
    w.attacker.publish(topics.global_part(FLEET, 0), part)
    return happens(lambda: _kept(w) == part.version, 4.0)


def _rows(rows: np.ndarray[Any, Any]) -> ClassRows:
    return ClassRows(np.arange(len(rows), dtype=np.uint16), rows)


def forged_global(w: World) -> bool:
    """A global state that devices answer with from now on."""
    return _forged_state(w, 0)


def global_of_the_last_version(w: World) -> bool:
    """A global state of version 2^32 − 1, above which no true one can come."""
    return _forged_state(w, 2**32 - 1)


def global_of_another_width(w: World) -> bool:
    """A global state of another dimension."""
    return _forged_state(w, 0, np.eye(3, 5))


def forged_receipt(w: World) -> bool:
    """While the aggregator is away a device is told that it has what it sent: it forgets it."""
    first = w.aggregator(min_clients=2, open_clients=1)
    w.device("b")
    until(lambda: (record := w.held("b")) is not None and record.rounds)
    w.enrol("a")  # while the aggregator is there
    first.stop()
    device = w.device("a")
    payload, sent = until(lambda: w.attacker.all_of(topics.up(FLEET, "a"), Contribution))[-1]
    forged = Receipt(sent.run, sent.round, sent.method, "committed", digest=digest_of(payload))
    w.attacker.publish(topics.down(FLEET, "a"), forged)
    robbed = happens(lambda: device.heard("committed"), 3.0)
    w.aggregator(min_clients=2, open_clients=1)
    got = lambda: (record := w.held("a")) is not None and record.rounds  # noqa: E731
    return robbed and not happens(got, 8.0)


def forged_birth(w: World) -> bool:
    """A second process of the device's name seems to run: the device ends."""
    _, device, _ = _standing(w)
    w.attacker.publish(topics.status(FLEET, "a"), Status(True, b"hostile!", 9), retain=True)
    return happens(lambda: device.ended, 4.0)


def stolen_name(w: World) -> bool:
    """A contribution under a device's name."""
    w.aggregator(min_clients=2, open_clients=1)
    w.device("b")
    until(lambda: (record := w.held("b")) is not None and record.rounds)
    _, announced = w.attacker.announcement(lambda a: a.phase == "open")
    w.attacker.publish(topics.up(FLEET, "a"), w.lie(announced))
    return happens(lambda: (record := w.held("a")) is not None and record.rounds, 4.0)


def replaced_sums(w: World) -> bool:
    """Newer sums under the name of a device whose sums stand."""
    _, _, announced = _standing(w)
    w.attacker.publish(topics.up(FLEET, "a"), w.lie(announced, round=1000, standing="present"))
    return happens(lambda: w.held("a").generation >= 1000, 4.0)


def forged_withdrawal(w: World) -> bool:
    """A device's sums are withdrawn in its name."""
    _, _, announced = _standing(w)
    b = w.read()
    origin = {"bundle": b.sha256, "extractor": b.extractor(method("ncm"))}
    w.attacker.publish(
        topics.up(FLEET, "a"), Contribution.withdrawal(run=announced.run, round=1000, method="ncm", **origin)
    )
    return happens(lambda: not w.held("a").present, 4.0)


def replayed_announcement(w: World) -> bool:
    """An announcement of before a class was forgotten is sent again: devices send sums of its photos again."""
    _, _, _ = _standing(w)
    old, _ = w.attacker.announcement()
    w.order("forget class", "", "dog")
    w.attacker.announcement(lambda a: a.withheld == (1,))
    up = topics.up(FLEET, "a")
    time.sleep(1.5)  # whatever the device sends of itself
    before = len(w.attacker.all_of(up, Contribution))
    news = lambda: w.attacker.all_of(up, Contribution)[before:]  # noqa: E731
    again = lambda: w.attacker.publish(topics.round_(FLEET), old, retain=True)  # noqa: E731
    return happens(lambda: any(1 in m.body.classes for _, m in news()), 5.0, again)


def forged_aggregator(w: World) -> bool:
    """Another aggregator seems to serve the fleet: the true one ends."""
    aggregator, _, _ = _standing(w)
    w.attacker.publish(topics.status(FLEET, topics.AGGREGATOR), Status(True, b"hostile!", 2**32 - 1), retain=True)
    return happens(lambda: aggregator.ended, 4.0)


ATTACKS: dict[str, Callable[[World], bool]] = {
    each.__name__.replace("_", "-"): each
    for each in (
        forged_finished, forged_round, other_fleets_round, replayed_announcement, forged_global,
        global_of_the_last_version, global_of_another_width, forged_receipt, forged_birth, stolen_name, replaced_sums,
        forged_withdrawal, forged_aggregator,
    )
}  # fmt: skip


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


def attack(name: str, bundle: Path) -> dict[str, Any]:
    """One attack, without and with defence."""
    found: dict[str, Any] = {"attack": name, "aim": (ATTACKS[name].__doc__ or "").strip()}
    for defended in (False, True):
        with world(bundle, defended=defended) as made:
            try:
                found["signed" if defended else "open"] = ATTACKS[name](made)
            except NotYet as error:
                said = "\n".join(f"{part.error or ''} {line}" for part in made.parts for line in part.said[-8:] or [""])
                raise NotYet(f"{name}, {'signed' if defended else 'open'}: {error}\n{said}") from None
            if defended:
                found["named"] = sorted(set(made.intruders()))
    return found


def cost(bundle: Path, repeats: int) -> dict[str, float]:
    """Processor milliseconds of each step of a device."""
    found, read = method("ncm"), read_bundle(bundle)
    signer, ring = Signer(os.urandom(32)), None
    ring = Keyring([signer.public_key])
    width = read.manifest.features
    body = _rows(np.random.default_rng(0).normal(size=(3, width)))
    sent = Contribution(RUN, 1, found.name, read.sha256[:4], body, np.full(3, 9, np.uint64))
    plain, topic = encode(sent), topics.up(FLEET, "a")
    signed = decode(signer.sign(topic, plain))
    from edge_client.extractor import Extractor  # ONNX Runtime is loaded for this alone

    photo = np.zeros((1, 28, 28, 1), np.uint8)
    features = Extractor(read, read.params)
    steps: dict[str, Callable[[], object]] = {
        "sign": lambda: signer.sign(topic, plain),
        "verify": lambda: ring.payload(signed, topic),  # type: ignore[arg-type]
        "encode": lambda: encode(sent),
        "features of a photo": lambda: features.features(photo),
    }
    took = {}
    for name, step in steps.items():
        step()
        began = time.process_time()
        for _ in range(repeats):
            step()
        took[name] = (time.process_time() - began) / repeats * 1e3
    return took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=sorted(ATTACKS))
    parser.add_argument("--cost", action="store_true")
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        bundle = small_bundle(Path(folder) / "identity.bundle")
        if options.cost:
            took = cost(bundle, options.repeats)
            for name, ms in took.items():
                print(f"{name:24} {ms:8.3f} ms  {ms / took['encode']:6.1f} × encoding a contribution of three classes")
            return
        rows = []
        print(f"{'attack':30} {'as it was':10} {'signed':8} named")
        for name in ATTACKS if options.only is None else (options.only,):
            row = attack(name, bundle)
            rows.append(row)
            words = ["succeeds" if row[which] else "fails" for which in ("open", "signed")]
            print(f"{name:30} {words[0]:10} {words[1]:8} {', '.join(row['named'])}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
