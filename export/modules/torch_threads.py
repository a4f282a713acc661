"""Torch on one thread, for as long as a network is exported.

An export is many small operators. Torch's second thread waits for most of them, and spins while it waits. On a machine
with other work that costs several times the processor time, and the clock gains little.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Within the block, torch's operators run on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
