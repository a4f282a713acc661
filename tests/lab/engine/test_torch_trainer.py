"""A device whose step torch computes is the device that its graphs train, but for rounding."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_samples import bundle_of, shipped, some
from second_device import compute_there
from torch import nn

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import DivergedError, UsageError
from protofleet.contract.methods import METHODS
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.training.trainer import Trainer, Weights
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.data.datasets import take
from protofleet.lab.data.partition import Partition
from protofleet.lab.engine.checkpoint import Checkpoint
from protofleet.lab.engine.deployed import Course, RoundRecord
from protofleet.lab.engine.evaluation import AveragingRecord
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.engine.run_averaging import Measures
from protofleet.lab.engine.torch_trainer import GraphsBesideTorch, TorchTrainer
from protofleet.lab.workers.engines import open_workers
from protofleet.lab.workers.workers import Workers

TRAINED = [name for name, found in METHODS.items() if found.trains]
BATCH = 16


def _given(bundle: Bundle) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    given = {name: rng.random(shape, np.float32) for name, shape in bundle.manifest.given_shapes.items()}
    return given | {"prototype_mask": np.array([1, 0] * 5, np.float32)}


def _check_same(start: Weights, ours: Weights, theirs: Weights) -> None:
    """After some steps in float32: they are apart by a fiftieth of the way that they went, at most."""
    for name, value in theirs.items():
        way = np.linalg.norm(value - start[name])
        assert np.linalg.norm(ours[name] - value) <= 0.02 * way + 1e-4, name


@pytest.mark.parametrize(
    ("method", "backbone"),
    [
        ("fedproto", "small_cnn"),
        ("fedhkd", "fedproto_mnist"),
        *(pytest.param(name, "small_cnn", marks=pytest.mark.slow) for name in TRAINED),
    ],
)
def test_torch_trains_as_the_graphs_do(method: str, backbone: str, tmp_path: Path) -> None:
    """Weights, running statistics and loss, a last batch that is not full among them; and again from the beginning."""
    bundle = bundle_of(tmp_path / "b.bundle", method, backbone)
    net, _ = build_backbone(backbone, (28, 28, 1), seed=8)  # its own weights do not matter
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    data, graphs = some(shipped().train, 7), GraphsBesideTorch(bundle, net)
    assert len(data) % BATCH
    found = []
    for trainer in (Trainer(bundle), graphs.trainer(), graphs.trainer()):
        trainer.load_state(bundle.params)
        loss = trainer.fit(data, epochs=2, lr=0.01, given=_given(bundle), seed=5)
        found.append((loss, trainer.export_state()))
    (wanted, weights), (loss, ours), (again, _) = found
    assert isinstance(graphs.trainer(), TorchTrainer)
    assert loss == pytest.approx(wanted, rel=1e-4)
    assert again == loss, "nothing of the first training is left"
    assert ours.keys() == weights.keys()
    _check_same(bundle.params, ours, weights)
    moved = [name for name, value in ours.items() if not np.array_equal(value, bundle.params[name])]
    assert set(bundle.manifest.names("param")) <= {*moved, "head.bias"}
    assert all((net.state_dict()[name] == tensor).all() for name, tensor in before.items())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
def test_the_step_runs_on_another_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a GPU's place stands torch's lazy device, which FedHKD's norm suits."""
    bundle, data = bundle_of(tmp_path / "b.bundle", "fedhkd", "fedproto_mnist"), some(shipped().train, 7)
    compute_there("protofleet.lab.engine.torch_trainer", monkeypatch)
    there, here = TorchTrainer(bundle, build_backbone("fedproto_mnist", (28, 28, 1), seed=8)[0]), Trainer(bundle)
    for trainer in (there, here):
        trainer.load_state(bundle.params)
        trainer.fit(data, epochs=1, lr=0.01, given=_given(bundle), seed=5)
    assert {tensor.device.type for tensor in there._net.parameters()} == {"lazy"}
    _check_same(bundle.params, there.export_state(), here.export_state())
    kept = there.optimizer_state()
    there.begin_with(kept)
    there.load_state(there.export_state())
    there.fit(data, epochs=1, lr=0.01, given=_given(bundle), seed=6)
    assert there.optimizer_state()["step.head.weight"] == 2 * kept["step.head.weight"] > 0
    counts = [own["step"] for each in there._optimizers for own in each.state.values()]
    assert {count.device.type for count in counts} == {"cpu"}, "torch's Adam refuses a count on a GPU"


