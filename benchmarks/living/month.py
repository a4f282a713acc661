"""A month of a fleet that stays, in minutes: who comes, sleeps, changes, is killed, is forgotten; and does it add up?

    python -m benchmarks.living.month [--days 30] [--devices 200] [--seed 0] [--method ffc|ncm] [--broker
        embedded|mosquitto]
                                [--sign]

Real: a broker process, `protofleet aggregate --standing` with its store, the devices' code (`edge_client`) with its
state directories, photos as files, journals and MQTT connections, the commands `export --extend`, `rollout`, `forget`,
`fleet admit` and `client --withdraw`; and SIGKILL, for every part, at moments drawn from the seed. One device in sixty
is a `protofleet client` process; the others run in four processes (`worker.py`), each of which dies with all
that is awake in it. Simulated: the clock, a day takes `--day-seconds`, and what a device does by the clock is shortened
with it (`worker.py`); and the photos, the shipped Fashion-MNIST ones, dealt, taken away and taught by the seed.
The class that comes later, by a bundle with a longer list that is rolled out in stages, is of boots upside down. One
device is a board on which that bundle crashes in the self-test (`rollout.py`).

A second fleet on the same broker, an eighth as many devices, has rounds in windows of half a day.

FFC's sums travel as triangles here: a factor is rounded, so the integers that photos come to are not its own.

The bundles and all that the aggregators publish are signed, and devices believe nothing else. With `--sign` every
device signs, too, with a key of its own, and the aggregators hear nobody who is not enrolled.

Each evening, and in the end with every device that is there brought up to date (`books.py`):

    exact      the integers in the store are those of the devices' journals, added up by a naive computation, in the end
               those of the photos that should be in them; the head that goes back is of these, bit for bit
    lost       contributions with a receipt that the store does not have
    doubled    a payload in the store that differs from what its device made
    hung       windows open for more than two days, and waits that did not end: these stop the run
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.living.books import rounds, tally
from benchmarks.living.days import Month
from benchmarks.living.parts import StalledError, mosquitto

SCHEMA = "protofleet.benchmark.living/1"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--devices", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--method", choices=("ffc", "ncm"), default="ffc")
    parser.add_argument(
        "--broker", choices=("embedded", "mosquitto"), default="mosquitto" if mosquitto() else "embedded"
    )
    parser.add_argument("--sign", action="store_true", help="devices sign, too, and all are enrolled")
    parser.add_argument("--day-seconds", type=float, default=15.0, help="of a simulated day, without its evening")
    parser.add_argument(
        "--keep", type=Path, help="a new folder for logs, stores and journals; a temporary one otherwise"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.days < 3 or options.devices < 6:
        parser.error("at least 3 days and 6 devices")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary) / "month").resolve()
        folder.mkdir(parents=True)
        month = Month(folder, options)
        try:
            month.run()
        except StalledError as error:
            month.faults.append(f"stalled: {error}")
        finally:
            month.end()
        result = summary(month, time.monotonic() - began)
    tell(result)
    if options.json:
        options.json.write_text(json.dumps({"schema": SCHEMA, **vars_of(options), **result}, indent=1) + "\n")
    sys.exit(1 if result["faults"] else 0)


def vars_of(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ("days", "devices", "seed", "method", "broker", "day_seconds")}


def summary(month: Month, seconds: float) -> dict[str, Any]:
    days = month.days
    week = min(7, max(1, len(days) // 2))
    ratio = mean(days[-week:], "rss_mb") / mean(days[:week], "rss_mb") if days else float("nan")
    store = month.aggregators["windows"].store
    opened = rounds(store)[0] if store.exists() else []
    return {
        "seconds": round(seconds, 1),
        "killed": dict(month.killed),
        "wakes": month.wakes,
        "cut_short": month.cut_short,
        "orders": dict(month.orders),
        "rollout": month.rolled_out(),
        "messages": tally(month.folder / "living.sqlite"),
        "generations": sum(number for number, _ in month.held.stands.values()) if month.held else 0,
        "rounds": len([each for each in opened if each[2] is not None]),
        "longest_round_days": round(max((each[2] or 0.0 for each in opened), default=0.0) / month.day_s, 2),
        "bytes_per_device_day": round(mean(days, "bytes_per_device"), 1),
        "rss_last_week_to_first": round(ratio, 3),
        "store_mb_by_day": [day["store_mb"] for day in days],
        "by_day": days,
        "faults": month.faults,
    }


def mean(days: list[dict[str, Any]], what: str) -> float:
    return sum(day[what] for day in days) / len(days) if days else float("nan")


def some_of(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {word}" for word, number in counts.items() if number)


def tell(result: dict[str, Any]) -> None:
    print(f"{result['seconds']:.0f} s, killed {some_of(result['killed'])}; {some_of(result['orders'])}")
    print(
        f"  {result['wakes']:,} times a device woke, {result['cut_short']} of them ended by a kill; "
        f"{result['generations']:,} generations of sums, {result['rounds']} windows, "
        f"the longest {result['longest_round_days']} days"
    )
    rollout = result["rollout"]
    print(
        f"  roll-out: {rollout['state']} at {rollout['fraction']:.0%}, {some_of(rollout['counts'])}, "
        f"the bad board {rollout['bad_board'] or 'took it'!r}; asked for: {'; '.join(rollout['asked'])}"
    )
    print(f"  messages beside those that were committed: {some_of(result['messages'])}")
    print(
        f"  {result['bytes_per_device_day']:,} bytes for each device and day; RSS of the last week to the first's: ",
        end="",
    )
    print(f"{result['rss_last_week_to_first']:.3f}")
    for fault in result["faults"]:
        print(f"  FAULT: {fault}")
    if not result["faults"]:
        print("  every evening and in the end: the same integers and the same head; nothing lost, doubled or hung")


if __name__ == "__main__":
    main()
