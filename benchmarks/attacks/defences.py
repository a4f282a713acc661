"""Attacks that succeed or fail, each without its defence and with it: on a broker, on blinded rounds, by announcements.

    python -m benchmarks.attacks.defences [--only broker blinded policy] [--json FILE]

    broker    somebody with a valid certificate of another device or fleet, against Mosquitto: one that listens to
              everybody, and one with the files of `protofleet pki` (needs Mosquitto and the extra `security`)
    blinded   an aggregator, or a helper, who wants one device's numbers: without blinding, or without one of the
              helper's checks, and with all of them. Success is the device's very words, or its photo among 1,000
    policy    an aggregator that announces more than a device's owner allows, without a policy and with one

What a hostile client does over a broker without rules, without signatures and with them, is in `identity.py`; lies in
`one_liar.py` and `liars.py`; what may be read out of what is sent, in `prototype_attacks.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.living.parts import mosquitto
from protofleet.aggregator.helper.ledger import Ledger as HelperLedger
from protofleet.aggregator.helper.opening import Helper
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.methods import METHODS
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.mqtt.link import Address, Disconnected, Failed, Link, Received
from protofleet.contract.privacy.blinding import RANDOM_WORDS, add_pad, blind, share_digest, words_of
from protofleet.contract.privacy.sealing import HelperKey, seal
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.helper_messages import Opening, SealedSeed, set_digest
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.privacy.elapsed_time import moment
from protofleet.edge_client.privacy.ledger import FILE, Ledger
from protofleet.edge_client.privacy.policy import Policy
from protofleet.edge_client.privacy.releases import Releases
from protofleet.pki.authority import Office, establish
from protofleet.pki.register import Member

FLEET, OTHER = "pets", "cows"
PATIENCE_S = 60.0
Row = tuple[str, str, str, str]
Connect = Callable[..., Link]


def says(succeeded: bool) -> str:
    return "succeeds" if succeeded else "fails"


# ── a broker ────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def served(folder: Path, *, guarded: bool) -> Iterator[tuple[Connect, Callable[[str], None]]]:
    """A Mosquitto, how its clients connect by name, and how one is revoked."""
    with EmbeddedBroker() as probe:
        port = probe.port
    pki, config = folder / "pki", folder / "mosquitto.conf"
    text = f"listener {port} 127.0.0.1\nallow_anonymous true\n"
    if guarded:
        establish(pki, ("127.0.0.1",), (FLEET, OTHER), port=port, place=str(pki / "broker"))
        with Office.open(pki) as office:
            for name, fleet in (("kitchen", FLEET), ("hall", FLEET), ("stranger", OTHER)):
                office.admit(name, Member(role="device", fleets=(fleet,)))
        text = (pki / "broker" / "mosquitto.conf").read_text()
        text = text.replace("persistence_location /var/lib/mosquitto/", f"persistence_location {folder}/")
    config.write_text(text + ("user root\n" if os.geteuid() == 0 else ""))
    process = subprocess.Popen([mosquitto() or "mosquitto", "-c", str(config)], stderr=subprocess.DEVNULL)

    def connect(name: str, *filters: str, client_id: str = "", within_s: float = PATIENCE_S) -> Link:
        address = Address.parse(f"mqtt://127.0.0.1:{port}")
        if guarded:
            ca, own = str(pki / "broker" / "ca.pem"), str(Office(pki, office.book, 0).file(name))
            address = Address.parse(f"mqtts://127.0.0.1:{port}", ca_file=ca, cert_file=own)
        link = Link(address, client_id or f"client-{name}", subscriptions=filters).open()
        link.wait_connected(within_s)
        return link

    def revoke(name: str) -> None:
        if guarded:
            with Office.open(pki) as office:
                office.revoke(name)
            process.send_signal(1)  # SIGHUP, as `systemctl reload` sends it
            time.sleep(2.0)

    try:
        yield connect, revoke
    finally:
        process.terminate()
        process.wait()


def heard(link: Link, within_s: float = 3.0) -> list[str]:
    """Topics of what came, and "gone" where the connection went."""
    found, deadline = [], time.monotonic() + within_s
    while (left := deadline - time.monotonic()) > 0:
        event = link.receive(left)
        if isinstance(event, Received):
            link.acknowledge(event)
            found += [event.topic] if event.payload else [f"{event.topic} (empty)"]
        elif isinstance(event, Disconnected | Failed):
            found.append("gone")
    return found


def sent(link: Link, topic: str, payload: bytes, *, retain: bool = False) -> None:
    link.publish(topic, payload, retain=retain)
    deadline = time.monotonic() + PATIENCE_S
    while not link.idle and time.monotonic() < deadline:
        if isinstance(link.receive(0.02), Disconnected | Failed):
            return


def broker_attacks(folder: Path, *, guarded: bool) -> dict[str, bool]:
    """What each attack came to; the names are those of the table."""
    found = {}
    with served(folder, guarded=guarded) as (connect, revoke), contextlib.ExitStack() as stack:
        kept: Connect = lambda *a, **k: stack.enter_context(contextlib.closing(connect(*a, **k)))  # noqa: E731
        up, round_ = f"{topics.PREFIX}/{FLEET}/up/+", topics.round_(FLEET)
        aggregator = kept("aggregator", up, client_id="pf-pets-aggregator")
        kept("kitchen", client_id="pf-pets-aggregator")
        found["a device takes over the aggregator's session by its client id"] = "gone" in heard(aggregator)
        aggregator.close()
        aggregator = kept("aggregator", up, client_id="pf-pets-aggregator-2")
        stranger = kept("stranger", topics.global_part(FLEET, 0), round_)
        sent(stranger, topics.up(FLEET, "stranger"), b"contribution")
        name = "a device of another fleet contributes to this one"
        found[name] = topics.up(FLEET, "stranger") in heard(aggregator)
        sent(aggregator, topics.global_part(FLEET, 0), b"state", retain=True)
        stranger.close()
        late = kept("stranger", topics.global_part(FLEET, 0), client_id="client-late")
        found["a device of another fleet reads this one's global state"] = topics.global_part(FLEET, 0) in heard(late)
        sent(aggregator, round_, b"announced", retain=True)
        clears = kept("kitchen", client_id="clears")
        sent(clears, round_, b"", retain=True)
        clears.close()
        newcomer = kept("hall", round_, client_id="newcomer")
        found["a device clears the announcement that newcomers wait for"] = round_ not in heard(newcomer)
        newcomer.close()
        spy, hall = kept("kitchen", "#", up, client_id="spy"), kept("hall", client_id="hall-2")
        sent(hall, topics.up(FLEET, "hall"), b"prototypes")
        found["a device reads what its neighbours send"] = topics.up(FLEET, "hall") in heard(spy)
        spy.close()
        poses = kept("kitchen", client_id="poses")
        heard(aggregator, 0.5)
        sent(poses, topics.up(FLEET, "hall"), b"forged")
        found["a device contributes under its neighbour's name"] = topics.up(FLEET, "hall") in heard(aggregator)
        hall.close()
        revoke("hall")
        try:
            kept("hall", client_id="thief", within_s=5.0)
            found["a stolen board connects after it was revoked"] = True
        except Exception:  # TLS refuses in more than one way
            found["a stolen board connects after it was revoked"] = False
    return found


def broker(folder: Path) -> Iterator[Row]:
    results = []
    for guarded in (False, True):
        place = folder / str(guarded)
        place.mkdir()
        results.append(broker_attacks(place, guarded=guarded))
    for name, bare in results[0].items():
        yield name, says(bare), says(results[1][name]), "files of `protofleet pki`"


# ── blinded rounds ──────────────────────────────────────────────────────────────────────────────────────────────────

RUN, METHOD, LEAST, CLASSES, WIDTH = b"run1", "ncm", 4, 3, 64
KEY = HelperKey(bytes([7]) * 32, bytes([8]) * 32)
Words = NDArray[np.uint64]


def _device(name: str, seed: bytes, round: int = 1) -> tuple[Words, Words, bytes]:
    """A device's words, its share of them, and its signed, sealed seed."""
    rng = np.random.default_rng(list(name.encode()))
    words = words_of(UnitMeans.of(unit_rows(rng.random((6, WIDTH))), np.arange(6) % CLASSES, CLASSES))
    share = blind(words.copy(), seed)
    bound = SealedSeed(
        run=RUN, round=round, method=METHOD, words=len(share), share=share_digest(share), least=2, terms=bytes(32),
        sealed=bytes(80),
    )  # fmt: skip
    bound = replace(bound, sealed=seal(seed, KEY.public.seal, FLEET, name, bound))
    return words, share, _signer(name).sign(topics.up(FLEET, name), encode(bound))


