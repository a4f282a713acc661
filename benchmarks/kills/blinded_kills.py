"""kill -9 of any part of a blinded fleet at random moments: is anything lost, is anything counted twice?

    python -m benchmarks.kills.blinded_kills [--kills 200] [--broker embedded|mosquitto] [--each 2] [--json FILE]

As `faults.py`, with rounds of NCM whose contributions are shares: a broker, `protofleet aggregate --helper`,
`protofleet helper`, and three `protofleet client --helper-key`. After every tenth kill all are left alone until a round
has closed, and the sum that it came to is compared with the pooled one of the devices' photos.

    lost      said to be committed by a device's journal, and not in the store
    doubled   a share opened twice, or a round opened in two sets
    wrong     sums that are not the pooled one: counts exactly, numbers to 3 · 2⁻³⁷
    stalled, hung   as in `faults.py`
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kills import faults
from benchmarks.kills.faults import DEVICES, FLEET, SAMPLES, Part, a_round_closes, closed, rounds_of
from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.identity.signatures import Signer
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.privacy.blinding import SCALE_BITS
from protofleet.contract.privacy.sealing import make_helper_key
from protofleet.contract.wire.codec import decode
from protofleet.contract.wire.messages import Contribution
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset

CLASSES = 10


def parts(folder: Path, kind: str) -> dict[str, Part]:
    """The broker, the aggregator, the helper and the devices, none of them started."""
    bundle = folder / "fleet.bundle"
    labels = [str(i) for i in range(CLASSES)]
    build_bundle(backbone="small_cnn", method_name="ncm", labels=labels, input_shape=(28, 28, 1), out=bundle)
    with EmbeddedBroker() as probe:
        port = probe.port
    broker = faults.broker_command(kind, port, folder)
    make_helper_key(folder / "helper.key")
    public, protofleet = str(folder / "helper.key.pub"), [sys.executable, "-m", "protofleet"]
    where = ["--broker", f"mqtt://127.0.0.1:{port}", "--fleet", FLEET]
    aggregate = [*protofleet, "aggregate", *where, "--bundle", str(bundle), "--store", str(folder / "store.sqlite")]
    aggregate += ["--helper", public, "--least", str(DEVICES), "--limit-bytes", "4096"]
    helper = [*protofleet, "helper", *where, "--key", str(folder / "helper.key"), "--least", str(DEVICES)]
    helper += ["--store", str(folder / "ledger.sqlite"), "--devices", str(folder / "devices.toml")]
    made = {"broker": Part("broker", broker, folder), "aggregator": Part("aggregator", aggregate, folder)}
    made["helper"] = Part("helper", helper, folder)
    train, lines = load_dataset("fashion_mnist_subset").train, ["[devices]"]
    for index in range(DEVICES):
        chosen = np.random.default_rng(index).permutation(len(train.y))[:SAMPLES]
        np.savez(folder / f"d{index}.npz", x=train.x[chosen], y=train.y[chosen])
        (folder / f"d{index}.key").write_bytes(bytes([index + 1]) * 32)
        lines.append(f'd{index} = "{Signer(bytes([index + 1]) * 32).public_key.hex()}"')
        client = [*protofleet, "client", "--until-finished", *where, "--bundle", str(bundle), "--id", f"d{index}"]
        client += [
            "--data",
            str(folder / f"d{index}.npz"),
            "--state",
            str(folder / f"state-d{index}"),
            "--hold-out",
            "0",
        ]
        client += ["--helper-key", public, "--identity", str(folder / f"d{index}.key")]
        made[f"d{index}"] = Part(f"d{index}", client, folder)
    (folder / "devices.toml").write_text("\n".join(lines))
    return made


def pooled(folder: Path) -> UnitMeans:
    """The sum over all devices' photos, by the bundle's own extractor."""
    bundle = read_bundle(folder / "fleet.bundle")
    extractor = CompiledGraphs(bundle, 1).shared_extractor()
    total = UnitMeans.zero(CLASSES, bundle.manifest.features)
    for index in range(DEVICES):
        data = np.load(folder / f"d{index}.npz")
        features = extractor.features(data["x"] if data["x"].ndim == 4 else data["x"][..., None])
        total = total.merge(UnitMeans.of(unit_rows(features.astype(np.float64)), data["y"], CLASSES))
    return total


def is_right(folder: Path, expected: UnitMeans) -> bool:
    """Whether the newest sum in the store is the pooled one."""
    with sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True) as db:
        row = db.execute("SELECT payload FROM blinded_sum").fetchone()
    db.close()
    message = decode(bytes(row[0]))
    assert isinstance(message, Contribution)
    found = message.statistic(UnitMeans, CLASSES, expected.width)
    off = float(np.abs(found.sums - expected.sums).max())
    return bool((found.counts == expected.counts).all()) and off <= DEVICES * 2.0 ** -(SCALE_BITS + 1) + 1e-12


def torment(
    fleet: dict[str, Part], kills: int, each_s: float, draw: random.Random, folder: Path, expected: UnitMeans
) -> tuple[Counter[str], int, int]:
    """Kill and restart; how often each part was, how often rounds stalled, and how many sums were wrong."""
    killed, stalled, wrong = Counter[str](), 0, 0
    for _ in range(0, kills, faults.BREATHER_EACH):
        some, held_up = faults.torment(fleet, min(faults.BREATHER_EACH, kills), each_s, draw, folder)
        killed, stalled = killed + some, stalled + held_up
        wrong += not is_right(folder, expected)
        print(f"  {killed.total()} kills, {len(closed(folder))} rounds", file=sys.stderr, flush=True)
    return killed, stalled, wrong


def bring_to_an_end(fleet: dict[str, Part], folder: Path) -> list[str]:
    """Restart the aggregator with a plan that ends with the round that is open; who did not end by itself."""
    fleet["aggregator"].kill()
    last = max([1, *(number for number, _ in rounds_of(folder))])
    fleet["aggregator"].with_options("--rounds", str(last)).start()
    until, hung = time.monotonic() + faults.HUNG_S, []
    for name in ("aggregator", *(f"d{index}" for index in range(DEVICES))):
        try:
            code = fleet[name].wait(max(1.0, until - time.monotonic()))
        except faults.subprocess.TimeoutExpired:
            hung.append(name)
            print(f"{name} did not end:\n{fleet[name].tail()}", file=sys.stderr)
            continue
        assert code == 0, f"{name} ended with {code}:\n{fleet[name].tail()}"
    return hung


def compare(folder: Path) -> dict[str, Any]:
    """Journals, store and ledger against each other."""
    with sqlite3.connect(folder / "store.sqlite") as db:
        rows = db.execute("SELECT round, method, device FROM contribution").fetchall()
        merged = dict(db.execute("SELECT number, classes_merged FROM round WHERE closed").fetchall())
    db.close()
    with sqlite3.connect(folder / "ledger.sqlite") as db:
        sets = db.execute("SELECT run, round, method, devices FROM opened").fetchall()
        shares = db.execute("SELECT run, round, method, device FROM share").fetchall()
    db.close()
    sent: dict[tuple[int, str, str], str] = {}
    for index in range(DEVICES):
        with sqlite3.connect(folder / f"state-d{index}" / "journal.sqlite") as db:
            for number, name, outcome in db.execute("SELECT round, method, outcome FROM contributions"):
                sent[(number, name, f"d{index}")] = str(outcome)
        db.close()
    seconds = closed(folder)
    return {
        "rounds": len(seconds),
        "longest_round_s": max(seconds, default=0.0),
        "sent": len(sent),
        "committed": len(rows),
        "opened": len(sets),
        "lost": sum(key not in set(rows) for key, outcome in sent.items() if outcome in ("committed", "duplicate")),
        "doubled": (len(sets) - len({row[:3] for row in sets})) + (len(shares) - len(set(shares))),
        "without_result": sum(not classes for classes in merged.values()),
        "unopened": sum(number not in {row[1] for row in sets} for number in merged),
        "outcomes": dict(Counter(sent.values())),
    }


def measure(kills: int, kind: str, each_s: float, seed: int, folder: Path) -> dict[str, Any]:
    fleet, began = parts(folder, kind), time.monotonic()
    expected = pooled(folder)
    fleet["aggregator"].with_options("--rounds", "1000000")
    try:
        for part in fleet.values():
            part.start()
        a_round_closes(folder)
        killed, stalled, wrong = torment(fleet, kills, each_s, random.Random(seed), folder, expected)
        hung = bring_to_an_end(fleet, folder)
        wrong += not is_right(folder, expected)
    finally:
        for part in fleet.values():
            part.kill()
    found = {"broker": kind, "kills": killed.total(), "killed": dict(killed), "seconds": time.monotonic() - began}
    return {**found, "stalled": stalled, "wrong": wrong, "hung": hung, **compare(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--broker", choices=("embedded", "mosquitto"), default="embedded")
    parser.add_argument("--each", type=float, default=2.0, help="seconds between two kills, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for logs, stores and journals; a temporary one otherwise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(options.kills, options.broker, options.each, options.seed, folder)
    print(f"{result['kills']} kills in {result['seconds']:.0f} s, {options.broker} broker: {result['killed']}")
    print(f"  {result['rounds']} rounds, the longest {result['longest_round_s']:.1f} s, {result['opened']} sums opened")
    print(f"  sent {result['sent']}, committed {result['committed']}; outcomes on the devices {result['outcomes']}")
    bad = ("lost", "doubled", "wrong", "without_result", "unopened", "stalled")
    print(
        "  " + ", ".join(f"{what.replace('_', ' ')} {result[what]}" for what in bad) + f", hung {len(result['hung'])}"
    )
    if options.json:
        text = json.dumps({"schema": "protofleet.benchmark.blinded_kills/1", **result}, indent=1)
        options.json.write_text(text + "\n")
    sys.exit(1 if any(result[what] for what in (*bad, "hung")) else 0)


if __name__ == "__main__":
    main()
