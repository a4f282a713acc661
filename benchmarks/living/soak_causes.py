"""What made a client's memory grow in a soak, each cause alone, before and after it was mended.

    MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=524288 python -m benchmarks.living.soak_causes

The two variables are those with which the client runs (`edge_client/run/process.py`). Linux; SQLite as a library.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.device.idle_day import SHIPPED
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.page.visitors import Visitor
from protofleet.edge_client.hardware.process_metrics import release_memory
from protofleet.edge_client.journal.journal import Journal
from protofleet.edge_client.training.extractor import Extractor

_LABELS, _ROUNDS = (1, 2, 4, 8, 16), (1, 4, 16, 42)
_PAYLOAD_BYTES = 66_105  # of a round in the soak
_VISITORS, _SHOWN = 32, 600  # as many as the page remembers; photos in two minutes of the soak


def session() -> str:
    """The session that the camera uses all the time, after rounds of more and more labels."""
    bundle = read_bundle(SHIPPED / "fleet.bundle")
    photos = np.random.default_rng(0).integers(0, 256, (max(_LABELS), *bundle.manifest.input_shape)).astype(np.uint8)
    lines = []
    for gives_back, name in ((False, "keeps"), (True, "gives back")):
        extractor = Extractor(bundle, bundle.params, gives_back=gives_back)
        extractor.features(photos[:1])
        before, more = _own_kb(), []
        for labels in _LABELS:
            extractor.features(photos[:labels])
            more.append(_own_kb() - before)
        lines.append(f"a session that {name}, kB more after rounds of {_LABELS} labels: {more}")
    return "\n".join(lines)


def journal() -> str:
    """SQLite's memory while rounds are written, and once the journal rests, as it does after each round."""
    found = re.search(r"/\S*libsqlite3\S*", Path("/proc/self/maps").read_text())
    if found is None:
        return "journal: SQLite is no library of its own here"
    used = ctypes.CDLL(found[0]).sqlite3_memory_used
    used.restype = ctypes.c_int64
    kib = []
    with (
        tempfile.TemporaryDirectory() as folder,
        Journal(Path(folder), fleet="fleet", device="porch", bundle=bytes(32)) as kept,
    ):
        for number in range(1, max(_ROUNDS) + 1):
            key = (b"run", number, "ffc")
            kept.commit_round(key, weights={}, payload=bytes(_PAYLOAD_BYTES), limit_bytes=1, metrics={})
            if number in _ROUNDS:
                kib.append(used() >> 10)
        kept.rest()
        return f"journal, KiB of SQLite's after {_ROUNDS} rounds: {kib}; at rest: {used() >> 10}"


def visitors() -> str:
    """What the page remembered of browsers that had gone: each photo that they were shown."""
    tracemalloc.start()
    before, gone = tracemalloc.get_traced_memory()[0], []
    for number in range(_VISITORS):
        gone.append(Visitor(str(number), "127.0.0.1"))
        for photo in range(_SHOWN):
            gone[-1].shown.add((number * _SHOWN + photo).to_bytes(16, "big"))
    kib = (tracemalloc.get_traced_memory()[0] - before) >> 10
    tracemalloc.stop()
    return f"{len(gone)} visitors that were shown {_SHOWN} photos each: {kib} KiB"


def _own_kb() -> int:
    """Memory of this process that is no file's, once all that is free was given back."""
    release_memory()
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:"))


if __name__ == "__main__":
    print(session(), journal(), visitors(), sep="\n")
