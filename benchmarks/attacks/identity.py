"""What a hostile client does on a broker that anyone may write to, without signatures and with them.

    python -m benchmarks.attacks.identity [--only NAME] [--json FILE]
    python -m benchmarks.attacks.identity --cost [--repeats 2000]

Each attack meets a real aggregator and real devices (`protofleet.Aggregator`, `protofleet.Device`) over the embedded
broker, which has no password and no ACL, twice: as they are without options, and with `aggregate --sign --enrolled` and
`client --trust --token`. The attacker reads everything and publishes anything, and has no key. Printed is whether it
got what it wanted. The bundle is an untrained `small_cnn` of three classes; what is attacked is no accuracy.

`--cost` prints what a signature costs a device, beside what it does anyway: the encoding of a contribution, and the
features of one photo. Processor time of this machine; the ratios are what carries over.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from benchmarks.attacks.identity_world import FLEET, RUN, NotYet, Part, World, happens, small_bundle, until, world
from protofleet.aggregator.ingest.broken_message import digest_of
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.methods import method
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, ClassRows, Contribution, GlobalPart, Receipt, Rival, Status
from protofleet.edge_client.journal.journal import FILE, read_kept

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


def replayed_receipt(w: World) -> bool:
    """A board takes another's place under its name, and what the one before was told is sent again: it forgets what it
    has to say."""
    first = w.aggregator(standing=True, every="0s")
    w.enrol("a")
    board = w.device("a", until_finished=False)
    down, up = topics.down(FLEET, "a"), topics.up(FLEET, "a")
    until(lambda: (record := w.held("a")) is not None and record.present)
    recorded, _ = until(lambda: w.attacker.all_of(down, Receipt))[-1]
    before = len(w.attacker.all_of(up, Contribution))
    for part in (board, first):
        part.stop()
    shutil.rmtree(w.folder / "a")
    board = w.device("a", photos=1, until_finished=False)
    payload, sent = until(lambda: w.attacker.all_of(up, Contribution)[before:])[-1]
    forged = Receipt(sent.run, sent.round, sent.method, "committed", digest=digest_of(payload))
    w.attacker.publish(down, recorded if w.defended else forged)
    robbed = happens(lambda: board.heard("committed"), 3.0)
    w.aggregator(standing=True, every="0s")
    return robbed and not happens(lambda: w.held("a").generation > 1, 8.0)


def forged_birth(w: World) -> bool:
    """A process of the device's name seems to have run for longer, and answers the device: the device ends."""
    _, device, _ = _standing(w)
    topic = topics.status(FLEET, "a")
    until(lambda: w.attacker.all_of(topic, Status))
    meant = Rival(w.attacker.all_of(topic, Status)[-1][1].instance, 2**32 - 1, 9)
    w.attacker.publish(topic, Status(True, b"hostile!", 9, rival=meant), retain=True)
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
        global_of_the_last_version, global_of_another_width, forged_receipt, replayed_receipt, forged_birth,
        stolen_name, replaced_sums, forged_withdrawal, forged_aggregator,
    )
}  # fmt: skip


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


def cost(bundle: Path, repeats: int) -> tuple[dict[str, float], tuple[int, int]]:
    """Processor milliseconds of each step of a device; and the bytes of a contribution, plain and signed."""
    found, read = method("ncm"), read_bundle(bundle)
    signer, ring = Signer(os.urandom(32)), None
    ring = Keyring([signer.public_key])
    width = read.manifest.features
    body = _rows(np.random.default_rng(0).normal(size=(3, width)))
    sent = Contribution(RUN, 1, found.name, read.sha256[:4], body, np.full(3, 9, np.uint64))
    plain, topic = encode(sent), topics.up(FLEET, "a")
    signed = decode(signer.sign(topic, plain))
    from protofleet.edge_client.training.extractor import Extractor  # ONNX Runtime is loaded for this alone

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
    return took, (len(plain), len(signer.sign(topic, plain)))


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
            took, (plain, signed) = cost(bundle, options.repeats)
            for name, ms in took.items():
                print(f"{name:24} {ms:8.3f} ms  {ms / took['encode']:6.1f} × encoding a contribution of three classes")
            print(f"{'bytes':24} {plain:8,} plain, {signed - plain} more signed")
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
