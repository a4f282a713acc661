"""Every method in every command, and one that is no part of Protofleet: the example of CONTRIBUTING.md, as it stands.

By default each method goes through export, inspect, profile, cost, aggregate and client, the last two as a real fleet
of processes over a broker; demo and lab run are asked of three of them, and of all where the tests are slow ones.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fleets
import pytest

from contract.bundle import read_bundle
from contract.methods import METHODS, closing_method, method
from contract.payload import payload_bytes

ROOT = Path(__file__).parents[1]
EXAMPLE = "spread:FedSpread"
EVERY = [*METHODS, EXAMPLE]
IN_THE_LAB = [name for name in EVERY if name != "spherefed"]  # there it averages weights: tests/test_lab_federation.py
PAIRS = ("ffc", "fedhp", EXAMPLE)  # with the demo by default: each way of answering, and what is not ours


@pytest.fixture(scope="module", autouse=True)
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The two files of CONTRIBUTING.md, where this process and the commands import from."""
    folder = tmp_path_factory.mktemp("package")
    method, objective = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.S)[:2]
    (folder / "spread.py").write_text(method)
    (folder / "spread_objective.py").write_text(objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setitem(fleets.ENVIRONMENT, "PYTHONPATH", paths)
        yield


def report(*words: object) -> dict:
    """What a command says as JSON on standard output."""
    command = [sys.executable, "-m", "protofleet", *map(str, words), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=fleets.ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def told(name: str) -> list[str]:
    """The option by which a command that has the bundle learns of a method that is not installed."""
    return ["--method", name] if ":" in name else []


@cache
def exported(folder: Path, method: str) -> Path:
    """A bundle of each method, made by the command when it is asked for."""
    path, shape = folder / f"{method.replace(':', '-')}.bundle", "x".join(map(str, fleets.SHAPE))
    words = ["--classes", ",".join(fleets.LABELS), "--input", shape, "--out", path, "--batch", 8]
    code, said = fleets.run("export", "--backbone", "small_cnn", "--method", method, *words)
    assert code == 0, said
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bundles")


@pytest.mark.parametrize("name", EVERY)
def test_inspect_and_profile_have_heard_of_it(name, folder):
    found, path = method(name), exported(folder, name)
    wanted = payload_bytes(read_bundle(path).manifest, found)
    facts = report("inspect", path, *told(name))
    assert (facts["method"], facts["inference"], facts["source"]) == (found.name, found.inference, found.source)
    assert facts["uplink_bytes_per_round"][found.name] == wanted
    uplink = report("profile", path, *told(name), "--devices", "raspberry-pi-4")["uplink"]
    assert (uplink["statistic"], uplink["contribution_bytes"]) == (found.statistic.NAME, wanted)


@pytest.mark.parametrize("name", EVERY)
def test_a_fleet_of_processes_learns_by_it(name, folder, tmp_path):
    """Its rounds and a closing one: what is sent is as long as was said, is committed, and devices answer by it."""
    found, path = method(name), exported(folder, name)
    rounds = 2 if found.trains else 0
    with fleets.fleet_in(tmp_path) as fleet:
        fleet.aggregator([path], *told(name), "--rounds", rounds, "--min-clients", 2)
        for index in range(2):
            data = fleets.share(index, range(fleets.CLASSES))
            test = tmp_path / f"d{index}.npz"
            fleet.client(f"d{index}", path, data, "--test", test, *told(name))
        assert set(fleet.finish(120).values()) == {0}
        assert fleet.told("summary")["totals"]["committed"] == 2 * (rounds + 1)
        sizes = {len(payload) for payload in fleet.payloads(max(rounds, 1)).values()}
        kinds = {message.method for message in fleet.messages(max(rounds, 1))}
    wanted = payload_bytes(read_bundle(path).manifest, found)
    assert kinds == {found.name}
    assert all(wanted - 3 * fleets.CLASSES <= size <= wanted for size in sizes)  # counts are shorter than a thousand's
    lines = (tmp_path / "state-d0" / "history.jsonl").read_text().splitlines()
    history = [json.loads(line) for line in lines]
    assert [line["method"] for line in history] == [found.name] * rounds + [closing_method().name]
    assert found.way in history[max(rounds - 1, 0)]["accuracy"]["all_classes"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in PAIRS else pytest.mark.slow) for n in EVERY])
def test_the_demo_runs_it(name, tmp_path):
    words = ["--clients", 2, "--rounds", 1, "--out", tmp_path / "demo", "--method", name]
    found = report("demo", *words)
    assert found["method"] == method(name).name
    assert found["accuracy"]["all_classes"]["federated" if method(name).trains else "ffc"] > 0
    assert (tmp_path / "demo" / "report.html").stat().st_size > 1_000


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in PAIRS else pytest.mark.slow) for n in IN_THE_LAB])
def test_the_lab_runs_it(name, tmp_path):
    out = tmp_path / "rounds.jsonl"
    words = ["--clients", 2, "--rounds", 1, "--samples", 80, "--test-samples", 40, "--batch", 8, "--json", out]
    code, said = fleets.run("lab", "run", "--method", name, *words, timeout_s=200)
    assert code == 0, said
    first = json.loads(out.read_text().splitlines()[0])
    assert first["method"] == method(name).name
    assert method(name).way in first["all_classes"]


def test_cost_lists_every_method():
    found = report("cost", "spherefed_convnet")
    listed = {row["method"] for row in found["methods"]} | {row["method"] for row in found["calibration"]}
    assert set(METHODS) <= listed
