"""Measure a bundle on this machine with the code that a device runs: its extractor and its trainer.

`edge_client` knows how to run a bundle, and `hw_profiles` how to measure. This command needs both. It uses neither
torch nor the ONNX package, so it works with the base install. Each run gets a new Python process (`spawn`), because the
peak memory of a process never goes down.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.contract.methods import load_method, method, place_of
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.hardware.process_metrics import board_name, peak_rss_bytes, versions
from protofleet.edge_client.training.extractor import Extractor
from protofleet.edge_client.training.onnx_session import open_session
from protofleet.edge_client.training.trainer import Trainer
from protofleet.hw_profiles.devices.measure import measured_run, operator_times, record, time_runs

__all__ = ["load_inference", "load_training", "measure_bundle"]

_TRACED_S = 1.0  # a trace has a line for every operator of every run


def measure_bundle(
    path: str | Path,
    *,
    threads: Sequence[int],
    seconds: float = 3.0,
    batch: int = 1,
    per_operator: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Time inference at `batch` and, where the bundle trains, a training step at the bundle's own batch.

    Args:
        threads: numbers of threads; each is measured separately.
        seconds: time of measuring in each run.
        per_operator: what each operator of inference takes, too, with the first number of threads.
        progress: called with one line before each run.

    Returns:
        A record of `protofleet.hw_profiles.devices.measure`.

    Raises:
        ProtofleetError: the bundle cannot be read or run, or a run was killed (out of memory).
    """
    bundle = read_bundle(path)
    manifest = bundle.manifest
    place = place_of(method(manifest.method))  # it may be a class that only this command has loaded
    phases = [("inference", batch)] + ([("training_step", manifest.batch)] if manifest.trainable else [])
    runs = []
    for count in threads:
        if count < 1:
            raise UsageError("threads", expected="positive numbers", got=count)
        for phase, size in phases:
            progress(f"measuring {phase.replace('_', ' ')}, batch {size}, {count} thread{'s' * (count > 1)}")
            measured = _in_process(path, place, phase, count, size, seconds)
            runs.append({"phase": phase, "threads": count, "batch": size, **measured})
    about = {
        "sha256": bundle.sha256.hex(),
        "backbone": manifest.backbone,
        "method": manifest.method,
        "input_shape": list(manifest.input_shape),
    }
    found = record(runs, bundle=about, board=board_name(), versions=versions())
    if per_operator:
        progress(f"measuring the operators of inference, batch {batch}, {threads[0]} thread{'s' * (threads[0] > 1)}")
        rows = _alone("operators", _operators_here, str(path), threads[0], batch, seconds)
        found["operators"] = {"threads": threads[0], "batch": batch, "rows": rows}
    return found


def _in_process(path: str | Path, place: str, phase: str, threads: int, batch: int, seconds: float) -> dict[str, Any]:
    return _alone(phase.replace("_", " "), _measure_here, str(path), place, phase, threads, batch, seconds)


def _alone(what: str, function: Callable[..., Any], *given: object) -> Any:
    """What a function returns in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(function, *given).result()
        except BrokenProcessPool:
            raise ProtofleetError(
                f"measuring {what}",
                expected="the run to end",
                got="its process killed, most likely for want of memory",
                hint="a smaller batch",
            ) from None


def _measure_here(path: str, place: str, phase: str, threads: int, batch: int, seconds: float) -> dict[str, Any]:
    load_method(place)
    loaders = {"inference": load_inference, "training_step": load_training}
    return measured_run(lambda: loaders[phase](path, threads, batch), seconds=seconds, peak_rss_bytes=peak_rss_bytes)


def _operators_here(path: str, threads: int, batch: int, seconds: float) -> list[dict[str, Any]]:
    """What ONNX Runtime's own trace says that each kind of operator took of a run, in the mean."""
    bundle = read_bundle(path)
    weights = {name: bundle.params[name] for name in bundle.manifest.weights}
    x = np.random.default_rng(0).integers(0, 256, (batch, *bundle.manifest.input_shape), dtype=np.uint8)  # (B, H, W, c)
    with tempfile.TemporaryDirectory() as folder:
        session, values = open_session(
            bundle.features, "features.onnx", threads=threads, weights=weights, trace=f"{folder}/trace"
        )
        time_runs(lambda: session.run(["z"], {"x": x}), seconds=min(seconds, _TRACED_S))
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))  # type: ignore[union-attr]
        del values  # the session read them until here
    return operator_times(events)


def load_inference(path: str, threads: int, batch: int) -> Callable[[], object]:
    bundle = read_bundle(path)
    extractor = Extractor(bundle, bundle.params, threads)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (batch, *bundle.manifest.input_shape), dtype=np.uint8)  # (B, H, W, c)
    return lambda: list(extractor.blocks(x, samples=batch))


def load_training(path: str, threads: int, batch: int) -> Callable[[], object]:
    bundle = read_bundle(path)
    manifest = bundle.manifest
    trainer = Trainer(bundle, threads)
    trainer.load_state(bundle.params)
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (batch, *manifest.input_shape), dtype=np.uint8)  # (B, H, W, c)
    data = LocalData(x, rng.integers(0, manifest.classes, batch))
    mask = np.ones(manifest.classes, np.float32)  # (C,)
    # The smallest learning rate keeps the weights where they are, so that no step meets a number it is slow at.
    return lambda: trainer.fit(data, epochs=1, lr=1e-9, given={"prototype_mask": mask}, seed=0)
