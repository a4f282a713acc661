"""The device's training step against eager torch: every objective, every family of backbone, partial batch included.

Two comparisons, since neither alone says enough: five steps, in which the device, torch in float64 and torch in float32
each go on from their own state; and single steps from one state (export/verify/verify.py). In both, the device must be
as near to float64 as torch's float32 is (export/verify/agreement.py), which a wrong gradient cannot be on any
processor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from export_samples import FAMILIES, OBJECTIVES, Device, device, eager_twin, session

from protofleet.contract.bundle.bundle_file import STEP_INPUTS
from protofleet.contract.errors import ExportError
from protofleet.contract.methods import Value
from protofleet.export.bundles.build import export_step
from protofleet.export.operators import norm
from protofleet.export.operators.translation import TABLE
from protofleet.export.steps import optimizers
from protofleet.export.steps import step as step_module
from protofleet.export.steps.step import StepPlan
from protofleet.export.verify.agreement import Agreement, distances, uneven, worst_agreement
from protofleet.export.verify.verify import random_images, verify_step

STEPS = 5
LR = 1e-3
# Deep BatchNorm networks that start from chance amplify rounding: torch in float32 leaves float64 as fast as we
# do (test_torch_itself_is_off). A smaller step keeps five of them comparable.
SMALLER_LR = dict.fromkeys(("resnet18", "vgg13-batch", "mobilenet_v3_small", "efficientnet_b0"), 1e-4)
SMALLER_LR["mobilenet_v2"] = 3e-7
# Adam divides a gradient by its own size: one that is nothing but rounding moves its weight as far as any other. And
# summed squares over D have gradients D/2 times those of their mean.
SHARE_OF_LR = {"fedhkd": 1e-3, "fedpr-sum": 0.1}

# The whole cross product is `slow`, and so are the large networks. By default one small network meets every objective,
# each objective a second one, and every small backbone is there; of a large one, a short network of the same blocks.
EVERY_OBJECTIVE = "small_cnn-batch"
USUAL = {
    "small_cnn": ("fedproto", "fedproto-frozen-l2", "fedhkd"),
    "fedproto_mnist": ("fedproto-l1-no-momentum", "fedproto-class-mean", "fedhkd-sgd", "spherefed"),
    "fedhp_mnist": ("fedhp",),
    "fedhp_cifar": ("fedproto-class-mean",),
    "spherefed_convnet": ("spherefed",),
    "spherefed_convnet-batch": ("fedproto",),
    "squeezenet1_1": ("fedhp", "fedpr-sum", "fedproto-unlabelled"),
    "short resnet": ("fedproto",),
    "short mobilenet_v2": ("fedproto",),
    "short mobilenet_v3": ("fedproto-l1-no-momentum",),
    "short efficientnet": ("spherefed",),
}
LARGE = {"resnet18", "vgg13", "mobilenet_v2", "mobilenet_v3_small", "efficientnet_b0"}


def _cases():
    for family in FAMILIES:
        for objective in OBJECTIVES:
            usual = family == EVERY_OBJECTIVE or objective in USUAL.get(family, ())
            yield pytest.param(family, objective, marks=() if usual else pytest.mark.slow)


def test_every_backbone_but_the_large_and_every_objective_is_in_the_default_run_and_none_alone():
    usual = {FAMILIES[family][0] for family in (EVERY_OBJECTIVE, *USUAL)}
    assert {row[0] for row in FAMILIES.values()} == usual | LARGE
    assert set(OBJECTIVES) == {objective for objectives in USUAL.values() for objective in objectives}


@pytest.mark.parametrize(("family", "objective"), list(_cases()))
def test_five_steps_equal_torch(family: str, objective: str):
    dev = device(family, objective)
    _check_names(dev)
    lr = SMALLER_LR.get(family, LR) * SHARE_OF_LR.get(objective, 1.0)
    worst_agreement(partial(_five_steps, dev, np.random.default_rng(1), lr), "five steps")
    verify_step(
        dev.session, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape, steps=2
    )


def _check_names(dev: Device) -> None:
    """Inputs and outputs are the contract."""
    assert dev.plan.inputs[: len(STEP_INPUTS)] == STEP_INPUTS
    assert [i.name for i in dev.session.get_inputs()] == [*dev.plan.inputs, *(t.name for t in dev.plan.state)]
    assert [o.name for o in dev.session.get_outputs()] == ["loss", *(f"{n}.next" for n in dev.plan.updated)]
    kinds = {i.name: (i.type, i.shape) for i in dev.session.get_inputs()}
    assert kinds["x"] == ("tensor(uint8)", [dev.batch, *dev.input_shape])
    assert kinds["y"] == ("tensor(int64)", [dev.batch])
    assert kinds["lr"] == ("tensor(float)", [])


def test_torch_itself_is_off():
    """Why a BatchNorm network gets the smaller step: torch in float32 leaves float64 by more than 1e-5 in one step."""
    twin = eager_twin("mobilenet_v2", "fedproto")
    images = random_images(twin.plan, twin.batch, twin.input_shape, twin.batch, np.random.default_rng(1))
    exact, single = (twin.eager(dtype).run(twin.state, images, 0.01) for dtype in (torch.float64, torch.float32))
    changes = {n: np.linalg.norm(exact[n] - twin.state[n]) for n in twin.plan.names("param")}
    off = max(np.linalg.norm(single[n] - exact[n]) / changes[n] for n in changes if changes[n] > 1e-6)
    assert off > 1e-3


# ── a wrong graph is refused, by both comparisons ──

# What the graph was exported with, in place of what it should have been.
WRONG_SETTINGS: dict[str, tuple[str, dict[str, Value]]] = {
    "a pull of 1.01": ("fedproto", {"lambda": 1.01}),
    "no momentum": ("fedproto", {"momentum": 0.0}),
    "no weight decay": ("fedhp", {"weight_decay": 0.0}),
    "no weight decay and no momentum to show it": ("fedproto-l1-no-momentum", {"weight_decay": 0.0}),
    "another rate of the prototypes": ("fedhp", {"prototype_lr": 0.00501}),
}


@pytest.mark.parametrize("slip", WRONG_SETTINGS)
def test_wrong_settings_are_refused(slip: str):
    objective, hyper = WRONG_SETTINGS[slip]
    dev = device("small_cnn-batch", objective)
    assert all(dev.plan.hyper[name] != value for name, value in hyper.items())
    _refused(dev, replace(dev.plan, hyper={**dev.plan.hyper, **hyper}))


def _padding_counts(patch: pytest.MonkeyPatch) -> None:
    def shares(e, real, positions):
        return e.graph.expand(e.graph.scalar(1 / (6 * positions)), (real.shape[0], 1))

    patch.setattr(norm, "_shares", shares)


def _relu_keeps_its_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(TABLE, torch.ops.aten.threshold_backward.default, lambda e, out, grad, *_: grad)


def _variance_is_off(patch: pytest.MonkeyPatch) -> None:
    right = TABLE[torch.ops.protofleet.batch_norm.default]

    def wrong(e, out, *args):
        y, mean, variance = right(e, out, *args)
        return y, mean, e.op("Mul", variance, e.graph.scalar(1.001))

    patch.setitem(TABLE, torch.ops.protofleet.batch_norm.default, wrong)


def _entropy_is_off(patch: pytest.MonkeyPatch) -> None:
    op, factor = torch.ops.aten._log_softmax.default, 1.0001
    right = TABLE[op]
    patch.setitem(TABLE, op, lambda e, *args: e.op("Mul", right(e, *args), e.graph.scalar(factor)))


def _the_rate_is_baked_in(patch: pytest.MonkeyPatch) -> None:
    right = step_module.update
    patch.setattr(step_module, "update", lambda t, *rest: right({**t, "lr": 0.0 * t["lr"] + LR}, *rest))


def _adam_forgets_its_bias(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(optimizers, "_bias_correction", lambda beta, steps: torch.ones_like(steps))


@pytest.mark.parametrize(
    ("objective", "slip"),
    [
        ("fedproto", _padding_counts),
        ("fedproto", _relu_keeps_its_gradient),
        ("fedproto", _variance_is_off),
        ("fedproto", _entropy_is_off),
        ("fedproto", _the_rate_is_baked_in),
        ("fedhp", _adam_forgets_its_bias),
    ],
)
def test_a_wrong_translation_is_refused(objective: str, slip: Callable[[pytest.MonkeyPatch], None], monkeypatch):
    dev = device("small_cnn-batch", objective)
    slip(monkeypatch)
    _refused(dev, dev.plan)


def _refused(dev: Device, wrong: StepPlan) -> None:
    """Export again by a wrong plan, or while something is patched, and compare with the right one."""
    graph = export_step(dev.net, dev.preprocess, wrong, dev.batch, dev.input_shape)
    with pytest.raises(ExportError, match=r"disagrees with torch at .*bundle was not written"):
        verify_step(graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape)
    lied_to = replace(dev, graph=graph, session=session(graph))
    with pytest.raises(ExportError, match="five steps disagrees with torch"):
        worst_agreement(partial(_five_steps, lied_to, np.random.default_rng(1), 100 * LR), "five steps")


@pytest.mark.parametrize("family", ["small_cnn", "small_cnn-batch"])
def test_a_batch_of_padding_moves_nothing(family: str):
    dev = device(family, "fedproto")
    state = dict(dev.state)
    images = dev.images(np.random.default_rng(0), real=0)
    got = dev.run(state, images, 0.1)
    assert float(got["loss"]) == 0.0
    for name in dev.plan.names("param", "buffer"):
        np.testing.assert_array_equal(got[name], state[name])


@pytest.mark.parametrize("family", ["small_cnn", "small_cnn-batch"])
def test_what_padding_holds_does_not_matter(family: str):
    dev = device(family, "fedproto")
    rng = np.random.default_rng(0)
    images = dev.images(rng, real=4)
    got = dev.run(dev.state, images, 0.1)
    padding = ~images.real
    images.x[padding] = 255 - images.x[padding]
    images.y[padding] = 0
    again = dev.run(dev.state, images, 0.1)
    for name, value in got.items():
        np.testing.assert_allclose(again[name], value, rtol=1e-6, atol=1e-7)


def test_prototypes_without_mask_do_not_matter():
    dev = device("small_cnn", "fedproto")
    images = dev.images(np.random.default_rng(0))
    got = dev.run(dev.state, images, 0.1)
    images.prototypes[images.mask == 0] = 1e6
    again = dev.run(dev.state, images, 0.1)
    for name, value in got.items():
        np.testing.assert_array_equal(again[name], value)


def _five_steps(dev: Device, rng: np.random.Generator, lr: float) -> list[Agreement]:
    """The device, torch in float64 and torch in float32, each on its own state; the third batch is padded."""
    sides = (dev.run, dev.eager(torch.float64).run, dev.eager(torch.float32).run)
    start = uneven(dev.state, dev.plan.names("param", "buffer"), 0)
    states = [dict(start) for _ in sides]
    for step in range(STEPS):
        images = dev.images(rng, dev.batch - 2 if step == 2 else dev.batch)
        for run, state in zip(sides, states, strict=True):
            state.update(run(state, images, lr))
    ours, exact, torchs = ({name: state[name] for name in ("loss", *dev.plan.updated)} for state in states)
    return distances(ours, exact, torchs, start)
