"""What a class may be called: what commands take, and what a device and an aggregator let somebody propose."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import one_error_line, run

from protofleet.contract.bundle.class_names import can_be_proposed, check_names, check_proposed
from protofleet.contract.errors import UsageError
from protofleet.export.cli import _added

BROKEN = {
    "two": "barn owl,bat",
    "added": "+owl",
    "option": "-owl",
    "line": "barn\nowl",
    "end of a line": "barn\u2028owl",
    "escape": "\x1b[2Jowl",
    "turned around": "\u202eowl",
    "half of a pair": "\ud800",
    "space before": " owl",
    "space after": "owl ",
    "nothing": "",
    "long": "o" * 65,
}
FINE = (
    "barn owl",
    "3",
    "a=b",
    "it's",
    "50 %",
    "open/shut",
    "Käuzchen",
    "猫",
    "<b>bat</b>",
    "C++",
    "half-open",
    "o" * 64,
)


@pytest.mark.parametrize("kind", BROKEN)
def test_what_no_command_would_take_is_not_proposed(kind: str) -> None:
    name = BROKEN[kind]
    assert not can_be_proposed(name)
    with pytest.raises(UsageError, match="the proposed class, expected a name of 1 to 64 characters") as refused:
        check_proposed(name)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize("name", FINE)
def test_what_is_proposed_is_added_as_it_stands(name: str) -> None:
    check_proposed(name, ("cat", "dog"))
    assert _added(f"+{name},+another") == [name, "another"]


def test_a_class_that_there_is_or_that_looks_like_one_is_not_proposed() -> None:
    for name in ("cat", "café", "cafe\u0301"):
        with pytest.raises(UsageError, match=r"expected one that the fleet has not got, .* try naming the photos c"):
            check_proposed(name, ("cat", "caf\u00e9"))


def test_names_of_a_bundle_may_be_those_of_any_folders() -> None:
    check_names(("tench, Tinca tinca", "+1", "-1", "0"))
    with pytest.raises(UsageError, match="characters that can be seen"):
        check_names(("a", "b\u2029"))


def test_a_plus_in_a_new_list_is_a_mistake(tmp_path: Path) -> None:
    out = tmp_path / "fleet.bundle"
    for words in (
        ("export", "--backbone", "small_cnn", "--method", "ncm", "--classes", "+a,b", "--out", out),
        ("init", "--no-photos", "--classes", "+a,b", "--out", tmp_path / "fleet"),
    ):
        done = run(*words)
        expected = "--classes, expected names without + before them, got '+a'"
        assert (done.returncode, expected in one_error_line(done)) == (2, True), done.stderr
    assert not out.exists()
