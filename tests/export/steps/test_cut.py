"""A network divided into a frozen trunk and a trained tail: where, into what, and equal to torch."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from export_samples import session
from torch import nn

from protofleet.contract.bundle.bundle_file import pack_params, read_bundle
from protofleet.contract.errors import BundleError, ExportError, UsageError
from protofleet.contract.methods import method
from protofleet.export.bundles.build import build_bundle, export_step, initial_state
from protofleet.export.bundles.features import export_halves
from protofleet.export.graphs.placement import place_weights
from protofleet.export.steps.cut import Cut, cut_network
from protofleet.export.steps.step import Preprocess, StepPlan, plan_step
from protofleet.export.verify.verify import random_images, run_step, verify_step

SHAPE, BATCH, CLASSES = (8, 8, 1), 5, 4
TAIL = {"norm": "batch", "trainable_blocks": 2, "hyper": {"epochs": 2}}


class Shortcut(nn.Module):
    """Four convolutions, batch norm, and a shortcut from the first to the last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.middle = nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)])
        self.late = nn.BatchNorm2d(4)
        self.end = nn.Linear(4 * 64, 6)
        for each in (self.norm, self.late):
            nn.init.uniform_(each.weight, 0.5, 1.5)
            nn.init.uniform_(each.running_var, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.norm(self.stem(x)))
        second = torch.tanh(self.middle[0](first))
        third = torch.tanh(self.late(self.middle[1](second)))
        return self.end((third + first).flatten(1))


@cache
def _divided() -> tuple[nn.Module, Preprocess, Cut]:
    net, preprocess = Shortcut(), Preprocess((0.5,), (0.25,))
    return net, preprocess, cut_network(net, preprocess, SHAPE, blocks=2)


def _plan(objective: str = "fedproto") -> StepPlan:
    net, _, cut = _divided()
    entry = method(objective)
    return plan_step(net, entry, entry.resolve({}), entry.heads[0], CLASSES, 6, cut)


def test_the_last_blocks_are_trained_and_both_ways_cross() -> None:
    _, _, cut = _divided()
    assert cut.trained == {
        *("middle.1.weight", "middle.1.bias", "late.weight", "late.bias"),
        *("end.weight", "end.bias"),
    }
    assert cut.read == cut.trained | {"late.running_mean", "late.running_var"}
    assert [(each.name, each.shape) for each in cut.activations] == [("a0", (4, 8, 8)), ("a1", (4, 8, 8))]
    named = cut_network(*_divided()[:2], SHAPE, layer="middle.1")
    assert (named.trained, named.activations) == (cut.trained, cut.activations)


def test_every_tensor_has_its_part() -> None:
    plan = _plan()
    roles = {t.name.removeprefix("backbone."): t.role for t in plan.state}
    assert {name for name, role in roles.items() if role == "trunk"} == {
        *(f"{layer}.{each}" for layer in ("stem", "middle.0") for each in ("weight", "bias")),
        *(f"norm.{each}" for each in ("weight", "bias", "running_mean", "running_var")),
    }
    assert roles["late.running_mean"] == roles["late.running_var"] == "frozen"
    assert roles["middle.1.weight"] == roles["head.weight"] == "param"
    assert not plan.names("buffer")
    assert not {t.name for t in plan.step_state} & set(plan.names("trunk"))


def test_trunk_and_tail_are_the_features_for_any_batch() -> None:
    net, preprocess, cut = _divided()
    state = initial_state(net, _plan(), 0)
    weights = {name: value for name, value in state.items() if name.startswith("backbone.")}
    halves = [_with_weights(graph, weights) for graph in export_halves(cut, unit=False)]
    x = np.random.default_rng(0).integers(0, 256, (7, *SHAPE), dtype=np.uint8)
    activations = dict(zip(("a0", "a1"), halves[0].run(["a0", "a1"], {"x": x}), strict=True))
    (z,) = halves[1].run(["z"], activations)
    with torch.no_grad():
        wanted = net.eval()(preprocess(torch.from_numpy(x))).numpy()
    assert z.shape == (7, 6)
    assert np.abs(z - wanted).max() < 1e-4 * np.abs(wanted).max()


def _with_weights(graph: bytes, weights: dict[str, np.ndarray]):  # type: ignore[no-untyped-def]
    from protofleet.contract.bundle.graph_checks import external_weights
    from protofleet.contract.bundle.onnx_runtime import ort
    from protofleet.edge_client.training.onnx_session import open_session

    placed = place_weights(graph, pack_params(weights))
    found, kept = open_session(placed, "half", weights={name: weights[name] for name in external_weights(placed)})
    assert isinstance(found, ort.InferenceSession)
    _KEPT.extend(kept)
    return found


_KEPT: list[object] = []


@pytest.mark.parametrize("objective", ["fedproto", "spherefed", "fedhkd"])
def test_the_tails_step_is_torchs_with_the_trunk_frozen(objective: str) -> None:
    """Against the whole network in torch, of which only the tail has gradients; a partial batch among the steps."""
    net, preprocess, cut = _divided()
    plan = _plan(objective)
    state = initial_state(net, plan, 0)
    stored = {name: state[name] for name in plan.names("param", "buffer", "frozen", "trunk")}
    trunk = place_weights(export_halves(cut, unit=False)[0], pack_params(stored))
    step = export_step(net, preprocess, plan, BATCH, SHAPE)
    given = {"batch": BATCH, "input_shape": SHAPE}
    verify_step(step, net, preprocess, plan, state, trunk=trunk, **given)  # type: ignore[arg-type]
    moved = Shortcut()
    nn.init.constant_(moved.norm.weight, 1.7)
    moved.norm.eps = 0.3
    other = export_halves(cut_network(moved, preprocess, SHAPE, blocks=2), unit=False)[0]
    other = place_weights(other, pack_params(stored))
    with pytest.raises(ExportError, match="train_step"):  # a trunk that is not the network's
        verify_step(step, net, preprocess, plan, state, trunk=other, **given)  # type: ignore[arg-type]


