"""Networks of torchvision's own blocks, but few of them: every kind of layer of a family, in a fraction of its time.

Each is a callable without arguments, so that `--backbone short_networks:resnet` takes it as a user's own network.
"""

from __future__ import annotations

from functools import partial

from torch import nn

from protofleet.export.backbones import vision

vision.make_importable()

from torchvision.models.efficientnet import EfficientNet, MBConvConfig  # noqa: E402
from torchvision.models.mobilenetv2 import MobileNetV2  # noqa: E402
from torchvision.models.mobilenetv3 import InvertedResidualConfig, MobileNetV3  # noqa: E402
from torchvision.models.resnet import BasicBlock, ResNet  # noqa: E402


def resnet() -> nn.Module:
    """The first two stages of ResNet-18 with one block each: a plain residual block and a strided one."""
    net = ResNet(BasicBlock, [1, 1, 1, 1])
    net.layer3, net.layer4, net.fc = nn.Identity(), nn.Identity(), nn.Identity()
    return net


def mobilenet_v2() -> nn.Module:
    """Depthwise blocks with and without expansion, stride and residual; ReLU6."""
    net = MobileNetV2(inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]], width_mult=0.5)
    net.classifier = nn.Identity()
    return net


def mobilenet_v3() -> nn.Module:
    """Blocks with and without squeeze-and-excite, with ReLU and hard swish."""
    block = partial(InvertedResidualConfig, dilation=1, width_mult=1.0)
    blocks = [
        block(16, 3, 16, 16, True, "RE", 2),
        block(16, 3, 48, 24, False, "RE", 2),
        block(24, 5, 96, 24, True, "HS", 1),
    ]
    net = MobileNetV3(blocks, last_channel=64)
    net.classifier = nn.Identity()
    return net


def efficientnet() -> nn.Module:
    """Blocks with SiLU, squeeze-and-excite, two kernels, and a residual that stochastic depth would drop."""
    block = partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
    blocks = [block(1, 3, 1, 32, 16, 1), block(6, 3, 2, 16, 24, 2), block(6, 5, 2, 24, 32, 1)]
    net = EfficientNet(blocks, dropout=0.2, stochastic_depth_prob=0.2)
    net.classifier = nn.Identity()
    return net


def one_pixel() -> nn.Module:
    """Twenty layers of batch normalisation over planes of one pixel, as a deep network has at the end."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), *(nn.BatchNorm2d(3) for _ in range(20)), nn.Flatten())
