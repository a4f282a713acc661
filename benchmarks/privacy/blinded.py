"""What blinded sums cost beside the open f32 uplink: bytes, processor time at each party, memory, exactness.

    python -m benchmarks.privacy.blinded [--width 1280] [--classes 10] [--devices 1000] [--samples 20] [--json FILE]

FFC's sums of `--devices` devices with `--samples` random unit features each, through the code that runs in a fleet: a
device blinds, seals, signs and encodes; the aggregator checks each share and adds it up; the helper verifies, unseals
and adds pads. The open way beside it encodes, decodes, checks and merges the same sums as f32. Times are processor time
of one thread, so that a busy machine hardly shows in them; the memory is what Python and numpy take beyond the
statistic while the device makes what it sends, at its peak.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from protofleet.aggregator.ingest.blinded_shares import ShareTerms, check_share
from protofleet.aggregator.ingest.validation import Terms, check_content
from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest
from protofleet.contract.heads.sphere import unit_rows
from protofleet.contract.identity.signatures import Keyring, Signer, inside
from protofleet.contract.methods import method
from protofleet.contract.privacy.blinding import SCALE_BITS, add_pad, share_words, statistic_of
from protofleet.contract.privacy.sealing import HelperKey, round_terms, unseal
from protofleet.contract.sums.statistics import FeatureGram
from protofleet.contract.wire import topics
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Announcement, Contribution, HelperTerms, SealedSeed
from protofleet.edge_client.privacy.blinded_shares import Blinding

FLEET, RUN, EXTRACTOR = "pets", b"run1", bytes(32)
OPEN, BLINDED = "open f32", "blinded"


class Clock:
    """Processor time by name, in seconds."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.process_time()
        yield
        self.spent[name] += time.process_time() - began


def manifest(classes: int, width: int) -> Manifest:
    labels = tuple(f"class-{index}" for index in range(classes))
    said = {"protofleet": "0.2", "backbone": "none", "provenance": "none", "head": "local", "hyper": {}, "state": ()}
    shape = {"input_shape": (1, 1, 1), "mean": (0.5,), "std": (0.5,), "batch": 1, "opset": 18, "members": {}}
    return Manifest(schema=SCHEMA, version=1, method="ffc", labels=labels, features=width, **said, **shape)  # type: ignore[arg-type]


def sums(draw: np.random.Generator, samples: int, classes: int, width: int) -> FeatureGram:
    features = unit_rows(np.maximum(draw.normal(size=(samples, width)), 0.0))
    return FeatureGram.of(features, draw.integers(0, classes, samples), classes)


