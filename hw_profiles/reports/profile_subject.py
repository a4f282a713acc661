"""A bundle's graphs as workloads, each read once, and what they need of a device's memory. Part of the profile report.

On a board the memory is that of our own client process (`process_rss`); on an accelerator what lives at once
(`liveness`). The largest training batch is found from steps derived of the forward graph at other batches, since the
bundle's own step graph has one fixed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from contract.bundle import Bundle
from hw_profiles.devices.schema import Device
from hw_profiles.memory.liveness import Memory, largest_batch, peak_memory
from hw_profiles.memory.process_rss import ClientMemory, Terms, client_memory, memory_terms
from hw_profiles.workload.fold import fold_weights
from hw_profiles.workload.from_onnx import bundle_workloads
from hw_profiles.workload.model import Workload
from hw_profiles.workload.training import bundle_training
from hw_profiles.workload.training_step import training_step

__all__ = ["Subject", "array_memory", "process_memory"]

_LARGEST_BATCH = 1024


class Subject:
    """A bundle's workloads, each made once."""

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self.bundle, self.batch = bundle, batch
        forward, self.step = bundle_workloads(bundle, batch=batch)
        self.inference = fold_weights(forward)
        self._without_step = replace(bundle, train_step=None)  # the step's batch is fixed; read it once
        self.forward_at = lru_cache(maxsize=64)(lambda size: bundle_workloads(self._without_step, batch=size)[0])

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as one report
    def derived_memory(self, batch: int) -> Memory:
        """Memory of a step at another batch than the bundle's."""
        return peak_memory(self.derived_step(batch), float_bytes=4)

    def derived_step(self, batch: int) -> Workload:
        """The bundle's step at any batch, derived of its forward graph, as `protofleet cost` costs it."""
        return training_step(self.forward_at(batch), bundle_training(self.bundle.manifest))

    def client(self, samples: int, batch: int | None = None) -> ClientMemory:
        """Our client with so many local samples, at the bundle's batch or another: what it works on grows with it."""
        terms = self.terms(samples)
        if batch is not None and self.step is not None and batch != self.step.batch:
            scale = self.derived_memory(batch).arena_bytes / self.derived_memory(self.step.batch).arena_bytes
            terms = replace(
                terms,
                step_arena=int(scale * terms.step_arena),
                arena=int(terms.arena * batch / self.step.batch),
            )
        return client_memory(terms)

    @lru_cache(maxsize=4)  # noqa: B019 - as above
    def terms(self, samples: int) -> Terms:
        """What the client's memory depends on, at the bundle's batch."""
        manifest = self.bundle.manifest
        return memory_terms(manifest, fold_weights(self.forward_at(manifest.batch)), self.step, samples)


def process_memory(subject: Subject, device: Device, samples: int) -> dict[str, Any]:
    """Resident bytes of our client on a board, whichever runtime is asked for: it runs ONNX Runtime, in fp32.

    What fits is decided by the upper bounds, over a device's life: rounds of the bundle's method and the closing one.
    """
    usable, client = device.memory.usable_bytes, subject.client(samples)
    trains = subject.step is not None and device.cpu is not None
    inference = max(client.inference, client.loading)

    def training(batch: int) -> int:
        found = subject.client(samples, batch)
        return found.at_most(max(found.training, found.loading))

    beyond = [*client.beyond, *(["its file names no CPU"] if device.cpu is None else [])]
    found = _memory(usable, client.process, inference, client.at_most(inference)) | {
        "closing_peak_bytes": client.closing,
        "closing_fits": client.at_most(client.closing) <= usable,
        "extrapolated": beyond,
    }
    if trains:
        assert subject.step is not None
        peak = max(client.training, client.loading)
        found |= _training(usable, peak, client.at_most(peak), training)
    return found | _life(found, usable, client.at_most)


def array_memory(subject: Subject, device: Device, float_bytes: int) -> dict[str, Any]:
    """Bytes in the memory behind an array: what lives at once, no process around it. A count, so its own bound."""
    usable = device.memory.usable_bytes
    inference = peak_memory(subject.inference, float_bytes=float_bytes).peak_bytes
    closing = inference + subject.terms(0).gram
    found = _memory(usable, 0, inference, inference)
    found |= {"closing_peak_bytes": closing, "closing_fits": closing <= usable, "extrapolated": []}
    if subject.step is not None:
        peak = subject.derived_memory(subject.step.batch).peak_bytes
        found |= _training(usable, peak, peak, lambda batch: subject.derived_memory(batch).peak_bytes)
    return found | _life(found, usable, lambda estimate: estimate)


def _memory(usable: int, process: int, inference: int, at_most: int) -> dict[str, Any]:
    """Inference alone: peak bytes, of them the process itself, and whether it fits."""
    return {
        "kind": "predicted",
        "usable_bytes": usable,
        "process_bytes": process,
        "inference_peak_bytes": inference,
        "inference_fits": at_most <= usable,
        "training_peak_bytes": None,
        "training_fits": None,
        "largest_training_batch": None,
    }


def _training(usable: int, peak: int, at_most: int, at_batch: Callable[[int], int]) -> dict[str, Any]:
    """Training at the bundle's batch, and the largest batch that fits; `at_batch` is the upper bound."""
    return {
        "training_peak_bytes": peak,
        "training_fits": at_most <= usable,
        "largest_training_batch": largest_batch(at_batch, usable, limit=_LARGEST_BATCH),
        "largest_training_batch_limit": _LARGEST_BATCH,
    }


def _life(found: dict[str, Any], usable: int, at_most: Callable[[int], int]) -> dict[str, Any]:
    """The worst of all that the device does."""
    peak = max(found[f"{what}_peak_bytes"] or 0 for what in ("inference", "training", "closing"))
    return {"peak_bytes": peak, "peak_bytes_at_most": at_most(peak), "fits": at_most(peak) <= usable}
