"""Batch normalisation for padded batches: the statistics of the real samples only.

A device pads its last batch so that shapes stay fixed, and gives padding the weight 0. Plain BatchNorm would count the
padding in its mean and variance. `RealBatchNorm` replaces it in the traced training step:

1. It reads from the step's `BatchContext` which samples are real.
2. It hands the new running statistics back through the same context.

Guarantee: a padded step equals a plain torch step on the partial batch alone, running statistics with their n/(n − 1)
included.

Its arithmetic is one operator of Protofleet's own, `protofleet::batch_norm`, and its gradient, `…_backward`. This keeps
the trace small. It also avoids `aten.native_batch_norm`, whose training mode torch's ONNX exporter silently translates
as inference (docs/decisions/010). `export/operators/norm.py` translates both to ONNX.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from protofleet.contract.errors import ExportError

__all__ = [
    "BatchContext",
    "BatchStatistics",
    "FrozenBatchNorm",
    "RealBatchNorm",
    "allow_one_value",
    "packed",
    "to_frozen_batch_norm",
    "to_group_norm",
    "to_real_batch_norm",
    "unpacked",
]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


class BatchContext:
    """What the normalisation layers of one traced step share.

    Attributes:
        real: (B,) float32, 1 for a real sample, 0 for padding.
        seen: the statistics of each layer's forward pass.
    """

    def __init__(self) -> None:
        self.real: Tensor | None = None
        self.seen: list[BatchStatistics] = []

    def new_running(self) -> dict[str, Tensor]:
        """The new running statistics by state-tensor name; all layers of one plane size are updated as one."""
        groups: dict[tuple[float, int], list[BatchStatistics]] = {}
        for layer in self.seen:
            groups.setdefault((layer.momentum, layer.positions), []).append(layer)
        running: dict[str, Tensor] = {}
        for (momentum, positions), layers in groups.items():
            samples = self.real.sum()
            count = samples * positions
            bessel = count / torch.clamp(count - 1.0, min=1.0)
            rate = momentum * torch.clamp(samples, max=1.0)  # no real sample: nothing moves
            shapes = [layer.mean.shape for layer in layers]
            for kind, factor in (("mean", 1.0), ("var", bessel)):
                old = packed([getattr(layer, f"running_{kind}") for layer in layers])
                batch_values = packed([getattr(layer, kind) for layer in layers])
                names = [f"{layer.name}.running_{kind}" for layer in layers]
                running.update(zip(names, unpacked(old + rate * (batch_values * factor - old), shapes), strict=True))
        return running


@dataclass(frozen=True)
class BatchStatistics:
    """One layer's batch statistics (C,), biased variance, beside the running ones it should move."""

    name: str
    momentum: float
    positions: int
    mean: Tensor
    var: Tensor
    running_mean: Tensor
    running_var: Tensor


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """All of them end to end, 1-D; a single one keeps its shape."""
    return tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])


def unpacked(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The inverse of `packed`."""
    if len(shapes) == 1:
        return [flat]
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class RealBatchNorm(nn.Module):
    """BatchNorm in training mode over the real samples; parameters and buffers are named as torch names them."""

    def __init__(self, source: nn.Module, name: str, context: BatchContext) -> None:
        super().__init__()
        if not source.affine or not source.track_running_stats or source.momentum is None:
            raise ExportError(
                f"batch normalisation {name}",
                expected="affine=True, track_running_stats=True and a momentum",
                got=repr(source),
                hint="--norm group",
            )
        self.weight, self.bias = source.weight, source.bias
        self.register_buffer("running_mean", source.running_mean)
        self.register_buffer("running_var", source.running_var)
        self._name, self._context = name, context
        self._momentum, self._eps = float(source.momentum), float(source.eps)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) or (B, C) → the same shape."""
        real = self._context.real
        if real is None:
            raise RuntimeError("RealBatchNorm runs inside a training step")
        y, mean, variance = _BatchNorm.apply(x, self.weight, self.bias, real, self._eps)
        statistics = (mean.detach(), variance.detach(), self.running_mean, self.running_var)
        self._context.seen.append(BatchStatistics(self._name, self._momentum, x.shape[2:].numel(), *statistics))
        return y


def to_real_batch_norm(net: nn.Module, context: BatchContext, prefix: str) -> nn.Module:
    """Replace every BatchNorm of `net`, in place; `prefix` goes before their names."""
    for name, module in list(net.named_modules()):
        if isinstance(module, _BATCH_NORMS):
            _replace(net, name, RealBatchNorm(module, f"{prefix}{name}", context))
    return net


class FrozenBatchNorm(nn.Module):
    """BatchNorm that takes its running statistics and leaves them as they are; its gradients have a translation."""

    def __init__(self, source: nn.Module) -> None:
        super().__init__()
        self.weight, self.bias = source.weight, source.bias
        for name in ("running_mean", "running_var"):
            self.register_buffer(name, getattr(source, name))
        self._eps = float(source.eps)

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) or (B, C) → the same shape."""
        scale = torch.rsqrt(self.running_var + self._eps)
        scale = scale if self.weight is None else self.weight * scale
        y = (x - _by_channel(self.running_mean, x)) * _by_channel(scale, x)
        return y if self.bias is None else y + _by_channel(self.bias, x)


def to_frozen_batch_norm(net: nn.Module, read: Collection[str]) -> nn.Module:
    """Replace, in place, every BatchNorm of `net` whose running mean is among the names `read`."""
    for name, module in list(net.named_modules()):
        if isinstance(module, _BATCH_NORMS) and f"{name}.running_mean" in read:
            _replace(net, name, FrozenBatchNorm(module))
    return net


class _OneValue:
    """BatchNorm that also takes one value per channel: a last batch of one sample whose plane is one pixel.

    Torch refuses it. A device does not: the value is its own mean, and its variance is 0. Here torch gets the same
    value twice, which has the same mean and variance.
    """

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) or (B, C) → the same shape."""
        if not self.training or x.numel() != x.shape[1]:  # type: ignore[attr-defined]
            return super().forward(x)  # type: ignore[misc]
        return super().forward(torch.cat([x, x]))[:1]  # type: ignore[misc]


