"""Training with torch in the place of a bundle's step: what the lab's devices train with where that is faster.

Which of them is depends on the network and the batch: on wide convolutions ONNX Runtime's training step, of stock
operators, takes longer than torch's own; on a small network in batches of four torch takes longer, for its overhead. A
device is the same either way (`edge_client.device.Device`): it asks its graphs for a trainer, and gets one whose step
is torch's. The objective, the optimizer's rules, the order of the samples and their batches are the same, so that two
runs differ by rounding alone; features come from the bundle's graph.
"""

from __future__ import annotations

from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from contract.bundle import Bundle
from contract.methods import method
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.data import LocalData
from edge_client.trainer import Trainer, Weights
from export.objectives import Scene, find_objective
from export.optimizers import torch_optimizers
from export.step import Preprocess, quiet
from export.torch_cache import load_dynamo

__all__ = ["GraphsBesideTorch", "TorchTrainer"]

_BACKBONE = "backbone."


class GraphsBesideTorch(CompiledGraphs):
    """The graphs of a bundle whose whole network is trained, but for the step.

    Args:
        net: the bundle's backbone, (B, c, H, W) float32 → (B, D); not changed.
    """

    def __init__(self, bundle: Bundle, net: nn.Module) -> None:
        super().__init__(bundle, keep=True)
        self._net = net

    def trainer(self) -> Trainer:
        """The same one every time; load a state before fitting."""
        self._trainer = self._trainer or TorchTrainer(self._bundle, self._net)
        return self._trainer


class TorchTrainer(Trainer):
    """`Trainer`'s local training with a step of torch: the state's buffers are the memory of torch's tensors.

    Args:
        net: the bundle's backbone; not changed.
    """

    def __init__(self, bundle: Bundle, net: nn.Module) -> None:
        load_dynamo()
        self._manifest = m = bundle.manifest
        self._method = method(m.method)
        self._objective = find_objective(self._method.objective or "")
        self._net = quiet(deepcopy(net)).to(memory_format=torch.channels_last)
        self._preprocess = Preprocess(m.mean, m.std)
        state, self._trained = _state(bundle, self._net)
        arrays = {name: tensor.detach().numpy() for name, tensor in state.items()}
        self._state = state
        self._now = {name: arrays[name] for name in m.names("param", "buffer")}
        self._frozen = {name: arrays[name] for name in m.names("frozen")}
        self._given = {name: np.zeros(shape, np.float32) for name, shape in m.given_shapes.items()}
        self._lr, self._loss = np.zeros((), np.float32), np.zeros((), np.float32)
        self._trunk = None
        self._optimizers: list[torch.optim.Optimizer] = []

    def load_state(self, params: Weights) -> None:
        super().load_state(params)
        self._optimizers = []

    def _run(self, data: LocalData, chosen: NDArray[np.int64]) -> float:
        if not self._optimizers:
            self._optimizers = torch_optimizers(self._trained, self._method, self._manifest.hyper, float(self._lr))
        features = self._net(self._preprocess(torch.from_numpy(data.x[chosen])))
        given = {name: torch.from_numpy(value) for name, value in self._given.items()}
        given |= {"y": torch.from_numpy(data.y[chosen]), "sample_weight": torch.ones(len(chosen))}
        loss = self._objective(Scene.of(features, given, self._state), self._manifest.hyper)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._loss[...] = loss.detach().numpy()
        return float(self._loss)


def _state(bundle: Bundle, net: nn.Module) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """Every tensor of the step but the optimizer's, by its name in the bundle, and those that are trained."""
    m = bundle.manifest
    own = {f"{_BACKBONE}{name}": tensor for name, tensor in net.state_dict(keep_vars=True).items()}
    state: dict[str, Tensor] = {}
    trained: dict[str, nn.Parameter] = {}
    for each in m.state:
        if each.role == "optimizer":
            continue
        tensor = own[each.name] if each.name in own else torch.zeros(each.shape)
        if each.role == "param":
            tensor = trained[each.name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        state[each.name] = tensor
    return state, trained
