"""FFC by factor beside FFC by triangle: bytes, time, memory, and what the head then answers.

    python -m benchmarks.heads.factor --signs DIR --cifar DIR [--photos 2000] [--seeds 3] [--markdown FILE]

`--signs` is a folder per class of photos, `--cifar` CIFAR-10 in the Hub's parquet layout, of whose training part
`--photos` photos are drawn. Features are those of the shipped extractor. For each seed a third of the photos is asked
about, and the others are dealt to 20 devices by Dir(0.1). Every device summarises and encodes as the client does
(`FFC.summarise`), and the aggregator decodes and checks as it does (`check_content`). The forms:

- triangle: as announced by default (f64), and in half precision (f16);
- factor: what devices send where the announcement takes it;
- 16 directions and the trace: the largest eigenvectors of a device's sum, and the rest spread evenly. It is not built;
  class sums are whole. It is here to show what would be gained, and lost.

The second table has the cost for one device with 30 to 1,280 photos: processor time at the device (features are there
already) and at the aggregator, and the most memory that numpy and Python had on the way (`tracemalloc`). Fastest of 3.
The third says how long a device's message takes over thin links at their highest rates, without retries and headers.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.heads.pretrained_fleet import enlarged
from protofleet.advice.frozen_fleet import features_of
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.shipped_extractor import photos_bundle
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.methods import method
from protofleet.contract.methods.ffc import closed_form
from protofleet.contract.sums.factor import most_rows
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.sums.triangle import pack_triangle
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.encodings import ENCODINGS
from protofleet.contract.wire.messages import Contribution, Encoding
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.export.bundles.fleet_bundle import fleet_bundle
from protofleet.lab.data.datasets import load_dataset, take
from protofleet.lab.data.partition import Partition, partition

DEVICES = 20
DIRECTIONS = 16
FFC = method("ffc")
LORA_MESSAGE = 222  # bytes of an application at data rate 5 of EU868 (LoRaWAN Regional Parameters RP002)
LORA_AIRTIME_S = 0.368  # of these and 13 of LoRaWAN at SF7, 125 kHz, coding rate 4/5 (Semtech AN1200.13)
LINKS = {  # seconds for one byte upwards
    "LTE-M, 1 Mbit/s (Cat-M1, full duplex)": 8 / 1e6,
    "NB-IoT, 159 kbit/s (Cat-NB2)": 8 / 159e3,
    "NB-IoT, 62.5 kbit/s (Cat-NB1)": 8 / 62.5e3,
    "LoRaWAN, EU868, SF7, 1 % of the time": LORA_AIRTIME_S / 0.01 / LORA_MESSAGE,
}
HEADS = ("ridge", "discriminant")


@dataclass
class Samples:
    """What `FFC.summarise` asks of a device: features that are there already."""

    z: NDArray[np.float32]
    y: NDArray[np.int64]
    classes: int
    factor_rows: int
    seed: int

    def __post_init__(self) -> None:
        self.width, self.hyper, self.counts = self.z.shape[1], FFC.resolve({}), np.bincount(self.y)

    def features(self, extractor: str) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
        for start in range(0, len(self.z), 32):
            yield self.z[start : start + 32], self.y[start : start + 32]

    def noise(self) -> np.random.Generator:
        return np.random.default_rng(self.seed)


def sent(samples: Samples, encoding: Encoding) -> bytes:
    """A device's contribution."""
    statistic = FFC.summarise(samples)  # type: ignore[arg-type]
    names = {"run": bytes(4), "round": 1, "method": "ffc", "bundle": bytes(32), "extractor": bytes(32)}
    return encode(Contribution.of(statistic, **names), encoding)  # type: ignore[arg-type]


def taken(payload: bytes, classes: int, width: int, encoding: Encoding) -> FeatureGram:
    """What the aggregator adds up of it."""
    message = decode(payload, limit_bytes=1 << 28)
    assert isinstance(message, Contribution)
    terms = Terms(encoding=encoding, extractor=bytes(32))
    check_content(message, terms, bundles=(bytes(32),), classes=classes, width=width)
    return message.statistic(FeatureGram, classes, width)


def few_directions(z: NDArray[np.float32], y: NDArray[np.int64], classes: int) -> FeatureGram:
    """The sums with the largest `DIRECTIONS` eigenvectors of Σ z zᵀ, and its other eigenvalues spread evenly."""
    unit = np.asarray(unit_rows(z.astype(np.float64)), dtype=np.float64)
    _, values, directions = np.linalg.svd(unit, full_matrices=False)
    kept = directions[:DIRECTIONS] * values[:DIRECTIONS, None]
    rest = (values[DIRECTIONS:] ** 2).sum() / unit.shape[1]
    whole = FeatureGram.of(unit, y, classes)
    return FeatureGram(pack_triangle(kept.T @ kept + rest * np.eye(unit.shape[1])), whole.cross, whole.counts)


def forms(width: int) -> dict[str, tuple[Encoding, int]]:
    """The encoding that is announced, and up to how many samples a factor is sent."""
    return {
        "triangle, f64": ("f64", 0),
        "triangle, f16": ("f16", 0),
        "factor": ("f64", most_rows(width, ENCODINGS["f64"].number_bytes)),
    }


