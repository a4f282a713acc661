"""How much memory comparing a training step with torch takes, and how it is kept within bounds.

Three sides take the same step one after another: torch in float64, torch in float32, ONNX Runtime. Torch keeps what the
backward pass needs of every sample, in float64 twice as much. So the samples that count in one comparison are as many
as fit `EAGER_BYTES` (`affordable`); the rest of the batch is padding, whose part the step has to leave out anyway. And
what one side has freed goes back to the system before the next begins (`give_back`): glibc would keep it.
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

__all__ = ["EAGER_BYTES", "LARGE_STATE_BYTES", "affordable", "give_back", "kept_bytes", "settled_heap"]

EAGER_BYTES = 512 << 20  # what torch may keep for one backward pass in float64
LARGE_STATE_BYTES = 32 << 20  # of which each side has several copies
_FEWEST = 4  # BatchNorm over fewer would compare noise


def affordable(net: nn.Module, input_shape: tuple[int, int, int], batch: int, budget: int | None = None) -> int:
    """How many samples of a batch count in one comparison: all where the budget allows it, at least four of them.

    Args:
        net: as it trains, without chance.
        input_shape: (H, W, c).
        budget: bytes; `EAGER_BYTES` when None.
    """
    return min(batch, max(_FEWEST, (budget or EAGER_BYTES) // max(kept_bytes(net, input_shape), 1)))


def kept_bytes(net: nn.Module, input_shape: tuple[int, int, int]) -> int:
    """Bytes that torch keeps of one sample for the backward pass, in float64: found with two and with four samples, as
    few as are compared at least, in the network's own precision."""
    kept = (_kept(net, input_shape, 4) - _kept(net, input_shape, 2)) // 2  # what does not grow with the batch is none
    _trim()
    return kept


def _kept(net: nn.Module, input_shape: tuple[int, int, int], count: int) -> int:
    height, width, channels = input_shape
    own, found = copy.deepcopy(net), dict[int, int]()  # BatchNorm's counters are written to

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        found[storage._cdata] = tensor.numel() * (8 if tensor.is_floating_point() else tensor.element_size())
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = own(torch.zeros(count, channels, height, width))  # held to the end: no storage's place is used twice
    return sum(found.values())


@contextmanager
def settled_heap() -> Iterator[None]:
    """Collecting within looks at what was made since, and not at torch's millions of objects each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def give_back() -> None:
    """Return freed memory to the system, where the C library can."""
    gc.collect()
    _trim()


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; musl and macOS have none
    if trim is not None:
        trim(0)
