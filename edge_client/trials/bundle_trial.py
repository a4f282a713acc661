"""A bundle that came in a roll-out, tried before it runs: `python -m protofleet.edge_client.trials.bundle_trial`, in a
process of its own.

Reading a bundle takes memory, and a graph may crash ONNX Runtime or never end. Whatever it does, the device goes on
with the bundle that it has. The trial uses the same code as a device:

1. Read the bundle, and check a trusted key's signature.
2. Compare its manifest with the offer: the version, and, for the same fleet, that it extends the bundle that runs, over
   the same extractor.
3. Compute the test vectors of the extractor, and the features of some of the device's own photos. They have to be
   finite numbers.
4. Do a round of the bundle's method on these photos, training included where it trains. Nothing of it is sent or kept.

The process is the first that the system ends where memory runs out. It ends by itself when its time is over, and when
the device's process ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, Manifest, read_bundle
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS
from protofleet.contract.bundle.test_vectors import probe_images
from protofleet.contract.errors import BundleError, ProtofleetError
from protofleet.contract.methods import load_method
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs

__all__ = ["PHOTOS", "Trial", "end_first", "failure", "some_photos", "tried_apart"]

PHOTOS = 8  # of the device's own that the test takes
PATIENCE_S = 900.0  # a large network's training step on a small board takes minutes
_LOOK_S = 0.2
_FAILURES: tuple[type[Exception], ...] = (ProtofleetError, *ORT_ERRORS)
_PR_SET_PDEATHSIG = 1


class Trial(msgspec.Struct, frozen=True):
    """What is to be tried.

    Attributes:
        path: where the bundle lies.
        public_keys: that are trusted.
        version: that was offered.
        extends: sha256 (hex) of the bundle that it has to extend, and `extractor`, that one's; empty for another fleet.
        threads: within an operator.
        method: of the device's own, `package.module:Class`, which is loaded first; empty for none.
        in_parts: train in parts where the bundle can.
        labels: class numbers of the photos.
    """

    path: str
    public_keys: tuple[bytes, ...]
    version: int
    extends: str = ""
    extractor: str = ""
    threads: int = 1
    method: str = ""
    in_parts: bool = False
    labels: tuple[int, ...] = ()


def some_photos(samples: LocalData, count: int = PHOTOS) -> LocalData:
    """A few of a device's labelled samples, from all over them."""
    rows = np.unique(np.linspace(0, max(len(samples) - 1, 0), min(count, len(samples))).astype(np.intp))
    return LocalData(np.ascontiguousarray(samples.x[rows]), samples.y[rows])


# ── asked for ───────────────────────────────────────────────────────────────────────────────────────────────────────


def tried_apart(
    trial: Trial,
    photos: NDArray[np.uint8],
    *,
    on_look: Callable[[], None] = lambda: None,
    stopping: threading.Event | None = None,
    patience_s: float = PATIENCE_S,
    command: Sequence[str] = (),
) -> str | None:
    """Why the bundle is not to be run here; empty where nothing speaks against it, None when `stopping` was set first.

    Args:
        photos: (n, H, W, c) uint8, as the bundle before it takes them.
        on_look: called now and then, while it runs.
        command: what tries it, for tests; by default this module.

    Raises:
        OSError: the system gives no process, file or memory for it.
    """
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    command_line = command or [sys.executable, *same_path, "-m", "protofleet.edge_client.trials.bundle_trial"]
    with open(os.memfd_create("trial", os.MFD_CLOEXEC), "w+b") as given, open(os.memfd_create("said"), "w+b") as output:
        given.write(msgspec.json.encode(trial) + b"\n")
        np.save(given, photos, allow_pickle=False)
        given.seek(0)
        # a session of its own, so that Ctrl-C ends the device first, which then ends it
        process = subprocess.Popen(command_line, stdin=given, stdout=output, stderr=output, start_new_session=True)
        try:
            ended = _wait(process, time.monotonic() + patience_s, on_look, stopping or threading.Event())
        finally:
            process.kill()
            code = process.wait()
        if ended is not None:
            return ended or None
        size = output.seek(0, io.SEEK_END)
        output.seek(max(0, size - 4096))
        return _outcome(code, output.read())


