"""How long it takes to forget a device of a fleet whose sums stand: from the order to the new head, durable.

    python -m benchmarks.server.forget --method ncm --devices 1000
    python -m benchmarks.server.forget --method ffc --devices 50 --devices 200

The real coordinator and store, without MQTT: every device's contribution is decoded, validated and committed, then one
device is ordered to be forgotten. Timed from the order until the new global state is durable and the log overwritten,
without the half second that may pass until a running aggregator looks for orders. Beside it: adding up all payloads of
those who remain and solving, as it would be without exact sums that subtract; both must be the same integers.

Features are random, of length 1; D and C as given. A store of FFC's sums takes D(D+1)/2 numbers for each device.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from protofleet.aggregator.coordinators.kinds import standing_sums
from protofleet.aggregator.merging.exact_sums import ExactSum
from protofleet.aggregator.settings import Settings
from protofleet.aggregator.standing.standing_heads import SolvedHeads
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.aggregator.store.operator_orders import Obeyed, give
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest, StateTensor, extractor_of
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.ncm import UnitMeans
from protofleet.contract.sums.statistics import FeatureGram, Statistic
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Contribution

BUNDLE = bytes(range(32))


def manifest(classes: int, width: int) -> Manifest:
    """Of a bundle whose graphs nobody asks for."""
    return Manifest(
        schema=SCHEMA,
        version=1,
        protofleet="0.2.0",
        backbone="opaque",
        provenance="made for a benchmark",
        method="ncm",
        head="none",
        hyper=method("ncm").resolve({}),
        labels=tuple(f"class-{i}" for i in range(classes)),
        features=width,
        input_shape=(4, 4, 1),
        mean=(0.5,),
        std=(0.5,),
        batch=8,
        opset=18,
        state=(StateTensor(name="backbone.weight", shape=(2, 2), role="param"),),
        members={},
    )


def statistic(name: str, seed: int, samples: int, classes: int, width: int) -> Statistic:
    rng = np.random.default_rng(seed)
    features, labels = unit_rows(rng.normal(size=(samples, width))), rng.integers(0, classes, samples)
    return (FeatureGram if name == "ffc" else UnitMeans).of(features, labels, classes)


def measure(name: str, devices: int, samples: int, classes: int, width: int, folder: Path) -> dict[str, object]:
    made, path = manifest(classes, width), folder / "s.sqlite"
    with DurableStore(path, BUNDLE, "b") as store:
        settings = Settings(method=name, standing=True, every=0.0, encoding="f32")
        core = standing_sums(store, made, BUNDLE, settings, now=0.0)
        key = {"run": core.parts.run, "round": 1, "method": name, "bundle": BUNDLE}
        key["extractor"] = extractor_of(made, BUNDLE, method(name))
        began = time.perf_counter()
        for index in range(devices):
            sums = statistic(name, index, samples, classes, width)
            payload = encode(Contribution.of(sums, **key, standing="present"), "f64" if name == "ffc" else "f32")
            (decision,) = core.take([(f"device-{index:05d}", payload)], 0.0)
            assert decision.outcome == "committed", decision.reason
        filled_s = time.perf_counter() - began
        while core.advance(0.0, 0.0) is not None:
            pass
        store_bytes, version = sum(file.stat().st_size for file in folder.iterdir()), core.state.version
        busy, began = time.process_time(), time.perf_counter()
        give(path, "forget", f"device-{devices // 2:05d}", "benchmark")
        done = core.advance(10.0, 10.0)
        assert isinstance(done, Obeyed)
        head_s = time.perf_counter() - began
        while core.advance(10.0, 10.0) is not None:
            pass
        forget_s, forget_cpu_s = time.perf_counter() - began, time.process_time() - busy
        assert (done.outcome, core.state.version) == ("done", version + 1)
        state, total = core.state, core.standing.total
        busy, began = time.process_time(), time.perf_counter()
        anew = ExactSum.zero(core.method.statistic, classes, width)
        for _, payload in store.standing.payloads():
            anew = anew.add(core.sums.exact(payload))
        core.standing.total = anew
        again = SolvedHeads(core.sums).solver()().state
        anew_s, anew_cpu_s = time.perf_counter() - began, time.process_time() - busy
        assert anew.equal(total), "the sums are not those of a fleet in which the device never was"
        (kind,) = state.rows
        assert np.array_equal(state.rows[kind].rows, again.rows[kind].rows)
    return {
        "method": name,
        "devices": devices,
        "classes": classes,
        "width": width,
        "payload_bytes": len(payload),
        "store_bytes": store_bytes,
        "filled_s": filled_s,
        "head_s": head_s,
        "forget_s": forget_s,
        "forget_cpu_s": forget_cpu_s,
        "anew_s": anew_s,
        "anew_cpu_s": anew_cpu_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=("ncm", "ffc"), default="ncm")
    parser.add_argument("--devices", type=int, action="append", help="again for each count  [default: 1000]")
    parser.add_argument("--samples", type=int, default=50, help="of each device")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--dir", help="where the store is made, and removed")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for devices in options.devices or [1000]:
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            sizes = (options.samples, options.classes, options.width)
            row = measure(options.method, devices, *sizes, Path(folder))
        rows.append(row)
        print(
            f"{row['method']}, {devices:,} devices, D = {row['width']:,}: {row['payload_bytes']:,} bytes each, store "
            f"{row['store_bytes'] / 1e6:,.0f} MB, filled in {row['filled_s']:.0f} s\n"
            f"  forgotten: {row['head_s']:.2f} s from the order to the durable head, {row['forget_s']:.2f} s with the "
            f"log overwritten ({row['forget_cpu_s']:.2f} s of processor time)\n"
            f"  all payloads added up and solved anew: {row['anew_s']:.2f} s ({row['anew_cpu_s']:.2f} s of processor "
            "time); the same integers, the same head"
        )
    if options.json:
        options.json.write_text(json.dumps({"schema": "protofleet.benchmark.forget/1", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
