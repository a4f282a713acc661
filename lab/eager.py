"""Training in torch, eagerly: for the lab's baselines and for the public pretraining of a backbone.

The objective is the one of `export/objectives.py`, the step is plain `torch.optim.SGD`, and samples come in the order
that a device would take them (`numpy.random.default_rng(seed).permutation`, once per epoch), so that one client
trained here and one device trained on ONNX Runtime follow the same path. Images stay uint8 until they are a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor, nn

from contract.errors import MethodError
from contract.methods import Value
from contract.sphere import orthonormal_frame
from edge_client.data import LocalData
from export.objectives import OBJECTIVES
from export.step import Preprocess, quiet

__all__ = ["EagerModel", "save_weights", "train_eager"]

_INFERENCE_BATCH = 256


class EagerModel(nn.Module):
    """A backbone with its preprocessing and a head.

    Args:
        backbone: (B, c, H, W) float32 → (B, D).
        classes: C.
        features: D.
        head: `local`, a linear layer that is trained, or `frozen`, orthonormal rows without a bias.
        seed: of the head.
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
        self.mean, self.std = mean, std
        self.preprocess = Preprocess(mean, std)
        self.backbone = backbone
        if head == "frozen":
            frame = torch.from_numpy(orthonormal_frame(classes, features, seed)).to(torch.float32)
            self.register_buffer("head_weight", frame)  # (C, D)
            self.head_bias = None
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                linear = nn.Linear(features, classes)
            self.head_weight, self.head_bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, D) of uint8 images (B, H, W, c)."""
        return self.backbone(self.preprocess(x))

    def features(self, x: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Features (N, D) in inference mode."""
        self.eval()
        with torch.inference_mode():
            blocks = torch.from_numpy(x).split(_INFERENCE_BATCH)
            return np.concatenate([self(block).numpy() for block in blocks])

    def predict(self, x: NDArray[np.uint8]) -> NDArray[np.int64]:
        """The head's answers (N,). The norm of a feature changes nothing where the head has no bias."""
        logits = self.features(x) @ self.head_weight.detach().numpy().T  # (N, C)
        if self.head_bias is not None:
            logits = logits + self.head_bias.detach().numpy()
        return np.asarray(logits.argmax(axis=1), dtype=np.int64)

    def floats(self) -> dict[str, Tensor]:
        """What FedAvg sends: every parameter and floating-point buffer but the preprocessing's and a frozen head."""
        return {
            name: tensor.detach()
            for name, tensor in self.state_dict().items()
            if tensor.is_floating_point() and not (name == "head_weight" and self.head_bias is None)
        }


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
    on_epoch: Callable[[int, float], None] | None = None,
) -> float:
    """Train in place without prototypes; returns the mean loss over samples and epochs.

    Args:
        hyper: the method's settled hyper-parameters; momentum and weight decay are taken from it.
        on_epoch: called with the epoch, from 1, and its mean loss.

    Raises:
        MethodError: when the loss is no longer a finite number.
    """
    quiet(model)
    step = _step(model, objective, hyper, lr)
    rng, total = np.random.default_rng(seed), 0.0
    for epoch in range(1, epochs + 1):
        shuffled, sums = rng.permutation(len(data)), 0.0
        for start in range(0, len(data), batch):
            chosen = shuffled[start : start + batch]
            sums += step(torch.from_numpy(data.x[chosen]), torch.from_numpy(data.y[chosen])) * len(chosen)
        if not np.isfinite(sums):
            raise MethodError("training diverged", expected="a finite loss", got=sums, hint="a smaller lr")
        total += sums
        if on_epoch is not None:
            on_epoch(epoch, sums / len(data))
    return total / (epochs * len(data))


def save_weights(model: EagerModel, path: Path) -> None:
    """The backbone's weights as safetensors, under the names that `protofleet export --weights` takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().contiguous() for name, tensor in model.backbone.state_dict().items()}, path)


def _step(
    model: EagerModel, objective: str, hyper: Mapping[str, Value], lr: float
) -> Callable[[Tensor, Tensor], float]:
    minimise = OBJECTIVES[objective]
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad],
        lr=lr,
        momentum=float(hyper["momentum"]),
        weight_decay=float(hyper["weight_decay"]),
    )
    no_prototypes, mask = torch.zeros_like(model.head_weight), torch.zeros(len(model.head_weight))

    def step(x: Tensor, y: Tensor) -> float:
        weight = torch.ones(len(y))
        loss = minimise(model(x), model.head_weight, model.head_bias, y, weight, no_prototypes, mask, hyper)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step