def measure(width: int, classes: int, devices: int, samples: int) -> dict[str, Any]:
    draw, clock, key = np.random.default_rng(0), Clock(), HelperKey(bytes([1]) * 32, bytes([2]) * 32)
    public, words = key.public, share_words(FeatureGram, classes, width)
    told = Announcement(RUN, 1, "open", "ffc", EXTRACTOR, helper=HelperTerms(public.seal, devices, SCALE_BITS))
    terms, plain_terms = ShareTerms(words, devices, round_terms(told)), Terms(encoding="f32")
    ours, theirs = np.zeros(words, np.uint64), np.zeros(words, np.uint64)
    exact, merged, open_bytes, blind_bytes = FeatureGram.zero(classes, width), None, 0, 0
    made = manifest(classes, width)
    for number in range(devices):
        statistic, device = sums(draw, samples, classes, width), f"d{number}"
        exact = exact.merge(statistic)
        signer = Signer(number.to_bytes(4, "big") * 8)
        topic = topics.up(FLEET, device)
        blinding = Blinding(made, fleet=FLEET, device=device, helper=public, signer=signer)
        plain = Contribution.of(statistic, run=RUN, round=1, method="ffc", bundle=EXTRACTOR)
        with clock.of(f"device, {OPEN}"):
            sent = signer.sign(topic, encode(plain, "f32"))
        open_bytes += len(sent)
        with clock.of(f"aggregator, {OPEN}"):
            came = inside(sent)
            check_content(came, plain_terms, bundles=(EXTRACTOR,), classes=classes, width=width)
            part = came.statistic(FeatureGram, classes, width)
            merged = part if merged is None else merged.merge(part)
        with clock.of(f"device, {BLINDED}"):
            sent = signer.sign(topic, encode(blinding.blinded(plain, told)))
        blind_bytes += len(sent)
        with clock.of(f"aggregator, {BLINDED}"):
            came = inside(sent)
            check_share(came, terms)
            np.add(ours, came.share, out=ours)
        with clock.of(f"helper, {BLINDED}"):
            seed = decode(Keyring([signer.public_key]).payload(decode(came.seed), topic))
            assert isinstance(seed, SealedSeed)
            add_pad(theirs, unseal(key, FLEET, device, seed))
    with clock.of(f"aggregator, {BLINDED}"):
        found = statistic_of(method("ffc").statistic, classes, width, ours + theirs)
    spent = {name: seconds / devices * 1e3 for name, seconds in clock.spent.items()}
    return {
        "width": width,
        "words": words,
        "devices": devices,
        "bytes": {OPEN: open_bytes / devices, BLINDED: blind_bytes / devices},
        "processor_ms_for_each_device": spent,
        "relative_error": {OPEN: off(merged, exact), BLINDED: off(found, exact)},
        "largest_error": float(np.abs(found.gram - exact.gram).max()),
        "counts_equal": bool((found.counts == exact.counts).all()),
        "device_peak_bytes": peaks(made, told, plain, signer, public),
    }


def off(found: FeatureGram | None, exact: FeatureGram) -> float:
    """How far sums are from the pooled ones, in norm."""
    assert found is not None
    return float(np.linalg.norm(found.gram - exact.gram) / np.linalg.norm(exact.gram))


def peaks(made: Manifest, told: Announcement, plain: Contribution, signer: Signer, public: Any) -> dict[str, int]:
    """The most memory that a device takes to make what it sends, beyond its statistic."""
    blinding = Blinding(made, fleet=FLEET, device="d0", helper=public, signer=signer)
    ways = {OPEN: lambda: encode(plain, "f32"), BLINDED: lambda: encode(blinding.blinded(plain, told))}
    found = {}
    for name, way in ways.items():
        tracemalloc.start()
        way()
        found[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1280)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--devices", type=int, default=1_000)
    parser.add_argument("--samples", type=int, default=20, help="of each device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = measure(options.width, options.classes, options.devices, options.samples)
    sent, spent, error = result["bytes"], result["processor_ms_for_each_device"], result["relative_error"]
    peak = result["device_peak_bytes"]
    print(f"FFC, D = {options.width}, C = {options.classes}: {result['words']:,} words, {options.devices:,} devices")
    print(f"  {'':<34}{OPEN:>14}{BLINDED:>14}{'ratio':>8}")
    rows = [("bytes of each device", sent, 1.0), ("its peak memory, MB", peak, 1e-6)]
    for name, told, scale in rows:
        print(
            f"  {name:<34}{told[OPEN] * scale:>14,.1f}{told[BLINDED] * scale:>14,.1f}{told[BLINDED] / told[OPEN]:>8.2f}"
        )
    for who in ("device", "aggregator"):
        one, other = spent[f"{who}, {OPEN}"], spent[f"{who}, {BLINDED}"]
        print(f"  {f'{who}, ms for each device':<34}{one:>14.1f}{other:>14.1f}{other / one:>8.2f}")
    print(f"  {'helper, ms for each device':<34}{'':>14}{spent[f'helper, {BLINDED}']:>14.1f}")
    print(f"  {'relative error of the sum':<34}{error[OPEN]:>14.1e}{error[BLINDED]:>14.1e}")
    print(f"  largest error {result['largest_error']:.1e}, counts {'equal' if result['counts_equal'] else 'DIFFER'}")
    if options.json:
        text = json.dumps({"schema": "protofleet.benchmark.blinded/1", **result}, indent=1)
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
