"""`client --memory-limit`: whether a bundle fits, before it is loaded; and whether its batches are trained in parts.

What a bundle takes is measured on the board itself, because a device has neither torch nor a model of memory. A process
of its own does a round of the bundle's method and the round that closes a run, and says what it had resident at most
(`memory_trial.py`).

1. Whole batches are tried first.
2. Parts are tried next, where the bundle has graphs for them.
3. Further forms of the step (`step_forms.py`) that do not fit are left out.

The trial may not take much more than the limit: a bundle that does not fit there is refused like one that does not fit
here. What was measured is kept in the state directory, for this bundle and this version of ONNX Runtime.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.console.sizes import read_size
from protofleet.contract.errors import UsageError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.edge_client.settings import ClientSettings

__all__ = ["BESIDE_BYTES", "KEPT_IN", "Needed", "fitting_forms", "measured_bytes", "trains_in_parts"]

logger = logging.getLogger(__name__)

KEPT_IN = "memory.json"
BESIDE_BYTES = 20_000_000  # photos, link, journal; 1 to 15 MB, which `benchmarks/device/device_memory.py` prints
_PATIENCE_S = 1800.0
_NO_ROOM = 3  # exit code of a trial that ran into its own limit
_FORMS = {False: "whole", True: "parts"}  # as `memory_trial.py` has them; it is not loaded here


class Needed(NamedTuple):
    """What a client of a bundle has resident at most, in bytes; None where that is more than may be tried.

    Attributes:
        rounds: in rounds of the bundle's method.
        all: in these and in the round that closes a run.
    """

    rounds: int | None
    all: int | None


Measure = Callable[[str], Needed]


def trains_in_parts(
    settings: ClientSettings,
    manifest: Manifest,
    sha256: bytes,
    path: Path,
    state: Path,
    measure: Measure | None = None,
) -> bool:
    """Whether batches are trained in parts: as asked, or since whole ones do not fit.

    Args:
        path: where the bundle lies.
        state: directory of what is kept.
        measure: what a bundle takes, by form; None for a real trial.

    Raises:
        UsageError: it does not fit, or has no parts of the size that was asked for.
    """
    wanted, parts = settings.micro_batch, manifest.micro_batch
    if wanted is not None and wanted != parts:
        got = f"one of parts of {parts}" if parts else "one without parts"
        hint = f"--micro-batch {parts}" if parts else f"exporting it anew with --micro-batch {wanted}"
        raise UsageError("--micro-batch", expected=f"a bundle with graphs for parts of {wanted}", got=got, hint=hint)
    if settings.memory_limit is None:
        return wanted is not None
    limit = read_size(settings.memory_limit, "--memory-limit")
    kept = _Kept(state / KEPT_IN, sha256, settings)
    least = Needed(None, None)
    for in_parts in (True,) if wanted else (False, True) if parts else (False,):
        least = kept.or_else(_FORMS[in_parts], measure or _trial(path, settings, limit))
        if least.all is not None and least.all <= limit:
            logger.info(f"{_described_training(manifest, in_parts)} takes {_mb(least.all)} of {_mb(limit)}")
            return in_parts
    raise _too_large(settings, manifest, path, least, limit)


def fitting_forms(
    settings: ClientSettings,
    bundle: Bundle,
    path: Path,
    state: Path,
    measure: Measure | None = None,
) -> Mapping[str, bytes]:
    """The further forms of the training step that the limit has room for; arguments as of `trains_in_parts`."""
    if settings.memory_limit is None:
        return bundle.forms
    limit, fitting = read_size(settings.memory_limit, "--memory-limit"), {}
    kept = _Kept(state / KEPT_IN, bundle.sha256, settings)
    for form, graph in bundle.forms.items():
        try:
            needed = kept.or_else(form, measure or _trial(path, settings, limit)).all
        except UsageError as error:
            logger.info(f"{form} is left out: {error.got}")
            continue
        if needed is not None and needed <= limit:
            fitting[form] = graph
        else:
            logger.info(f"{form} is left out: it takes {_taken(needed, limit)} of {_mb(limit)}")
    return fitting


def _trial(path: Path, settings: ClientSettings, limit: int) -> Measure:
    def measure(form: str) -> Needed:
        logger.info(f"measures what {path.name} takes ({form}), once: a round in a process of its own")
        return measured_bytes(path, settings, limit, form)

    return measure


def measured_bytes(path: Path, settings: ClientSettings, limit: int, form: str = "whole") -> Needed:
    """What a client of this bundle has resident at most, by a trial.

    Args:
        form: `whole` batches, `parts`, or the name of a further form of the training step.

    Raises:
        UsageError: the trial could not be made.
    """
    tests = "tests" if _tests(settings) else ""
    arguments = [str(path), str(settings.threads), form, str(limit), settings.method or "", tests]
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    try:
        done = subprocess.run(
            [sys.executable, *same_path, "-m", "protofleet.edge_client.trials.memory_trial", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError("--memory-limit", expected="a trial of the bundle", got=error) from None
    if done.returncode in (0, _NO_ROOM) or done.returncode < 0:
        peaks = [int(line) + BESIDE_BYTES for line in done.stdout.split()]
        return Needed(*[*peaks, None, None][:2])
    last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    raise UsageError("--memory-limit", expected="a trial of the bundle", got=last)


def _too_large(settings: ClientSettings, m: Manifest, path: Path, needed: Needed, limit: int) -> UsageError:
    closes = m.trainable and needed.rounds is not None and needed.rounds <= limit
    narrower = [f"exporting it with --set project={m.features // 2}"] if "project" in m.hyper else []
    if closes:  # FFC's sums, (D, D) numbers, and the head that is solved of them
        unsolved = ["--hold-out 0 (then no head is solved here)"] if _tests(settings) else []
        ways = [*unsolved, *narrower, f"a backbone of fewer features than {m.features}"]
    elif m.trainable:
        smaller = (m.micro_batch or m.batch) // 2
        parts = [f"--micro-batch {smaller}"] if smaller else []
        ways = [f"exporting it with {' or '.join([*parts, '--trainable-blocks 1', '--method ffc'])}"]
    else:
        ways = [*narrower, "a bundle of a smaller backbone or input"]
    doing = "the round that closes a run" if closes else _described_training(m, bool(m.micro_batch))
    return UsageError(
        f"--memory-limit {settings.memory_limit}: {path.name}",
        expected=f"at most {_mb(limit)}",
        got=f"{_taken(needed.all, limit)} for {doing}",
        hint=" or ".join(ways),
    )


def _tests(settings: ClientSettings) -> bool:
    """Whether the device tests its answers with photos of its own."""
    return settings.test is not None or settings.hold_out != 0


def _taken(needed: int | None, limit: int) -> str:
    return _mb(needed) if needed is not None and needed > limit else f"more than {_mb(limit)}"


def _described_training(m: Manifest, in_parts: bool) -> str:
    if not m.trainable:
        return "a round"
    return f"training in batches of {m.batch}" + (f", {m.micro_batch} at a time" if in_parts else "")


def _mb(size: int) -> str:
    return f"{-(-size // 10**6):,} MB"


_NEEDED = msgspec.json.Decoder(dict[str, Needed])  # made here: see `protofleet.contract.bundle.bundle_file._MANIFESTS`


class _Kept:
    """What was measured, by bundle, threads, whether photos test, and form."""

    def __init__(self, path: Path, sha256: bytes, settings: ClientSettings) -> None:
        from protofleet.contract.bundle.onnx_runtime import ort

        tests = "tests" if _tests(settings) else "tests nothing"
        self._path, self._key = path, f"{sha256.hex()} {settings.threads} {tests} {ort.__version__}"
        try:
            self._known = _NEEDED.decode(path.read_bytes())
        except (OSError, msgspec.MsgspecError):
            self._known = {}

    def or_else(self, form: str, measure: Measure) -> Needed:
        """Bytes as they were measured, or are now; remembered where all of it could be tried."""
        name = f"{self._key} {form}"
        if name in self._known:
            return self._known[name]
        needed = measure(form)
        if needed.all is not None:
            self._known[name] = needed
            with contextlib.suppress(OSError):  # a disk that refuses has it measured again
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with whole_file(self._path) as file:
                    file.write(msgspec.json.encode(self._known))
        return needed
