"""Averaging weights: against naive sums, against plain local training, and against the device's own training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lab_samples import shares, shipped, some, summed
from safetensors.torch import load_file

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.heads.sphere import orthonormal_frame
from protofleet.contract.methods import method
from protofleet.contract.wire.messages import Announcement
from protofleet.edge_client.device.device import Device, round_seed
from protofleet.export.backbones.backbone import build_backbone
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.algorithms.base import average
from protofleet.lab.algorithms.head_calibration import calibrated_head
from protofleet.lab.demo.baselines import ridge_head
from protofleet.lab.engine.deployed import Course, run_id
from protofleet.lab.engine.run_averaging import run_algorithm
from protofleet.lab.training.local_training import EagerModel, save_weights, train_eager

TEST = some(shipped().test, 8)


def _model(head: str = "local", seed: int = 3) -> EagerModel:
    net, width = build_backbone("fedproto_mnist", (28, 28, 1), seed=seed)
    return EagerModel(net, classes=10, features=width, mean=(0.5,), std=(0.5,), head=head, seed=seed)


def test_average_is_the_weighted_mean_number_by_number() -> None:
    rng = np.random.default_rng(0)
    arrays = [{"a": rng.normal(size=(3, 2)), "b": rng.normal(size=4)} for _ in range(4)]
    samples = [5, 1, 7, 20]
    found = average([{k: torch.from_numpy(v) for k, v in each.items()} for each in arrays], samples)
    for name in ("a", "b"):
        naive = np.zeros_like(arrays[0][name])
        for index in np.ndindex(naive.shape):
            naive[index] = sum(n * each[name][index] for n, each in zip(samples, arrays, strict=True)) / sum(samples)
        np.testing.assert_allclose(found[name].numpy(), naive, rtol=1e-12)


def test_one_round_of_fedavg_is_the_average_of_local_trainings() -> None:
    algorithm, held, course = ALGORITHMS["fedavg"], shares(), Course(rounds=1, calibrate=False, seed=4)
    hyper = algorithm.resolve({"lr": 0.02, "epochs": 1})
    model = _model()
    locals_ = []
    for number, share in enumerate(held, start=1):
        local = copy.deepcopy(model)
        seed = round_seed(f"device-{number}", run_id(4), 1)
        train_eager(local, share, algorithm.loss(), hyper, epochs=1, batch=8, lr=0.02, seed=seed)
        locals_.append(local.state_dict())
    (record,) = run_algorithm(algorithm, model, held, TEST, course, hyper, batch=8)
    total = sum(len(share) for share in held)
    for name, tensor in model.state_dict().items():
        naive = sum(len(share) / total * local[name].double() for share, local in zip(held, locals_, strict=True))
        np.testing.assert_allclose(tensor.numpy(), naive.numpy(), rtol=1e-5, atol=1e-7, err_msg=name)
    assert record.uplink_bytes == 4 * sum(p.numel() for p in model.parameters())
    assert record.all_classes["head"] == pytest.approx((model.predict(TEST.x) == TEST.y).mean())


def test_torch_and_the_device_train_alike(lab_bundle: Callable[..., Path]) -> None:
    """The same samples in the same order: a device's round on ONNX Runtime ends where plain torch does."""
    bundle = read_bundle(lab_bundle(lr=0.02, momentum=0.9))
    share = shares()[0]
    device = Device(bundle, share, "device-1")
    device.run_round(Announcement(run_id(0), 1, "open", "fedproto", bundle.sha256), None)
    model = _model()
    seed = round_seed("device-1", run_id(0), 1)
    train_eager(model, share, "fedproto", bundle.manifest.hyper, epochs=1, batch=8, lr=0.02, seed=seed)
    trained = device.state()
    ended = {f"backbone.{name}": tensor.numpy() for name, tensor in model.backbone.state_dict().items()}
    ended["head.weight"] = model.head_weight.detach().numpy()
    for name, wanted in ended.items():
        # Rounding, and a ReLU that it turns over, change a hundredth of the way at most; another order of the samples,
        # or training without momentum, most of it.
        way = np.linalg.norm(wanted - bundle.params[name])
        assert np.linalg.norm(trained[name] - wanted) < 0.01 * way, name


def test_spherefed_never_moves_its_head() -> None:
    algorithm, model = ALGORITHMS["spherefed"], _model("frozen")
    hyper = algorithm.resolve({"epochs": 1, "lr": 0.1})
    before = copy.deepcopy(model.backbone.state_dict())
    records = run_algorithm(algorithm, model, shares(), TEST, Course(rounds=2), hyper, batch=8)
    np.testing.assert_allclose(model.head_weight.numpy(), orthonormal_frame(10, 50, 3), atol=1e-7)
    assert any(not torch.equal(before[name], tensor) for name, tensor in model.backbone.state_dict().items())
    assert set(records[0].all_classes) == {"head"}
    assert set(records[1].all_classes) == {"head", "linear"}


def test_the_calibrated_head_is_the_pooled_one() -> None:
    model, held = _model(), shares()
    pooled = np.concatenate([model.features(share.x) for share in held]).astype(np.float64)
    best = ridge_head(pooled, np.concatenate([share.y for share in held]), 10, 1e-6)
    rounding = 1e-6 * np.abs(best).max()  # two solvers of one system, whose smallest penalty is a millionth of the mean
    np.testing.assert_allclose(
        calibrated_head(summed(model, held), method("ffc").resolve({"ridge": 1e-6, "form": "ridge"})).weight,
        best,
        rtol=1e-6,
        atol=rounding,
    )


def test_saved_weights_are_what_export_takes(tmp_path: Path) -> None:
    model = _model(seed=11)
    save_weights(model, tmp_path / "w" / "backbone.safetensors")
    assert set(load_file(tmp_path / "w" / "backbone.safetensors")) == set(model.backbone.state_dict())
