"""`scripts/setup`, `scripts/check` and `scripts/test`: what they run, and what they say where they cannot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ("setup", "check", "test")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A working tree with a virtual environment whose python says what it was asked."""
    (tmp_path / "scripts").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    bin = tmp_path / ".venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "python").write_text('#!/bin/sh\necho "$@"\n')
    (bin / "python").chmod(0o755)
    return tmp_path


def ran(tree: Path, name: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tree / "scripts" / name, *words], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_is_a_script_that_can_be_run_and_says_how(name: str) -> None:
    path = ROOT / "scripts" / name
    assert path.stat().st_mode & 0o111
    assert subprocess.run(["bash", "-n", path]).returncode == 0
    assert f"#     scripts/{name}" in path.read_text()


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ((), "-m pytest"),
        (("tests/contract", "-m", "slow"), "-m pytest tests/contract -m slow"),
        (("contract/sums/factor.py",), "-m pytest tests/contract/sums/test_factor.py"),
        (("contract/wire/tensors.py",), "-m pytest tests/contract/wire"),  # it has no file of its own
    ],
)
def test_a_place_or_a_file_of_the_code_names_its_tests(tree: Path, words: tuple[str, ...], asked: str) -> None:
    if words == ("contract/wire/tensors.py",):
        assert not (ROOT / "tests/contract/wire/test_tensors.py").exists()
    assert ran(tree, "test", *words).stdout.strip() == asked


def test_a_file_without_tests_is_refused_in_a_line(tree: Path) -> None:
    done = ran(tree, "test", "nowhere/file.py")
    assert done.returncode == 1
    assert done.stderr.startswith("error: scripts/test nowhere/file.py, expected a file with tests in tests/nowhere")


@pytest.mark.parametrize("name", ["check", "test"])
def test_without_an_environment_it_says_what_makes_one(tree: Path, name: str) -> None:
    shutil.rmtree(tree / ".venv")
    done = ran(tree, name)
    assert done.returncode == 1
    assert done.stderr == f"error: scripts/{name}, expected .venv, got none, try scripts/setup\n"


def test_one_failed_check_does_not_hide_the_others(tree: Path) -> None:
    for name, code in (("ruff", 1), ("mypy", 0), ("lint-imports", 1)):
        (tree / ".venv" / "bin" / name).write_text(f"#!/bin/sh\nexit {code}\n")
        (tree / ".venv" / "bin" / name).chmod(0o755)
    done = ran(tree, "check")
    assert done.returncode == 1
    assert done.stdout.count("── ") == 5
    assert done.stderr.strip() == "failed: .venv/bin/ruff .venv/bin/ruff .venv/bin/lint-imports"
