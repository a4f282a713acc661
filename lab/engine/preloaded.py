"""What every worker has loaded: the fork server imports this module once for all of them.

Making torch's first optimizer loads its compiler, for more than a second; a worker that is forked afterwards has it.
"""

from __future__ import annotations

import threadpoolctl
import torch

import lab.engine.experiment  # noqa: F401
from export.torch_cache import load_dynamo

__all__ = ["limit_threads"]

load_dynamo()
_limits: list[int] = []


def limit_threads(number: int) -> None:
    """From now on torch and numpy's BLAS compute on so many threads in this process."""
    if _limits != [number]:
        _limits[:] = [number]
        torch.set_num_threads(number)
        threadpoolctl.threadpool_limits(number, user_api="blas")
