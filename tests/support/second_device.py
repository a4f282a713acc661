"""A second device for torch where there is no GPU: its lazy one, which every build of torch has.

It computes what it is asked for when somebody looks, and refuses the processor's tensors beside its own, as a GPU does.
Its own faults: no views (aten::as_strided) in inference mode, nor within an operator of somebody else's, which
`compute_there` goes around; and a Python number times a scalar of float32 is a float64, which the gradient of a mean of
squares does not survive, so that FedProto, FedHP and FedPR run there with another distance or not at all.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from protofleet.export.modules.preprocess import Preprocess, _preprocess

__all__ = ["compute_there"]


@cache
def _lazy() -> torch.device:
    """It can be made ready but once in a process. Each of its small graphs is run a few times at most: not optimising
    them saves three quarters of the time."""
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    torch._C._set_graph_executor_optimize(False)
    return torch.device("lazy", 0)


def compute_there(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The networks of a module that asks `torch_device` lie on the second device until the test ends."""
    device = _lazy()
    monkeypatch.setattr(f"{module}.torch_device", lambda: device)
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    monkeypatch.setattr(Preprocess, "forward", lambda own, x: _preprocess(x, own._mean, own._std))
