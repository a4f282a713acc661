"""Execution providers tried for real, once: a real inference and a real training step of the device's own bundle.

`choose_providers` tries the providers that this build of ONNX Runtime has and that `providers.py` asks for. It writes
the results to `providers.json` in the state directory. They hold as long as the same ONNX Runtime runs the same bundle
with as many threads. Where the build has the CPU alone, nothing is tried. Whatever was chosen, the bundle's test
vectors are computed again before anything is summed (`compiled_graphs.py`).

A provider other than the CPU is tried in a process of its own (`python -m
protofleet.edge_client.trials.provider_trials`), because a driver that does not fit may end the process that loads it,
or never answer.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, read_bundle
from protofleet.contract.bundle.onnx_runtime import ORT_ERRORS, ort
from protofleet.contract.bundle.test_vectors import distance, probe_images
from protofleet.contract.errors import BundleError, ProtofleetError
from protofleet.contract.methods import method
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.hardware.providers import PROVIDERS, Trial, check_provider, choose, wanted_trials
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.onnx_session import CPU, Provider, Providers, providers_built_in
from protofleet.edge_client.training.trainer import Trainer, Weights
from protofleet.edge_client.trials.trials_file import TrialsFile

__all__ = ["FILE", "SILENT", "apart", "asked_apart", "choose_providers", "error_text", "step_on", "tried"]

FILE = "providers.json"
SCHEMA = "protofleet.providers/1"
_FAILURES: tuple[type[Exception], ...] = (ProtofleetError, *ORT_ERRORS)
SILENT = "the process that tried it said nothing"
_REPEATS = 3
_PATIENCE_S = 1_200.0  # TensorRT compiles for minutes on a small board

Try = Callable[[str], Trial]
_TRIALS = msgspec.json.Decoder(Trial)  # made here: see `protofleet.contract.bundle.bundle_file._MANIFESTS`


def choose_providers(
    bundle: Bundle,
    path: Path,
    *,
    wanted: str = "auto",
    threads: int = 1,
    state: Path | None = None,
    try_one: Try | None = None,
) -> Providers:
    """Try what is to be tried, or remember it, and choose.

    Args:
        path: where the bundle lies, for the processes that try it.
        wanted: one of `providers.CHOICES`.
        threads: within an operator.
        state: the state directory; nothing is remembered when None, and what compiles for minutes (TensorRT) is tried
            only where it is named.
        try_one: tries a provider, for tests; by default here for the CPU, and in a process of its own for others.

    Raises:
        UsageError: there is no such choice.
        BundleError: the CPU cannot run the bundle.
    """
    names = wanted_trials(check_provider(wanted), providers_built_in())
    if state is None and wanted == "auto":
        names = tuple(name for name in names if not PROVIDERS[name].compiles)
    build = f"onnxruntime {ort.__version__}"
    if names == ("cpu",):  # nothing to choose; and a board that waits for its first round keeps its memory
        return Providers(choose([Trial("cpu")], wanted, has_vectors=bundle.vectors is not None, build=build))
    engines = None if state is None else state / "engines" / (bundle.manifest.extractor or bundle.sha256.hex())[:16]
    known = {} if state is None else {trial.provider: trial for trial in _file(state, bundle).read(threads)}
    first = try_one or (lambda name: _tried_by_default(bundle, path, name, threads, engines))
    fresh = {name: first(name) for name in names if not _counts(known.get(name), name, wanted)}
    if fresh and state is not None:
        _file(state, bundle).write(threads, [*(known | fresh).values()])
    trials = known | fresh
    if trials["cpu"].failed:
        raise BundleError("features.onnx on cpu", expected="an inference", got=trials["cpu"].failed)
    choice = choose([trials[name] for name in names], wanted, has_vectors=bundle.vectors is not None, build=build)
    again = [name for name in names if name not in fresh and trials[name].failed]
    if again and state is not None:
        choice = replace(choice, line=f"{choice.line} (as tried before; remove {state / FILE} to try again)")
    return Providers(choice, engines)


def _counts(known: Trial | None, name: str, wanted: str) -> bool:
    """Whether what is remembered is enough: a provider that is named gets another chance, and so does the CPU, without
    which nothing runs."""
    return known is not None and not (name in (wanted, "cpu") and known.failed)


# ── a trial ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def tried(bundle: Bundle, provider: Provider, threads: int = 1) -> Trial:
    """An inference, and where the bundle trains a step, on a provider without fall-back, compared and timed."""
    x = probe_images(bundle.manifest.input_shape) if bundle.vectors is None else bundle.vectors.x
    try:
        trial = _inference(bundle, provider, threads, x)
    except _FAILURES as error:
        return Trial(provider.name, failed=error_text(error))
    if not bundle.manifest.trainable or PROVIDERS[provider.name].compiles:
        return trial
    try:
        moved, step_ms = step_on(bundle, provider, threads, x)
    except _FAILURES as error:
        return replace(trial, step_failed=error_text(error))
    if provider.name == "cpu":
        return replace(trial, step_ms=step_ms, step_error=0.0)
    return replace(trial, step_ms=step_ms, step_error=apart(moved, step_on(bundle, CPU, threads, x)[0]))


def _inference(bundle: Bundle, provider: Provider, threads: int, x: NDArray[np.uint8]) -> Trial:
    extractor = Extractor(bundle, bundle.params, threads, provider)
    batch = bundle.manifest.batch
    block = x[np.arange(batch) % len(x)]
    reference = _reference(bundle, threads, x)
    alone, image_ms = _timed(lambda: extractor.features(x[:1]))
    together, block_ms = _timed(lambda: extractor.features(block))
    error = max(distance(alone, reference[:1]), distance(together, reference[np.arange(batch) % len(x)]))
    return Trial(provider.name, image_ms, block_ms / batch, error)


def _reference(bundle: Bundle, threads: int, x: NDArray[np.uint8]) -> NDArray[np.float32]:
    return Extractor(bundle, bundle.params, threads).features(x) if bundle.vectors is None else bundle.vectors.z


def step_on(bundle: Bundle, provider: Provider, threads: int, x: NDArray[np.uint8]) -> tuple[Weights, float]:
    """How a step moves the weights, by name, and the milliseconds that it takes."""
    m = bundle.manifest
    trainer = Trainer(bundle, threads, provider)
    labels = np.arange(m.batch, dtype=np.int64) % m.classes
    data = LocalData(x[np.arange(m.batch) % len(x)], labels)
    given = _given(bundle, np.bincount(labels, minlength=m.classes))

    def once() -> dict[str, NDArray[np.float32]]:
        trainer.load_state(bundle.params)
        trainer.fit(data, epochs=1, lr=float(m.hyper["lr"]), given=given, seed=0)
        return trainer.export_state()

    after, step_ms = _timed(once)
    return {name: value - bundle.params[name] for name, value in after.items()}, step_ms


def _given(bundle: Bundle, counts: NDArray[np.int64]) -> Mapping[str, NDArray[np.float32]]:
    """What a step takes of a fleet that has learned nothing yet."""
    m = bundle.manifest
    return method(m.method).inputs(counts, GlobalState(bytes(4), 0, 0), m.classes, m.features)


def apart(moved: Weights, reference: Weights) -> float:
    """The distance between two changes of the weights, relative to the second."""
    squares = sum(float(((moved[name] - reference[name]).astype(np.float64) ** 2).sum()) for name in reference)
    length = sum(float((value.astype(np.float64) ** 2).sum()) for value in reference.values())
    return float(np.sqrt(squares / max(length, 1e-60)))


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the milliseconds of the fastest run but the first, which compiles and allocates."""
    result, times = run(), []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        result = run()
        times.append((time.perf_counter() - began) * 1e3)
    return result, min(times)


