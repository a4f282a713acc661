"""Feature shift: by corruption, a kind for each client, and by source, several data sets as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from lab_samples import shipped, small_directory, some
from PIL import Image

from protofleet.contract.errors import DataError, UsageError
from protofleet.edge_client.data import LocalData
from protofleet.lab.data.datasets import load_dataset
from protofleet.lab.data.partition import Partition
from protofleet.lab.data.shift import CORRUPTIONS, shifted
from protofleet.lab.engine.deployed import Course
from protofleet.lab.engine.experiment import Experiment, run_experiment
from protofleet.lab.paper_tables.config import Settings
from protofleet.lab.paper_tables.run_log import data_mark


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("client", "kind"), list(enumerate(CORRUPTIONS)))
def test_a_clients_images_change_and_more_so_with_severity(client: int, kind: str, channels: int) -> None:
    x = np.repeat(some(shipped().train, 1).x, channels, axis=3)
    data = LocalData(x, np.arange(10))
    weak, strong = (shifted(data, client, severity, 0) for severity in (1, 5))
    assert np.array_equal(strong.y, data.y)
    assert strong.x.shape == x.shape
    assert strong.x.dtype == np.uint8
    apart = [float(np.abs(each.x.astype(int) - x).mean()) for each in (weak, strong)]
    assert (apart == [0.0, 0.0]) if kind == "none" else (0 < apart[0] < apart[1])
    assert np.array_equal(shifted(data, client, 5, 0).x, strong.x)
    assert np.array_equal(shifted(data, client + len(CORRUPTIONS), 5, 0).x, strong.x) or kind == "gaussian_noise"


def test_a_wrong_shift_is_one_line() -> None:
    with pytest.raises(UsageError, match="got corupption, try one of corruption"):
        Settings(method="fedavg", shift="corupption").experiment("d", 0)
    with pytest.raises(UsageError, match="severity, expected 1 to 5, got 6"):
        Settings(method="fedavg", severity=6).experiment("d", 0)


def test_clients_train_and_are_tested_on_their_own_kind() -> None:
    seen = []
    for shift in ("none", "corruption"):
        experiment = Experiment(
            "fedavg", "d", Partition("iid", 3, only=120), Course(1, False), "fedproto_mnist", 16,
            shift=shift, severity=5, test_samples=20, local_test=0.5, hyper={"lr": 0.02},
        )  # fmt: skip
        nothing = {"on_round": lambda r: None, "on_device": lambda n, t: None, "on_text": lambda text: None}
        (last,) = run_experiment(experiment, data=shipped(), **nothing)
        seen.append((last.loss, last.clients["local_test/head"]))
    assert seen[0][0] != seen[1][0]


def test_several_data_sets_are_one_that_knows_where_each_sample_is_from(tmp_path: Path) -> None:
    one, two = (small_directory(tmp_path / name, few, 3) for name, few in (("a", 4), ("b", 6)))
    found = load_dataset(f"{one}+{two}")
    assert found.name == "a+b"
    assert found.classes == 10
    assert found.sources.tolist() == [0] * 40 + [1] * 60
    assert len(found.test) == 60
    assert np.array_equal(found.train.x[:40], load_dataset(str(one)).train.x)
    assert load_dataset(str(one)).sources is None
    assert data_mark(f"{one}+{two}") == f"{data_mark(str(one))} + {data_mark(str(two))}"


def _folder(root: Path, names: Sequence[str]) -> Path:
    for value, name in enumerate(names):
        (root / name).mkdir(parents=True)
        for n in range(12):
            Image.fromarray(np.full((8, 8), 10 * value + n, np.uint8)).save(root / name / f"{n}.png")
    return root


def test_a_class_of_several_data_sets_is_found_by_its_name(tmp_path: Path, said: list[str]) -> None:
    """Two sets with as many classes, of which they share one."""
    one = _folder(tmp_path / "a", ("cat", "dog"))
    two = _folder(tmp_path / "b", ("bird", "cat"))
    found = load_dataset(f"{one}+{two}")
    assert found.labels == ("cat", "dog", "bird")
    of = {name: set(found.train.y[found.sources == n].tolist()) for n, name in enumerate("ab")}
    assert of == {"a": {0, 1}, "b": {0, 2}}
    assert set(found.test.y.tolist()) == {0, 1, 2}
    assert any("3 classes in all, found by their names; a has 2, b has 2" in line for line in said)


def test_a_set_that_only_numbers_its_classes_has_the_numbers_of_the_first(tmp_path: Path) -> None:
    one = _folder(tmp_path / "a", ("cat", "dog", "bird"))
    for name, classes in (("b", 2), ("c", 4)):
        y = np.arange(6 * classes) % classes
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((len(y), 8, 8, 1), np.uint8), y=y)
    numbers = load_dataset(f"{tmp_path / 'b.npz'}+{tmp_path / 'c.npz'}")
    assert numbers.labels == ("0", "1", "2", "3")
    found = load_dataset(f"{one}+{tmp_path / 'b.npz'}")
    assert found.labels == ("bird", "cat", "dog")
    assert set(found.train.y[found.sources == 1].tolist()) == {0, 1}
    with pytest.raises(DataError, match="expected numbers of the 3 classes of a, got 4 classes"):
        load_dataset(f"{one}+{tmp_path / 'c.npz'}")
