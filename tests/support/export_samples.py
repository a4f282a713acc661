"""What the tests of `export/` share: small backbones of every family, exported once per test run, and their device.

A *family* is a way of building a network: with or without normalisation, plain, residual, depthwise, squeeze-and-
excite, fire modules. Images are as small as the family allows, so that the whole cross product stays in minutes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import nn

from protofleet.contract.bundle.onnx_runtime import ort
from protofleet.contract.methods import method
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.bundles.build import export_step, initial_state
from protofleet.export.steps.step import Preprocess, StepPlan, plan_step
from protofleet.export.verify.verify import EagerStep, Images, random_images, run_step

CLASSES = 5

# backbone, norm, input, batch
FAMILIES = {
    "small_cnn": ("small_cnn", None, (16, 16, 1), 6),
    "small_cnn-batch": ("small_cnn", "batch", (16, 16, 3), 6),
    "fedproto_mnist": ("fedproto_mnist", None, (28, 28, 1), 6),
    "fedhp_mnist": ("fedhp_mnist", None, (28, 28, 1), 6),
    "fedhp_cifar": ("fedhp_cifar", None, (32, 32, 3), 6),
    "spherefed_convnet": ("spherefed_convnet", None, (32, 32, 3), 6),
    "spherefed_convnet-batch": ("spherefed_convnet", "batch", (32, 32, 3), 6),
    "resnet18": ("resnet18", None, (64, 64, 3), 8),
    "resnet18-group": ("resnet18", "group", (32, 32, 3), 6),
    "vgg13": ("vgg13", None, (32, 32, 3), 4),
    "vgg13-batch": ("vgg13", "batch", (32, 32, 3), 6),
    "squeezenet1_1": ("squeezenet1_1", None, (32, 32, 3), 4),
    "mobilenet_v2": ("mobilenet_v2", None, (64, 64, 3), 8),
    "mobilenet_v2-group": ("mobilenet_v2", "group", (32, 32, 3), 4),
    "mobilenet_v3_small": ("mobilenet_v3_small", None, (64, 64, 3), 8),
    "efficientnet_b0": ("efficientnet_b0", None, (64, 64, 3), 8),
    "short resnet": ("short_networks:resnet", None, (32, 32, 3), 8),
    "short mobilenet_v2": ("short_networks:mobilenet_v2", None, (32, 32, 3), 8),
    "short mobilenet_v3": ("short_networks:mobilenet_v3", None, (32, 32, 3), 8),
    "short efficientnet": ("short_networks:efficientnet", None, (32, 32, 3), 8),
}

# method, head, hyper-parameters that differ from the defaults
OBJECTIVES: dict[str, tuple[str, str, dict[str, object]]] = {
    "fedproto": ("fedproto", "local", {}),
    "fedproto-frozen-l2": ("fedproto", "frozen", {"distance": "l2", "weight_decay": 1e-3}),
    "fedproto-l1-no-momentum": ("fedproto", "local", {"distance": "l1", "momentum": 0.0, "weight_decay": 1e-4}),
    "fedproto-class-mean": ("fedproto", "local", {"reading": "class_mean", "lambda": 0.5}),
    "fedproto-unlabelled": ("fedproto", "local", {"pu_weight": 0.5}),
    "fedhp": ("fedhp", "none", {}),
    "fedpr-sum": ("fedpr", "local", {"distance": "sum", "lambda": 0.1}),
    "fedhkd": ("fedhkd", "local", {}),
    "fedhkd-sgd": ("fedhkd", "local", {"optimizer": "sgd", "momentum": 0.5}),
    "spherefed": ("spherefed", "frozen", {}),
}


@dataclass(frozen=True)
class EagerTwin:
    """A training step in torch."""

    net: nn.Module
    preprocess: Preprocess
    plan: StepPlan
    state: Mapping[str, np.ndarray]
    batch: int
    input_shape: tuple[int, int, int]

    def eager(self, dtype: torch.dtype = torch.float32) -> EagerStep:
        return EagerStep(self.net, self.preprocess, self.plan, dtype)


@dataclass(frozen=True)
class Device(EagerTwin):
    """A training step as a device runs it, and what is needed to do the same in torch."""

    graph: bytes
    session: ort.InferenceSession

    def images(self, rng: np.random.Generator, real: int | None = None) -> Images:
        return random_images(self.plan, self.batch, self.input_shape, self.batch if real is None else real, rng)

    def run(self, state: Mapping[str, np.ndarray], images: Images, lr: float) -> dict[str, np.ndarray]:
        return run_step(self.session, self.plan, state, images, lr)


def session(graph: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def make_device(
    net: nn.Module,
    width: int,
    objective: str,
    input_shape: tuple[int, int, int],
    batch: int,
) -> Device:
    """Export the step of `net` under an entry of `OBJECTIVES`."""
    twin = _twin(net, width, objective, input_shape, batch)
    graph = export_step(net, twin.preprocess, twin.plan, batch, input_shape)
    return Device(**vars(twin), graph=graph, session=session(graph))


def _twin(net: nn.Module, width: int, objective: str, input_shape: tuple[int, int, int], batch: int) -> EagerTwin:
    name, head, hyper = OBJECTIVES[objective]
    entry = method(name)
    preprocess = Preprocess((0.5,) * input_shape[2], (0.25,) * input_shape[2])
    plan = plan_step(net, entry, entry.resolve(hyper), head, CLASSES, width)
    return EagerTwin(net, preprocess, plan, initial_state(net, plan, 0), batch, input_shape)


@lru_cache(maxsize=2)  # a device of a large family holds hundreds of megabytes
def device(family: str, objective: str, batch: int | None = None) -> Device:
    """One family under one objective, exported once while tests ask for it."""
    net, width, input_shape, its_batch = _built(family)
    return make_device(net, width, objective, input_shape, batch or its_batch)


def eager_twin(family: str, objective: str) -> EagerTwin:
    """The same in torch alone, without an export."""
    net, width, input_shape, batch = _built(family)
    return _twin(net, width, objective, input_shape, batch)


def _built(family: str) -> tuple[nn.Module, int, tuple[int, int, int], int]:
    backbone, norm, input_shape, batch = FAMILIES[family]
    net, width = build_backbone(backbone, input_shape, norm)  # type: ignore[arg-type]
    _settle_norms(net)
    return net, width, input_shape, batch


def _settle_norms(net: nn.Module) -> None:
    """Random scales and shifts for every normalisation, as a trained network has.

    At the usual start, ones and zeros, a deep network's gradients grow from layer to layer until a step in float32 is
    chance, in torch too; and ones and zeros would hide a scale or a shift that the graph forgets.
    """
    random = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            with torch.no_grad():
                module.weight.uniform_(0.2, 0.6, generator=random)
                module.bias.normal_(0.1, 0.1, generator=random)
