"""Samples without a label: read from every source where the method knows them, refused where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from edge_samples import announcement, fashion

from protofleet.contract.bundle.bundle_file import Manifest, read_bundle
from protofleet.contract.errors import DataError
from protofleet.contract.methods import METHODS, method
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.global_state import GlobalState
from protofleet.edge_client.data import UNLABELLED, LocalData
from protofleet.edge_client.data.load import load_data
from protofleet.edge_client.device.device import Device
from tests.edge_client.data.test_load import manifest, png, samples, write_folder, write_parquet

FORMS = ("npz", "folder", "parquet")
OTHERS = [name for name, row in METHODS.items() if "pu_weight" not in row.hyper]


def _of(name: str) -> Manifest:
    return msgspec.structs.replace(manifest(), method=name, hyper=method(name).resolve({}))


def _source(form: str, folder: Path) -> tuple[Path, np.ndarray, np.ndarray]:
    """Nine images, the last three of which have no label."""
    x, y = samples()
    y = np.where(np.arange(9) < 6, y, UNLABELLED)
    if form == "npz":
        np.savez(folder / "d.npz", x=x, y=y)
        return folder / "d.npz", x, y
    if form == "parquet":
        return write_parquet(folder / "d.parquet", x, y, manifest().labels), x, y
    root = write_folder(folder / "images", x[:6], y[:6], manifest().labels)
    (root / "unlabelled").mkdir()
    for row in range(6, 9):
        (root / "unlabelled" / f"{row:04}.png").write_bytes(png(x[row]))
    return root, x, y


def _rows(x: np.ndarray, y: np.ndarray) -> list[tuple[int, bytes]]:
    return sorted((int(number), pixels.tobytes()) for pixels, number in zip(x, y, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_every_source_may_hold_them(form: str, tmp_path: Path) -> None:
    path, x, y = _source(form, tmp_path)
    data = load_data(path, _of("fedproto"))
    assert _rows(data.x, data.y) == _rows(x, y)
    assert data.counts(3).tolist() == [2, 2, 2]
    assert _rows(data.labelled.x, data.labelled.y) == _rows(x[:6], y[:6])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OTHERS)
def test_a_method_that_does_not_know_them_refuses_them(form: str, name: str, tmp_path: Path) -> None:
    path, _, _ = _source(form, tmp_path)
    line = "unknown class, .*'unlabelled'" if form == "folder" else "a label is out of range, expected 0 to 2, got -1"
    with pytest.raises(DataError, match=line):
        load_data(path, _of(name))


@pytest.mark.parametrize("form", FORMS)
def test_a_test_set_has_labels(form: str, tmp_path: Path) -> None:
    path, _, _ = _source(form, tmp_path)
    with pytest.raises(DataError, match="a label is out of range, expected 0 to 2, got -1"):
        load_data(path, _of("fedproto"), purpose="test")


def test_some_labels_are_needed(tmp_path: Path) -> None:
    x, _ = samples()
    np.savez(tmp_path / "d.npz", x=x, y=np.full(9, UNLABELLED))
    with pytest.raises(DataError, match="labels for some images at least"):
        load_data(tmp_path / "d.npz", _of("fedproto"))


def test_a_label_below_minus_one_is_no_missing_one(tmp_path: Path) -> None:
    x, y = samples()
    np.savez(tmp_path / "d.npz", x=x, y=np.where(np.arange(9) < 6, y, -2))
    with pytest.raises(DataError, match="expected 0 to 2, or -1 for none, got -2"):
        load_data(tmp_path / "d.npz", _of("fedproto"))


@pytest.mark.parametrize("weight", [0.0, 0.8])
def test_a_device_trains_on_them_by_their_weight_and_never_counts_them(
    weight: float, mnist_like_bundle: Callable[..., Path]
) -> None:
    bundle = read_bundle(mnist_like_bundle("fedproto", hyper={"pu_weight": weight} if weight else {}))
    known, more = fashion(bundle, 24, (0, 3)), fashion(bundle, 24, (0, 3), seed=1)
    mixed = LocalData(np.concatenate([known.x, more.x]), np.append(known.y, np.full(24, UNLABELLED)))
    results = [Device(bundle, data, "pi-1").run_round(announcement(bundle), None) for data in (known, mixed)]
    assert [result.contribution.counts.sum() for result in results] == [24, 24]
    assert [result.samples for result in results] == [24, 24]
    assert [result.steps for result in results] == ([2, 3] if weight else [2, 2])
    one, other = (encode(result.contribution, "f64") for result in results)
    assert (one == other) == (not weight)


def test_class_priors_are_the_shares_of_the_labelled():
    given = method("fedproto").inputs(np.array([1, 0, 3]), GlobalState(bytes(4), 0, 0), 3, 2)
    np.testing.assert_array_equal(given["class_priors"], np.array([0.25, 0.0, 0.75], np.float32))
