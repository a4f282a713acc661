"""A run's settings from a file and from the command line, and written out with every default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from commands import ROOT
from lab_samples import small_directory

from protofleet.cli import main
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHODS
from protofleet.export.backbones.backbone_names import check_backbone_name
from protofleet.lab.algorithms import ALGORITHMS
from protofleet.lab.method_names import algorithm_names
from protofleet.lab.run_settings import experiment_of, read_settings, resolved_text

GIVEN = {
    "settings": None, "save_weights": None, "set": None, "calibrate": None, "ccvr": False, "personal": None,
    "weights": None,
    "method": "fedproto", "data": "fashion_mnist_subset", "input": None, "partition": "dirichlet", "alpha": 0.5,
    "samples": 0, "clients": 5, "rounds": None, "fraction": 1.0, "seed": 0, "backbone": "small_cnn", "head": None,
    "batch": 32, "evaluate_every": 1, "liars": 0, "rule": "mean",
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
        {"method": "fedproto", "liars": 2, "rule": "median"},
    ],
    ids=["defaults", "closings", "backbones", "ffc", "liars"],
)
def test_what_is_written_is_the_same_experiment(said: dict[str, object], tmp_path: Path) -> None:
    first = experiment_of(GIVEN | said, set(said))
    again = _of(tmp_path, resolved_text(first))
    assert again.resolved() == first.resolved() | {"measures": again.resolved()["measures"]}
    assert (again.data, again.course, again.input_shape) == (first.data, first.course, first.input_shape)
    assert again.backbones == first.backbones


OWN = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from protofleet.contract.methods.fedproto import FedProto
from protofleet.contract.sums.statistics import Field, Rows, Statistic


@dataclass(frozen=True, eq=False)
class Weighed(Statistic):
    NAME: ClassVar[str] = "weighed"
    FIELDS: ClassVar[tuple[Field, ...]] = (Rows("weighed"), Rows("weights"))

    weighed: np.ndarray
    weights: np.ndarray
    counts: np.ndarray


class Own(FedProto):
    name = "own"
    statistic = Weighed
"""


@pytest.fixture
def own_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A method with a statistic of its own, whose rows travel as means, but are no class means."""
    (tmp_path / "own_method_of_settings.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "_known", dict(METHODS._known))
    return "own_method_of_settings:Own"


def test_a_method_of_ones_own_is_written_by_its_place(own_method: str, tmp_path: Path) -> None:
    """By its name alone another process does not find it."""
    text = resolved_text(experiment_of(GIVEN | {"method": own_method}, {"method"}))
    assert f'method = "{own_method}"\n' in text
    assert _of(tmp_path, text).method == "own"
    assert 'method = "fedprox"\n' in resolved_text(experiment_of(GIVEN | {"method": "fedprox"}, {"method"}))


def test_a_rule_is_for_class_means_and_no_other_means(own_method: str) -> None:
    """Refused at once, not when the first round has been trained."""
    with pytest.raises(UsageError, match="--rule, expected mean for own, which sends no class means, got median"):
        experiment_of(GIVEN | {"method": own_method, "rule": "median"}, {"method", "rule"})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"liars": 5}, "--liars, expected 0 to 4, fewer than clients, got 5"),
        ({"liars": -1}, "--liars, expected 0 to 4"),
        ({"rule": "medain"}, "--rule, expected .*, got medain"),
        ({"rule": "median", "method": "fedavg"}, "--rule, expected mean for fedavg, which sends no class means"),
        ({"rule": "median", "method": "ffc"}, "--rule, expected mean for ffc, which sends no class means"),
        ({"rule": "median", "method": "local"}, "--rule, expected mean for local"),
    ],
)
def test_liars_and_rules_that_cannot_be_are_one_line(said: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        experiment_of(GIVEN | said, set(said))


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


_TABLE = """
title = "t"
source = "s"
data = "nowhere"
metric = "all/head"
settings = {{ rounds = 1{settings} }}
columns = [{{ name = "iid" }}, {{ name = "uneven" }}]
rows = [{{ name = "first", settings = {{ method = "{method}" }} }}]
"""
_RUN = ("lab", "run", "--data", "nowhere")
_DEMO = ("demo", "--data", "nowhere")
_EXPORT = ("export", "--out", "x.bundle", "--method", "fedproto")


Answered = Callable[[Sequence[object], str], tuple[int, str]]
_ANSWERS = """
import json, sys
from commands import run
for line in sys.stdin:
    words, table = json.loads(line)
    with open("t.toml", "w") as file:
        file.write(table)
    done = run(*words)
    print(json.dumps([done.returncode, done.stderr]), flush=True)
