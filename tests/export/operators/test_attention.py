"""Attention is exported and trained: features and five steps of small transformers equal torch's."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from export_samples import make_device
from torch import nn

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.methods import method
from protofleet.export.backbones import vision
from protofleet.export.bundles.features import export_features
from protofleet.export.steps.step import Preprocess, plan_step
from protofleet.export.verify.verify import verify_features

SHAPE = (16, 16, 3)


class Attentive(nn.Module):
    """Patches, one block of `nn.MultiheadAttention`, and their mean; with a mask that hides the last patch from the
    first, and all patches from the second."""

    def __init__(self, masked: bool = False) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.first, self.second = nn.LayerNorm(8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        mask = torch.zeros(16, 16)
        mask[0, -1], mask[1, :] = -torch.inf, -torch.inf
        self.register_buffer("mask", mask if masked else None, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.patches(x).flatten(2).transpose(1, 2)
        h = self.first(z)
        z = z + self.attention(h, h, h, need_weights=False, attn_mask=self.mask)[0]
        return (z + self.mlp(self.second(z))).mean(1)


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    patches = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.encoder = patches, nn.TransformerEncoder(layer, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(self.patches(x).transpose(1, 2)).mean(1)

    return Net()


def _vit() -> nn.Module:
    models = vision.models()
    net = models.VisionTransformer(image_size=16, patch_size=8, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)
    net.heads = nn.Identity()
    return net


def _swin(version: int) -> nn.Module:
    module = vision.models().swin_transformer
    kinds = {} if version == 1 else {"block": module.SwinTransformerBlockV2, "downsample_layer": module.PatchMergingV2}
    net = module.SwinTransformer([2, 2], 8, [2, 1], [2, 2], [4, 4], **kinds)  # the second block's window is shifted
    net.head = nn.Identity()
    return net


NETS = {
    "multihead": lambda: (Attentive(), 8),
    "masked": lambda: (Attentive(masked=True), 8),
    "encoder": lambda: (_encoder(), 8),
    "vit": lambda: (_vit(), 8),
    "swin": lambda: (_swin(1), 16),
    "swin_v2": lambda: (_swin(2), 16),
}


def _net(name: str) -> tuple[nn.Module, int]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        net, width = NETS[name]()
        for p in net.parameters():  # a fresh ViT begins with zeros, and a frozen term of zeros would hide a wrong one
            nn.init.normal_(p, std=0.3)
    return net, width


@pytest.mark.parametrize("name", NETS)
def test_features_equal_torch(name: str):
    net, width = _net(name)
    preprocess = Preprocess((0.5,) * 3, (0.25,) * 3)
    plan = plan_step(net, method("ffc"), method("ffc").resolve({}), "none", 3, width)
    graph = export_features(net, preprocess, plan.state, SHAPE, unit=False)
    weights = {t.name: net.state_dict()[t.name.removeprefix("backbone.")].numpy() for t in plan.state}
    assert verify_features(graph, net, preprocess, weights, input_shape=SHAPE, unit=False).error < 1e-4


@pytest.mark.parametrize("name", NETS)
def test_five_steps_equal_torch(name: str):
    """Each from the same state as torch's in float64, the third on a padded batch; sums only differ in their order."""
    net, width = _net(name)
    device = make_device(net, width, "fedproto", SHAPE, 4)
    eager, single = device.eager(torch.float64), device.eager(torch.float32)
    rng, state = np.random.default_rng(0), dict(device.state)
    for step in range(5):
        images = device.images(rng, 3 if step == 2 else None)
        exact, torchs = eager.run(state, images, 0.05), single.run(state, images, 0.05)
        found = device.run(state, images, 0.05)
        for key, value in exact.items():
            scale = max(1.0, float(np.abs(value).max()))
            own = float(np.abs(torchs[key] - value).max())
            assert float(np.abs(found[key] - value).max()) <= max(20 * own, 1e-5 * scale), key
        state |= {key: found[key] for key in device.plan.updated}
    moved = [n for n in device.plan.names("param") if not np.array_equal(state[n], device.state[n])]
    assert set(device.plan.names("param")) == set(moved)


def test_no_weight_is_repeated_for_every_token():
    """Torch multiplies 197 rows of a ViT-B with 197 copies of one matrix: 17 GB where 86 million weights are 343 MB."""
    net, width = _net("vit")
    plan = plan_step(net, method("ffc"), method("ffc").resolve({}), "none", 3, width)
    graph = onnx.load_from_string(
        export_features(net, Preprocess((0.5,) * 3, (0.25,) * 3), plan.state, SHAPE, unit=False)
    )
    expanded = [node.input[0] for node in graph.graph.node if node.op_type == "Expand"]
    assert expanded == ["backbone.class_token"]


def test_a_class_token_follows_the_batch():
    """A constant row per image: the graph takes any number of images, one included."""
    net, width = _net("vit")
    plan = plan_step(net, method("ffc"), method("ffc").resolve({}), "none", 3, width)
    graph = export_features(net, Preprocess((0.5,) * 3, (0.25,) * 3), plan.state, SHAPE, unit=False)
    weights = {t.name: net.state_dict()[t.name.removeprefix("backbone.")].numpy() for t in plan.state}
    options = ort.SessionOptions()
    values = [ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(v)) for v in weights.values()]
    options.add_external_initializers(list(weights), values)
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    for count in (1, 2, 7):
        assert session.run(["z"], {"x": np.zeros((count, *SHAPE), np.uint8)})[0].shape == (count, width)
