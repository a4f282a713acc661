"""Where torch computes in the lab: on a GPU where torch finds one, else on the processor.

Everything else stays where it is: images, what travels, what is kept and what is added up are arrays of the processor,
and only a network, its batch and its loss go there. `CUDA_VISIBLE_DEVICES=` in the environment hides a GPU, as from all
of torch.
"""

from __future__ import annotations

import torch

__all__ = ["torch_device"]


def torch_device() -> torch.device:
    """The first GPU of this process, or the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
