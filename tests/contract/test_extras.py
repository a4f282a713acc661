"""The one hint of what misses a package: the command adds the extra to the installation that runs, wherever from."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT

from protofleet.contract import extras
from protofleet.contract.extras import install_command


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python of a virtual environment in the present folder, whose packages are in a place of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    monkeypatch.setattr(extras, "__file__", str(tmp_path / ".venv" / "lib" / "contract" / "extras.py"))
    return tmp_path


def _came_from(monkeypatch: pytest.MonkeyPatch, found: object) -> None:
    class Installed:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if found is None else json.dumps(found)

    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Installed())


def test_in_a_checkout_the_command_is_that_of_readme(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(ROOT / ".venv" / "bin" / "python"))
    monkeypatch.chdir(ROOT)
    command = ".venv/bin/python -m pip install -c constraints.txt -e '.[export]'"
    assert install_command("export") == command
    assert install_command("flower") == ".venv/bin/python -m pip install -e '.[flower]'"  # flwr wants other versions
    monkeypatch.chdir("/")
    root = str(ROOT).removeprefix("/")
    assert install_command("export") == (
        f"{root}/.venv/bin/python -m pip install -c {root}/constraints.txt -e './{root}[export]'"
    )


@pytest.mark.parametrize(
    ("came", "what"),
    [
        (None, "'protofleet[x]'"),
        ({"url": "file:///media/a%20wheel.whl", "archive_info": {}}, "'/media/a wheel.whl[x]'"),
        ({"url": "https://host/p.whl", "archive_info": {}}, "'protofleet[x] @ https://host/p.whl'"),
        (
            {"url": "https://host/p.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "'protofleet[x] @ git+https://host/p.git@abc'",
        ),
        (["no table"], "'protofleet[x]'"),
    ],
)
def test_elsewhere_it_names_what_was_installed(
    python: Path, came: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _came_from(monkeypatch, came)
    assert install_command("x") == f".venv/bin/python -m pip install {what}"


def test_a_folder_that_was_installed_brings_its_constraints(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (python / "source").mkdir()
    (python / "source" / "constraints.txt").touch()
    _came_from(monkeypatch, {"url": (python / "source").as_uri(), "dir_info": {}})
    assert install_command("x") == ".venv/bin/python -m pip install -c source/constraints.txt './source[x]'"


def test_pip_takes_the_command() -> None:
    """As a person pastes it; nothing is installed, nothing is downloaded."""
    command = install_command("", "--dry-run", "--no-deps", "--no-build-isolation", "--no-index", "--quiet")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_hint_is_made_here() -> None:
    rooms = ("contract", "edge_client", "aggregator", "export", "hw_profiles", "lab", "protofleet")
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        named = re.findall(r"install ['\"]*protofleet\[", path.read_text())
        assert not named, path
