"""The device where torch computes in the lab: a GPU where torch finds one, else the CPU.

Only a network, its batch and its loss go to the GPU. Everything else stays on the CPU: images, messages, kept tensors
and sums. `CUDA_VISIBLE_DEVICES=` in the environment hides a GPU, as for all of torch.
"""

from __future__ import annotations

import torch

__all__ = ["torch_device"]


def torch_device() -> torch.device:
    """The first GPU of this process, or the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
