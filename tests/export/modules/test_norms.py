"""Batch normalisation over the real samples against plain BatchNorm on the real samples alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from export_samples import make_device
from torch import nn

from protofleet.contract.errors import ExportError
from protofleet.export.modules.norms import BatchContext, RealBatchNorm, to_group_norm, to_real_batch_norm
from protofleet.export.verify.verify import verify_step


def _pair(norm: nn.Module, real: torch.Tensor) -> tuple[RealBatchNorm, BatchContext]:
    context = BatchContext()
    context.real = real
    return RealBatchNorm(norm, "bn", context), context


def _dressed(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        norm.weight.uniform_(0.5, 1.5)
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 1.5)
    return norm.double()


@pytest.mark.parametrize(
    ("shape", "real"), [((5, 3, 4, 2), 1), ((5, 3, 4, 2), 3), ((5, 3, 4, 2), 5), ((5, 3), 2), ((5, 3), 5)]
)
def test_padded_equals_plain_on_the_real_samples(shape: tuple[int, ...], real: int):
    torch.manual_seed(0)
    norm = _dressed((nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)(3))
    weight = (torch.arange(5) < real).double()
    ours, context = _pair(norm, weight)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    target = torch.randn(real, *shape[1:], dtype=torch.float64)
    got = torch.autograd.grad((ours(x)[:real] * target).sum(), (x, norm.weight, norm.bias))
    plain = norm.train()
    before = plain.running_mean.clone()
    running = context.new_running()  # before the plain layer moves the buffers they share
    y = plain(x[:real])
    want = torch.autograd.grad((y * target).sum(), (x, norm.weight, norm.bias))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert not torch.equal(before, plain.running_mean)
    torch.testing.assert_close(running["bn.running_mean"], plain.running_mean)
    torch.testing.assert_close(running["bn.running_var"], plain.running_var)


def test_only_padding_leaves_the_running_statistics():
    norm = _dressed(nn.BatchNorm2d(3))
    ours, context = _pair(norm, torch.zeros(4, dtype=torch.float64))
    y = ours(torch.randn(4, 3, 2, 2, dtype=torch.float64))
    assert torch.isfinite(y).all()
    assert torch.equal(context.new_running()["bn.running_mean"], norm.running_mean)
    assert torch.equal(context.new_running()["bn.running_var"], norm.running_var)


@pytest.mark.parametrize(
    "norm",
    [nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False), nn.BatchNorm2d(3, momentum=None)],
)
def test_unusual_batch_norms_are_refused(norm: nn.Module):
    with pytest.raises(ExportError, match=r"batch normalisation 0, expected affine=True.*try --norm group"):
        to_real_batch_norm(nn.Sequential(norm), BatchContext(), "")


def test_group_norm_takes_the_place_of_batch_norm():
    net = to_group_norm(nn.Sequential(nn.BatchNorm2d(24), nn.Sequential(nn.BatchNorm2d(10), nn.BatchNorm2d(7))), 8)
    assert [m.num_groups for m in net.modules() if isinstance(m, nn.GroupNorm)] == [8, 5, 7]


class _Functional(nn.Module):
    """A backbone that normalises over the batch by hand: the exporter's silent trap."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.batch_norm(self.conv(x), self.mean, self.var, training=self.training)
        return y.mean((2, 3))


def test_training_batch_norm_outside_a_module_is_refused():
    with pytest.raises(ExportError, match="batch normalisation outside a BatchNorm module"):
        make_device(_Functional(), 4, "fedproto", (8, 8, 1), 3)


class _Mixed(nn.Module):
    """BatchNorm1d on features, dropout, an unused parameter, a frozen one and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.linear = nn.Linear(4 * 36, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.unused = nn.Parameter(torch.ones(3))
        self.fixed = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.register_buffer("shift", torch.linspace(0, 1, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.linear(F.relu(self.conv(x), inplace=True).flatten(1))
        return self.drop(self.norm(z)) * self.fixed + self.shift


def test_roles_of_an_unusual_backbone():
    torch.manual_seed(0)
    dev = make_device(_Mixed(), 6, "fedproto", (8, 8, 1), 5)
    roles = {t.name: t.role for t in dev.plan.state}
    assert roles["backbone.fixed"] == roles["backbone.shift"] == "frozen"
    assert roles["backbone.norm.running_var"] == "buffer"
    assert roles["backbone.unused"] == "param"
    assert roles["momentum.backbone.unused"] == "optimizer"
    assert not any("num_batches_tracked" in name for name in roles)
    verify_step(dev.graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=5, input_shape=(8, 8, 1))
