"""The optional wheel of kernels: what counts as installed, and which forms of a training step are left without it."""

from __future__ import annotations

import base64
import hashlib
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


@pytest.mark.parametrize("kept", [0, 1000, 4096])
def test_a_part_of_a_library_is_not_loaded(folder: Path, caplog: pytest.LogCaptureFixture, kept: int) -> None:
    """Loading it would end the process: pages that a file does not have are a signal, and no error."""
    library, whole = folder / "protofleet_kernels" / "k.so", bytes(range(256)) * 20
    info = folder / "protofleet_kernels-1.2.dist-info"
    library.parent.mkdir()
    info.mkdir()
    body = "import hashlib, pathlib\n" + WHEEL.replace('"k.so"', 'pathlib.Path(__file__).with_name("k.so")')
    (library.parent / "__init__.py").write_text(
        body.replace('"00"', "hashlib.sha256(library().read_bytes()).hexdigest()")
    )
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: protofleet-kernels\nVersion: 1.2\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(whole).digest()).decode().rstrip("=")
    (info / "RECORD").write_text(f"protofleet_kernels/k.so,sha256={digest},{len(whole)}\n")
    library.write_bytes(whole)
    assert installed_kernels() is not None
    installed_kernels.cache_clear()
    library.write_bytes(whole[:kept])
    assert installed_kernels() is None
    assert f"protofleet-kernels is not used: {library} is not the file that was installed" in caplog.text