def _signer(name: str) -> Signer:
    return Signer(name.encode().ljust(32, b"."))


def _asked(path: Path, enrolled: list[str], seeds: Mapping[str, bytes], *, least: int, round: int = 1) -> Words | None:
    """The helper's answer to a set, by a ledger and a list of devices."""
    with HelperLedger(path, fleet=FLEET, key=KEY.public.seal) as ledger:
        keys = {name: _signer(name).public_key for name in enrolled}
        part = Opening(RUN, round, METHOD, set_digest(seeds), 0, 1, dict(seeds))
        answer = Helper(ledger, KEY, FLEET, lambda: keys, least).take(part, 0.0)
        return None if answer is None else answer.total


def _same(words: Words, others: Words) -> bool:
    """Whether they are of the same numbers, whatever random words follow."""
    return bool(np.array_equal(words[:-RANDOM_WORDS], others[:-RANDOM_WORDS]))


def _unmasked_by_invention(folder: Path, *, checked: bool) -> bool:
    """k − 1 devices of the aggregator's own beside one true one: it takes off what it knows."""
    names = ["true", *(f"invented-{n}" for n in range(LEAST - 1))]
    made = {name: _device(name, name.encode().ljust(32)) for name in names}
    enrolled = ["true", *(f"real-{n}" for n in range(LEAST))] if checked else names
    total = _asked(folder / "a", enrolled, {name: each[2] for name, each in made.items()}, least=LEAST)
    if total is None:
        return False
    total = total + sum(each[1] for each in made.values()) - sum(made[name][0] for name in names[1:])
    return _same(total, made["true"][0])


