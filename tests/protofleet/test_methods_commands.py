"""Every method in `inspect`, `profile`, `cost`, `demo` and `lab run`; one of them is not Protofleet's.

By default the demo is asked of the one that is not (`lab/demo/test_demo.py` has two of ours), the lab of that and one
of ours, and both of all where the tests are slow ones. `fleet/test_every_method.py` has the commands that make a fleet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from commands import run
from every_method import EVERY, EXAMPLE, OURS, exported, folder, package, told  # noqa: F401
from lab_samples import small_directory

from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.bundle.uplink_bytes import payload_bytes
from protofleet.contract.methods import METHODS, method

IN_THE_LAB = [
    name for name in EVERY if name != "spherefed"
]  # there it averages weights: tests/lab/engine/test_federation.py


def report(*words: object) -> dict:
    """What a command says as JSON on standard output."""
    done = run(*words, "--json", "-")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def mostly_slow(names: Iterable[str], *by_default: str) -> list:
    return [pytest.param(name, marks=() if name in by_default else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", EVERY)
def test_inspect_and_profile_have_heard_of_it(name, folder):  # noqa: F811
    found, path = method(name), exported(folder, name)
    wanted = payload_bytes(read_bundle(path).manifest, found)
    facts = report("inspect", path, *told(name))
    assert (facts["method"], facts["inference"], facts["source"]) == (found.name, found.inference, found.source)
    assert facts["uplink_bytes_per_round"][found.name] == wanted
    uplink = report("profile", path, *told(name), "--devices", "raspberry-pi-4")["uplink"]
    assert (uplink["statistic"], uplink["contribution_bytes"]) == (found.statistic.NAME, wanted)


def test_a_method_that_is_not_installed_is_measured_in_processes_of_their_own(folder):  # noqa: F811
    measuring = ("--measure", "--under-load", "--seconds", "0.05")
    found = report("profile", exported(folder, EXAMPLE), *told(EXAMPLE), *measuring)
    assert {row["phase"] for row in found["measured"]["runs"]} == {"inference", "training_step"}


def test_a_bundle_of_an_unknown_method_says_how_the_method_is_named(folder):  # noqa: F811
    exported(folder, EXAMPLE)
    METHODS._known.pop("fedspread")  # as in a process that has not been told of it
    done = run("inspect", exported(folder, EXAMPLE))
    assert done.returncode == 2
    assert "or --method package.module:Class for one of your own" in done.stderr


@pytest.mark.parametrize("name", mostly_slow(EVERY, EXAMPLE))
def test_the_demo_runs_it(name, tmp_path, package):  # noqa: F811
    data = small_directory(tmp_path / "small")
    words = ["--clients", 2, "--rounds", 1, "--data", data, "--out", tmp_path / "demo"]
    found = report("demo", *words, "--method", name)
    assert found["method"] == method(name).name
    assert found["accuracy"]["all_classes"]["federated"] > 0
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1_000


@pytest.mark.parametrize("name", mostly_slow(IN_THE_LAB, "ncm", EXAMPLE))
def test_the_lab_runs_it(name, tmp_path, package):  # noqa: F811
    out = tmp_path / "rounds.jsonl"
    words = ["--clients", 2, "--rounds", 1, "--samples", 80, "--batch", 8, "--json", out]
    done = run("lab", "run", "--jobs", "1", "--method", name, *words)
    assert done.returncode == 0, done.stderr
    first = json.loads(out.read_text().splitlines()[0])
    assert first["method"] == method(name).name
    assert method(name).way in first["all_classes"]


def test_cost_lists_every_method():
    found = report("cost", "spherefed_convnet")
    assert set(OURS) <= {row["method"] for row in [*found["methods"], *found["calibration"]]}