"""


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answered]:
    """`answered(words, table)`: the exit code of that command, with `table` as t.toml, and its standard error.

    All are asked of one process, in which the first import of torch is an error, and so is every further one.
    """
    folder = tmp_path_factory.mktemp("answers")
    (folder / "torch.py").write_text("raise RuntimeError('torch was loaded')\n")
    (folder / "run.toml").write_text('method = "scafold"\n')
    paths = os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests" / "support")))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    command, environment = [sys.executable, "-c", _ANSWERS], {**os.environ, "PYTHONPATH": paths}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:

        def ask(words: Sequence[object], table: str) -> tuple[int, str]:
            process.stdin.write(json.dumps([list(map(str, words)), table]) + "\n")
            process.stdin.flush()
            code, said = json.loads(process.stdout.readline())
            return code, said

        yield ask
        process.stdin.close()


@pytest.mark.parametrize(
    ("words", "table", "near"),
    [
        ((*_RUN, "--partition", "dirichle"), {}, "dirichlet"),
        ((*_RUN, "--method", "fedbab"), {}, "try one of fedbabu"),
        ((*_RUN, "--method", "fedprot"), {}, "try one of fedproto"),
        ((*_RUN, "--backbone", "small_cn"), {}, "try one of small_cnn"),
        ((*_RUN, "--backbone", "small_cnn,resnet8"), {}, "try one of resnet18"),
        ((*_RUN, "--settings", "run.toml"), {}, "try one of scaffold"),
        (("lab", "table", "pretrained-method"), {}, "try one of pretrained-methods"),
        (("lab", "table", "t.toml", "--only", "frist"), {}, "try one of first"),
        (("lab", "table", "t.toml", "--columns", "iid,unevn"), {}, "try one of uneven"),
        (("lab", "table", "t.toml"), {"method": "scafold"}, "first, iid: method, expected a method of the lab"),
        (("lab", "table", "t.toml"), {"settings": ', partition = "shot"'}, "first, iid: partition, expected iid, dir"),
        (("lab", "table", "t.toml"), {"settings": ', backbone = "resnet8"'}, "first, iid: backbone, expected a known"),
        ((*_EXPORT[:3], "--backbone", "small_cnn", "--classes", 10, "--method", "fedprot"), {}, "fedproto"),
        ((*_EXPORT, "--backbone", "small_cnn", "--classes", "cat,dog,cat"), {}, "names that differ, got 'cat' again"),
        ((*_EXPORT, "--backbone", "small_cnn", "--classes", "1o"), {}, "a number, or names"),
        ((*_EXPORT, "--backbone", "tim:resnet18", "--classes", 10), {}, "try one of timm:resnet18"),
        ((*_EXPORT, "--backbone", "resnet8", "--classes", 10), {}, "try one of resnet18"),
        ((*_EXPORT, "--backbone", "resnet18", "--classes", 10, "--weights", "pretraind"), {}, "try pretrained"),
        ((*_EXPORT, "--backbone", "resnet18", "--classes", 10, "--weights", "w.pt"), {}, "try the path of"),
        ((*_EXPORT, "--backbone", "resnet18", "--classes", 10, "--weights", "pretrained"), {}, "torchvision:resnet18"),
        ((*_DEMO, "--backbone", "nonsense"), {}, "--backbone, expected a known backbone"),
        ((*_DEMO, "--backbone", "small_cnn,resnet8"), {}, "try one of resnet18"),
        ((*_RUN, "--partition", "dirichlet:-1"), {}, "try --partition dirichlet --alpha NUMBER"),
        ((*_RUN, "--partition", "dirichlet:0.3"), {}, "try --partition dirichlet --alpha 0.3"),
        ((*_RUN, "--partition", "pathological:2"), {}, "try --partition pathological --classes-per-client 2"),
        ((*_RUN, "--partition", "iid:2"), {}, "try --partition iid"),
        ((*_RUN, "--alpha", "-1"), {}, "--alpha, expected above 0"),
        ((*_RUN, "--weights", "w.pt"), {}, "--weights, expected pretrained, or a file that is there"),
        ((*_RUN, "--partition", "source"), {}, "--partition source, expected several data sets, got nowhere, try"),
        ((*_RUN, "--shift", "corruptoin"), {}, "try one of corruption"),
        ((*_RUN, "--input", "10"), {}, "--input, expected HxWxc"),
    ],
)
def test_a_misspelt_name_is_answered_before_torch_is_loaded(
    words: tuple[object, ...], table: dict[str, str], near: str, answered: Answered
) -> None:
    code, said = answered(words, _TABLE.format(**{"settings": "", "method": "fedavg"} | table))
    assert code == 2, said
    assert said.startswith("error: ")
    assert (near in said, said.count("\n")) == (True, 1)


def test_the_names_of_algorithms_are_those_of_their_classes() -> None:
    assert sorted(algorithm_names()) == sorted(ALGORITHMS)
    assert algorithm_names() is algorithm_names()  # read once, for the hundreds of experiments of a table


def test_what_lies_behind_a_colon_may_be_anybodys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mine.networks:small", "timm:any", "hub:timm/any", "onnx:a.onnx", "resnet18"):
        check_backbone_name(name)
    for name in ("timm:", ":small", "tim:any", "torchvison:resnet18", ""):
        with pytest.raises(UsageError, match="expected a known backbone or module:callable"):
            check_backbone_name(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tim.py").touch()
    check_backbone_name("tim:any")