def _wait(
    process: subprocess.Popen[bytes], until_s: float, on_look: Callable[[], None], stopping: threading.Event
) -> str | None:
    """None once it has ended; why it was not waited for, or an empty text when the device is to stop."""
    while process.poll() is None:
        on_look()
        if time.monotonic() >= until_s:
            return "its self-test did not end in time"
        if stopping.is_set():
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_S)
    return None


def _outcome(code: int, output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    if code == 0 and lines:
        with contextlib.suppress(msgspec.MsgspecError):
            return msgspec.json.decode(lines[-1], type=dict[str, str]).get("failed", "its self-test said nothing")
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"its self-test ended with {how}" + (f": {lines[-1]}" if lines and code > 0 else "")


# ── done ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def failure(trial: Trial, photos: NDArray[np.uint8]) -> str:
    """Do all of it here; why the bundle is not to be run, or an empty text."""
    try:
        if trial.method:
            load_method(trial.method)
        bundle = read_bundle(trial.path, public_key=trial.public_keys)
        _check_offered(bundle.manifest, trial)
        _run(bundle, photos, trial)
    except _FAILURES as error:
        return str(error).replace(trial.path, "the bundle")
    except MemoryError:
        return "not enough memory"
    return ""


def _check_offered(m: Manifest, trial: Trial) -> None:
    rules = (
        (m.version == trial.version, f"version {trial.version}, as offered", f"version {m.version}"),
        (
            not trial.extends or (bytes.fromhex(trial.extends) in m.extended and m.extractor == trial.extractor),
            f"one that extends {trial.extends[:12]}…, which runs here",
            "another",
        ),
    )
    for holds, expected, got in rules:
        if not holds:
            raise BundleError("the bundle that was rolled out", expected=expected, got=got)


def _run(bundle: Bundle, photos: NDArray[np.uint8], trial: Trial) -> None:
    """What a device does with it, on these photos."""
    m = bundle.manifest
    x = _shaped(photos, m.input_shape)
    graphs = CompiledGraphs(bundle, trial.threads, in_parts=trial.in_parts and m.micro_batch > 0)
    features = graphs.shared_extractor().features(x)
    if not np.isfinite(features).all():
        raise BundleError("features of this device's photos", expected="finite numbers", got="others")
    given = np.array(trial.labels[: len(x)], np.int64)
    labels = given if len(given) == len(x) else np.arange(len(x))
    device = Device(bundle, LocalData(x, labels % m.classes), "self-test", graphs=graphs)
    device.run_round(Announcement(bytes(4), 1, "open", m.method, bundle.sha256), None)


def _shaped(photos: NDArray[np.uint8], shape: tuple[int, int, int]) -> NDArray[np.uint8]:
    """Photos (n, h, w, c) in the bundle's shape (H, W, c); made-up ones where that cannot be, or there are none."""
    if photos.shape[1:] == shape:
        return photos if len(photos) else probe_images(shape)
    channels = (photos.shape[-1], shape[2])
    if not len(photos) or not set(channels) <= {1, 3}:
        return probe_images(shape)
    from PIL import Image

    mode = "L" if shape[2] == 1 else "RGB"
    images = [Image.fromarray(photo[..., 0] if channels[0] == 1 else photo) for photo in photos]
    resized = [np.asarray(image.convert(mode).resize((shape[1], shape[0]))) for image in images]
    return np.stack(resized).reshape(-1, *shape)


def end_first(patience_s: float = PATIENCE_S) -> None:
    """End when the time is over, when the device's process does, and before it where memory runs out."""
    signal.alarm(int(patience_s) + 60)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def main() -> int:
    """Try what standard input says: a `Trial` as a line of JSON, then the photos as `.npy`; the answer is JSON, too."""
    end_first()
    given = sys.stdin.buffer
    trial = msgspec.json.decode(given.readline(), type=Trial)
    photos = np.load(io.BytesIO(given.read()), allow_pickle=False)
    reason = failure(trial, photos)
    sys.stdout.write(msgspec.json.encode({"failed": reason}).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