class _BatchNorm1d(_OneValue, nn.BatchNorm1d):
    pass


class _BatchNorm2d(_OneValue, nn.BatchNorm2d):
    pass


_TAKES_ONE_VALUE = {nn.BatchNorm1d: _BatchNorm1d, nn.BatchNorm2d: _BatchNorm2d}


def allow_one_value(net: nn.Module) -> nn.Module:
    """Let every BatchNorm of `net` train on one value per channel, as a device does, in place."""
    for module in net.modules():
        module.__class__ = _TAKES_ONE_VALUE.get(type(module), type(module))
    return net


def to_group_norm(net: nn.Module, groups: int = 32) -> nn.Module:
    """Replace every BatchNorm2d of `net`, in place, by a GroupNorm of at most `groups` equal groups."""
    for name, module in list(net.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            channels = module.num_features
            count = max(n for n in range(1, min(groups, channels) + 1) if channels % n == 0)
            _replace(net, name, nn.GroupNorm(count, channels, eps=module.eps))
    return net


def _replace(net: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(net.get_submodule(parent), leaf, module)


def _by_channel(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(1, -1, *[1] * (x.dim() - 2))


def _by_sample(vector: Tensor, x: Tensor) -> Tensor:
    return vector.view(-1, *[1] * (x.dim() - 1))


def _reduced(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y like x; mean (C,) and biased variance (C,) over the real samples."""
    shares = _by_sample(real, x) / torch.clamp(real.sum() * x.shape[2:].numel(), min=1.0)
    mean = (x * shares).sum(_reduced(x))
    centred = x - _by_channel(mean, x)
    variance = (centred * centred * shares).sum(_reduced(x))
    y = centred * _by_channel(weight * torch.rsqrt(variance + eps), x) + _by_channel(bias, x)
    return y, mean, variance


def _batch_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor, mean: Tensor, variance: Tensor, real: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias. With x̂ = (x − mean)·r, n real values per channel and padded rows of `grad`
    zero: ∂x = w·r·(g − Σg/n − x̂·Σ(g·x̂)/n) on real samples, 0 on padding."""
    scale = torch.rsqrt(variance + eps)
    shares = _by_sample(real, x) / torch.clamp(real.sum() * x.shape[2:].numel(), min=1.0)
    normal = (x - _by_channel(mean, x)) * _by_channel(scale, x)
    grad_bias = grad.sum(_reduced(x))
    grad_weight = (grad * normal).sum(_reduced(x))
    pull = _by_channel(grad_bias, x) + normal * _by_channel(grad_weight, x)
    return _by_channel(weight * scale, x) * (grad - pull * shares), grad_weight, grad_bias


def _shapes(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)


# Defined without an autograd kernel of their own, so that `torch.func` transforms see through to `_BatchNorm` below.
_library = torch.library.Library("protofleet", "FRAGMENT")
_library.define("batch_norm(Tensor x, Tensor weight, Tensor bias, Tensor real, float eps) -> (Tensor, Tensor, Tensor)")
_library.define(
    "batch_norm_backward(Tensor grad, Tensor x, Tensor weight, Tensor mean, Tensor variance, Tensor real, float eps)"
    " -> (Tensor, Tensor, Tensor)"
)
_library.impl("batch_norm", _batch_norm, "CompositeExplicitAutograd")
_library.impl("batch_norm_backward", _batch_norm_backward, "CompositeExplicitAutograd")
torch.library.register_fake("protofleet::batch_norm", lambda x, weight, *_: _shapes(x, weight))
torch.library.register_fake("protofleet::batch_norm_backward", lambda grad, x, weight, *_: _shapes(x, weight))


class _BatchNorm(torch.autograd.Function):
    """Ties the two operators together; mean and variance carry no gradient of their own."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, real: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.protofleet.batch_norm(x, weight, bias, real, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, real, eps = inputs
        ctx.mark_non_differentiable(output[1], output[2])
        ctx.save_for_backward(x, weight, output[1], output[2], real)
        ctx.eps = eps

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Any, ...]:
        x, weight, mean, variance, real = ctx.saved_tensors
        grads = torch.ops.protofleet.batch_norm_backward(grad, x, weight, mean, variance, real, ctx.eps)
        return (*grads, None, None)
