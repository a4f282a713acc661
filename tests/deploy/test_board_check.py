"""`scripts/board-check`: what `make` writes, `run` measures by a client's own parts, and says what it could not do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _board_check(script: Path, *words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(script), *map(str, words)], capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("board")
    done = _board_check(ROOT / "scripts" / "board-check", "make", folder, "--networks", "small_cnn,mobilenet_v3_small")
    assert done.returncode == 0, done.stderr
    assert "board-check run" in done.stdout
    return folder


@pytest.mark.slow
def test_a_board_is_told_of_from_its_processor_to_its_cameras(made: Path) -> None:
    done = _board_check(made / "board-check", "run", "--seconds", "0.1")
    found = json.loads((made / "board.json").read_text())
    assert {*found["networks"]} == {"small_cnn", "mobilenet_v3_small"}
    for name, network in found["networks"].items():
        runs = network["profile"]["runs"]
        assert {run["phase"] for run in runs} == {"inference", "training_step"}
        assert all(run["median_ms"] > 0 for run in runs)
        assert network["providers"].startswith("runs on ")
        assert {"kernels", "lanes8", "lanes16"} >= {*network["step forms"]}
        assert "kernels" in network["step forms"]
        assert name in done.stdout
    assert "of 64" in found["networks"]["mobilenet_v3_small"]["int8"]
    assert "int8" not in found["networks"]["small_cnn"]
    assert {*found["cameras"]} == {"v4l2:0", "picamera2:0"}
    assert {"system", "memory", "packages"} <= {*found["doctor"]}
    assert str(Path.home()) not in (made / "board.json").read_text()


@pytest.mark.slow
def test_what_the_time_does_not_suffice_for_is_not_run(made: Path, tmp_path: Path) -> None:
    done = _board_check(made / "board-check", "run", "--minutes", "0", "--json", tmp_path / "b.json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "b.json").read_text())["networks"]["small_cnn"]["profile"].startswith("not run")
    assert done.stdout.count("not run: no time left") >= 8


@pytest.mark.slow
def test_a_broken_bundle_fails_alone(made: Path, tmp_path: Path) -> None:
    for file in ("small_cnn.bundle", "board-check"):
        (tmp_path / file).write_bytes((made / file).read_bytes())
    (tmp_path / "worse.bundle").write_bytes(b"no zip")
    done = _board_check(tmp_path / "board-check", "run", "--seconds", "0.05")
    assert done.returncode == 1
    found = json.loads((tmp_path / "board.json").read_text())["networks"]
    assert found["worse"]["profile"].startswith("failed: ")
    assert "worse.bundle" in found["worse"]["profile"]
    assert found["small_cnn"]["profile"]["runs"]


def test_an_unknown_network_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "board-check"
    done = _board_check(script, "make", tmp_path, "--networks", "resnet19")
    assert done.returncode == 2
    assert "got resnet19" in done.stderr
    (tmp_path / "board-check").write_bytes(script.read_bytes())
    done = _board_check(tmp_path / "board-check", "run")
    assert done.returncode == 1
    assert "got none" in done.stderr
