"""The named backbones have the papers' shapes, and a user's own is taken or refused with a reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from protofleet.contract.errors import ExportError, UsageError
from protofleet.export.backbones.backbone import (
    BACKBONES,
    IMAGENET_MEAN,
    build_backbone,
    default_statistics,
    find_backbone,
)
from protofleet.export.steps.step import quiet

# features (D) and parameters of the backbone alone, with the papers' or torchvision's own input
WIDTHS = {
    "small_cnn": ((28, 28, 1), 128, None),
    "fedproto_mnist": ((28, 28, 1), 50, 10 * 26 + 20 * 251 + 321 * 50),
    "fedproto_mnist_18": ((28, 28, 1), 50, 10 * 26 + 18 * 251 + (18 * 16 + 1) * 50),
    "fedproto_mnist_22": ((28, 28, 1), 50, 10 * 26 + 22 * 251 + (22 * 16 + 1) * 50),
    "fedhp_mnist": ((28, 28, 1), 1024, 582_026 - (1024 + 1) * 512 - 513 * 10),
    "fedhp_cifar": ((32, 32, 3), 1600, 725_952 - (1600 + 1) * 384 - 384 * 10),
    "fedhp_mnist_512": ((28, 28, 1), 512, 582_026 - 513 * 10),
    "fedhp_cifar_384": ((32, 32, 3), 384, 725_952 - 384 * 10),
    "spherefed_convnet": ((32, 32, 3), 1024, None),
    "mobilenet_v2": ((32, 32, 3), 1280, 2_223_872),
    "mobilenet_v3_small": ((32, 32, 3), 576, None),
    "resnet18": ((32, 32, 3), 512, 11_176_512),
    "vgg13": ((32, 32, 3), 512, None),
    "efficientnet_b0": ((32, 32, 3), 1280, None),
    "squeezenet1_1": ((32, 32, 3), 512, None),
}


def test_every_backbone_is_checked():
    assert set(WIDTHS) == set(BACKBONES)


@pytest.mark.parametrize("name", BACKBONES)
def test_width_and_parameters(name: str):
    shape, width, parameters = WIDTHS[name]
    net, found = build_backbone(name, shape)
    assert found == width
    if parameters is not None:
        assert sum(p.numel() for p in net.parameters()) == parameters


@pytest.mark.parametrize("name", ["small_cnn", "mobilenet_v3_small"])
def test_seed_fixes_the_weights_and_leaves_torch_alone(name: str):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second, third = (build_backbone(name, (32, 32, 3), seed=s)[0].state_dict() for s in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[k], second[k]) for k in first)
    assert any(not torch.equal(first[k], third[k]) for k in first)


@pytest.mark.parametrize("name", ["small_cnn", "spherefed_convnet", "resnet18", "vgg13", "mobilenet_v2"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_norm_is_a_choice(name: str, norm: str):
    net, _ = build_backbone(name, (32, 32, 3), norm)  # type: ignore[arg-type]
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    present = {k for k, kind in kinds.items() if any(isinstance(m, kind) for m in net.modules())}
    assert present == {norm}


def test_grey_images_get_a_grey_stem():
    net, width = build_backbone("resnet18", (32, 32, 1))
    assert net.conv1.in_channels == 1
    assert width == 512


def test_chance_is_off_while_training():
    net = quiet(build_backbone("efficientnet_b0", (32, 32, 3))[0])
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(net(x), net(x))
    assert any(m.training for m in net.modules() if isinstance(m, nn.BatchNorm2d))


def test_default_statistics():
    assert default_statistics("resnet18", 3)[0] == IMAGENET_MEAN
    assert default_statistics("resnet18", 1) == ((0.5,), (0.5,))
    assert default_statistics("small_cnn", 3) == ((0.5,) * 3, (0.5,) * 3)


OWN = """
import torch
from torch import nn
def good():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
def image(): return nn.Conv2d(3, 4, 3)
def pair():
    class Two(nn.Module):
        def forward(self, x): return x.flatten(1), x
    return Two()
def number(): return 7
def hungry(width): return nn.Flatten()
def broken(): return {}["weights"]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_nets_for_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return "my_nets_for_test"


def test_a_users_own_backbone_is_found_in_the_working_directory(own):
    assert build_backbone(f"{own}:good", (8, 8, 3))[1] == 4


@pytest.mark.parametrize(
    ("attribute", "message"),
    [
        ("absent", "cannot be imported"),
        ("image", r"expected features \(B, D\), got \(2, 4, 6, 6\), try ending it with nn.Flatten"),
        ("pair", r"expected features \(B, D\), got tuple"),
        ("number", "returns an nn.Module, got int"),
        ("hungry", "callable without arguments, got TypeError"),
        ("broken", "cannot be imported and called.* got KeyError: 'weights'"),
    ],
)
def test_a_users_own_backbone_is_refused_with_a_reason(own, attribute, message):
    with pytest.raises(ExportError, match=message):
        build_backbone(f"{own}:{attribute}", (8, 8, 3))


def test_an_absent_module_is_refused():
    with pytest.raises(ExportError, match="No module named 'surely_absent'"):
        build_backbone("surely_absent:net", (8, 8, 3))


def test_an_unknown_name_names_its_neighbours():
    with pytest.raises(UsageError, match=r"try one of .*mobilenet_v2"):
        build_backbone("mobilenetv2", (32, 32, 3))
    with pytest.raises(UsageError, match=r"try one of .*mobilenet_v2"):  # before its size is asked for
        find_backbone("mobilenetv2", None)
    with pytest.raises(UsageError, match="expected a known backbone or module:callable, got timm:"):
        find_backbone("timm:", None)


def test_a_callable_that_ends_the_program_is_refused():
    with pytest.raises(ExportError, match=r"cannot be imported and called, .* got SystemExit"):
        build_backbone("builtins:exit", (8, 8, 3))


def test_a_norm_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="--norm, expected a backbone with batch normalisation, got fedhp_mnist"):
        build_backbone("fedhp_mnist", (28, 28, 1), "batch")


@pytest.mark.parametrize(
    ("name", "shape"), [("small_cnn", (2, 2, 1)), ("fedhp_mnist", (8, 8, 1)), ("vgg13", (8, 8, 3))]
)
def test_images_that_are_too_small_are_refused(name, shape):
    with pytest.raises(ExportError, match="images"):
        build_backbone(name, shape)