def _unmasked_by_difference(folder: Path, *, checked: bool, again: bool = False) -> bool:
    """A set, and the same without one device: in the next round, or (`again`) of the same shares."""
    names, sums = [f"real-{n}" for n in range(2 * LEAST)], []
    for number, chosen in enumerate((names, names[1:]), 1):
        round = 1 if again else number
        made = {name: _device(name, f"{name} {round}".encode().ljust(32), round) for name in chosen}
        ledger = folder / ("a" if checked else f"ledger-{number}")  # a new ledger remembers nothing
        total = _asked(ledger, names, {name: each[2] for name, each in made.items()}, least=LEAST, round=round)
        if total is None:
            return False
        sums.append(total + sum(each[1] for each in made.values()))
    return _same(sums[0] - sums[1], _device(names[0], bytes(32))[0])


def _unmasked_by_accomplices(folder: Path) -> bool:
    """k − 1 devices that the helper's operator has enrolled tell the aggregator what they sent."""
    names = [f"real-{n}" for n in range(LEAST)]
    made = {name: _device(name, name.encode().ljust(32)) for name in names}
    total = _asked(folder / "a", names, {name: each[2] for name, each in made.items()}, least=LEAST)
    assert total is not None
    total = total + sum(each[1] for each in made.values()) - sum(made[name][0] for name in names[1:])
    return _same(total, made[names[0]][0])


def _found(*, blinded: bool, helper: bool = False, trials: int = 300) -> str:
    """How often a photo is the nearest of 1,000 to what one party has of a device with one photo of a class."""
    rng, right = np.random.default_rng(0), 0
    for trial in range(trials):
        photos = unit_rows(rng.random((1_000, WIDTH)))
        words = words_of(UnitMeans.of(photos[:1], np.zeros(1, np.int64), CLASSES))
        seen = blind(words.copy(), rng.bytes(32)) if blinded else words
        if helper:
            seen = np.zeros_like(words)
            add_pad(seen, trial.to_bytes(32, "big"))
        row = seen[:WIDTH].view(np.int64).astype(np.float64)
        right += int((photos @ (row / max(float(np.linalg.norm(row)), 1e-12))).argmax() == 0)
    return f"{100 * right / trials:.1f} %"


def _guessed(*, random: bool, trials: int = 20) -> str:
    """How often a helper knows a device's only photo, by trying 1,000 of them against the digest of its share."""
    rng, right = np.random.default_rng(0), 0
    for _ in range(trials):
        photos, seed = unit_rows(rng.random((1_000, WIDTH))), rng.bytes(32)
        label = np.zeros(1, np.int64)
        kept = None if random else -RANDOM_WORDS
        shown = share_digest(blind(words_of(UnitMeans.of(photos[:1], label, CLASSES)), seed)[:kept])
        each = (words_of(UnitMeans.of(photo[None], label, CLASSES)) for photo in photos)
        right += any(share_digest(blind(words, seed)[:kept]) == shown for words in each)
    return f"{100 * right / trials:.1f} %"


