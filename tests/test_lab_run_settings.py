"""A run's settings from a file and from the command line, and written out with every default."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab_samples import small_directory

from contract.errors import UsageError
from lab.run_settings import experiment_of, read_settings, resolved_text
from protofleet.cli import main

GIVEN = {
    "settings": None, "save_weights": None, "set": None, "calibrate": None, "ccvr": False, "personal": None,
    "weights": None,
    "method": "fedproto", "data": "fashion_mnist_subset", "input": None, "partition": "dirichlet", "alpha": 0.5,
    "samples": 0, "clients": 5, "rounds": None, "fraction": 1.0, "seed": 0, "backbone": "small_cnn", "head": None,
    "batch": 32, "evaluate_every": 1,
}  # fmt: skip


def _of(tmp_path: Path, text: str, **said: object):
    (path := tmp_path / "run.toml").write_text(text)
    return experiment_of(GIVEN | {"settings": path} | said, set(said) | {"settings"})


def test_the_command_line_goes_before_the_file_and_that_before_defaults(tmp_path: Path) -> None:
    text = 'method = "fedavg"\nclients = 7\nbatch = 8\nmin_classes = 1\nseed = 3\n[hyper]\nlr = 0.5\nmomentum = 0.1\n'
    found = _of(tmp_path, text, batch=16, set=["lr=0.2"])
    assert (found.method, found.partition.clients, found.batch, found.course.seed) == ("fedavg", 7, 16, 3)
    assert found.partition.min_classes == 1
    assert found.resolved()["hyper"]["lr"] == 0.2
    assert found.resolved()["hyper"]["momentum"] == 0.1
    assert found.course.rounds == 5
    assert found.course.calibrate


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"calibrate": False, "ccvr": True, "method": "fedavg", "personal": ["fit"]},
        {"backbone": "fedproto_mnist_18, fedproto_mnist", "input": "28x28x1"},
        {"method": "ffc", "samples": 300, "rounds": 1},
    ],
    ids=["defaults", "closings", "backbones", "ffc"],
)
def test_what_is_written_is_the_same_experiment(said: dict[str, object], tmp_path: Path) -> None:
    first = experiment_of(GIVEN | said, set(said))
    again = _of(tmp_path, resolved_text(first))
    assert again.resolved() == first.resolved() | {"measures": again.resolved()["measures"]}
    assert (again.data, again.course, again.input_shape) == (first.data, first.course, first.input_shape)
    assert again.backbones == first.backbones


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected a TOML file, got No such file"):
        read_settings(tmp_path / "none.toml")
    (path := tmp_path / "a.toml").write_text("round = 3")
    with pytest.raises(UsageError, match="expected settings of a run, got Object contains unknown field `round`"):
        read_settings(path)


def test_the_command_takes_a_file_and_writes_what_it_ran(tmp_path: Path) -> None:
    data = small_directory(tmp_path / "data", 6, 3)
    (tmp_path / "in.toml").write_text('method = "ncm"\npartition = "iid"\nclients = 2\n')
    out = tmp_path / "out.toml"
    line = ["lab", "run", "--settings", str(tmp_path / "in.toml"), "--data", str(data), "--jobs", "1", "--clients", "3"]
    assert main([*line, "--backbone", "fedproto_mnist", "--save-settings", str(out), "-q"]) == 0
    found = read_settings(out)
    assert (found.method, found.clients, found.partition, found.rounds) == ("ncm", 3, "iid", 1)
    assert found.data == str(data)


@pytest.mark.parametrize("given", [["--backbone", "small_cn"], ["--backbone", "fedproto_mnist,small_cn"]])
def test_a_wrong_backbone_is_refused_before_data_are_looked_for(
    given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "run", "--method", "fedproto", "--data", str(tmp_path / "nowhere"), *given]) == 2
    assert (
        "error: --backbone, expected a known backbone or module:callable, got small_cn, try" in capsys.readouterr().err
    )
