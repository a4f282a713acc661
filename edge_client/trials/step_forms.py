"""The training step in the form that is fastest here: tried once, beside the portable one, and remembered.

A bundle may hold its training step in further forms (`train_step.FORM.onnx`). They use what ONNX Runtime has for some
processors only. Whether this device's processor has it, and gains by it, is found out by trying:

1. A process of its own, whose crash ends nothing else, runs one step of the portable graph and one of the form, on the
   same images. Both are timed, each as the fastest of a few runs.
2. The form is taken if it needs less than 0.95 of the time, and moves the weights as the portable graph does. The
   allowed distance is three times what a nudge of every weight by one part in a million does to the portable graph
   itself. It is at least 1 % and at most 30 % (docs/decisions/171).
3. The result is written to `step.json` in the state directory. It holds for this ONNX Runtime, this processor, this
   bundle, this number of threads, and for the form `kernels` this library of protofleet-kernels.

If anything fails, the device trains with the portable graph, and a line says why. Statistics that are summed over
devices come from `features.onnx`, which no form touches.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.native_kernels import FORM, installed_kernels
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.bundle.test_vectors import probe_images
from protofleet.contract.errors import ProtofleetError
from protofleet.edge_client.hardware.providers import NEAR
from protofleet.edge_client.training.onnx_session import CPU
from protofleet.edge_client.trials.bundle_trial import end_first
from protofleet.edge_client.trials.provider_trials import SILENT, apart, asked_apart, error_text, step_on
from protofleet.edge_client.trials.trials_file import TrialsFile

__all__ = ["FILE", "FormTrial", "choose_step_form", "tried"]

logger = logging.getLogger(__name__)

FILE = "step.json"
SCHEMA = "protofleet.step-forms/1"
_FAILURES: tuple[type[Exception], ...] = (ProtofleetError, *ORT_ERRORS)
_GAIN = 0.95  # of the portable step's time; what saves less is within the noise of the trial
_NUDGE = 1e-6
_NUDGES = 3.0
_FURTHEST = 0.3
_PATIENCE_S = 900.0  # a large network's step on a small board takes minutes
_CHANGING = ("processor", "core id", "apicid", "initial apicid", "physical id", "cpu MHz", "bogomips", "BogoMIPS")


class FormTrial(msgspec.Struct, frozen=True):
    """What came of a form.

    Attributes:
        portable_ms, form_ms: of one step.
        error: relative distance of the weights' change from the portable step's; `allowed`, how large it may be.
        failed: why it cannot be used; empty where it can.
    """

    form: str
    portable_ms: float = 0.0
    form_ms: float = 0.0
    error: float = 0.0
    allowed: float = 0.0
    failed: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it does what the portable step does."""
        return not self.failed and self.error <= self.allowed

    @property
    def pays(self) -> bool:
        """Whether it is right and enough faster."""
        return self.is_right and self.form_ms < _GAIN * self.portable_ms

    def __str__(self) -> str:
        if self.failed:
            return f"{self.form}: {self.failed}"
        apart = f"off by {self.error:.1g}, allowed {self.allowed:.1g}"
        return f"{self.form}: {self.form_ms:.0f} ms where the portable step takes {self.portable_ms:.0f}, {apart}"


_TRIALS = msgspec.json.Decoder(FormTrial)
Try = Callable[[str], FormTrial]


def choose_step_form(
    bundle: Bundle,
    path: Path,
    *,
    threads: int = 1,
    state: Path | None = None,
    try_one: Try | None = None,
) -> Bundle:
    """The bundle with the fastest right form of its training step as the training step, and without the others.

    Args:
        path: where the bundle lies, for the processes that try it.
        threads: within an operator.
        state: the state directory; nothing is remembered when None.
        try_one: tries a form, for tests; by default in a process of its own.
    """
    if not bundle.forms:
        return bundle
    known = {} if state is None else {trial.form: trial for trial in _file(state, bundle).read(threads)}

    def try_apart(form: str) -> FormTrial:
        logger.info(f"tries {form}, a further form of the training step, once: in a process of its own")
        return _tried_apart(path, form, threads)

    try_it = try_one or try_apart
    fresh = {form: try_it(form) for form in bundle.forms if form not in known}
    if fresh and state is not None:
        _file(state, bundle).write(threads, [*(known | fresh).values()])
    trials = [(known | fresh)[form] for form in bundle.forms]
    best = min((trial for trial in trials if trial.pays), key=lambda trial: trial.form_ms, default=None)
    before = f" (as tried before; remove {state / FILE} to try again)" if state is not None and not fresh else ""
    if best is None:
        logger.info(f"trains with the portable step; {'; '.join(map(str, trials))}{before}")
        return replace(bundle, forms={})
    logger.info(f"trains with {best}{before}")
    return replace(bundle, train_step=bundle.forms[best.form], forms={})


def tried(bundle: Bundle, form: str, threads: int = 1) -> FormTrial:
    """A step of the portable graph, one of it with weights that are nudged, and one of the form."""
    x = probe_images(bundle.manifest.input_shape) if bundle.vectors is None else bundle.vectors.x
    try:
        moved, portable_ms = step_on(bundle, CPU, threads, x)
        nudged, _ = step_on(replace(bundle, params=_nudged(bundle.params)), CPU, threads, x)
        allowed = min(max(NEAR, _NUDGES * apart(nudged, moved)), _FURTHEST)
        mine, form_ms = step_on(replace(bundle, train_step=bundle.forms[form]), CPU, threads, x)
    except _FAILURES as failure:
        return FormTrial(form, failed=error_text(failure))
    error = apart(mine, moved)
    return FormTrial(form, portable_ms, form_ms, error if np.isfinite(error) else 1e30, allowed)


def _nudged(weights: Mapping[str, Any]) -> dict[str, Any]:
    signs = np.random.default_rng(0)
    return {n: (w * (1.0 + _NUDGE * signs.choice((-1.0, 1.0), w.shape))).astype(np.float32) for n, w in weights.items()}


def _tried_apart(path: Path, form: str, threads: int) -> FormTrial:
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    command = [
        sys.executable,
        *same_path,
        "-m",
        "protofleet.edge_client.trials.step_forms",
        str(path),
        form,
        str(threads),
    ]
    answer, failed = asked_apart(command, _PATIENCE_S)
    try:
        return FormTrial(form, failed=failed) if failed else _TRIALS.decode(answer)
    except msgspec.MsgspecError:
        return FormTrial(form, failed=SILENT)


def main(arguments: Sequence[str]) -> int:
    """Try one form and print the trial as JSON: bundle, form, threads."""
    end_first()
    path, form, threads = arguments
    print(msgspec.json.encode(tried(read_bundle(path), form, int(threads))).decode())
    return 0


# ── remembered ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _key(bundle: Bundle) -> dict[str, str]:
    kernels = installed_kernels() if FORM in bundle.forms else None
    wheel = {} if kernels is None else {"kernels": kernels.sha256}
    return {"onnxruntime": ort.__version__, "processor": processor(), "bundle": bundle.sha256.hex(), **wheel}


def processor() -> str:
    """What this processor is and can, as a short hash: another one may be behind the same state directory tomorrow."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        first = platform.processor()
    kept = [line for line in first.splitlines() if line.partition(":")[0].strip() not in _CHANGING]
    return hashlib.sha256("\n".join([platform.machine(), *kept]).encode()).hexdigest()[:16]


def _file(state: Path, bundle: Bundle) -> TrialsFile[FormTrial]:
    return TrialsFile(state / FILE, SCHEMA, _key(bundle), FormTrial)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