def blinded(folder: Path) -> Iterator[Row]:
    """Each attack in a folder of its own."""

    def tried(attack: Callable[..., bool], **options: Any) -> list[str]:
        places = [folder / f"{attack.__name__}-{options.get('again', '')}-{checked}" for checked in (False, True)]
        for place in places:
            place.mkdir()
        return [says(attack(place, checked=at == 1, **options)) for at, place in enumerate(places)]

    words = "finds a device's only photo of a class among 1,000 in"
    yield f"the aggregator {words} what that sent", _found(blinded=False), _found(blinded=True), "blinded rounds"
    yield f"the helper {words} what it is sent", "–", _found(blinded=True, helper=True), "the seed follows from no data"
    bare, held = _guessed(random=False), _guessed(random=True)
    yield "the helper tries 1,000 photos against the digest of a share", bare, held, "four random words in it"
    bare, held = tried(_unmasked_by_invention)
    yield "the aggregator invents k − 1 devices, and takes them off the sum", bare, held, "the helper's own list"
    bare, held = tried(_unmasked_by_difference)
    yield "it has two sums opened that differ by one device", bare, held, "the helper's ledger: blocks of k"
    bare, held = tried(_unmasked_by_difference, again=True)
    yield "it has shares opened again in another set", bare, held, "the helper's ledger: each once"
    (folder / "accomplices").mkdir()
    yield (
        "k − 1 enrolled devices tell it what they sent",
        "–",
        says(_unmasked_by_accomplices(folder / "accomplices")),
        "none",
    )


# ── announcements ───────────────────────────────────────────────────────────────────────────────────────────────────


def policy(folder: Path) -> Iterator[Row]:
    """What a device makes of an announcement, by its own gate (`edge_client/privacy/releases.py`)."""
    owner = Policy(methods=("ncm", "ncm-dp"), encodings=("f32",), min_samples=5, releases_per_day=1)
    asked = Announcement(RUN, 1, "open", "ncm", bytes(32), encoding="f32")
    private = Policy(epsilon=4.0, delta=1e-5)
    gram = replace(asked, method="ffc", encoding="f64")
    yield _row("asks FFC's Gram matrix of a device that gives class means", folder, owner, _made, gram)
    exact = replace(asked, encoding="f64")
    yield _row("asks for more digits than the owner lets out", folder, owner, _made, exact)
    yield _row("asks for classes of one photo", folder, owner, _of_one, asked)
    yield _row("asks for ten rounds in a day", folder, owner, _ten_times, asked)
    yield _row("asks for sums without noise of a device with an ε", folder, private, _made, asked)


def _row(
    what: str, folder: Path, owner: Policy, tried: Callable[[Releases, Announcement], bool], asked: Announcement
) -> Row:
    told = []
    for number, held in enumerate((Policy(), owner)):
        place = folder / f"{what}-{number}"
        place.mkdir()
        with Ledger(place / FILE) as ledger:
            gate = Releases(held, ledger, fleet=FLEET, own=METHODS["ncm"], hyper={}, now=moment)
            told.append(says(tried(gate, asked)))
    return f"the aggregator {what}", *told, "the device's policy"  # type: ignore[return-value]


def _made(gate: Releases, asked: Announcement) -> bool:
    return gate.refusal(asked, np.array([9, 9, 9])) is None


def _of_one(gate: Releases, asked: Announcement) -> bool:
    return gate.narrowed(asked).min_samples == 1


def _ten_times(gate: Releases, asked: Announcement) -> bool:
    for number in range(1, 11):
        again = replace(asked, round=number)
        if not _made(gate, again):
            return False
        gate.made(again, "f32", bytes([number]), np.array([9, 9, 9]))
    return True


def main() -> None:
    """Print a table of rows as they are done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"broker": broker, "blinded": blinded, "policy": policy}
    parser.add_argument("--only", nargs="+", choices=sorted(parts), default=list(parts))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows: list[Row] = []
    print("| attack | without | with | which defence |\n| --- | --- | --- | --- |", flush=True)
    with TemporaryDirectory() as folder:
        for name in options.only:
            place = Path(folder) / name
            place.mkdir()
            for row in parts[name](place):
                print("| " + " | ".join(row) + " |", flush=True)
                rows.append(row)
    if options.json:
        options.json.write_text(
            json.dumps({"schema": "protofleet.benchmark.defences/1", "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
