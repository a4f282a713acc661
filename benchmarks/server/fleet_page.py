"""How soon a browser shows the operator's page, and what it costs to keep it new.

    python -m benchmarks.server.fleet_page [--devices 500 10000] [--runs 5] [--seconds 30] [--json FILE]

For each number of devices: a store is made, `protofleet watch --page` serves it as a process of its own, and Chromium
opens it in a new tab, from the beginning of the navigation until the first frame with the table is drawn
(`performance.mark`, median of `--runs`). Targets: 0.3 s for 500 devices, 1 s for 10,000. Then one tab stays open, while
100 devices change in the store each second: the processor time of the serving process, as a share of one core, against
the same time without changes and without a browser. The target is 2 %. It takes a Chromium on PATH. The load of the
machine is printed beside it: on one that does other things the times say little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.server.ingest import BUNDLE
from protofleet.aggregator.database import beside
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.schema import KIND
from protofleet.contract.wire.messages import Status
from tests.support.browser import Visitor, chromium

TARGETS_S = {500: 0.3, 10_000: 1.0}
CHANGES = 100  # a second
FIGURES = {"rss_bytes": 5e7, "peak_rss_bytes": 9e7, "train_step_ms": 12.5, "profile_train_step_ms": 11.9}
VERSIONS = {"protofleet": "0.2.0", "python": "3.12.1", "onnxruntime": "1.20.0", "bundle": "3 0123abcd"}
DRAWN = "performance.getEntriesByName('drawn').map((mark) => mark.startTime)[0]"


def make(path: Path, devices: int) -> None:
    """A store of so many devices, one in twenty of them gone, and thirty rounds in which 200 told their accuracy."""
    draw, now = random.Random(1), time.time()
    with DurableStore(path, BUNDLE, "orchard") as store:
        table = store.devices
        for i in range(devices):
            name, at = f"camera-{i:05d}", now - draw.random() * 86_400
            figures = FIGURES | {"train_step_ms": 10 + 10 * draw.random()}
            table.status(
                name, Status(True, b"instance", draw.randrange(1, 9), "Raspberry Pi 5", VERSIONS, figures), 200, at
            )
            table.decided(name, draw.randrange(10**6), at)
            if draw.random() < 0.05:
                table.status(name, Status(False, b"instance", 1), 10, at)
        table.keep(0.0, now)
        with store._file.transaction() as db:
            for number in range(1, 31):
                db.execute(
                    "INSERT INTO round (number, method, seed, opened_at, closed) VALUES (?, 'ncm', 1, ?, 1)",
                    (number, now - 3_600.0 * (31 - number)),
                )
                db.executemany(
                    "INSERT INTO accuracy (round, device, samples, all_classes) VALUES (?, ?, 50, ?)",
                    [(number, f"camera-{i:05d}", draw.random()) for i in range(min(200, devices))],
                )


def serve(path: Path, folder: Path) -> tuple[subprocess.Popen[bytes], int]:
    """`watch --page` on the store, and its port."""
    log = folder / "watch.log"
    with log.open("wb") as out:
        words = ["watch", "--store", str(path), "--page", "0", "--every", "1h"]
        process = subprocess.Popen([sys.executable, "-m", "protofleet", *words], stdout=out, stderr=out)
    while not (found := re.search(r"page at http://127\.0\.0\.1:(\d+)/", log.read_text())):
        if process.poll() is not None:
            raise SystemExit(log.read_text())
        time.sleep(0.05)
    return process, int(found[1])


def cpu_s(pid: int) -> float:
    """Processor time of a process until now."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def change(path: Path, devices: int, seconds: float) -> None:
    """Change `CHANGES` devices in each second."""
    draw, until = random.Random(2), time.monotonic() + seconds
    while time.monotonic() < until:
        began, now = time.monotonic(), time.time()
        rows = [(now, draw.randrange(10**6), f"camera-{draw.randrange(devices):05d}") for _ in range(CHANGES)]
        with beside(path, KIND) as db:
            db.executemany("UPDATE device_count SET heard_at = ?, up_bytes = ? WHERE device = ?", rows)
        time.sleep(max(0.0, 1.0 - (time.monotonic() - began)))


def measure(devices: int, runs: int, seconds: float) -> dict[str, Any]:
    """Times of the first look, bytes, and shares of a core."""
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        make(folder / "store", devices)
        process, port = serve(folder / "store", folder)
        url = f"http://127.0.0.1:{port}/"
        try:
            time.sleep(2.0)  # what is loaded once
            idle_before = cpu_s(process.pid)
            time.sleep(seconds / 2)
            idle = (cpu_s(process.pid) - idle_before) / (seconds / 2)
            _, _, body = Visitor(port).ask("GET", "/")
            with chromium() as browser:
                browser.open(url + "shared.css")  # Chromium has loaded what it loads once
                drawn_ms = []
                for _ in range(runs):
                    page = browser.open(url, width=1400)
                    drawn_ms.append(float(page.until(DRAWN)))
                    rows = page.run("document.querySelectorAll('#rows th').length")
                    page.ask("Page.navigate", url="about:blank")  # its stream ends
                page = browser.open(url, width=1400)
                page.until(DRAWN)
                busy_before, began = cpu_s(process.pid), time.monotonic()
                change(folder / "store", devices, seconds)
                busy = (cpu_s(process.pid) - busy_before) / (time.monotonic() - began)
        finally:
            process.kill()
            process.wait()
    return {
        "devices": devices,
        "drawn_ms": drawn_ms,
        "median_s": statistics.median(drawn_ms) / 1e3,
        "page_bytes": len(body),
        "rows_drawn": rows,
        "idle_share": idle,
        "share": busy,
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[500, 10_000])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print("python -m benchmarks.server.fleet_page", *sys.argv[1:])
    found = []
    for devices in options.devices:
        took = measure(devices, options.runs, options.seconds)
        found.append(took)
        each = ", ".join(f"{ms:.0f}" for ms in took["drawn_ms"])
        target = f", target {TARGETS_S[devices]:g} s" if devices in TARGETS_S else ""
        print(f"{devices:,} devices: drawn after {took['median_s']:.3f} s (median of {each} ms){target}", end="")
        print(f"; {took['page_bytes']:,} bytes, {took['rows_drawn']} rows drawn; load {took['load']:.1f}")
        print(f"  {CHANGES} changes a second: {took['share']:.1%} of a core, target 2 %; idle {took['idle_share']:.1%}")
    if options.json:
        options.json.write_text(
            json.dumps({"schema": "protofleet.benchmark.fleet_page/1", "runs": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
