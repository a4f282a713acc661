"""kill -9 of any part at random moments: is anything lost, is anything counted twice?

    python -m benchmarks.kills.faults [--kills 200] [--broker embedded|mosquitto] [--each 3] [--keep FOLDER] [--json
        FILE]

A fleet of real processes runs FedProto rounds on the shipped images: a broker, `protofleet aggregate` and three
`protofleet client`s. Again and again one of the five, drawn at random, is killed with SIGKILL after a random time of
at most `--each` seconds and started again; after every tenth kill all are left alone until a round has closed, however
slow the machine. After the last kill the run is brought to its end, with an FFC round, and every contribution in the
aggregator's store is compared with the journals of the devices: byte for byte where a journal still has the payload.

    rounds    that closed, and the longest time that one of them was open: each kill can delay a round, none may stop it
    lost      in a journal as sent, and not in the store
    doubled   in the store twice, or differing from what the journal says was sent
    stalled   how often no round closed within three minutes of such a pause
    hung      parts that did not end by themselves within three minutes after the last kill
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from protofleet.aggregator.server.broker import EmbeddedBroker
from protofleet.export.bundles.build import build_bundle
from protofleet.lab.data.datasets import load_dataset

DEVICES, SAMPLES, FLEET = 3, 48, "faults"
HUNG_S = 180.0
BREATHER_EACH = 10  # kills: on a busy machine the five are seldom all up, and nothing would be measured
PAYLOADS = "SELECT c.round, c.method, c.device, p.bytes FROM contribution c JOIN payload p ON p.id = c.payload"


class Part:
    """A process that can be killed and started again."""

    def __init__(self, name: str, command: list[str], folder: Path) -> None:
        self.name, self._command, self._log = name, command, folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with open(self._log, "ab") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)

    def with_options(self, *options: str) -> Part:
        self._command = [*self._command, *options]
        return self

    def kill(self) -> int | None:
        """Kill it; its exit code when it had ended by itself before, which it should not have."""
        assert self._process is not None
        ended = self._process.poll()
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        return ended

    @property
    def has_ended(self) -> bool:
        """Whether it did by itself."""
        return self._process is not None and self._process.poll() is not None

    def wait(self, timeout_s: float) -> int:
        assert self._process is not None
        return self._process.wait(timeout_s)

    def tail(self) -> str:
        return "\n".join(self._log.read_text().splitlines()[-5:])


def broker_command(kind: str, port: int, folder: Path) -> list[str]:
    """What starts a broker on this port."""
    if kind == "embedded":
        return [sys.executable, "-m", "protofleet", "broker", "--listen", f"127.0.0.1:{port}"]
    config = folder / "mosquitto.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\npersistence true\n"
        f"persistence_location {folder}/\nautosave_interval 1\n" + ("user root\n" if os.geteuid() == 0 else "")
    )
    return ["mosquitto", "-c", str(config)]


def parts(folder: Path, kind: str) -> dict[str, Part]:
    """The broker, the aggregator and the devices, none of them started."""
    labels = [str(i) for i in range(10)]
    bundle = folder / "fleet.bundle"
    build_bundle(backbone="small_cnn", method_name="fedproto", labels=labels, input_shape=(28, 28, 1), out=bundle)
    with EmbeddedBroker() as probe:
        port = probe.port
    broker = broker_command(kind, port, folder)
    common = ["--bundle", str(bundle), "--broker", f"mqtt://127.0.0.1:{port}", "--fleet", FLEET]
    aggregate = [sys.executable, "-m", "protofleet", "aggregate", *common, "--store", str(folder / "store.sqlite")]
    aggregate += ["--min-clients", str(DEVICES), "--json", str(folder / "out.json"), "--limit-bytes", "8192"]
    made = {"broker": Part("broker", broker, folder), "aggregator": Part("aggregator", aggregate, folder)}
    train = load_dataset("fashion_mnist_subset").train
    for index in range(DEVICES):
        chosen = np.random.default_rng(index).permutation(len(train.y))[:SAMPLES]
        np.savez(folder / f"d{index}.npz", x=train.x[chosen], y=train.y[chosen])
        client = [sys.executable, "-m", "protofleet", "client", "--until-finished", *common, "--id", f"d{index}"]
        client += ["--data", str(folder / f"d{index}.npz"), "--state", str(folder / f"state-d{index}")]
        made[f"d{index}"] = Part(f"d{index}", client, folder)
    return made


def torment(
    fleet: dict[str, Part], kills: int, each_s: float, draw: random.Random, folder: Path
) -> tuple[Counter[str], int]:
    """Kill and restart `kills` times; how often each part was, and how often the rounds stalled."""
    killed: Counter[str] = Counter()
    stalled = 0
    for number in range(kills):
        time.sleep(draw.uniform(0.0, each_s))
        name = draw.choice(list(fleet))
        ended = fleet[name].kill()
        assert ended is None, f"{name} had ended with {ended}:\n{fleet[name].tail()}"
        time.sleep(draw.choice((0.0, 0.0, draw.uniform(0.0, 1.0))))
        fleet[name].start()
        killed[name] += 1
        if number % BREATHER_EACH == BREATHER_EACH - 1:
            stalled += not a_round_closes(folder)
    return killed, stalled


def a_round_closes(folder: Path) -> bool:
    """Whether one does from now on, within three minutes."""
    before, until = closed(folder), time.monotonic() + HUNG_S
    while time.monotonic() < until:
        if len(closed(folder)) > len(before):
            return True
        time.sleep(0.2)
    return False


def bring_to_an_end(fleet: dict[str, Part], folder: Path) -> list[str]:
    """Restart the aggregator with a plan that ends after the round that is open, and wait for all; who did not end."""
    fleet["aggregator"].kill()
    last = max([1, *(number for number, _ in rounds_of(folder))])
    fleet["aggregator"].with_options("--rounds", str(last), "--calibrate").start()
    until = time.monotonic() + HUNG_S
    hung = []
    for name, part in fleet.items():
        if name != "broker":
            try:
                code = part.wait(max(1.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                hung.append(name)
                print(f"{name} did not end:\n{part.tail()}", file=sys.stderr)
                continue
            assert code == 0, f"{name} ended with {code}:\n{part.tail()}"
    return hung


def rounds_of(folder: Path) -> list[tuple[int, float | None]]:
    """Number and seconds of each round in the store; None while it is open. The aggregator may have been killed before
    there was a store."""
    if not (folder / "store.sqlite").exists():
        return []
    with sqlite3.connect(f"file:{folder}/store.sqlite?mode=ro", uri=True) as db:
        has_rounds = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'round'").fetchone()
        rows = db.execute("SELECT number, seconds FROM round ORDER BY number").fetchall() if has_rounds else []
    db.close()
    return rows


def closed(folder: Path) -> list[float]:
    """The seconds that each closed round took."""
    return [seconds for _, seconds in rounds_of(folder) if seconds is not None]


def compare(folder: Path) -> dict[str, Any]:
    """Journals against the store."""
    with sqlite3.connect(folder / "store.sqlite") as db:
        rows = db.execute(PAYLOADS).fetchall()
    db.close()
    stored = {(number, name, device): payload for number, name, device, payload in rows}
    sent: dict[tuple[int, str, str], tuple[bytes | None, int, str]] = {}
    for index in range(DEVICES):
        with sqlite3.connect(folder / f"state-d{index}" / "journal.sqlite") as db:
            query = "SELECT round, method, payload, payload_bytes, outcome FROM contributions"
            for number, name, payload, size, outcome in db.execute(query):
                sent[(number, name, f"d{index}")] = (payload, size, outcome)
        db.close()
    differing = [
        key
        for key, payload in stored.items()
        if key not in sent or len(payload) != sent[key][1] or sent[key][0] not in (None, payload)
    ]
    with sqlite3.connect(folder / "store.sqlite") as db:
        (refused,) = db.execute("SELECT coalesce(sum(messages), 0) FROM tally WHERE outcome = 'duplicate'").fetchone()
    db.close()
    seconds = closed(folder)
    return {
        "rounds": len(seconds),
        "longest_round_s": max(seconds, default=0.0),
        "sent": len(sent),
        "committed": len(stored),
        "lost": sum(key not in stored for key in sent),
        "doubled": len(rows) - len(stored) + len(differing),
        "compared_byte_for_byte": sum(payload is not None for payload, _, _ in sent.values()),
        "duplicates_refused": refused,
        "outcomes": dict(Counter(outcome for _, _, outcome in sent.values())),
    }


def measure(kills: int, kind: str, each_s: float, seed: int, folder: Path) -> dict[str, Any]:
    fleet = parts(folder, kind)
    fleet["aggregator"].with_options("--rounds", "1000000")
    began = time.monotonic()
    try:
        for part in fleet.values():
            part.start()
        time.sleep(4.0)
        killed, stalled = torment(fleet, kills, each_s, random.Random(seed), folder)
        hung = bring_to_an_end(fleet, folder)
    finally:
        for part in fleet.values():
            part.kill()
    seconds = time.monotonic() - began
    found = {
        "broker": kind,
        "kills": kills,
        "killed": dict(killed),
        "seconds": seconds,
        "stalled": stalled,
        "hung": hung,
    }
    return {**found, **compare(folder)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--broker", choices=("embedded", "mosquitto"), default="embedded")
    parser.add_argument("--each", type=float, default=3.0, help="seconds between two kills, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for logs, store and journals; a temporary one otherwise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        result = measure(options.kills, options.broker, options.each, options.seed, folder)
    print(f"{options.kills} kills in {result['seconds']:.0f} s, {options.broker} broker: {result['killed']}")
    print(f"  {result['rounds']} rounds, the longest {result['longest_round_s']:.1f} s")
    print(
        f"  sent {result['sent']}, committed {result['committed']}, duplicates refused {result['duplicates_refused']}"
    )
    print(
        f"  lost {result['lost']}, doubled {result['doubled']}, stalled {result['stalled']}, hung {len(result['hung'])}"
    )
    print(f"  {result['compared_byte_for_byte']} compared byte for byte; outcomes on the devices {result['outcomes']}")
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.faults/1", **result}, indent=1) + "\n")
    sys.exit(1 if any(result[what] for what in ("lost", "doubled", "stalled", "hung")) else 0)


if __name__ == "__main__":
    main()
