"""What a bundle needs of a device's memory, as the profile report tells it.

On a board it is that of our own client process (`process_rss`); on an accelerator what lives at once (`liveness`). The
largest training batch is found from steps derived of the forward graph at other batches, since the bundle's own step
graph has one fixed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from msgspec import structs

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.memory.liveness import largest_batch, peak_memory
from protofleet.hw_profiles.memory.process_rss import ClientMemory, client_memory, memory_terms
from protofleet.hw_profiles.reports.subject import Subject
from protofleet.hw_profiles.workload.constant_folding import fold_weights

__all__ = ["BundleMemory"]

_LARGEST_BATCH = 1024


class BundleMemory:
    """The memory of a bundle on one device after another; what does not depend on the device is computed once."""

    def __init__(self, subject: Subject, manifest: Manifest) -> None:
        self.subject = subject
        forward = fold_weights(subject.forward_at(manifest.extraction_batch))
        self._photos_at = lambda batch: (
            structs.replace(manifest, batch=batch).extraction_batch / manifest.extraction_batch
        )
        self._terms = lru_cache(lambda samples: memory_terms(manifest, forward, subject.step, samples))
        self._step_at = lru_cache(lambda batch: peak_memory(subject.derived_step(batch), float_bytes=4))

    def on_board(self, device: Device, samples: int) -> dict[str, Any]:
        """Resident bytes of our client, whichever runtime is asked for: it runs ONNX Runtime, in fp32.

        What fits is decided by the upper bounds, over a device's life: rounds of the bundle's method, and the closing
        one.
        """
        usable, client = device.memory.usable_bytes, self._client(samples)
        inference = max(client.inference, client.loading)

        def training(batch: int) -> int:
            estimate = self._client(samples, batch)
            return estimate.at_most(max(estimate.training, estimate.loading))

        beyond = [*client.beyond, *(["its file names no CPU"] if device.cpu is None else [])]
        memory = _memory(usable, client.process, inference, client.at_most(inference)) | {
            "closing_peak_bytes": client.closing,
            "closing_fits": client.at_most(client.closing) <= usable,
            "extrapolated": beyond,
        }
        if self.subject.step is not None and device.cpu is not None:
            peak = max(client.training, client.loading)
            memory |= _training(usable, peak, client.at_most(peak), training)
        return memory | _life(memory, usable, client.at_most)

    def on_array(self, device: Device, float_bytes: int) -> dict[str, Any]:
        """Bytes in the memory behind an array: what lives at once, no process around it. A count, so its own bound."""
        usable, step = device.memory.usable_bytes, self.subject.step
        inference = peak_memory(self.subject.inference, float_bytes=float_bytes).peak_bytes
        closing = inference + self._terms(0).gram
        memory = _memory(usable, 0, inference, inference)
        memory |= {"closing_peak_bytes": closing, "closing_fits": closing <= usable, "extrapolated": []}
        if step is not None:
            peak = self._step_at(step.batch).peak_bytes
            memory |= _training(usable, peak, peak, lambda batch: self._step_at(batch).peak_bytes)
        return memory | _life(memory, usable, lambda estimate: estimate)

    def _client(self, samples: int, batch: int | None = None) -> ClientMemory:
        """Our client with so many local samples, at the bundle's batch or another: what it works on grows with it."""
        terms, step = self._terms(samples), self.subject.step
        if batch is not None and step is not None and batch != step.batch:
            scale = self._step_at(batch).arena_bytes / self._step_at(step.batch).arena_bytes
            arena = int(self._photos_at(batch) * terms.arena)
            terms = replace(terms, step_arena=int(scale * terms.step_arena), arena=arena)
        return client_memory(terms)


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


def _life(memory: dict[str, Any], usable: int, at_most: Callable[[int], int]) -> dict[str, Any]:
    """The worst of all that the device does."""
    peak = max(memory[f"{what}_peak_bytes"] or 0 for what in ("inference", "training", "closing"))
    return {"peak_bytes": peak, "peak_bytes_at_most": at_most(peak), "fits": at_most(peak) <= usable}
