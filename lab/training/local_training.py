"""Eager training in torch: for the federations that average weights, and for the public pretraining of a backbone.

- The objective is that of `export/objectives/`. Samples come in the order of a device
  (`numpy.random.default_rng(seed).permutation`, once per epoch). So a client trained here and a device trained on
  ONNX Runtime follow the same path.
- Images stay uint8 until they are in a batch. Networks are laid out channels last, as the images are. This is faster
  on a CPU.
- A network lies on the device of `torch_device.py`. The values of a step go there, too: its batch, the guide, the class
  priors, the optimiser's moments. All results come back to the CPU: `floats`, `tensors`, `head_copy`, features, logits,
  losses.
- Some hyper-parameters exist only in the lab: the optimiser (`sgd`, `adam`), `halve_every` steps, and `clip_norm` of a
  step's gradients.
- An algorithm that changes its clients' gradients (FedProx, SCAFFOLD) passes a function that does it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from protofleet.contract.errors import DivergedError, StoreError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.heads.sphere import orthonormal_frame, uniform_prototypes
from protofleet.contract.methods import Value
from protofleet.contract.methods.optimizers import Update
from protofleet.edge_client.data import LocalData
from protofleet.export.modules.torch_cache import load_dynamo
from protofleet.export.objectives import Scene, find_objective
from protofleet.export.steps.optimizers import torch_optimizer
from protofleet.export.steps.step import Preprocess, quiet
from protofleet.lab.training.torch_device import torch_device

__all__ = ["EagerModel", "Fitted", "Guide", "LabHead", "save_weights", "train_eager"]

LabHead = Literal["local", "initial", "frozen", "normalised"]
_INFERENCE_BATCH = 256
_FEDNH_SCALE = 20.0


@dataclass(frozen=True, eq=False)
class Guide:
    """Values that the server sends beside weights, in the form of the objectives.

    Attributes:
        prototypes: (C, D) float32, FedPR's ȳ or FedHKD's H; rows whose mask is 0 are not read.
        mask: (C,) float32, 1 where a row exists.
        soft_predictions: (C, C) float32, FedHKD's Q, row j for class j; zeros for other methods.
    """

    prototypes: Tensor
    mask: Tensor
    soft_predictions: Tensor

    @classmethod
    def nothing(cls, classes: int, width: int) -> Guide:
        """The guide before the server has sent anything."""
        return cls(torch.zeros(classes, width), torch.zeros(classes), torch.zeros(classes, classes))

    def to(self, device: torch.device) -> Guide:
        """The guide on another device."""
        return Guide(self.prototypes.to(device), self.mask.to(device), self.soft_predictions.to(device))


@dataclass(frozen=True)
class Fitted:
    """The result of local training.

    Attributes:
        loss: mean over samples and epochs.
        steps: optimiser steps.
        pull: ‖a‖₁, by how many summed gradients, in units of the learning rate, the optimiser has moved the weights.
            It is FedNova's normaliser (Wang et al., NeurIPS 2020, section 3), and equals `steps` for plain SGD.
        lr: the learning rate of the first step.
    """

    loss: float
    steps: int
    pull: float
    lr: float


class EagerModel(nn.Module):
    """A backbone with its preprocessing and a head, on the device where torch computes.

    It is sent to other processes as CPU tensors, and lies on their device there.

    Args:
        backbone: (B, c, H, W) float32 → (B, D); moved in place.
        classes: C.
        features: D.
        head: `local`, a trained linear layer; `initial`, one that keeps its initial weights (FedBABU); `frozen`,
            orthonormal rows without a bias (SphereFed); `normalised`, spread unit prototypes that the server moves,
            with a trained scale (FedNH).
        seed: seed of the head.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        classes: int,
        features: int,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        head: str = "local",
        seed: int = 0,
    ) -> None:
        super().__init__()
        assert head in get_args(LabHead)
        self.mean, self.std = mean, std
        self.preprocess = Preprocess(mean, std)
        self.backbone = backbone.to(memory_format=torch.channels_last)
        self.head, self.head_bias, self.head_scale = head, None, None
        if head in ("frozen", "normalised"):
            spread = orthonormal_frame if head == "frozen" else uniform_prototypes
            frame = torch.from_numpy(spread(classes, features, seed)).to(torch.float32)
            self.register_buffer("head_weight", frame)  # (C, D)
            if head == "normalised":
                self.head_scale = nn.Parameter(torch.tensor(_FEDNH_SCALE))
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                linear = nn.Linear(features, classes)
            self.head_weight, self.head_bias = linear.weight, linear.bias
            linear.requires_grad_(head == "local")
        self.to(torch_device())

    def __getstate__(self) -> dict[str, Any]:
        if self.device.type == "cpu":
            return self.__dict__
        twin = object.__new__(type(self))
        twin.__dict__ = copy.deepcopy(self.__dict__)
        return twin.cpu().__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.to(torch_device())

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.head_weight.device

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, D) of uint8 images (B, H, W, c)."""
        return self.backbone(self.preprocess(x))

    def features(self, x: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features (N, D) in inference mode."""
        self.eval()
        with torch.inference_mode():
            blocks = torch.from_numpy(x).split(_INFERENCE_BATCH)
            return np.concatenate([self(block.to(self.device)).cpu().numpy() for block in blocks])

    def logits(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """The head's outputs (N, C) for features (N, D), before any scale."""
        z = features
        if self.head in ("frozen", "normalised"):
            z = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
        logits = z @ self.head_weight.detach().cpu().numpy().T  # (N, C)
        return logits if self.head_bias is None else logits + self.head_bias.detach().cpu().numpy()

    def predict(self, x: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The head's answers (N,)."""
        return np.asarray(self.logits(self.features(x)).argmax(axis=1), dtype=np.int64)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of `state_dict`, on the CPU.

        Where the network lies on the CPU these are its own tensors, which training changes. Otherwise they are copies.
        """
        return {name: tensor.detach().cpu() for name, tensor in self.state_dict().items()}

    def floats(self) -> dict[str, Tensor]:
        """The tensors that FedAvg sends: every parameter and floating-point buffer.

        The preprocessing's tensors are left out, and so is a head that is not trained.
        """
        fixed = {"head_weight", "head_bias"} if self.head != "local" else set()
        return {
            name: tensor for name, tensor in self.tensors().items() if tensor.is_floating_point() and name not in fixed
        }

    def head_copy(self) -> tuple[Tensor, Tensor | None]:
        """Copies of the head's weight (C, D) and bias (C,) on the CPU."""
        weight, bias = self.head_weight.detach().to("cpu", copy=True), self.head_bias
        return weight, None if bias is None else bias.detach().to("cpu", copy=True)


# arguments: the terms of one training, by name
def train_eager(
    model: EagerModel,
    data: LocalData,
    objective: str,
    hyper: Mapping[str, Value],
    *,
    epochs: int,
    batch: int,
    lr: float,
    seed: int,
    guide: Guide | None = None,
    correct: Callable[[Mapping[str, Tensor]], None] | None = None,
    on_epoch: Callable[[int, float], None] | None = None,
) -> Fitted:
    """Train a model in place.

    Args:
        objective: a name from `export/objectives/`, or `fednh`.
        hyper: the method's resolved hyper-parameters: the objective's, `momentum`, `weight_decay`, and optionally
            `optimizer` and `halve_every`.
        guide: global prototypes or hyper-knowledge. Without it their terms add nothing.
        correct: changes each step's gradients in place, given the trained parameters by name. All its tensors lie on
            the model's device.
        data: at least one sample. Samples without a label are left out, unless `pu_weight` gives their weight.
        on_epoch: called with the epoch, from 1, and its mean loss.

    Raises:
        MethodError: the loss is no longer a finite number.
    """
    quiet(model)
    data = data if hyper.get("pu_weight") else data.labelled
    stepper = _Stepper(model, data, objective, hyper, lr, guide, correct)
    rng, total = np.random.default_rng(seed), 0.0
    for epoch in range(1, epochs + 1):
        shuffled, sums = rng.permutation(len(data)), 0.0
        for start in range(0, len(data), batch):
            chosen = shuffled[start : start + batch]
            sums += stepper.step(torch.from_numpy(data.x[chosen]), torch.from_numpy(data.y[chosen])) * len(chosen)
        if not np.isfinite(sums):
            raise DivergedError("training diverged", expected="a finite loss", got=sums, hint="a smaller lr")
        total += sums
        if on_epoch is not None:
            on_epoch(epoch, sums / len(data))
    return Fitted(total / (epochs * len(data)), stepper.steps, stepper.pull, lr)


def save_weights(model: EagerModel, path: Path) -> None:
    """The backbone's weights as safetensors, under the names that `protofleet export --weights` takes.

    Raises:
        StoreError: the file cannot be written.
    """
    encoded = save({name: tensor.detach().cpu().contiguous() for name, tensor in model.backbone.state_dict().items()})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(encoded)
    except OSError as error:
        raise StoreError(
            f"--save-weights {path}", expected="a file that can be written", got=error.strerror, hint="another path"
        ) from None


def _loss(
    model: EagerModel,
    objective: str,
    x: Tensor,
    y: Tensor,
    guide: Guide,
    priors: Tensor,
    hyper: Mapping[str, Value],
) -> Tensor:
    """The objective's value for a batch: the one place where the lab calls `export/objectives/`."""
    features = model(x)
    if objective == "fednh":
        unit = nn.functional.normalize(features, dim=1)
        return nn.functional.cross_entropy(model.head_scale * (unit @ model.head_weight.T), y)
    scene = Scene(
        features=features,
        y=y,
        sample_weight=torch.ones(len(y), device=y.device),
        head_weight=model.head_weight,
        head_bias=model.head_bias,
        prototypes=guide.prototypes,
        prototype_mask=guide.mask,
        given={"soft_predictions": guide.soft_predictions, "class_priors": priors},
    )
    return find_objective(objective)(scene, hyper)


class _Stepper:
    """One client's optimiser, with its counts for `Fitted`."""

    def __init__(
        self,
        model: EagerModel,
        data: LocalData,
        objective: str,
        hyper: Mapping[str, Value],
        lr: float,
        guide: Guide | None,
        correct: Callable[[Mapping[str, Tensor]], None] | None,
    ) -> None:
        self.model, self.objective, self.hyper = model, objective, hyper
        self.guide = (guide or Guide.nothing(*model.head_weight.shape)).to(model.device)
        counts = torch.from_numpy(data.counts(len(model.head_weight))).to(torch.float32)
        self.priors = (counts / counts.sum().clamp(min=1.0)).to(model.device)  # (C,) among the labelled
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.correct = correct
        self.optimizer, self.momentum = _optimizer(list(self.trained.values()), hyper, lr)
        self.halve_every, self.clip_norm = int(hyper.get("halve_every", 0)), float(hyper.get("clip_norm", 0.0))
        self.steps, self.pull, self._running, self._rate = 0, 0.0, 0.0, 1.0

    def step(self, x: Tensor, y: Tensor) -> float:
        """Do one step on a batch from the CPU; returns its loss, without the correction's term."""
        x, y = x.to(self.model.device), y.to(self.model.device)
        loss = _loss(self.model, self.objective, x, y, self.guide, self.priors, self.hyper)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if self.correct is not None:
            self.correct(self.trained)
        if self.clip_norm:
            nn.utils.clip_grad_norm_(self.trained.values(), self.clip_norm)
        self.optimizer.step()
        self._count()
        return float(loss.detach())

    def _count(self) -> None:
        """The gradient of step j moves the weights by Σ_{k ≥ j} lr_k·ρ^{k−j}; `pull` sums that over j, over lr_1."""
        self._running = self.momentum * self._running + 1.0
        self.pull += self._rate * self._running
        self.steps += 1
        if self.halve_every and self.steps % self.halve_every == 0:
            self._rate /= 2.0
            for group in self.optimizer.param_groups:
                group["lr"] /= 2.0


def _optimizer(trained: list[Tensor], hyper: Mapping[str, Value], lr: float) -> tuple[torch.optim.Optimizer, float]:
    """The optimiser and the momentum that FedNova must correct for (Adam's steps count as they are)."""
    load_dynamo()
    move = Update.of(hyper)
    return torch_optimizer(trained, move, lr), move.momentum
