"""Every method that Protofleet has, and the example of CONTRIBUTING.md, which it has not: bundles of them for tests."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fleets
import pytest
from commands import run

from protofleet.contract.methods import METHODS

EXAMPLE = "spread:FedSpread"
OURS = tuple(name for name in METHODS if ":" not in name)
EVERY = (*OURS, EXAMPLE)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The two files of CONTRIBUTING.md, where this process and the commands import from."""
    folder = tmp_path_factory.mktemp("package")
    text = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
    method, objective = re.findall(r"```python\n(.*?)```", text, re.S)[:2]
    (folder / "spread.py").write_text(method)
    (folder / "spread_objective.py").write_text(objective)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        paths = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setitem(fleets.ENVIRONMENT, "PYTHONPATH", paths)
        patch.setenv("PYTHONPATH", paths)
        before = dict(METHODS._known)
        yield
        METHODS._known.clear()  # the tests that follow know no method but ours
        METHODS._known.update(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, package: None) -> Path:
    return tmp_path_factory.mktemp("bundles")


def told(name: str) -> list[str]:
    """The option by which a command that has the bundle learns of a method that is not installed."""
    return ["--method", name] if ":" in name else []


@cache
def exported(folder: Path, name: str) -> Path:
    """A bundle of each method, made by the command when it is asked for."""
    path, shape = folder / f"{name.replace(':', '-')}.bundle", "x".join(map(str, fleets.SHAPE))
    words = ["--classes", ",".join(fleets.LABELS), "--input", shape, "--out", path, "--batch", 8]
    done = run("export", "--backbone", "small_cnn", "--method", name, *words)
    assert done.returncode == 0, done.stderr
    return path
