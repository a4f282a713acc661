"""Weights from a file: what fits goes in, what does not is refused by name, and no code in the file ever runs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from protofleet.contract.errors import ExportError
from protofleet.export.backbones import vision
from protofleet.export.backbones.backbone import build_backbone
from protofleet.export.backbones.weights import load_weights


@pytest.fixture
def net() -> nn.Module:
    return build_backbone("small_cnn", (12, 12, 1), "batch")[0]


def _other(net: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v + 1 if v.is_floating_point() else v for k, v in net.state_dict().items()}


@pytest.mark.parametrize("prefix", ["", "module.", "backbone.", "module.model."])
@pytest.mark.parametrize("nest", [None, "state_dict"])
def test_torch_and_safetensors_load_the_same(net: nn.Module, tmp_path: Path, prefix: str, nest: str | None):
    wanted = _other(net)
    named = {prefix + k: v for k, v in wanted.items()}
    torch.save({nest: named} if nest else named, tmp_path / "w.pt")
    save_file(named, tmp_path / "w.safetensors")
    for name in ("w.pt", "w.safetensors"):
        fresh = build_backbone("small_cnn", (12, 12, 1), "batch", seed=9)[0]
        assert load_weights(fresh, tmp_path / name) == []
        for key, value in fresh.state_dict().items():
            assert torch.equal(value, wanted[key])


def test_a_classifier_is_ignored_and_named(net: nn.Module, tmp_path: Path):
    save_file(
        {**_other(net), "fc.weight": torch.ones(3), "classifier.1.bias": torch.ones(2)}, tmp_path / "w.safetensors"
    )
    assert load_weights(net, tmp_path / "w.safetensors") == ["classifier.1.bias", "fc.weight"]


def test_counters_may_be_missing(net: nn.Module, tmp_path: Path):
    save_file({k: v for k, v in _other(net).items() if "num_batches" not in k}, tmp_path / "w.safetensors")
    load_weights(net, tmp_path / "w.safetensors")


def test_torchvisions_own_names_fit():
    whole = vision.models().mobilenet_v2(weights=None).state_dict()
    assert {"classifier.1.weight", "classifier.1.bias"} == set(whole) - set(
        build_backbone("mobilenet_v2", (32, 32, 3))[0].state_dict()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("0.weight"), r"1 of the backbone's tensors are missing, expected 0\.weight"),
        (lambda w: w.update({"stray": torch.ones(1)}), "got stray"),
        (lambda w: w.update({"0.weight": torch.ones(32, 3, 3, 3)}), r"expected shape \(32, 1, 3, 3\)"),
        (lambda w: w["0.bias"].fill_(float("nan")), "expected finite weights"),
        (lambda w: w.clear(), "no tensors"),
    ],
)
def test_what_does_not_fit_is_refused(net: nn.Module, tmp_path: Path, change, message: str):
    weights = _other(net)
    change(weights)
    torch.save(weights, tmp_path / "w.pt")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    with pytest.raises(ExportError, match=message):
        load_weights(net, tmp_path / "w.pt")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


class _Bomb:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def test_no_code_in_the_file_runs(net: nn.Module, tmp_path: Path):
    target = tmp_path / "exploded"
    torch.save({"0.weight": _Bomb(str(target))}, tmp_path / "w.pt")
    (tmp_path / "w.pkl").write_bytes(pickle.dumps(_Bomb(str(target)), protocol=2))
    for name in ("w.pt", "w.pkl"):
        with pytest.raises(ExportError, match="cannot be read safely"):
            load_weights(net, tmp_path / name)
    assert not target.exists()


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
@pytest.mark.parametrize("content", [b"", b"not weights", b"PK\x03\x04broken"])
def test_a_file_of_something_else_is_refused(net: nn.Module, tmp_path: Path, name: str, content: bytes):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ExportError, match="cannot be read safely"):
        load_weights(net, tmp_path / name)


def test_a_whole_model_is_refused(net: nn.Module, tmp_path: Path):
    torch.save({"epoch": 3, "w": torch.ones(2)}, tmp_path / "w.pt")
    with pytest.raises(ExportError, match="state dict"):
        load_weights(net, tmp_path / "w.pt")
    with pytest.raises(ExportError, match="no such file"):
        load_weights(net, tmp_path / "absent.pt")