def accuracies(z: NDArray[np.float32], y: NDArray[np.int64], classes: int, seed: int) -> dict[str, dict[str, float]]:
    """One seed's figures by form."""
    order = np.random.default_rng(seed).permutation(len(y))
    asked, own = order[: len(order) // 3], order[len(order) // 3 :]
    spec = Partition("dirichlet", DEVICES, alpha=0.1, min_classes=1, min_client_samples=5)
    dealt = [own[rows] for rows in partition(y[own], spec, seed=seed)]
    width = z.shape[1]
    unit = np.asarray(unit_rows(z[asked].astype(np.float64)), dtype=np.float64)
    sums: dict[str, tuple[FeatureGram, float]] = {}
    for name, (encoding, rows) in forms(width).items():
        payloads = [sent(Samples(z[d], y[d], classes, rows, seed * DEVICES + n), encoding) for n, d in enumerate(dealt)]
        merged = [taken(payload, classes, width, encoding) for payload in payloads]
        sums[name] = _merged(merged), float(np.median([len(payload) for payload in payloads]))
    few = [few_directions(z[d], y[d], classes) for d in dealt]
    held = [2 * width * min(DIRECTIONS, len(d)) + 8 * width * len(np.unique(y[d])) for d in dealt]
    sums[f"{DIRECTIONS} directions and the trace"] = _merged(few), float(np.median(held))
    found: dict[str, dict[str, float]] = {}
    first: dict[str, NDArray[np.int64]] = {}
    for name, (total, size) in sums.items():
        found[name] = {"bytes": size}
        for head in HEADS:
            answers = (unit @ closed_form(total, {**FFC.resolve({}), "form": head}).T).argmax(axis=1)
            first.setdefault(head, answers)
            found[name][head] = 100 * float((answers == y[asked]).mean())
            found[name][f"{head}: other answers"] = 100 * float((answers != first[head]).mean())
    return found


def _merged(all_sums: list[FeatureGram]) -> FeatureGram:
    total = all_sums[0]
    for each in all_sums[1:]:
        total = total.merge(each)
    return total


def fastest_ms(run: Callable[[], Any]) -> float:
    """Processor time of all threads."""
    found = []
    for _ in range(3):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return 1e3 * min(found)


def peak_mb(run: Callable[[], Any]) -> float:
    """The most memory beside what there is before."""
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6


def costs(z: NDArray[np.float32], y: NDArray[np.int64], classes: int) -> Iterator[str]:
    """A line for each number of photos and form."""
    width = z.shape[1]
    for count in (30, 90, 320, 640, 1280):
        for name, (encoding, rows) in forms(width).items():
            samples = Samples(z[:count], y[:count], classes, rows, 0)
            payload = sent(samples, encoding)
            device = [measure(lambda s=samples, e=encoding: sent(s, e)) for measure in (fastest_ms, peak_mb)]  # type: ignore[misc]
            there = [
                measure(lambda p=payload, e=encoding: taken(p, classes, width, e))  # type: ignore[misc]
                for measure in (fastest_ms, peak_mb)
            ]
            cells = f"{device[0]:.0f} | {device[1]:.1f} | {there[0]:.0f} | {there[1]:.1f}"
            yield f"| {count:,} | {name} | {len(payload) / 1e3:,.0f} | {cells} |"


def _features(data: LocalData) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    return np.asarray(data.x, dtype=np.float32), data.y


def links(kilobytes: float) -> Iterator[str]:
    """How long so many bytes take over thin links, at the rates that their standards give at most."""
    for name, seconds in LINKS.items():
        took = kilobytes * 1e3 * seconds
        yield f"{name}: {took / 3600:,.1f} h" if took >= 3600 else f"{name}: {took:,.0f} s"


def tables(options: argparse.Namespace) -> Iterator[str]:
    """Both tables, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        fleet_bundle(read_bundle(photos_bundle()), [str(n) for n in range(10)], Path(folder) / "b.bundle")
        bundle = read_bundle(Path(folder) / "b.bundle")
        train = load_dataset(options.cifar).train
        some = take(train, np.sort(np.random.default_rng(0).permutation(len(train))[: options.photos]))
        signs = load_data(options.signs, bundle.manifest, purpose="train")
        given = {"sign_digits": signs, "CIFAR-10": enlarged(some, 128)}
        sets = {name: _features(features_of(bundle, photos, 2)) for name, photos in given.items()}
    yield "| photos | form | kB, median device | ridge, % right | other answers, % | discriminant | other answers, % |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, (z, y) in sets.items():
        found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for seed in range(options.seeds):
            for form, figures in accuracies(z, y, bundle.manifest.classes, seed).items():
                for figure, value in figures.items():
                    found[form][figure].append(value)
        for form, rows in found.items():
            cells = [f"{np.median(rows['bytes']) / 1e3:,.0f}"]
            for head in HEADS:
                cells.append(f"{np.mean(rows[head]):.1f} ± {np.std(rows[head], ddof=1):.1f}")
                cells.append(f"{np.mean(rows[f'{head}: other answers']):.1f}")
            yield f"| {name} | {form} | {' | '.join(cells)} |"
    yield ""
    yield "| photos of a device | form | kB | device, ms | device, MB | aggregator, ms | aggregator, MB |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    sizes: dict[str, float] = {}
    for line in costs(*sets["CIFAR-10"], bundle.manifest.classes):
        yield line
        _, count, form, kilobytes, *_ = (cell.strip() for cell in line.split("|"))
        if count == "90":
            sizes[form] = float(kilobytes.replace(",", ""))
    yield ""
    yield f"| 90 photos | kB | {' | '.join(LINKS)} |"
    yield f"| --- | --- |{' --- |' * len(LINKS)}"
    for form, size in sizes.items():
        yield f"| {form} | {size:,.0f} | {' | '.join(link.partition(': ')[2] for link in links(size))} |"


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("signs", "cifar"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--photos", type=int, default=2_000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--markdown", help="write the tables to this file, too")
    options = parser.parse_args()
    lines = []
    for line in tables(options):
        print(line, flush=True)
        lines.append(line)
    if options.markdown:
        Path(options.markdown).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
