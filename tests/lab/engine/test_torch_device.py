"""Federations that average weights on a second device of torch (`second_device.py`), against the processor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from lab_samples import shares, shipped, some
from safetensors.torch import load_file
from second_device import compute_there
from torch import nn

from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.algorithms import ALGORITHMS, RULES
from protofleet.lab.data.partition import Partition
from protofleet.lab.demo.from_scratch import Recipe, pretrain
from protofleet.lab.engine.client_training import Bench, Start, Turn
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.engine.weight_averaging import Federation
from protofleet.lab.training.local_training import EagerModel, Fitted, save_weights, train_eager
from protofleet.lab.training.torch_device import torch_device
from protofleet.lab.workers.shared_arrays import pack, unpack

BACKBONE = "fedproto_mnist"
INSTEAD = {"fedpr-averaged": {"distance": "l2"}}


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Networks lie on the lazy device from now on; gives the devices of all that has been trained."""
    seen: list[str] = []

    def fit(bench: Bench, start: Start, turn: Turn) -> Fitted:
        fitted = trained(bench, start, turn)
        seen.extend(tensor.device.type for tensor in bench.model.state_dict().values())
        assert all(p.grad is None or p.grad.device.type == "lazy" for p in bench.model.parameters())
        return fitted

    trained = Bench.fit
    monkeypatch.setattr(Bench, "fit", fit)
    compute_there("protofleet.lab.training.local_training", monkeypatch)
    return lambda: seen


