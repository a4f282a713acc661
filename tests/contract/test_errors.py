"""The error tree is the one that is drawn, and each error is one helpful line."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protofleet.contract import errors
from protofleet.contract.errors import BundleError, ProtofleetError, UsageError, WireError, near_names


def drawn_tree() -> dict[str, str]:
    """Class → parent, as the module's docstring draws them by indentation."""
    parents, above = {}, {}
    for line in errors.__doc__.splitlines():
        found = re.match(r"(    (?:[│ ]   )*(?:[├└]── )?)([A-Z]\w+)\b", line)
        if found and (found.group(2) == "ProtofleetError" or "──" in found.group(1)):
            depth = len(found.group(1)) // 4
            above[depth] = found.group(2)
            parents[found.group(2)] = above.get(depth - 1, "")
    return parents


def real_tree(root: type[ProtofleetError] = ProtofleetError, parent: str = "") -> dict[str, str]:
    found = {root.__name__: parent}
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found |= real_tree(child, root.__name__)
    return found


def test_the_tree_in_the_docstring_is_the_real_one():
    assert len(drawn_tree()) > 5
    assert drawn_tree() == real_tree()


def test_every_error_of_the_tree_is_public_and_no_other_module_adds_one():
    assert set(real_tree()) <= set(errors.__all__)
    import importlib

    for module in (
        "bundle.bundle_file",
        "heads.sphere",
        "methods",
        "mqtt.link",
        "sums.statistics",
        "wire.chunks",
        "wire.codec",
        "wire.global_state",
        "wire.messages",
        "wire.sampling",
    ):
        importlib.import_module(f"protofleet.contract.{module}")
    everywhere = {
        child for parent in [ProtofleetError, *ProtofleetError.__subclasses__()] for child in parent.__subclasses__()
    }
    assert {child.__module__ for child in everywhere if child.__module__.startswith("protofleet.contract")} == {
        errors.__name__
    }


def test_a_line_says_what_was_expected_what_came_and_what_to_do():
    error = BundleError("a.bundle", expected="a zip", got="text", hint="copying it again")
    assert str(error) == "a.bundle, expected a zip, got text, try copying it again"
    assert (error.message, error.expected, error.got, error.hint) == ("a.bundle", "a zip", "text", "copying it again")
    assert str(BundleError("a.bundle")) == "a.bundle"
    assert str(UsageError("--rounds", expected=1, got=0)) == "--rounds, expected 1, got 0"


@given(message=st.text(max_size=5000), got=st.text(max_size=5000))
def test_whatever_stands_in_it_it_is_one_line_of_bounded_length(message, got):
    line = str(WireError(message, got=got))
    assert len(line.splitlines()) <= 1
    assert len(line) < 700


@pytest.mark.parametrize("kind", [name for name, parent in real_tree().items() if parent])
def test_exit_codes_tell_wrong_use_from_failure(kind):
    wrong_use = {"UsageError", "DataError", "BundleError", "ExportError", "MethodError", "SecondProcessError"}
    assert getattr(errors, kind).exit_code == (2 if kind in wrong_use else 1)


def test_near_names_come_nearest_first_and_all_when_none_is_near():
    assert near_names("fedprot", ["ffc", "fedproto", "spherefed"]).startswith("one of fedproto")
    assert near_names("zzz", ["b", "a"]) == "one of a, b"
