"""What a bundle takes, measured by doing it.

    python -m edge_client.memory_trial BUNDLE THREADS WAY LIMIT METHOD TESTS

In a process of its own, which ends with it: reads the bundle, does two rounds of its method on one batch of made-up
photos, so that the weights of the round before are there, and the round that closes a run, each with what is sent of it
and, unless TESTS is empty, what held-out photos say of it. Prints the bytes that were resident at most after the
method's rounds, and once more after the one that closes, each in a line of its own. Nothing of it is sent or kept. WAY
is `whole`, `parts`, or the name of a further form of the step. The system refuses it memory far beyond LIMIT (bytes),
so that trying a bundle that is too large does no harm; then it ends with exit code 3.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from contract.bundle import read_bundle
from contract.errors import DivergedError, ProtofleetError
from contract.messages import Announcement
from contract.methods import last_method, load_method, method
from contract.runtime import ORT_ERRORS
from contract.vectors import probe_images
from contract.wire import encode
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.process_metrics import peak_rss_bytes, release_memory
from edge_client.self_test import end_first

__all__ = ["PARTS", "PATIENCE_S", "WHOLE", "main", "peaks"]

WHOLE, PARTS = "whole", "parts"
PATIENCE_S = 1800.0

_ROOM_BYTES = 256_000_000  # beyond the limit: what is mapped, and never touched, counts for the system's, too
_NO_ROOM = 3


def peaks(path: str, threads: int, way: str, *, tests: bool = True) -> Iterator[int]:
    """Do what a device does with the bundle, and say what this process has had resident at most: after two rounds of
    its method, and after the round that closes a run."""
    bundle = read_bundle(path)
    m = bundle.manifest
    x = np.resize(probe_images(m.input_shape), (m.batch, *m.input_shape))
    photos = LocalData(x, np.arange(m.batch) % m.classes)
    if way not in (WHOLE, PARTS):
        bundle = replace(bundle, train_step=bundle.forms[way], forms={})
    graphs = CompiledGraphs(bundle, threads, in_parts=way == PARTS)
    device = Device(bundle, photos, "memory-trial", test=photos if tests else None, held=photos, graphs=graphs)
    own = method(m.method)
    release_memory()  # as a client does before its first round
    for number, found in enumerate((own, own, last_method(own)), 1):
        with contextlib.suppress(DivergedError):  # of photos that are none; the memory was taken
            result = device.run_round(Announcement(bytes(4), number, "open", found.name, bundle.sha256), None)
            encode(result.contribution, found.encoding)
            del result
        release_memory()
        evaluation = device.evaluate(None)
        if evaluation is not None:
            device.accuracy(evaluation, found.name)
        release_memory()
        if number > 1:
            yield peak_rss_bytes()


def hold_to(limit: int) -> None:
    """The system refuses this process more than `limit` and what is mapped without being touched."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = limit + _ROOM_BYTES if hard == resource.RLIM_INFINITY else min(limit + _ROOM_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def main(arguments: list[str]) -> int:
    """Print the bytes, as far as it gets; 3 where the system gave no more."""
    path, threads, way, limit, own, tests = arguments
    end_first(PATIENCE_S)
    hold_to(int(limit))
    try:
        if own:
            load_method(own)
        for peak in peaks(path, int(threads), way, tests=bool(tests)):
            print(peak, flush=True)
    except MemoryError:
        return _NO_ROOM
    except ORT_ERRORS as error:
        if "alloc" in str(error).lower():
            return _NO_ROOM
        raise
    except ProtofleetError as error:
        print(error, file=sys.stderr)
        return _NO_ROOM if "alloc" in str(error).lower() else 1
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
