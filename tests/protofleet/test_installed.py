"""The wheel, installed beside files of a user that have the names of our rooms: nobody gets in the other's way."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import ROOT

from protofleet.contract.methods import moved_imports

ROOMS = ("contract", "edge_client", "aggregator", "export", "hw_profiles", "lab")
HOSTILE = (*ROOMS, "wire", "errors", "codec", "cli", "files", "messages", "settings", "training", "database", "methods")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    nothing_made = shutil.ignore_patterns("__pycache__", ".*", "build", "dist", "*.egg-info", "tests", "results")
    shutil.copytree(ROOT, folder / "source", symlinks=True, ignore=nothing_made)
    (folder / "source" / "protofleet-demo").mkdir(exist_ok=True)  # as the demo leaves it in a checkout
    (folder / "source" / "protofleet-demo" / "report.py").touch()
    before = folder / "source" / "build" / "lib" / "contract" / "__init__.py"  # what building version 0.1 left there
    before.parent.mkdir(parents=True)
    before.touch()
    asked = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet", "-w", folder, "."]
    subprocess.run([sys.executable, "-m", *asked], cwd=folder / "source", check=True, timeout=240)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose protofleet is the wheel; what it needs comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return folder / "bin" / "python"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder as a user may have it: a module for each name, or a package, that ends whoever imports it."""
    for number, name in enumerate(HOSTILE):
        file = tmp_path / f"{name}.py" if number % 3 else tmp_path / name / "__init__.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"raise SystemExit('took {name}')\n")
    return tmp_path


def test_one_name_is_in_site_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (top,) = (name for name in names if name.endswith("top_level.txt"))
        assert file.read(top).decode().split() == ["protofleet"]
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"protofleet"}
    assert {f"protofleet/{room}/__init__.py" for room in ROOMS} <= set(names)
    assert "protofleet/contract/wire/messages.cddl" in names


def test_command_and_library_run_beside_files_with_the_names_of_our_rooms(python: Path, beside: Path) -> None:
    code = (
        "import protofleet\n"
        "from importlib.resources import files\n"
        "bundle = files('protofleet.lab.demo') / 'shipped' / 'fleet.bundle'\n"
        "print(protofleet.__file__, len(protofleet.load_bundle(bundle).manifest.labels), bundle)\n"
        "protofleet.Device, protofleet.Aggregator, protofleet.Predictor\n"
    )
    (beside / "mine.py").write_text(code)
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = {"cwd": beside, "capture_output": True, "text": True, "timeout": 120, "env": bare}
    done = subprocess.run([python, "mine.py"], **run)
    assert done.returncode == 0, done.stdout + done.stderr
    file, labels, bundle = done.stdout.split()
    assert Path(file).is_relative_to(python.parents[1])
    assert labels == "10"
    for words in (["inspect", bundle], ["client", "--help"], ["aggregate", "--help"], ["methods"], ["--version"]):
        done = subprocess.run([python, "-m", "protofleet", *words], **run)
        assert done.returncode in (0, 2), done.stdout + done.stderr
        assert "took" not in done.stdout + done.stderr
        assert (done.returncode == 2) == (words == ["methods"]), done.stderr


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_that_is_imported_from_a_checkout_says_its_name(room: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {room}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert f"expected import protofleet.{room}, got import {room}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("cwd", ["checkout", "elsewhere"])
def test_a_method_that_was_written_for_0_2_is_told_of_its_new_import(cwd: str, tmp_path: Path) -> None:
    """From a checkout the room is found, and refuses; elsewhere there is none."""
    (tmp_path / "theirs.py").write_text("from contract.methods.base import Method\n\n\nclass Theirs(Method): ...\n")
    code = "from protofleet.contract.methods import load_method; load_method('theirs:Theirs')"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)][: 2 if cwd == "checkout" else 1])}
    where = ROOT if cwd == "checkout" else tmp_path
    done = subprocess.run([sys.executable, "-c", code], cwd=where, env=env, capture_output=True, text=True, timeout=60)
    line = done.stderr.splitlines()[-1]
    assert "try protofleet.contract in the place of contract: from protofleet.contract.methods import Method" in line


@pytest.mark.parametrize(
    ("written", "named"),
    [
        ("contract.statistics", "protofleet.contract in the place of contract"),
        ("protofleet.contract.statistics", "protofleet.contract.sums.statistics in the place of"),
        ("export.objectives.scene", "protofleet.export in the place of export"),
        ("protofleet.export.objectives.scene", "protofleet.export.objectives.loss_terms in the place of"),
    ],
)
@pytest.mark.parametrize("kind", ["method", "objective", "backbone"])
def test_what_moved_since_0_2_is_named_to_whoever_imports_it(
    kind: str, written: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "theirs.py").write_text(f"import {written}\n")
    code = {
        "method": "from protofleet.contract.methods import load_method as load",
        "objective": "from protofleet.export.objectives import find_objective as load",
        "backbone": "from protofleet.export.backbones.backbone import _users_own as load",
    }[kind]
    command = [sys.executable, "-c", f"{code}; load('theirs:Theirs')"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert f"try {named}" in done.stderr.splitlines()[-1]


def test_each_new_import_is_there() -> None:
    for module in moved_imports._MODULES.values():
        assert importlib.util.find_spec(module) is not None
    for room, line in moved_imports._ROOMS.items():
        assert room in ROOMS
        exec(f"from {line}")