def error_text(error: object) -> str:
    got = getattr(error, "got", None)
    line = " ".join(str(got if got is not None else error).split())
    return line if len(line) <= 160 else line[:159] + "…"


# ── in a process of its own ─────────────────────────────────────────────────────────────────────────────────────────


def _tried_by_default(bundle: Bundle, path: Path, name: str, threads: int, engines: Path | None) -> Trial:
    if name == "cpu":
        return tried(bundle, CPU, threads)
    if engines is not None and PROVIDERS[name].compiles:
        engines.mkdir(mode=0o700, parents=True, exist_ok=True)
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]
    command = [sys.executable, *same_path, "-m", "protofleet.edge_client.trials.provider_trials"]
    return tried_apart([*command, str(path), name, str(threads), str(engines or "")], name)


def tried_apart(command: Sequence[str], name: str, patience_s: float = _PATIENCE_S) -> Trial:
    """What a process that tries a provider says, or how it ended."""
    answer, failed = asked_apart(command, patience_s)
    try:
        return Trial(name, failed=failed) if failed else _TRIALS.decode(answer)
    except msgspec.MsgspecError:
        return Trial(name, failed=SILENT)


def asked_apart(command: Sequence[str], patience_s: float) -> tuple[bytes, str]:
    """The last line that a process prints; and in its place, how it ended, where it did not end well."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience_s, check=False)
    except subprocess.TimeoutExpired:
        return b"", f"no answer within {patience_s:g} s"
    except OSError as error:
        return b"", error_text(error)
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return b"", error_text(f"the process that tried it ended with {done.returncode} {''.join(last)}")
    lines = done.stdout.strip().splitlines()
    return (lines[-1], "") if lines else (b"", SILENT)


def main(arguments: Sequence[str]) -> int:
    """Try one provider and print the trial as JSON: bundle, provider, threads, a folder for engines or nothing."""
    path, name, threads, engines = arguments
    trial = tried(read_bundle(path), Provider(name, Path(engines) if engines else None), int(threads))
    print(msgspec.json.encode(trial).decode())
    return 0


# ── remembered ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _key(bundle: Bundle) -> dict[str, Any]:
    built_in = list(providers_built_in())
    return {"onnxruntime": ort.__version__, "built_in": built_in, "bundle": bundle.sha256.hex()}


def _file(state: Path, bundle: Bundle) -> TrialsFile[Trial]:
    return TrialsFile(state / FILE, SCHEMA, _key(bundle), Trial)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
