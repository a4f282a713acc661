"""docs/api.md is what the public names have today; docs/stability.md names tests that exist."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import protofleet

ROOT = Path(__file__).parents[2]


def test_the_api_page_is_what_the_names_have_today() -> None:
    made = "import sys; sys.path.insert(0, 'docs'); from write_api import reference; print(reference(), end='')"
    done = subprocess.run([sys.executable, "-c", made], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (ROOT / "docs" / "api.md").read_text() == done.stdout, "run: python docs/write_api.py"


def test_the_page_has_each_public_name_and_each_argument() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in protofleet.__all__:
        if name != "__version__":
            assert f"\n## {name}\n" in text, name
    for found in (protofleet.Device, protofleet.Predictor, protofleet.simulate):
        section = text.split(f"\n## {found.__name__}\n")[1].split("\n## ")[0]
        for argument in inspect.signature(found).parameters:
            assert re.search(rf"\b{argument}\b", section), argument


def test_what_stays_is_held_by_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "stability.md").read_text()
    named = re.findall(r"`([\w/]+/test_\w+\.py)`", text)
    assert len(named) >= 5
    for name in named:
        assert (ROOT / "tests" / name).exists(), name
