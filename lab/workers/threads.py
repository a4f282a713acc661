"""Limits the threads of a worker's libraries. It loads torch."""

from __future__ import annotations

import threadpoolctl
import torch

__all__ = ["limit_threads"]

_limits: list[int] = []


def limit_threads(number: int) -> None:
    """Limit torch and numpy's BLAS to this number of threads in this process."""
    if _limits != [number]:
        _limits[:] = [number]
        torch.set_num_threads(number)
        threadpoolctl.threadpool_limits(number, user_api="blas")
