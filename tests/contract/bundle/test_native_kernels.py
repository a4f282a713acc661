"""The optional wheel of kernels: what counts as installed, and which forms of a training step are left without it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from protofleet.contract.bundle.native_kernels import FORM, installed_kernels, runnable_forms

WHEEL = """
__version__ = "1.2"
def library(): return "k.so"
def loops(): return "avx2"
def sha256(): return "00"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Modules are found here first; the one of the wheel is imported anew."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "protofleet_kernels", raising=False)
    installed_kernels.cache_clear()
    yield tmp_path
    sys.modules.pop("protofleet_kernels", None)
    installed_kernels.cache_clear()


@pytest.mark.parametrize(
    ("wheel", "version"),
    [
        (WHEEL, "protofleet-kernels 1.2, avx2, sha256 00"),
        (WHEEL.replace("def loops", "def other"), "None"),  # of another time
        ('raise OSError("no such library")', "None"),
        ("import no_such_module", "None"),
    ],
)
def test_a_wheel_that_cannot_be_used_is_none_and_its_form_is_passed_over(
    folder: Path, wheel: str, version: str
) -> None:
    (folder / "protofleet_kernels.py").write_text(wheel)
    assert str(installed_kernels()) == version
    forms, others = {FORM: b"1", "lanes16": b"2"}, {"lanes16": b"2"}
    assert runnable_forms(forms) == (others if version == "None" else forms)
    assert runnable_forms(others) == others
