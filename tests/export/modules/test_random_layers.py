"""Whatever a network leaves to chance while it trains is named, and off."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from protofleet.export.backbones.backbone import find_backbone
from protofleet.export.backbones.vision import models
from protofleet.export.modules.random_layers import chance_of, switch_off

Settings = namedtuple("Settings", ["width", "drop_connect_rate"])


class DropConnect(nn.Module):
    """As the EfficientNet packages write it: the rate lies in a named tuple, the block asks whether it trains."""

    def __init__(self) -> None:
        super().__init__()
        self._settings = Settings(8, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rate = self._settings.drop_connect_rate
        return x * (torch.rand(len(x), 1) > rate) if rate and self.training else x


class DropRate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, p=self.drop_rate, training=self.training)


class DropPath(nn.Module):
    """As timm calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_prob = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(len(x), 1) > self.drop_prob) if self.training else x


class SelfAttention(nn.Module):
    """As torch writes it: by a number that has no name of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(x, p=0.5, training=self.training)


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (nn.Dropout(0.5), ("Dropout",)),
        (DropConnect(), ("drop_connect_rate",)),
        (DropRate(), ("drop_rate",)),
        (DropPath(), ("DropPath",)),
        (SelfAttention(), ()),
        (nn.Dropout(0.0), ()),
        (nn.BatchNorm1d(8), ()),
    ],
)
def test_it_is_named_and_off(layer: nn.Module, names: tuple[str, ...]):
    net, x = nn.Sequential(layer).train(), torch.randn(64, 8)
    assert chance_of(net) == names
    if names:
        assert not torch.equal(net(x), net(x))
    switch_off(net)
    assert torch.equal(net(x), net(x))
    assert net.training


def test_torchvisions_stochastic_depth_is_named():
    assert chance_of(models().get_model("efficientnet_b0", weights=None)) == ("Dropout", "StochasticDepth")
    assert "Dropout" in chance_of(find_backbone("torchvision:mobilenet_v3_small", (32, 32, 3)).net)
