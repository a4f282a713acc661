"""The device's training step against eager torch: every objective, every family of backbone, partial batch included.

Two comparisons, since neither alone says enough. Over five steps, the device on its own state and torch in float64 on
its own, no tensor may differ by more than 1e-5. And each single step's *change* must be as near to float64 as torch's
float32 is (export/verify.py), which a wrong gradient cannot be, however small the learning rate.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from export_samples import FAMILIES, OBJECTIVES, Device, device

from contract.bundle import STEP_INPUTS
from contract.errors import ExportError
from export.verify import verify_step

STEPS = 5
LR = 1e-3
# Deep BatchNorm networks that start from chance amplify rounding: torch in float32 leaves float64 as fast as we
# do (test_torch_itself_is_off). A smaller step keeps five of them comparable.
SMALLER_LR = dict.fromkeys(("resnet18", "vgg13-batch", "mobilenet_v3_small", "efficientnet_b0"), 1e-4)
SMALLER_LR["mobilenet_v2"] = 3e-7
# Adam divides a gradient by its own size: one that is nothing but rounding moves its weight as far as any other. And
# summed squares over D have gradients D/2 times those of their mean.
SHARE_OF_LR = {"fedhkd": 1e-3, "fedpr-sum": 0.1}

# The whole cross product is `slow`; by default every family meets one objective, and four small ones meet them all.
EVERY_OBJECTIVE = {"small_cnn", "small_cnn-batch", "fedproto_mnist", "squeezenet1_1"}
ONE_OBJECTIVE = {
    "fedhp_mnist": "fedhp",
    "fedhp_cifar": "fedproto-class-mean",
    "spherefed_convnet": "spherefed",
    "spherefed_convnet-batch": "fedproto",
    "resnet18": "fedproto",
    "resnet18-group": "fedhp",
    "vgg13": "fedhkd",
    "vgg13-batch": "spherefed",
    "mobilenet_v2": "fedproto",
    "mobilenet_v2-group": "fedproto-unlabelled",
    "mobilenet_v3_small": "fedproto-l1-no-momentum",
    "efficientnet_b0": "spherefed",
}


def _cases():
    for family in FAMILIES:
        for objective in OBJECTIVES:
            usual = family in EVERY_OBJECTIVE or ONE_OBJECTIVE.get(family) == objective
            yield pytest.param(family, objective, marks=() if usual else pytest.mark.slow)


def test_every_family_is_in_the_default_run():
    assert set(FAMILIES) == EVERY_OBJECTIVE | set(ONE_OBJECTIVE)


@pytest.mark.parametrize(("family", "objective"), list(_cases()))
def test_five_steps_equal_torch(family: str, objective: str):
    dev = device(family, objective)
    error, tensor = _worst_after_five_steps(dev, SMALLER_LR.get(family, LR) * SHARE_OF_LR.get(objective, 1.0))
    assert error <= 1e-5, tensor
    verify_step(
        dev.graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape, steps=2
    )


def test_torch_itself_is_off():
    """Why a BatchNorm network gets the smaller step: torch in float32 leaves float64 by more than 1e-5 in one step."""
    dev = device("mobilenet_v2", ONE_OBJECTIVE["mobilenet_v2"])
    images = dev.images(np.random.default_rng(1))
    exact, single = (dev.eager(dtype).run(dev.state, images, 0.01) for dtype in (torch.float64, torch.float32))
    changes = {n: np.linalg.norm(exact[n] - dev.state[n]) for n in dev.plan.names("param")}
    off = max(np.linalg.norm(single[n] - exact[n]) / changes[n] for n in changes if changes[n] > 1e-6)
    assert off > 1e-3


@pytest.mark.parametrize("sabotage", ["mean", "gradient", "momentum", "loss"])
def test_verification_refuses_a_wrong_graph(sabotage: str, monkeypatch: pytest.MonkeyPatch):
    """Four wrong translations, each of them a plausible slip, must not pass."""
    import export.translate_norm as norm
    from export.build import export_step
    from export.translate import TABLE

    aten, ours = torch.ops.aten, torch.ops.protofleet
    dev = device("small_cnn-batch", "fedproto")
    if sabotage == "mean":  # padding enters the statistics
        monkeypatch.setattr(
            norm, "_shares", lambda e, real, n: e.graph.expand(e.graph.scalar(1 / (6 * n)), (1, real.shape[0] * n))
        )
    elif sabotage == "gradient":  # ReLU's mask is forgotten
        monkeypatch.setitem(TABLE, aten.threshold_backward.default, lambda e, out, grad, *_: grad)
    elif sabotage == "momentum":  # the running variance is a weight decay off
        right = TABLE[ours.batch_norm.default]

        def wrong(e, out, *args):
            y, mean, variance = right(e, out, *args)
            return y, mean, e.op("Mul", variance, e.graph.scalar(1.01))

        monkeypatch.setitem(TABLE, ours.batch_norm.default, wrong)
    else:
        right_softmax = TABLE[aten._log_softmax.default]
        monkeypatch.setitem(
            TABLE,
            aten._log_softmax.default,
            lambda e, *args: e.op("Mul", right_softmax(e, *args), e.graph.scalar(1.001)),
        )
    graph = export_step(dev.net, dev.preprocess, dev.plan, dev.batch, dev.input_shape)
    with pytest.raises(ExportError, match=r"disagrees with torch at .*bundle was not written"):
        verify_step(graph, dev.net, dev.preprocess, dev.plan, dev.state, batch=dev.batch, input_shape=dev.input_shape)


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
    images.x[4:] = 255 - images.x[4:]
    images.y[4:] = 0
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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_inputs_and_outputs_are_the_contract(objective: str):
    dev = device("small_cnn", objective)
    assert dev.plan.inputs[: len(STEP_INPUTS)] == STEP_INPUTS
    assert [i.name for i in dev.session.get_inputs()] == [*dev.plan.inputs, *(t.name for t in dev.plan.state)]
    assert [o.name for o in dev.session.get_outputs()] == ["loss", *(f"{n}.next" for n in dev.plan.updated)]
    kinds = {i.name: (i.type, i.shape) for i in dev.session.get_inputs()}
    assert kinds["x"] == ("tensor(uint8)", [dev.batch, *dev.input_shape])
    assert kinds["y"] == ("tensor(int64)", [dev.batch])
    assert kinds["lr"] == ("tensor(float)", [])


def _worst_after_five_steps(dev: Device, lr: float) -> tuple[float, str]:
    """Device and torch each on their own state; the third batch is padded. The largest difference and where."""
    rng, eager = np.random.default_rng(1), dev.eager(torch.float64)
    ours, theirs = dict(dev.state), dict(dev.state)
    for step in range(STEPS):
        images = dev.images(rng, dev.batch - 2 if step == 2 else dev.batch)
        got, want = dev.run(ours, images, lr), eager.run(theirs, images, lr)
        assert float(got["loss"]) == pytest.approx(float(want["loss"]), rel=1e-5, abs=1e-6)
        ours.update({n: got[n] for n in dev.plan.updated})
        theirs.update({n: want[n] for n in dev.plan.updated})
    return max(
        (float(np.abs(ours[n] - theirs[n]).max() / max(1.0, np.abs(theirs[n]).max())), n)
        for n in dev.plan.names("param", "buffer")
    )
