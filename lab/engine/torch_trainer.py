"""Training with torch instead of a bundle's step. The lab's devices use it where it is faster.

Which one is faster depends on the network and the batch. On wide convolutions ONNX Runtime's training step, of stock
operators, is slower than torch. On a small network in batches of four torch is slower, because of its overhead.

The device is the same either way (`protofleet.edge_client.device.device.Device`): it asks its graphs for a trainer, and
gets one whose step is torch's. The objective, the optimizer's rules, the order of the samples and their batches are the
same, so two runs differ by rounding alone. Features come from the bundle's graph. The step runs on a GPU where torch
has one (`torch_device.py`).

A device's optimizer starts anew in each round. `begin_with` simulates frameworks that keep its state between rounds.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.methods import method
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.trainer import Trainer, Weights
from protofleet.export.modules.torch_cache import load_dynamo
from protofleet.export.objectives import Scene, find_objective
from protofleet.export.steps.optimizers import torch_optimizers
from protofleet.export.steps.step import Preprocess, quiet
from protofleet.lab.training.torch_device import torch_device

__all__ = ["GraphsBesideTorch", "TorchTrainer"]

_BACKBONE = "backbone."
_ON_THE_PROCESSOR = "step"  # Adam's count, wherever the weights are


class GraphsBesideTorch(CompiledGraphs):
    """The graphs of a bundle whose whole network is trained, with torch in place of the training step.

    Args:
        net: the bundle's backbone, (B, c, H, W) float32 → (B, D); not changed.
    """

    def __init__(self, bundle: Bundle, net: nn.Module) -> None:
        super().__init__(bundle, keep=True)
        self._net = net
        self._torch: TorchTrainer | None = None

    def trainer(self) -> TorchTrainer:
        """The trainer, the same one every time. Load a state before fitting."""
        self._torch = self._torch or TorchTrainer(self._bundle, self._net)
        return self._torch


class TorchTrainer(Trainer):
    """`Trainer`'s local training with a step of torch.

    Args:
        net: the bundle's backbone; not changed.
    """

    def __init__(self, bundle: Bundle, net: nn.Module) -> None:
        load_dynamo()
        self._manifest = m = bundle.manifest
        self._method = method(m.method)
        self._objective = find_objective(self._method.objective or "")
        self._device = torch_device()
        self._net = quiet(deepcopy(net)).to(self._device, memory_format=torch.channels_last)
        self._preprocess = Preprocess(m.mean, m.std).to(self._device)
        self._state, self._trained = _state(bundle, self._net, self._device)
        self._given = {name: np.zeros(shape, np.float32) for name, shape in m.given_shapes.items()}
        self._lr, self._loss = np.zeros((), np.float32), np.zeros((), np.float32)
        self._trunk = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._kept: dict[str, NDArray[np.float32]] = {}

    def load_state(self, params: Weights) -> None:
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(torch.from_numpy(params[name]))
        self._optimizers = []

    def export_state(self) -> dict[str, NDArray[np.float32]]:
        return {name: _array(self._state[name]) for name in self._manifest.names("param", "buffer")}

    def begin_with(self, optimizer: Weights) -> None:
        """Set the optimizer's state for the next training: a result of `optimizer_state`, or nothing."""
        self._kept, self._optimizers = dict(optimizer), []

    def optimizer_state(self) -> dict[str, NDArray[np.float32]]:
        """The optimizer's tensors after the last training; before it those of `begin_with`.

        Their names are `KEY.PARAMETER`: torch's name of the tensor, and the bundle's name of the parameter.
        """
        if not self._optimizers:
            return dict(self._kept)
        every = ((name, self._optimizer_of(name).state[tensor]) for name, tensor in self._trained.items())
        return {f"{key}.{name}": _array(value) for name, own in every for key, value in _tensors(own)}

    def _optimizer_of(self, name: str) -> torch.optim.Optimizer:
        """The optimizer of the parameter `name`."""
        tensor = self._trained[name]
        groups = ((optimizer, group) for optimizer in self._optimizers for group in optimizer.param_groups)
        return next(optimizer for optimizer, group in groups if any(tensor is other for other in group["params"]))

    def _begin(self) -> None:
        self._optimizers = torch_optimizers(self._trained, self._method, self._manifest.hyper, float(self._lr))
        for kept, value in self._kept.items():
            key, _, name = kept.partition(".")
            place = torch.device("cpu") if key == _ON_THE_PROCESSOR else self._device
            self._optimizer_of(name).state[self._trained[name]][key] = torch.tensor(value, device=place)

    def _is_finite(self) -> bool:
        return all(bool(torch.isfinite(self._state[name]).all()) for name in self._manifest.names("param", "buffer"))

    def _run(self, data: LocalData, chosen: NDArray[np.int64]) -> float:
        if not self._optimizers:
            self._begin()
        features = self._net(self._preprocess(self._there(data.x[chosen])))
        given = {name: self._there(value) for name, value in self._given.items()}
        given |= {"y": self._there(data.y[chosen]), "sample_weight": torch.ones(len(chosen), device=self._device)}
        loss = self._objective(Scene.of(features, given, self._state), self._manifest.hyper)
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
        self._loss[...] = _array(loss)
        return float(self._loss)

    def _there(self, array: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _array(tensor: Tensor) -> NDArray[np.float32]:
    """A copy."""
    return tensor.detach().cpu().numpy().copy()


def _tensors(state: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of an optimizer's state. Plain SGD has None in place of a momentum."""
    return ((key, value) for key, value in state.items() if isinstance(value, Tensor))


def _state(bundle: Bundle, net: nn.Module, device: torch.device) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """All tensors of the step except the optimizer's, by name in the bundle, and the trained ones among them."""
    m = bundle.manifest
    own = {f"{_BACKBONE}{name}": tensor for name, tensor in net.state_dict(keep_vars=True).items()}
    state: dict[str, Tensor] = {}
    trained: dict[str, nn.Parameter] = {}
    for entry in m.state:
        if entry.role == "optimizer":
            continue
        tensor = own[entry.name] if entry.name in own else torch.zeros(entry.shape, device=device)
        if entry.role == "param":
            tensor = trained[entry.name] = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
        state[entry.name] = tensor
    return state, trained
