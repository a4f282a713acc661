"""What a bundle takes, measured by doing it.

    python -m protofleet.edge_client.trials.memory_trial BUNDLE THREADS FORM LIMIT METHOD TESTS

It runs in a process of its own, which ends with it:

1. Read the bundle.
2. Do two rounds of its method on one batch of made-up photos, so that the weights of the round before are there.
3. Print the bytes that were resident at most so far.
4. Do the round that closes a run, and print the bytes once more, in a line of its own.

Each round includes what is sent of it and, unless TESTS is empty, the test with held-out photos. Nothing of it is sent
or kept. FORM is `whole`, `parts`, or the name of a further form of the step.

The system refuses the process memory far beyond LIMIT (bytes), so that trying a bundle that is too large does no harm.
Then it ends with exit code 3.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS
from protofleet.contract.bundle.test_vectors import probe_images
from protofleet.contract.errors import DivergedError, ProtofleetError
from protofleet.contract.methods import last_method, load_method, method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.hardware.process_metrics import own_this_process, peak_rss_bytes, release_memory
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.trials.bundle_trial import end_first

__all__ = ["PARTS", "PATIENCE_S", "WHOLE", "main", "peaks"]

WHOLE, PARTS = "whole", "parts"
PATIENCE_S = 1800.0

_ROOM_BYTES = 256_000_000  # beyond the limit: what is mapped, and never touched, counts for the system's, too
_NO_ROOM = 3


def peaks(path: str, threads: int, form: str, *, tests: bool = True) -> Iterator[int]:
    """Do what a device does with the bundle, and say what this process has had resident at most: after two rounds of
    its method, and after the round that closes a run."""
    bundle = read_bundle(path)
    m = bundle.manifest
    x = np.resize(probe_images(m.input_shape), (m.batch, *m.input_shape))
    photos = LocalData(x, np.arange(m.batch) % m.classes)
    if form not in (WHOLE, PARTS):
        bundle = replace(bundle, train_step=bundle.forms[form], forms={})
    graphs = CompiledGraphs(bundle, threads, in_parts=form == PARTS)
    tested = photos if tests else None
    device = Device(bundle, photos, "memory-trial", test=tested, held=photos, graphs=graphs, by_factor=False)
    own = method(m.method)
    release_memory()  # as a client does before its first round
    for number, round_method in enumerate((own, own, last_method(own)), 1):
        with contextlib.suppress(DivergedError):  # of photos that are none; the memory was taken
            result = device.run_round(Announcement(bytes(4), number, "open", round_method.name, bundle.sha256), None)
            encode(result.contribution, round_method.encoding)
            del result
        release_memory()
        evaluation = device.evaluate(None)
        if evaluation is not None:
            device.accuracy(evaluation, round_method.name)
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
    path, threads, form, limit, own, tests = arguments
    end_first(PATIENCE_S)
    own_this_process()
    hold_to(int(limit))
    try:
        if own:
            load_method(own)
        for peak in peaks(path, int(threads), form, tests=bool(tests)):
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