@pytest.mark.parametrize(
    "method", ["fedproto", *(pytest.param(name, marks=pytest.mark.slow) for name in TRAINED if name != "fedproto")]
)
def test_nothing_of_a_step_stays_on_the_processor(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory are refused beside those of the processor, too: every method's step, without numbers."""
    monkeypatch.setattr("protofleet.lab.engine.torch_trainer.torch_device", lambda: torch.device("meta"))
    monkeypatch.setattr("protofleet.lab.engine.torch_trainer._array", lambda tensor: np.zeros(tensor.shape, np.float32))
    monkeypatch.setattr(TorchTrainer, "_is_finite", lambda self: True)
    bundle = bundle_of(tmp_path / "b.bundle", method, "fedproto_mnist")
    trainer = TorchTrainer(bundle, build_backbone("fedproto_mnist", (28, 28, 1), seed=8)[0])
    for _ in range(2):
        trainer.load_state(bundle.params)
        trainer.fit(some(shipped().train, 7), epochs=1, lr=0.01, given=_given(bundle), seed=5)
        trainer.begin_with(trainer.optimizer_state())
    assert {tensor.device.type for tensor in trainer._state.values()} == {"meta"}


def test_a_training_that_comes_to_nothing_is_said_so(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path / "b.bundle", "fedproto", "fedproto_mnist")
    trainer = TorchTrainer(bundle, build_backbone("fedproto_mnist", (28, 28, 1), seed=0)[0])
    trainer.load_state(bundle.params)
    with pytest.raises(DivergedError, match="training diverged"):
        trainer.fit(some(shipped().train, 7), epochs=3, lr=1e6, given=_given(bundle), seed=5)


def _records(
    method: str,
    trainer: str,
    *,
    keep: Path | None = None,
    on_round: Callable[[RoundRecord], None] = lambda record: None,
    workers: Workers | None = None,
    **given: object,
) -> list[RoundRecord]:
    experiment = Experiment(
        method,
        "fashion_mnist_subset",
        Partition("dirichlet", 3, alpha=0.5, only=150),
        Course(rounds=2, calibrate=False),
        "fedproto_mnist",
        BATCH,
        test_samples=50,
        trainer=trainer,
        **{"hyper": {"lr": 0.02, "epochs": 1}, **given},
    )
    checkpoint = None if keep is None else Checkpoint.of(keep, experiment)
    more = {"on_device": lambda number, turn: None, "on_text": lambda text: None, "on_round": on_round}
    return run_experiment(experiment, data=shipped(), checkpoint=checkpoint, workers=workers, **more)


@pytest.mark.parametrize("method", ["fedproto", "local"])
def test_a_run_by_either_trainer_is_the_same_but_for_rounding(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = _records(method, "torch"), _records(method, "onnx")
    assert [each.loss for each in ours] == pytest.approx([each.loss for each in theirs], rel=1e-3)
    assert [each.loss for each in ours] != [each.loss for each in theirs], "they are not one and the same"
    assert [each.uplink_bytes for each in ours] == [each.uplink_bytes for each in theirs]
    monkeypatch.setattr(TorchTrainer, "__init__", None)
    with pytest.raises(TypeError):
        _records(method, "torch")


@pytest.mark.parametrize("of_torch", [False, True])
def test_a_last_step_that_comes_to_nothing_is_said_so(of_torch: bool, tmp_path: Path) -> None:
    """Its loss was finite: it is of the weights before."""
    bundle = bundle_of(tmp_path / "b.bundle", "fedproto", "fedproto_mnist")
    net, _ = build_backbone("fedproto_mnist", (28, 28, 1), seed=0)
    trainer = TorchTrainer(bundle, net) if of_torch else Trainer(bundle)
    trainer.load_state(bundle.params)
    with pytest.raises(DivergedError, match="expected finite weights, got others after the last step"):
        trainer.fit(some(shipped().train, 1), epochs=1, lr=np.inf, given=_given(bundle), seed=5)


def test_each_device_trains_its_own_backbone() -> None:
    records = _records("fedproto", "torch", backbones=("fedproto_mnist_18", "fedproto_mnist"))
    assert records[-1].loss == pytest.approx(
        _records("fedproto", "onnx", backbones=("fedproto_mnist_18", "fedproto_mnist"))[-1].loss, rel=1e-3
    )


@pytest.mark.parametrize("trainer", ["torch", "onnx"])
def test_a_device_that_trains_alone_has_its_own_backbone_too(trainer: str) -> None:
    """As in the federation: before the first global state the same devices train in the same way."""
    backbones = ("fedproto_mnist_18", "fedproto_mnist")
    alone, together = (_records(method, trainer, backbones=backbones) for method in ("local", "fedproto"))
    one = _records("local", trainer, backbones=("fedproto_mnist_18", "fedproto_mnist_18"))
    assert alone[0].loss == together[0].loss != one[0].loss


def test_a_run_that_torch_trains_goes_on_with_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an interruption, and in processes, to the bit."""
    monkeypatch.setattr("protofleet.lab.engine.checkpoint._EVERY_S", 0.0)
    path, seen = tmp_path / "run.pt", []

    def stop(record: RoundRecord) -> None:
        raise KeyboardInterrupt

    whole = _records("fedproto", "torch")
    with pytest.raises(KeyboardInterrupt):
        _records("fedproto", "torch", keep=path, on_round=stop)
    with pytest.raises(UsageError, match="a checkpoint of this very run, got one of other settings"):
        _records("fedproto", "onnx", keep=path)
    assert _records("fedproto", "torch", keep=path, on_round=seen.append) == whole
    assert len(seen) == 2
    with open_workers("processes", 2) as workers:
        assert _records("fedproto", "torch", workers=workers) == whole


def test_each_devices_own_test_is_by_the_same_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the graph trains")

    given = {"local_test": 0.3, "measures": Measures(personal=("fit",))}
    theirs = _records("fedproto", "onnx", **given)[-1]
    monkeypatch.setattr(Trainer, "__init__", never)
    ours = _records("fedproto", "torch", **given)[-1]
    assert isinstance(ours, AveragingRecord)
    assert isinstance(theirs, AveragingRecord)
    assert ours.personal == pytest.approx(theirs.personal, abs=0.05)


@pytest.mark.parametrize("method", ["ncm", "fedavg"])
def test_what_no_device_trains_takes_no_trainer(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hyper = {"lr": 0.02} if method == "fedavg" else {}
    theirs = _records(method, "onnx", hyper=hyper)
    monkeypatch.setattr(GraphsBesideTorch, "__init__", None)
    ours = _records(method, "torch", hyper=hyper)
    assert [each.as_json() for each in ours] == [each.as_json() for each in theirs]


def test_unlabelled_samples_decay_and_the_global_state_count_for_either(tmp_path: Path) -> None:
    bundle = bundle_of(
        tmp_path / "b.bundle", "fedproto", "fedproto_mnist", pu_weight=0.5, weight_decay=0.05, momentum=0.9
    )
    net, _ = build_backbone("fedproto_mnist", (28, 28, 1), seed=8)
    data, found = some(shipped().train, 7), []
    data = LocalData(data.x, np.where(np.arange(len(data)) % 3, data.y, -1))
    for trainer in (Trainer(bundle), TorchTrainer(bundle, net)):
        trainer.load_state(bundle.params)
        losses = [trainer.fit(data, epochs=1, lr=0.02, given=given, seed=5) for given in (_given(bundle), {})]
        found.append((losses, trainer.export_state()))
    (wanted, weights), (losses, ours) = found
    assert losses == pytest.approx(wanted, rel=1e-4)
    _check_same(bundle.params, ours, weights)


def with_batch_norm() -> nn.Module:
    """A backbone of one convolution, with running statistics."""
    convolution = (nn.Conv2d(1, 4, 3, 4, bias=False), nn.BatchNorm2d(4, momentum=0.3))
    return nn.Sequential(*convolution, nn.ReLU(), nn.Flatten(), nn.Linear(196, 8))


def test_running_statistics_are_the_same(tmp_path: Path) -> None:
    """With a last batch that is not full."""
    backbone, found = f"{__name__}:with_batch_norm", []
    bundle = bundle_of(tmp_path / "b.bundle", "fedproto", backbone)
    buffers = bundle.manifest.names("buffer")
    assert len(buffers) == 2
    for trainer in (Trainer(bundle), TorchTrainer(bundle, with_batch_norm())):
        trainer.load_state(bundle.params)
        trainer.fit(some(shipped().train, 7), epochs=1, lr=0.01, given=_given(bundle), seed=5)
        found.append(trainer.export_state())
    _check_same(bundle.params, found[1], found[0])
    assert all(not np.array_equal(found[1][name], bundle.params[name]) for name in buffers)


def test_a_wrong_trainer_is_one_line() -> None:
    with pytest.raises(UsageError, match="--trainer, expected onnx, kernels or torch, got jax"):
        _records("fedproto", "jax")


def test_samples_of_one_client_may_be_one(tmp_path: Path) -> None:
    """A batch of one photo, which batch normalisation knows no spread of."""
    bundle = bundle_of(tmp_path / "b.bundle", "fedproto", "small_cnn")
    one, found = take(shipped().train, np.arange(1)), []
    for trainer in (Trainer(bundle), TorchTrainer(bundle, build_backbone("small_cnn", (28, 28, 1), seed=0)[0])):
        trainer.load_state(bundle.params)
        found.append((trainer.fit(one, epochs=2, lr=0.01, given=_given(bundle), seed=5), trainer.export_state()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4)
    _check_same(bundle.params, found[1][1], found[0][1])
