"""Names of methods that the lab takes: of a package that is installed and broken, the line says what is wrong."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from protofleet.contract.errors import MethodError, UsageError
from protofleet.contract.methods import GROUP, METHODS
from protofleet.lab.method_names import check_method_name


def test_a_package_that_was_written_for_0_2_is_told_of_its_new_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "written_for_0_2.py").write_text("import contract.methods.base\n")
    entry = EntryPoint("theirs", "written_for_0_2:Theirs", GROUP)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(METHODS, "_installed", {"theirs": [entry]})
    monkeypatch.setattr(METHODS, "_broken", set())
    with pytest.raises(MethodError, match=r"try protofleet\.contract in the place of contract"):
        check_method_name("theirs")
    with pytest.raises(UsageError, match="expected a method of the lab, got their"):
        check_method_name("their")
