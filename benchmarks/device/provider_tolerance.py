"""How far features are from float64 in float32, and with inputs and weights of each product rounded as a GPU may round
them: TF32 (10 bits of mantissa), half precision, bfloat16.

    python -m benchmarks.device.provider_tolerance [BACKBONE@SIDE ...]

The tolerance of a bundle's test vectors (decision 110) is to lie between the first column and the others. Networks as
they are initialised, in inference mode; images of patches under noise; the largest distance of an image's features,
relative to their length.
"""

from __future__ import annotations

import copy
import sys

import torch
from torch import Tensor, nn

from protofleet.contract.bundle.test_vectors import probe_images
from protofleet.export.backbones.backbone import find_backbone

_KEPT_BITS = {"TF32": 10, "bfloat16": 7}


def rounded(value: Tensor, kind: str) -> Tensor:
    """Float32 numbers as the format has them, in float32."""
    if kind == "float16":
        return value.half().float()
    dropped = 23 - _KEPT_BITS[kind]
    bits = value.contiguous().view(torch.int32)
    return ((bits + (1 << (dropped - 1))) & ~((1 << dropped) - 1)).view(torch.float32)


def features(net: nn.Module, x: Tensor, kind: str | None) -> Tensor:
    """(N, D), with every convolution's and matrix product's operands rounded where a kind is given."""
    if kind is None:
        return net(x)
    hooks, kept = [], {}
    for module in net.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            kept[module] = module.weight.data
            module.weight.data = rounded(module.weight.data, kind)
            hooks.append(module.register_forward_pre_hook(lambda _, given: (rounded(given[0], kind),)))
    z = net(x)
    for hook in hooks:
        hook.remove()
    for module, weight in kept.items():
        module.weight.data = weight
    return z


def main() -> None:
    named = sys.argv[1:] or ["small_cnn@28", "resnet18@64", "torchvision:mobilenet_v2@96"]
    print(f"{'network, side':<34} {'float32':>9} {'TF32':>9} {'float16':>9} {'bfloat16':>9}")
    for name, _, side in (each.partition("@") for each in named):
        net = find_backbone(name, (int(side), int(side), 3), None, seed=0, weights=None).net.eval()
        x = torch.from_numpy(probe_images((int(side), int(side), 3), 4)).permute(0, 3, 1, 2).float() / 127.5 - 1
        with torch.no_grad():
            exact = copy.deepcopy(net).double()(x.double())
            apart = [(features(net, x, kind).double() - exact) for kind in (None, "TF32", "float16", "bfloat16")]
        worst = [float((each.norm(dim=1) / exact.norm(dim=1)).max()) for each in apart]
        print(f"{name + ', ' + side:<34} " + " ".join(f"{value:9.1e}" for value in worst))


if __name__ == "__main__":
    main()
