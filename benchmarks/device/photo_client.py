"""Peak memory of a device that only extracts: a real `protofleet client` over a broker, with colour photos.

    python -m benchmarks.device.photo_client --data DIR [--bundle FILE.bundle] [--photos 1000] [--methods ncm ffc]

`--data` is a folder per class. For each method, a broker, an aggregator and one client run as processes: one round,
measured on photos that the client holds out. Printed, for each method: the client's largest resident set (VmHWM, MB of
1,000,000 bytes) as it reports it at its end, the seconds of its round, and its right answers on the held-out photos.
Exits with 1 where a limit is missed. Without `--bundle` the extractor of `protofleet-photos` is taken.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.methods import method
from protofleet.edge_client.hardware.process_metrics import board_name, versions
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.demo.processes import Fleet, free_port, wait_for_port

LIMITS_MB = {"ncm": 115.0, "fedcof": 115.0, "ffc": 150.0}
_PATIENCE_S = 600.0


def main() -> None:
    """Run each method, print one table."""
    options = _options()
    missed = []
    print(f"{board_name()}, {versions()}\n")
    print("| method | peak | limit | seconds of the round | right on held-out photos |")
    print("| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        data = _some(Path(options.data), Path(folder) / "photos", options.photos)
        bundle = options.bundle and options.bundle.absolute()
        if bundle is None:
            labels = sorted(path.name for path in data.iterdir())
            bundle = fleet_bundle(read_bundle(photos_bundle()), labels, Path(folder) / "fleet.bundle").path
        for name in options.methods:
            peak_mb, last = _client(Path(folder) / name, name, bundle, data)
            right = last["accuracy"]["all_classes"][method(name).way]
            print(f"| {name} | {peak_mb:.1f} MB | {LIMITS_MB[name]:.0f} MB | {last['seconds']:.1f} | {right:.1%} |")
            missed += [name] if peak_mb > LIMITS_MB[name] else []
    sys.exit(f"over the limit: {', '.join(missed)}" if missed else 0)


def _some(data: Path, out: Path, photos: int) -> Path:
    """The first of each class, `photos` in all or a few less."""
    classes = sorted(path for path in data.iterdir() if path.is_dir())
    for each in classes:
        (out / each.name).mkdir(parents=True)
        for photo in sorted(each.iterdir())[: photos // len(classes)]:
            shutil.copyfile(photo, out / each.name / photo.name)
    return out


def _client(folder: Path, name: str, bundle: Path, data: Path) -> tuple[float, dict[str, Any]]:
    """The client's peak in MB, and the last line of its history."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    common = ["--broker", f"mqtt://{address}", "--fleet", "bench", "--bundle", str(bundle)]
    with Fleet(folder / "logs") as fleet:
        fleet.start("broker", ["broker", "--listen", address])
        wait_for_port(fleet, "broker", int(address.split(":")[1]))
        own = ["--data", str(data), "--id", "device-1", "--state", str(folder / "state"), "--until-finished"]
        fleet.start("client", ["client", *common, *own, "--json", str(folder / "client.json")])
        course = ["--method", name, "--rounds", "1", "--min-clients", "1", "--max-share", "1", "--no-calibrate"]
        fleet.start("aggregator", ["aggregate", *common, "--store", str(folder / "store.sqlite"), *course])
        deadline = time.monotonic() + _PATIENCE_S
        while not (fleet.ended("client") and fleet.ended("aggregator")) and time.monotonic() < deadline:
            fleet.check(lasting=("broker",))
            time.sleep(0.2)
    summary = json.loads((folder / "client.json").read_text())
    history = (folder / "state" / "history.jsonl").read_text().splitlines()
    return summary["peak_rss_bytes"] / 1e6, json.loads(history[-1])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--bundle", type=Path, help="any bundle of the data's classes")
    parser.add_argument("--photos", type=int, default=1_000)
    parser.add_argument("--methods", nargs="+", choices=list(LIMITS_MB), default=list(LIMITS_MB))
    return parser.parse_args()


if __name__ == "__main__":
    main()
