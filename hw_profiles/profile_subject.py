"""A bundle's graphs as workloads, each read once, and what they need of a device's memory. Part of the profile report.

On a board the memory is that of our own client process (`client_memory`); on an accelerator what lives at once
(`memory`). The largest training batch is found from steps derived of the forward graph at other batches, since the
bundle's own step graph has one fixed batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from contract.bundle import Bundle
from hw_profiles.client_memory import ClientMemory, client_memory
from hw_profiles.device import Device
from hw_profiles.graph import bundle_workloads
from hw_profiles.memory import Memory, largest_batch, peak_memory
from hw_profiles.training import bundle_training, training_step
from hw_profiles.workload import Workload

__all__ = ["Subject", "array_memory", "process_memory"]

_LARGEST_BATCH = 1024


class Subject:
    """A bundle's workloads, each made once."""

    def __init__(self, bundle: Bundle, batch: int) -> None:
        self.bundle, self.batch = bundle, batch
        self.inference, self.step = bundle_workloads(bundle, batch=batch)
        self._without_step = replace(bundle, train_step=None)  # the step's batch is fixed; read it once
        self.forward_at = lru_cache(maxsize=64)(lambda size: bundle_workloads(self._without_step, batch=size)[0])

    @lru_cache(maxsize=64)  # noqa: B019 - lives as long as one report
    def derived_memory(self, batch: int) -> Memory:
        """Memory of a step at another batch than the bundle's."""
        return peak_memory(self.derived_step(batch), float_bytes=4)

    def derived_step(self, batch: int) -> Workload:
        """The bundle's step at any batch, derived of its forward graph, as `protofleet cost` costs it."""
        method, options = bundle_training(self.bundle.manifest)
        return training_step(self.forward_at(batch), method, self.bundle.manifest.classes, **options)

    @cached_property
    def process(self) -> ClientMemory:
        """Our client in training, at the bundle's own batch."""
        assert self.step is not None
        return client_memory(self.step, training=True)

    def process_peak(self, batch: int) -> int:
        """Resident bytes of our client in training at a batch: what a step works on grows with it."""
        assert self.step is not None
        scale = self.derived_memory(batch).arena_bytes / self.derived_memory(self.step.batch).arena_bytes
        return int(self.process.peak_bytes + (scale - 1) * self.process.arena)


def process_memory(subject: Subject, device: Device, float_bytes: int) -> dict[str, Any]:
    """Resident bytes of our client on a board, from its own graphs."""
    inference = client_memory(subject.inference, training=False, float_bytes=float_bytes)
    trains = subject.step is not None and device.cpu is not None
    training = subject.process_peak if trains else None
    return _memory(subject, device, inference.process, inference.peak_bytes, training)


def array_memory(subject: Subject, device: Device, float_bytes: int) -> dict[str, Any]:
    """Bytes in the memory behind an array: what lives at once, without a process around it."""
    inference = peak_memory(subject.inference, float_bytes=float_bytes).peak_bytes
    training = None if subject.step is None else lambda batch: subject.derived_memory(batch).peak_bytes
    return _memory(subject, device, 0, inference, training)


def _memory(
    subject: Subject, device: Device, process: int, inference: int, training: Callable[[int], int] | None
) -> dict[str, Any]:
    """Peak bytes of inference and training, what the process itself takes, and what fits."""
    usable = device.memory.usable_bytes
    found = {
        "kind": "predicted",
        "usable_bytes": usable,
        "process_bytes": process,
        "inference_peak_bytes": inference,
        "inference_fits": inference <= usable,
        "training_peak_bytes": None,
        "training_fits": None,
        "largest_training_batch": None,
    }
    if training is None or subject.step is None:
        return found
    peak = training(subject.step.batch)
    return found | {
        "training_peak_bytes": peak,
        "training_fits": peak <= usable,
        "largest_training_batch": largest_batch(training, usable, limit=_LARGEST_BATCH),
        "largest_training_batch_limit": _LARGEST_BATCH,
    }
