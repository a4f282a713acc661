"""The notebooks run from their first cell to their last, as a reader runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def _script(notebook: Path) -> str:
    """Its cells of code as Python: `%%writefile` writes its cell, a line with `!` is a command that has to succeed."""
    lines = ["import subprocess, sys", "from pathlib import Path", "sys.path.insert(0, '')"]
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            continue
        if source.startswith("%%writefile "):
            name, _, text = source.removeprefix("%%writefile ").partition("\n")
            lines.append(f"Path({name!r}).write_text({text + chr(10)!r})")
            continue
        for line in source.split("\n"):
            lines.append(f"subprocess.run({line[1:]!r}, shell=True, check=True)" if line.startswith("!") else line)
    return "\n".join(lines)


@pytest.mark.timeout(900)  # some exports and six short federations
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "protofleet"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m protofleet "$@"\n')
    command.chmod(0o755)
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", _script(notebook)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_notebooks_are_kept_without_output() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["own-backbone", "own-method"]
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            assert not cell.get("outputs"), f"{path.name}: clear its output"
            assert cell.get("execution_count") is None
