"""What a bundle takes, measured by doing it: `python -m edge_client.memory_trial BUNDLE THREADS PARTS LIMIT METHOD`.

In a process of its own, which ends with it: reads the bundle, does two rounds of its method on one batch of made-up
photos, so that the weights of the round before are there, and the round that closes a run; then prints the bytes that
were resident at most. Nothing of it is sent or kept. The system refuses it memory far beyond LIMIT (bytes), so that
trying a bundle that is too large does no harm; then it ends with exit code 3.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import numpy as np

from contract.bundle import read_bundle
from contract.errors import DivergedError, ProtofleetError
from contract.messages import Announcement
from contract.methods import last_method, load_method, method
from contract.runtime import ORT_ERRORS
from contract.vectors import probe_images
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.device import Device
from edge_client.process_metrics import peak_rss_bytes, release_memory

__all__ = ["main", "peak_bytes"]

_ROOM_BYTES = 256_000_000  # beyond the limit: what is mapped, and never touched, counts for the system's, too
_NO_ROOM = 3


def peak_bytes(path: str, threads: int, *, in_parts: bool) -> int:
    """Do what a device does with the bundle, and say what this process has had resident at most."""
    bundle = read_bundle(path)
    m = bundle.manifest
    x = np.resize(probe_images(m.input_shape), (m.batch, *m.input_shape))
    graphs = CompiledGraphs(bundle, threads, in_parts=in_parts)
    device = Device(bundle, LocalData(x, np.arange(m.batch) % m.classes), "memory-trial", graphs=graphs)
    own = method(m.method)
    release_memory()  # as a client does before its first round
    for number, name in enumerate((own.name, own.name, last_method(own).name), 1):
        with contextlib.suppress(DivergedError):  # of photos that are none; the memory was taken
            device.run_round(Announcement(bytes(4), number, "open", name, bundle.sha256), None)
        release_memory()
    return peak_rss_bytes()


def main(arguments: list[str]) -> int:
    """Print the bytes; 3 where the system gave no more."""
    path, threads, in_parts, limit, own = arguments
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit) + _ROOM_BYTES,) * 2)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    try:
        if own:
            load_method(own)
        print(peak_bytes(path, int(threads), in_parts=in_parts == "1"))
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
