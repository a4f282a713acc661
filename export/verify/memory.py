"""The memory of comparing a training step with torch, and how it is bounded.

Three sides take the same step one after another: torch in float64, torch in float32, ONNX Runtime. Torch keeps what the
backward pass needs of every sample; in float64 that is twice as much. Two rules bound the memory:

- Only as many samples count in one comparison as fit into `EAGER_BYTES` (`affordable`). The rest of the batch is
  padding, which the step must leave out anyway.
- Memory that one side has freed goes back to the system before the next side begins (`give_back`); glibc would keep it.
"""

from __future__ import annotations

import copy
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["EAGER_BYTES", "LARGE_STATE_BYTES", "affordable", "frozen_heap", "give_back", "kept_bytes"]

EAGER_BYTES = 512 << 20  # what torch may keep for one backward pass in float64
LARGE_STATE_BYTES = 32 << 20  # of which each side has several copies
_RARELY = 200_000  # new objects between two collections
_FEWEST = 4  # BatchNorm over fewer would compare noise


def affordable(net: nn.Module, input_shape: tuple[int, int, int], batch: int, budget: int | None = None) -> int:
    """How many samples of a batch count in one comparison: all if the budget allows it, and at least four.

    Args:
        net: the network in training mode, without random layers.
        input_shape: (H, W, c).
        budget: bytes; `EAGER_BYTES` when None.
    """
    return min(batch, max(_FEWEST, (budget or EAGER_BYTES) // max(kept_bytes(net, input_shape), 1)))


def kept_bytes(net: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Bytes that torch keeps of one sample for the backward pass, in float64.

    They are measured with two and with four samples, in the network's own precision. Four is the smallest number that
    is ever compared. What does not grow with the batch is not counted.
    """
    per_sample = (_saved_bytes(net, input_shape, 4) - _saved_bytes(net, input_shape, 2)) // 2
    _trim()
    return per_sample


def _saved_bytes(net: nn.Module, input_shape: tuple[int, int, int], count: int) -> int:
    height, width, channels = input_shape
    own, bytes_by_storage = copy.deepcopy(net), dict[int, int]()  # BatchNorm's counters are written to

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage._cdata] = tensor.numel() * (8 if tensor.is_floating_point() else tensor.element_size())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = own(torch.zeros(count, channels, height, width))  # held to the end: no storage's place is used twice
    return sum(bytes_by_storage.values())


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Within the block, the garbage collector looks only at new objects, and rarely.

    Torch has millions of objects, and recording a network makes many more that live to the end. A program that has
    frozen its own objects finds them frozen afterwards.
    """
    before, is_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not is_frozen:
        gc.collect()
        gc.freeze()
    gc.set_threshold(_RARELY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not is_frozen:
            gc.unfreeze()


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    gc.collect()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl and macOS have none
    if trim is not None:
        trim(0)
