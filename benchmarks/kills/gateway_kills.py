"""kill -9 of any part of a fleet with a gateway at random moments: is anything lost, is anything counted twice?

    python -m benchmarks.kills.gateway_kills [--kills 200] [--method ncm|ffc] [--broker embedded|mosquitto] [--rounds]

As `faults.py`, with sums that stand: a broker above and one on the site, `protofleet aggregate --standing --gateway`,
`protofleet gateway`, three `protofleet client`s behind it and one beside it. One of the parts, drawn at random, is
killed with SIGKILL after a random time of at most `--each` seconds and started again; or the link between gateway and
broker above is cut. Half of the time it is a device, and that has more photos when it starts again. After every tenth
kill all are left alone until the sums above are of all photos that there are.

    unkept    a device was told that more photos are above than were; looked at after every kill
    lost, doubled   samples that the sums above have too few, or too many, in the end
    unequal   whether the sums above, as integers, are not those of a fleet with the same photos and no gateway
    hung      how often the sums above were not complete within three minutes
    In rounds, of which each is compared alone, after all kills:

    doubled   contributions that a store has twice
    lost      contributions that a device was told are committed, and are not in the store of its site with these bytes,
              or the site's not in that above
    unequal   rounds in which what the gateway sent is not, as integers, the sum of what its site's store holds
    hung      how often no round closed within three minutes

    ended     parts that had ended by themselves, with a line that is printed, and were started again
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
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kills.faults import BREATHER_EACH, HUNG_S, PAYLOADS, Part, broker_command
from benchmarks.server.gateway import Link, free_port
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.merging.forgotten_classes import held_by
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.methods import method
from protofleet.lab.data.datasets import load_dataset

SHIPPED = Path(__file__).parents[2] / "lab" / "demo" / "shipped" / "fleet.bundle"
BEHIND, BESIDE, FLEET = ("d0", "d1", "d2"), ("d3",), "kills"
FIRST, MORE = 20, 5  # photos of a device at the start, and with each start after a kill
COMMAND = [sys.executable, "-m", "protofleet"]
STANDING = ("--standing", "--every", "1s")
ROUNDS = ("--rounds", "1000000", "--min-clients", "2", "--deadline", "60", "--no-calibrate")


@dataclass(frozen=True)
class Storm:
    """How often something is killed: `kills` times with at most `each_s` between, and no more after `within_s`."""

    kills: int
    each_s: float
    within_s: float
    seed: int


class Devices:
    """What each device has, and how it is started."""

    def __init__(self, folder: Path) -> None:
        train = load_dataset("fashion_mnist_subset").train
        self._folder, self._x, self._y = folder, train.x, train.y
        names = (*BEHIND, *BESIDE)
        self.counts = dict.fromkeys(names, FIRST)
        self._rows = {name: np.arange(len(train.y))[index :: len(names)] for index, name in enumerate(names)}
        for name in names:
            self._write(name)

    @property
    def photos(self) -> int:
        return sum(self.counts.values())

    def grow(self, name: str) -> None:
        """It has more photos; its process must not be reading."""
        self.counts[name] = min(self.counts[name] + MORE, len(self._rows[name]))
        self._write(name)

    def part(self, name: str, port: int, state: str) -> Part:
        words = ["client", "--bundle", SHIPPED, "--broker", f"mqtt://127.0.0.1:{port}", "--fleet", FLEET, "--id", name]
        words += ["--data", self._folder / f"{name}.npz", "--hold-out", "0", "--state", self._folder / state]
        return Part(name, [*COMMAND, *map(str, words)], self._folder)

    def _write(self, name: str) -> None:
        chosen = self._rows[name][: self.counts[name]]
        np.savez(self._folder / f"{name}.npz", x=self._x[chosen], y=self._y[chosen])


def aggregator(folder: Path, name: str, port: int, way: str, *options: str) -> Part:
    """An aggregator with a store of this name."""
    words = ["aggregate", "--bundle", SHIPPED, "--broker", f"mqtt://127.0.0.1:{port}", "--fleet", FLEET]
    words += ["--store", folder / f"{name}.sqlite", "--method", way, *options]
    return Part(name, [*COMMAND, *map(str, words)], folder)


def broker(folder: Path, name: str, kind: str, port: int) -> Part:
    (folder / name).mkdir()
    return Part(name, broker_command(kind, port, folder / name), folder)


def parts(folder: Path, kind: str, way: str, devices: Devices, *, rounds: bool) -> tuple[dict[str, Part], Link]:
    """All of them, none started, and the link between the gateway and the broker above."""
    above, site = free_port(), free_port()
    link = Link(above)
    made = {"broker above": broker(folder, "broker above", kind, above)}
    made["broker of the site"] = broker(folder, "broker of the site", kind, site)
    options = ROUNDS if rounds else STANDING
    made["aggregator"] = aggregator(folder, "aggregator", above, way, *options, "--gateway", "site")
    words = ["gateway", "--bundle", SHIPPED, "--broker", f"mqtt://127.0.0.1:{site}", "--fleet", FLEET, "--id", "site"]
    words += ["--above", f"mqtt://127.0.0.1:{link.port}", "--store", folder / "site.sqlite", "--state", folder / "up"]
    words += ["--every", "1s", "--method", way, "--min-clients", len(BEHIND)]
    made["gateway"] = Part("gateway", [*COMMAND, *map(str, words)], folder)
    for name in (*BEHIND, *BESIDE):
        made[name] = devices.part(name, site if name in BEHIND else above, f"state-{name}")
    return made, link


def total(store: Path, way: str) -> ExactSum:
    """The exact sums that a store holds, whether its aggregator runs or not."""
    made, kind = read_bundle(SHIPPED), method(way).statistic
    classes, width = made.manifest.classes, made.manifest.features
    found = ExactSum.zero(kind, classes, width)
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as db:
        for (payload,) in db.execute("SELECT payload FROM standing WHERE payload IS NOT NULL").fetchall():
            found = found.add(ExactSum.sent_in(held_by(bytes(payload)), kind, classes, width))
    return found


def samples(store: Path, way: str) -> int:
    """Of how many samples they are; 0 before there is a store."""
    try:
        return int(total(store, way).counts.sum())
    except (sqlite3.Error, ProtofleetError):
        return 0


def promised(folder: Path) -> int:
    """How many samples devices were told are in the sums above."""
    query = (
        "SELECT r.metrics FROM contributions JOIN rounds r USING (run, round, method)"
        " WHERE outcome IN ('committed', 'duplicate') ORDER BY round DESC LIMIT 1"
    )
    found = 0
    for name in (*BEHIND, *BESIDE):
        path = folder / f"state-{name}" / "journal.sqlite"
        if path.exists():
            with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
                has_rounds = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'contributions'").fetchone()
                row = db.execute(query).fetchone() if has_rounds else None
            found += 0 if row is None else int(json.loads(row[0])["samples"])
    return found


def is_complete(store: Path, way: str, devices: Devices) -> bool:
    """Whether the sums in a store are of all photos that there are, within three minutes."""
    until = time.monotonic() + HUNG_S
    while time.monotonic() < until:
        if samples(store, way) == devices.photos:
            return True
        time.sleep(0.3)
    return False


def torment(
    fleet: dict[str, Part], link: Link, storm: Storm, devices: Devices, settles: Callable[[], bool],
    breaks: Callable[[], bool],
) -> tuple[Counter[str], int, int, int]:  # fmt: skip
    """Kill and restart; how often each part was, a promise was not kept, they hung, and one had ended by itself.

    Args:
        settles: waits until all is as it should be; False where that takes too long.
        breaks: whether a promise is not kept now.
    """
    killed, unkept, hung, ended = Counter[str](), 0, 0, 0
    draw, until_s = random.Random(storm.seed), time.monotonic() + storm.within_s
    others = [name for name in (*fleet, "link") if name not in devices.counts]
    for number in range(1, storm.kills + 1):
        if time.monotonic() > until_s:
            break
        time.sleep(draw.uniform(0.0, storm.each_s))
        name = draw.choice((draw.choice(list(devices.counts)), draw.choice(others)))
        if name == "link":
            link.cut(draw.choice((0.0, draw.uniform(0.0, 2.0))))
        else:
            ended += revive(fleet)
            fleet[name].kill()
            if name in devices.counts:
                devices.grow(name)
            time.sleep(draw.choice((0.0, 0.0, draw.uniform(0.0, 1.0))))
            fleet[name].start()
        killed[name] += 1
        unkept += breaks()
        if number % BREATHER_EACH == 0:
            time.sleep(5.0)
            ended += revive(fleet)
            hung += not settles()
            print(f"  {number} kills, {devices.photos} photos, {hung} hung", file=sys.stderr, flush=True)
    return killed, unkept, hung, ended


def revive(fleet: dict[str, Part]) -> int:
    """Start again what has ended by itself; how many that were."""
    gone = [part for part in fleet.values() if part.has_ended]
    for part in gone:
        print(f"{part.name} had ended:\n{part.tail()}", file=sys.stderr, flush=True)
        part.start()
    return len(gone)


def without_gateway(folder: Path, way: str, devices: Devices) -> ExactSum:
    """The sums of the same photos in a fleet where every device connects to the aggregator."""
    port = free_port()
    made = [broker(folder, "direct broker", "embedded", port), aggregator(folder, "direct", port, way, *STANDING)]
    made += [devices.part(name, port, f"direct-{name}") for name in devices.counts]
    try:
        for part in made:
            part.start()
        assert is_complete(folder / "direct.sqlite", way, devices), "the fleet without a gateway is not complete"
    finally:
        for part in made:
            part.kill()
    return total(folder / "direct.sqlite", way)


def closed(folder: Path) -> int:
    """How many rounds have closed above."""
    try:
        with closing(sqlite3.connect(f"file:{folder / 'aggregator.sqlite'}?mode=ro", uri=True)) as db:
            return int(db.execute("SELECT count(*) FROM round WHERE closed").fetchone()[0])
    except sqlite3.Error:
        return 0


def a_round_closes(folder: Path) -> bool:
    """Whether one that opens from now on does, within three minutes."""
    before, until = closed(folder), time.monotonic() + HUNG_S
    while time.monotonic() < until:
        if closed(folder) > before + 1:
            return True
        time.sleep(0.3)
    return False


def stored(folder: Path, name: str) -> tuple[dict[tuple[int, str], bytes], int]:
    """The contributions that a store holds, by round and device, and how many it has once more."""
    with closing(sqlite3.connect(folder / f"{name}.sqlite")) as db:
        rows = db.execute(PAYLOADS).fetchall()
    found = {(number, who): bytes(payload) for number, _, who, payload in rows}
    return found, len(rows) - len(found)


def compare(folder: Path, way: str) -> dict[str, int]:
    """Rounds of both stores, and what devices were told, against each other."""
    made, kind = read_bundle(SHIPPED), method(way).statistic
    shape = (kind, made.manifest.classes, made.manifest.features)
    (above, twice_above), (below, twice_below) = stored(folder, "aggregator"), stored(folder, "site")
    lost = told = unequal = rounds = 0
    for name in (*BEHIND, *BESIDE):
        with closing(sqlite3.connect(folder / f"state-{name}" / "journal.sqlite")) as db:
            query = "SELECT round, payload FROM contributions WHERE outcome IN ('committed', 'duplicate')"
            found = db.execute(query).fetchall()
        told += len(found)
        for number, payload in found:
            here = (below if name in BEHIND else above).get((number, name))
            lost += here is None or here != (payload or here) or (name in BEHIND and (number, "site") not in above)
    for (number, who), payload in above.items():
        if who == "site":
            rounds += 1
            total = ExactSum.zero(*shape)
            for name in BEHIND:
                if (number, name) in below:
                    total = total.add(ExactSum.sent_in(held_by(below[number, name]), *shape))
            unequal += not ExactSum.sent_in(held_by(payload), *shape).equal(total)
    return {"rounds": rounds, "told": told, "lost": lost, "doubled": twice_above + twice_below, "unequal": unequal}


def measure_rounds(storm: Storm, kind: str, way: str, folder: Path) -> dict[str, Any]:
    devices, began = Devices(folder), time.monotonic()
    fleet, link = parts(folder, kind, way, devices, rounds=True)
    try:
        for part in fleet.values():
            part.start()
        assert a_round_closes(folder), "no round closes before anything is killed"
        settles = lambda: a_round_closes(folder)  # noqa: E731
        killed, _, hung, ended = torment(fleet, link, storm, devices, settles, lambda: False)
    finally:
        for part in fleet.values():
            part.kill()
        link.close()
    found = {"broker": kind, "method": way, "kills": killed.total(), "killed": dict(killed), "photos": devices.photos}
    found |= {"seconds": time.monotonic() - began, "hung": hung, "ended": ended}
    return found | compare(folder, way)


def measure(storm: Storm, kind: str, way: str, folder: Path) -> dict[str, Any]:
    devices, began, store = Devices(folder), time.monotonic(), folder / "aggregator.sqlite"
    fleet, link = parts(folder, kind, way, devices, rounds=False)
    try:
        for part in fleet.values():
            part.start()
        assert is_complete(store, way, devices), "the fleet is not complete before anything is killed"
        settles = lambda: is_complete(store, way, devices)  # noqa: E731
        breaks = lambda: promised(folder) > samples(store, way)  # noqa: E731
        killed, unkept, hung, ended = torment(fleet, link, storm, devices, settles, breaks)
        hung += not is_complete(store, way, devices)
    finally:
        for part in fleet.values():
            part.kill()
        link.close()
    found, expected = total(store, way), without_gateway(folder, way, devices)
    off = found.counts.astype(int) - expected.counts.astype(int)
    return {
        "broker": kind,
        "method": way,
        "kills": killed.total(),
        "killed": dict(killed),
        "seconds": time.monotonic() - began,
        "photos": devices.photos,
        "unkept": unkept,
        "lost": int(-off[off < 0].sum()),
        "doubled": int(off[off > 0].sum()),
        "unequal": not found.equal(expected),
        "hung": hung,
        "ended": ended,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--method", choices=("ncm", "ffc"), default="ncm")
    parser.add_argument("--broker", choices=("embedded", "mosquitto"), default="embedded")
    parser.add_argument("--each", type=float, default=2.0, help="seconds between two kills, at most")
    parser.add_argument("--rounds", action="store_true", help="rounds, instead of sums that stand")
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds after which no more is killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder for logs, stores and journals; a temporary one otherwise")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run = measure_rounds if options.rounds else measure
        storm = Storm(options.kills, options.each, options.within, options.seed)
        result = run(storm, options.broker, options.method, folder)
    print(f"{result['kills']} kills in {result['seconds']:.0f} s, {options.broker} broker: {result['killed']}")
    bad = [what for what in ("unkept", "lost", "doubled", "unequal", "hung") if what in result]
    found = ", ".join(f"{what} {result[what]}" for what in (*bad, "ended"))
    what = f"{result['rounds']} rounds, {result['told']} receipts" if options.rounds else f"{result['photos']} photos"
    print(f"  {what} ({result['method']}): {found}")
    if options.json:
        text = json.dumps({"schema": "protofleet.benchmark.gateway_kills/1", **result}, indent=1)
        options.json.write_text(text + "\n")
    sys.exit(1 if any(result[what] for what in bad) else 0)


if __name__ == "__main__":
    main()
