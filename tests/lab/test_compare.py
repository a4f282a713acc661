"""`protofleet lab compare`: methods on the same clients and seeds, their spread, and the curves."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, run, run_process

from protofleet.cli import main

SMALL = ("--samples", "200", "--clients", "2", "--rounds", "2", "--jobs", "1")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, str]:
    folder = tmp_path_factory.mktemp("compared")
    told = ("--seeds", "2", "--first-seed", "3", "--plot", folder / "c.svg", "--json", folder / "c.json")
    done = run("lab", "compare", "ncm,fedavg", *SMALL, *told)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr, json.loads((folder / "c.json").read_text()), (folder / "c.svg").read_text()


def test_each_method_has_its_accuracies_by_seed_and_round(compared: tuple[str, dict, str]) -> None:
    _, found, _ = compared
    assert found["seeds"] == [3, 4]
    ncm, fedavg = found["methods"]
    assert (ncm["method"], fedavg["method"], fedavg["way"]) == ("ncm", "fedavg", "head")
    for each in (ncm, fedavg):
        assert np.array(each["all_classes"]).shape == (2, 2)
        assert each["rounds"] == [1, 2]
    assert len(fedavg["closing"]) == 2
    assert ncm["uplink_bytes"] < fedavg["uplink_bytes"] / 100


def test_the_runs_are_those_of_lab_run(compared: tuple[str, dict, str], tmp_path: Path) -> None:
    told = ("--method", "fedavg", "--seed", "4", "--json", tmp_path / "r.jsonl")
    assert run("lab", "run", *SMALL, *told).returncode == 0
    records = [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    _, found, _ = compared
    assert [record["all_classes"]["head"] for record in records] == found["methods"][1]["all_classes"][1]


def test_images_are_decoded_once_for_all_runs(compared: tuple[str, dict, str]) -> None:
    text, _, _ = compared
    assert text.count("decoding 6,000 images") == 1


def test_the_table_has_the_spread_and_the_paired_difference(compared: tuple[str, dict, str]) -> None:
    text, found, _ = compared
    ncm, fedavg = (np.array(each["all_classes"])[:, -1] for each in found["methods"])
    (line,) = (line for line in text.splitlines() if line.startswith("fedavg "))
    assert f"{100 * fedavg.mean():.1f}%" in line
    assert f"{100 * fedavg.std(ddof=1):.2f}" in line
    assert f"{100 * (fedavg - ncm).mean():+.1f} ± " in line


def test_the_plot_has_a_line_and_a_band_of_each(compared: tuple[str, dict, str]) -> None:
    _, _, svg = compared
    assert svg.startswith("<svg")
    assert all(re.search(rf">{name}<", svg) for name in ("ncm", "fedavg"))
    assert "standard deviation" in svg
    assert ">after round; mean and deviation of 2 seeds<" in svg


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fedproto,fedavgg",), "fedavg"),
        ((",",), "methods, expected names with commas between"),
        (("ncm", "--seeds", "0"), "--seeds, expected 1 or more, got 0"),
        (("ncm", "--plot", "c.png"), "--plot, expected a file that ends in .svg, got c.png"),
        (("ncm", "--plot", "/nowhere/c.svg"), "/nowhere/c.svg"),
        (("ncm", "--partition", "dirichlett"), "dirichlet"),
        (("ncm", "-q"), "--quiet, expected --json or --plot, where the result goes, got neither"),
    ],
)
def test_what_cannot_be_is_a_line_before_anything_runs(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lab", "compare", *words]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert said in lines[0]


def test_liars_are_named_and_cost_answers(tmp_path: Path) -> None:
    given = ("--method", "ncm", "--partition", "iid", "--samples", "400", "--clients", "5", "--jobs", "1")
    right = []
    for liars in (0, 2):
        out = tmp_path / f"{liars}.jsonl"
        done = run("lab", "run", *given, "--no-calibrate", "--liars", liars, "--json", out)
        assert done.returncode == 0, done.stderr
        assert (done.stdout + done.stderr).count("lies: each of its training images has the label of the next") == liars
        right.append(json.loads(out.read_text().splitlines()[-1])["all_classes"]["class_mean"])
    assert right[1] < right[0] - 0.05


@pytest.mark.slow
def test_a_method_of_ones_own_is_answered_by_its_own_way(tmp_path: Path) -> None:
    """As the method that it extends: by prototypes, not by the head that both have, too."""
    (tmp_path / "halved.py").write_text(
        "from protofleet.contract.methods.fedproto import FedProto\n\n\n"
        'class Halved(FedProto):\n    """FedProto by another name."""\n\n    name = "halved"\n'
    )
    small = ("--samples", "120", "--clients", "2", "--rounds", "1", "--jobs", "1", "--seeds", "1")
    told = ("fedproto,halved:Halved", *small, "--json", tmp_path / "c.json", "--plot", tmp_path / "c.svg")
    done = run_process("lab", "compare", *told, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith(("method ", "fedproto ", "halved "))]
    assert len(table) == 3
    assert max(map(len, table)) <= 80
    assert table[2].rstrip().endswith("kB")
    usual, own = json.loads((tmp_path / "c.json").read_text())["methods"]
    assert ">halved<" in (tmp_path / "c.svg").read_text()  # as the table has it
    assert usual["way"] == "prototype"
    assert (own["way"], own["all_classes"]) == (usual["way"], usual["all_classes"])
