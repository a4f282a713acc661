"""What a fleet of a million or ten million devices would need, from the slopes that `workers.py` has measured.

    python -m benchmarks.server.workers --json workers.json
    python -m benchmarks.server.sizing workers.json [--devices 10000,100000,1000000,10000000] [--window-h 1] [--every-h
        6]

Measured: processor time of workers, broker and PostgreSQL for each contribution of 20 KB, and of the merge when a round
closes (the difference between the largest and the smallest number of devices that were run, so that what is spent once
falls out); bytes of the store for each; bytes of the broker for an idle connection. All else is arithmetic, and every
line beyond the devices that were run is extrapolated: it supposes that each of these grows in proportion, that
contributions come evenly over the window, and that nothing else is short (disk, network, locks).
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

LOAD = 0.5  # of a core: what is planned with, since contributions do not come evenly


def slopes(rows: list[dict[str, float]]) -> dict[str, float]:
    """For each contribution, of the rows with the most workers that were run with several numbers of devices."""
    workers = max(row["workers"] for row in rows)
    chosen = sorted((row for row in rows if row["workers"] == workers), key=lambda row: row["devices"])
    low, high = chosen[0], chosen[-1]
    if low["devices"] == high["devices"]:
        raise SystemExit("error: rows, expected two numbers of devices with the same workers, got one")
    names = [f"{when}{part}_ms" for when in ("", "closing_") for part in ("workers", "broker", "postgres")]
    found = {
        name: max(0.0, high[name] * high["devices"] - low[name] * low["devices"]) / (high["devices"] - low["devices"])
        for name in names
    }
    for name in ("store_bytes", "peak_rss_mb"):
        found[name] = max(0.0, high[name] - low[name]) / (high["devices"] - low["devices"])
    return found | {"fixed_rss_mb": low["peak_rss_mb"] - found["peak_rss_mb"] * low["devices"], "most": high["devices"]}


def cores(ms: float, devices: int, window_s: float) -> float:
    """Busy cores for a window's contributions, at the planned load."""
    return ms / 1e3 * devices / window_s / LOAD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("--devices", default="10000,100000,1000000,10000000")
    parser.add_argument("--window-h", type=float, default=1.0)
    parser.add_argument("--every-h", type=float, default=6.0)
    options = parser.parse_args()
    measured = json.loads(options.measured.read_text())
    slope, window_s = slopes(measured["rows"]), 3_600 * options.window_h
    parts = ", ".join(f"{part} {slope[f'{part}_ms']:.2f}" for part in ("workers", "broker", "postgres"))
    closing = slope["closing_workers_ms"] + slope["closing_postgres_ms"]
    print(f"measured up to {slope['most']:.0f} devices: ms of processor for each contribution: {parts};")
    print(
        f"  closing {closing:.2f}; {slope['store_bytes'] / 1e3:.1f} kB of the store; {slope['peak_rss_mb'] * 1e3:.1f}",
        end="",
    )
    print(f" kB of the one that leads; {measured['connection_bytes'] / 1e3:.1f} kB of the broker for a connection")
    print(f"windows of {options.window_h:g} h, every {options.every_h:g} h, cores planned at {LOAD:.0%}:")
    print(
        "| devices | per s | workers' cores | broker's cores | its connections | PostgreSQL's cores | store, a round |",
        end="",
    )
    print(" closing | leader's memory | up, a day | |\n|" + " --- |" * 11)
    for devices in map(int, options.devices.split(",")):
        row = [
            f"{devices:,}",
            f"{devices / window_s:.1f}",
            *(str(max(1, math.ceil(cores(slope[f"{part}_ms"], devices, window_s)))) for part in ("workers", "broker")),
            f"{devices * measured['connection_bytes'] / 1e9:.2f} GB",
            str(max(1, math.ceil(cores(slope["postgres_ms"], devices, window_s)))),
            f"{devices * slope['store_bytes'] / 1e9:.1f} GB",
            f"{devices * closing / 1e3 / 60:.1f} min",
            f"{(slope['fixed_rss_mb'] + slope['peak_rss_mb'] * devices) / 1e3:.1f} GB",
            f"{devices * 20_700 * 24 / options.every_h / 1e9:.1f} GB",
        ]
        print("| " + " | ".join([*row, "extrapolated" if devices > slope["most"] else "was run"]) + " |")


if __name__ == "__main__":
    main()