def test_a_step_by_hand() -> None:
    """Nothing of ours on torch's side: its own loss, gradients of the tail alone, its own SGD."""
    net, preprocess, cut = _divided()
    plan = _plan()
    state = initial_state(net, plan, 0)
    weights = {name: value for name, value in state.items() if name.startswith("backbone.")}
    trunk = _with_weights(export_halves(cut, unit=False)[0], weights)
    images = random_images(plan, BATCH, SHAPE, BATCH, np.random.default_rng(0))
    seen = dict(zip(("a0", "a1"), trunk.run(["a0", "a1"], {"x": images.x}), strict=True))
    step = session(export_step(net, preprocess, plan, BATCH, SHAPE))
    mask = images.inputs()["prototype_mask"] * 0
    images.mask[...] = mask  # cross-entropy alone
    found = run_step(step, plan, state, images, 0.1, seen)
    twin, head = Shortcut().eval(), nn.Linear(6, CLASSES)
    with torch.no_grad():
        head.weight.copy_(torch.from_numpy(state["head.weight"]))
        head.bias.copy_(torch.from_numpy(state["head.bias"]))
    tail = [p for name, p in twin.named_parameters() if name in cut.trained]
    optimizer = torch.optim.SGD([*tail, *head.parameters()], lr=0.1)  # the first step has no momentum yet
    loss = nn.functional.cross_entropy(head(twin(preprocess(torch.from_numpy(images.x)))), torch.from_numpy(images.y))
    loss.backward()
    optimizer.step()
    assert abs(float(found["loss"]) - float(loss.detach())) < 1e-5
    for name, parameter in twin.named_parameters():
        if name in cut.trained:
            assert np.abs(found[f"backbone.{name}"] - parameter.detach().numpy()).max() < 1e-5
        else:
            assert f"backbone.{name}" not in found


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ({"layer": "midle.1"}, "--train-from, expected a layer, got midle.1, try one of middle.1, "),
        ({"layer": "middle"}, ""),
        ({"layer": "stem"}, "expected a layer before which there is another, got stem"),
        ({"blocks": 4}, "--trainable-blocks, expected 1 to 3 for this network, got 4"),
        ({"blocks": 0}, "--trainable-blocks, expected 1 to 3 for this network, got 0"),
    ],
)
def test_where_a_network_cannot_be_divided(where: dict[str, object], words: str) -> None:
    net, preprocess, _ = _divided()
    if not words:
        assert len(cut_network(net, preprocess, SHAPE, **where).activations) == 1  # type: ignore[arg-type]
        return
    with pytest.raises(UsageError) as caught:
        cut_network(net, preprocess, SHAPE, **where)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_a_layer_is_not_another_whose_name_begins_with_its() -> None:
    net = nn.Sequential(nn.Conv2d(1, 1, 1), *(nn.Tanh() for _ in range(9)), nn.Flatten(), nn.Linear(64, 6))
    with pytest.raises(UsageError, match="--train-from, expected a layer with weights, got 1"):
        cut_network(net, Preprocess((0.5,), (0.25,)), SHAPE, layer="1")
    assert cut_network(net, Preprocess((0.5,), (0.25,)), SHAPE, layer="11").trained == {"11.weight", "11.bias"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method_name": "ffc", "trainable_blocks": 1}, "expected a method that trains, got ffc"),
        ({"trainable_blocks": 1, "train_from": "9"}, "expected one of them, got both"),
        ({"backbone": "onnx:f.onnx", "train_from": "9"}, "expected a network of torch, got onnx:f.onnx"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, object], words: str, tmp_path: Path) -> None:
    given = {"backbone": "small_cnn", "method_name": "fedproto", "labels": ["a", "b"], "input_shape": (28, 28, 1)}
    with pytest.raises(UsageError) as caught:
        build_bundle(**{**given, **options}, out=tmp_path / "b.bundle")  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_the_bundle_has_its_parts(mnist_like_bundle: Callable[..., Path], tmp_path: Path) -> None:
    """The whole features graph is the same extractor as of a bundle that trains all; the rate is a tenth."""
    path = mnist_like_bundle(**TAIL)
    bundle, whole = read_bundle(path), read_bundle(mnist_like_bundle(norm="batch"))
    m = bundle.manifest
    assert m.step_inputs[:2] == ("a0", "y")
    assert m.activation_bytes == 4 * 32 * 14 * 14
    assert m.extractor == whole.manifest.extractor
    assert m.hyper["lr"] == whole.manifest.hyper["lr"] / 10
    assert not whole.manifest.cut
    broken = tmp_path / "broken.bundle"
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(broken, "w", zipfile.ZIP_STORED) as target:
        for name in source.namelist():
            if name != "trunk.onnx":
                target.writestr(zipfile.ZipInfo(name), source.read(name))
    with pytest.raises(BundleError, match=r"trunk\.onnx is missing"):
        read_bundle(broken)