def batch_normalised() -> nn.Module:
    """A backbone with running statistics and counts of batches."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(36, 20)
    )


def _records(method: str, weights: Path, *, backbone: str = BACKBONE, **hyper: Any) -> list[RoundRecord]:
    """Two rounds on three clients, all that is measured and both closings with them."""
    experiment = Experiment(
        method,
        "fashion_mnist_subset",
        Partition("iid", 3, only=120),
        Course(rounds=2, calibrate=True),
        backbone,
        16,
        test_samples=50,
        local_test=0.2,
        hyper={"lr": 0.02, "epochs": 1, "ccvr_virtual": 50, "ccvr_epochs": 2, **hyper},
        measures=Measures(closings=("ffc", "ccvr"), personal=("fit", "head-sgd", "head-ffc"), fresh=True),
        save_weights=weights,
    )
    nothing = {"on_device": lambda number, turn: None, "on_text": lambda text: None, "on_round": lambda record: None}
    return run_experiment(experiment, data=shipped(), **nothing)


@pytest.mark.parametrize(
    ("method", "hyper"),
    [
        ("fednh", {"base": "scaffold", "momentum": 0.0}),
        ("fedhkd-averaged", {"base": "fedprox"}),
        *(pytest.param(name, INSTEAD.get(name, {}), marks=pytest.mark.slow) for name in ALGORITHMS),
        pytest.param("fedpr-averaged", {"prototypes": "merged", "distance": "l2"}, marks=pytest.mark.slow),
        pytest.param("fedavg", {"optimizer": "adam", "lr": 0.001}, marks=pytest.mark.slow),
        pytest.param("fedavg", {"clip_norm": 1.0, "halve_every": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_federation_is_the_same_on_a_second_device_but_for_rounding(
    method: str, hyper: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Losses, every accuracy, bytes, and the weights in the end; every rule is some algorithm's own."""
    assert {ALGORITHMS[name].base for name in ALGORITHMS} == set(RULES)
    theirs = _records(method, tmp_path / "cpu.safetensors", **hyper)
    devices = request.getfixturevalue("there")
    ours = _records(method, tmp_path / "lazy.safetensors", **hyper)
    assert set(devices()) == {"lazy"}
    assert [each.loss for each in ours] == pytest.approx([each.loss for each in theirs], rel=1e-3)
    for one, other in zip(ours, theirs, strict=True):
        assert one.uplink_bytes == other.uplink_bytes
        for part in ("own_classes", "all_classes", "local_test", "trained", "fresh", "personal"):
            # Within an image or two: two classes may have about the same answer for one.
            assert getattr(one, part) == pytest.approx(getattr(other, part), abs=0.05), part
    assert {"head", "linear", "ccvr"} <= theirs[-1].all_classes.keys() or ALGORITHMS[method].centres
    assert theirs[-1].personal.keys() >= {"fit/head", "head-sgd/head", "head-ffc/linear"}
    wanted = load_file(tmp_path / "cpu.safetensors")
    for name, tensor in load_file(tmp_path / "lazy.safetensors").items():
        torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_counts_of_batches_come_back_with_the_weights(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of batch normalisation. Its running statistics are left out: on the lazy device torch itself loses them when an
    optimizer takes a step, and what a network answers by them is not compared."""
    normalised, files = f"{__name__}:batch_normalised", [tmp_path / "cpu.safetensors", tmp_path / "lazy.safetensors"]
    theirs = _records("fedavg", files[0], backbone=normalised)
    request.getfixturevalue("there")
    ours = _records("fedavg", files[1], backbone=normalised)
    assert [each.loss for each in ours] == pytest.approx([each.loss for each in theirs], rel=1e-3)
    wanted, found = (load_file(path) for path in files)
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        if "running" not in name:
            torch.testing.assert_close(tensor, wanted[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("there", [True, False])
def test_a_gpu_is_used_where_torch_finds_one(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: there)
    assert torch_device().type == ("cuda" if there else "cpu")


def test_the_share_of_each_class_is_where_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory, which are refused beside the processor's; the loss alone would be looked at."""
    monkeypatch.setattr("protofleet.lab.training.local_training.torch_device", lambda: torch.device("meta"))
    hyper = ALGORITHMS["fedavg"].resolve({"lr": 0.02, "pu_weight": 0.5})
    with pytest.raises(RuntimeError, match=r"item\(\) cannot be called on meta"):
        train_eager(_model(), some(shipped().train, 2), "fedproto", hyper, epochs=1, batch=16, lr=0.02, seed=1)


def test_counts_of_batches_begin_anew_with_every_client() -> None:
    """They are no weights: what one client's batch normalisation counts is not the next one's."""
    net = batch_normalised()
    model = EagerModel(net, classes=10, features=20, mean=(0.5,), std=(0.5,), seed=3)
    hyper = ALGORITHMS["fedhkd-averaged"].resolve({"lr": 0.02, "epochs": 1})
    course = Course(rounds=3, calibrate=False)
    federation = Federation(ALGORITHMS["fedhkd-averaged"], model, shares(), course, hyper, batch=15)
    for number in (1, 2, 3):
        federation.run_round(number)
        counts = {n: int(t) for n, t in federation.fixed.items() if n.endswith("num_batches_tracked")}
        assert counts == {"backbone.1.num_batches_tracked": 0}


def _model(head: str = "local") -> EagerModel:
    net, width = build_backbone(BACKBONE, (28, 28, 1), seed=3)
    return EagerModel(net, classes=10, features=width, mean=(0.5,), std=(0.5,), head=head, seed=3)


@pytest.mark.usefixtures("there")
def test_a_network_travels_as_tensors_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """To a process that has another device, and back; a copy in this one lies where the network does."""
    x = some(shipped().train, 1).x
    model = _model()
    wanted, packed = model.features(x), pack(model)
    assert (model.device.type, deepcopy(model).device.type, unpack(packed).device.type) == ("lazy",) * 3
    monkeypatch.setattr("protofleet.lab.training.local_training.torch_device", lambda: torch.device("cpu"))
    arrived = unpack(packed)
    assert arrived.device.type == "cpu"
    assert arrived.features(x) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.usefixtures("there")
def test_what_a_federation_keeps_and_sends_is_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state between rounds, for a checkpoint, and what goes to another process."""
    algorithm = ALGORITHMS["fednh"]
    hyper = algorithm.resolve({"lr": 0.02, "base": "scaffold"})
    model = _model(algorithm.head)
    federation = Federation(algorithm, model, shares(), Course(rounds=2, calibrate=False), hyper, batch=15)
    federation.run_round(1)
    assert model.device.type == "lazy"
    assert "head_weight" in federation.fixed
    with monkeypatch.context() as patched:
        patched.setattr("protofleet.lab.training.local_training.torch_device", lambda: torch.device("cpu"))
        there = unpack(pack((federation.bench, federation.start(2), federation.turn(0), federation.told(0))))
    assert there[0].model.device.type == "cpu"
    found = [*_tensors(federation.state()), *_tensors(vars(there[1])), *_tensors(vars(there[2])), *_tensors(there[3])]
    assert len(found) > 4 * len(federation.centres[0])
    assert {each.device.type for each in found} == {"cpu"}


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)


@pytest.mark.usefixtures("there")
def test_what_is_asked_of_a_network_is_on_the_processor(tmp_path: Path) -> None:
    model = _model()
    weight, bias = model.head_copy()
    assert bias is not None
    for tensor in (*model.tensors().values(), *model.floats().values(), weight, bias):
        assert tensor.device.type == "cpu"
    save_weights(model, tmp_path / "w.safetensors")
    for name, tensor in load_file(tmp_path / "w.safetensors").items():
        assert torch.equal(tensor, model.floats()[f"backbone.{name}"]), name


def test_on_the_processor_floats_are_the_networks_own_and_the_head_is_a_copy() -> None:
    model = _model()
    floats, copied = model.floats(), model.head_copy()
    for name, copy in zip(("head_weight", "head_bias"), copied, strict=True):
        before = copy.clone()
        with torch.no_grad():
            getattr(model, name).add_(1.0)
        assert torch.equal(floats[name], before + 1.0)
        assert torch.equal(copy, before)
    assert all(isinstance(each, nn.Parameter) for each in unpack(pack(model)).parameters())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_backbone_is_pretrained_there(frozen: bool, request: pytest.FixtureRequest) -> None:
    """As the demo's is."""
    told = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.0, "epochs": 2, "lambda": 0.0}
    told |= {"distance": "squared"}
    plan = Recipe("spherefed" if frozen else "fedproto", frozen, told)
    found = []
    for device in ("cpu", "lazy"):
        if device == "lazy":
            request.getfixturevalue("there")
        losses: list[float] = []
        model, accuracy = pretrain(
            some(shipped().train, 10),
            10,
            plan,
            BACKBONE,
            seed=0,
            on_epoch=lambda _, loss, seen=losses: seen.append(loss),
        )
        assert model.device.type == device
        found.append((losses, accuracy))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-3)
    assert found[1][1] == pytest.approx(found[0][1], abs=0.06)
