"""Imports point down only, and what runs on a device or a server never meets torch."""

from __future__ import annotations

import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protofleet import aggregator, contract, edge_client, hw_profiles

ROOT = Path(contract.__file__).parents[2]
SLIM = (contract, edge_client, aggregator, hw_profiles)
# What reads ONNX graphs needs the package `onnx` (docs/architecture.md); measuring and everything else does not.
READS_GRAPHS = {
    f"protofleet.hw_profiles.{name}"
    for name in (
        "cli",
        "sweep_cli",
        "reports.cost_report",
        "workload.from_onnx",
        "workload.paper_networks",
        "workload.operators",
        "workload.phases",
        "reports.profile_report",
        "reports.profile_memory",
        "reports.subject",
        "reports.sweep_report",
        "plan.device_work",
        "plan.bill",
        "plan.choice",
        "plan.report",
    )
}
MODULES = sorted(
    found.name
    for room in SLIM
    for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    if not found.name.endswith("__main__")  # runs when it is loaded
    and found.name not in READS_GRAPHS
)


def test_import_linter_finds_every_contract_kept():
    linter = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
    assert "11 kept, 0 broken" in done.stdout


def test_the_linter_would_notice_a_forbidden_import(tmp_path):
    """The same contracts over a copy in which the device imports torch, the aggregator the device, the ground floor the
    front door, the lab Flower, and one folder of the ground floor another that lies above it."""
    house = tmp_path / "protofleet"
    shutil.copytree(ROOT / "protofleet", house, ignore=shutil.ignore_patterns("__pycache__"))
    (house / "edge_client" / "run" / "bad.py").write_text("import torch\n")
    (house / "aggregator" / "server" / "bad.py").write_text("import protofleet.edge_client.run.bad\n")
    (house / "contract" / "mqtt" / "bad.py").write_text("import protofleet.cli\n")
    (house / "contract" / "files" / "bad.py").write_text("import protofleet.contract.wire.codec\n")
    (house / "lab" / "engine" / "bad.py").write_text("import flwr.app\n")
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    linter = Path(sys.executable).parent / "lint-imports"
    env = {"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([linter, "--no-cache"], cwd=tmp_path, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "6 kept, 5 broken" in done.stdout


def test_every_folder_with_code_is_a_package():
    """The linter does not look into a folder without `__init__.py`, though Python imports from it."""
    rooms = [path for path in (ROOT / "protofleet").iterdir() if path.is_dir()]
    files = [file for folder in [ROOT / "protofleet", *rooms] for file in folder.rglob("*.py")]
    assert len(files) > 500
    assert [str(file) for file in files if not (file.parent / "__init__.py").is_file()] == []


@pytest.mark.parametrize("room", [room.__name__ for room in SLIM])
def test_every_module_of_a_slim_room_loads_where_torch_and_onnx_do_not_exist(room):
    modules = [name for name in MODULES if name.startswith(f"{room}.")]
    code = (
        "import importlib, sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'torchvision', 'onnx', 'onnxscript', 'sklearn', 'datasets'):\n"
        "            raise ModuleNotFoundError('blocked ' + name, name=name)\n"
        "sys.meta_path.insert(0, Blocked())\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print('loaded', len(sys.argv))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loaded")


def test_the_contract_needs_no_runtime_and_no_pillow():
    rooms = "protofleet.contract.bundle.bundle_file, protofleet.contract.mqtt.link, protofleet.contract.wire.codec"
    rooms += ", protofleet.contract.wire.global_state, protofleet.contract.wire.chunks"
    code = f"import sys, {rooms}; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for heavy in ("onnxruntime", "PIL", "pandas", "typer", "rich"):
        assert f"'{heavy}'" not in done.stdout
