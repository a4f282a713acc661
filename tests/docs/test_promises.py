"""What a release promised still holds: names, arguments, options, settings, exit codes, fields (docs/stability.md)."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
from write_promises import PAGE, Promises, broken, promises  # noqa: E402

KEPT = sorted((ROOT / "tests" / "golden").glob("promises_*.json"))


@pytest.fixture(scope="module")
def now() -> Promises:
    return promises()


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.stem)
def test_what_that_release_promised_still_holds(path: Path, now: Promises) -> None:
    lines = broken(json.loads(path.read_text()), now)
    assert not lines, f"promised by {PAGE}, and not kept: {'; '.join(lines)}; deprecate it for one minor release first"


def test_a_version_that_is_released_has_promised_all_that_it_has(now: Promises) -> None:
    """Until then its file may lack what is new. At the release: `python docs/write_promises.py` and its name."""
    version, said = re.findall(r"^## (\d+\.\d+)\.\d+(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    newest = ROOT / "tests" / "golden" / f"promises_{version}.json"
    assert newest in KEPT
    if "unreleased" not in said:
        assert json.loads(newest.read_text()) == now, f"run: python docs/write_promises.py {newest}"


def changed(now: Promises, room: str, name: str, part: str = "", to: Any = None) -> list[str]:
    """What `broken` says where one thing goes, or becomes another."""
    after = copy.deepcopy(now)
    where, key = (after[room][name], part) if part else (after[room], name)
    if to is None:
        del where[key]
    else:
        where[key] = to
    return broken(now, after)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("library", "simulate"), "library simulate is gone"),
        (("library", "simulate", "seed"), "library simulate: seed is gone"),
        (("library", "simulate", "seed", "by name, 1"), "library simulate: seed was 'by name, 0', is 'by name, 1'"),
        (("message", "Status", "4", "boot, an unsigned integer, optional"), "message Status: 4 was 'boot, "),
        (("library", "Device", "more", "by name, required"), "library Device: more is new and required"),
        (("command", "fleet list"), "command fleet list is gone"),
        (("command", "client", "--every"), "command client: --every is gone"),
        (("setting", "PROTOFLEET_CLIENT_EVERY", "", "one, 9.0"), "_EVERY was 'one, 5.0', is 'one, 9.0'"),
        (("exit code", "UsageError", "", 1), "exit code UsageError was 2, is 1"),
        (("message", "Status", "4"), "message Status: 4 is gone"),
        (("bundle", "manifest.json", "more", "required"), "bundle manifest.json: more is new and required"),
        (("method", "ncm"), "method ncm is gone"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_breaks_a_promise_is_said_in_one_line(change: tuple[Any, ...], line: str, now: Promises) -> None:
    (said,) = changed(now, *change)
    assert line in said


def test_what_is_new_breaks_none(now: Promises) -> None:
    assert changed(now, "library", "simulate", "more", "by name, 1") == []
    assert changed(now, "library", "Device", "state", "by name, None") == []
    assert changed(now, "setting", "PROTOFLEET_CLIENT_ID", "", "one, None") == []
    assert changed(now, "command", "more", "", {"--x": "a value, required"}) == []
    assert changed(now, "message", "Status", "60", "more, text, optional") == []


def test_arguments_by_place_keep_their_order(now: Promises) -> None:
    after = copy.deepcopy(now)
    first, second, *rest = after["library"]["simulate"].items()
    after["library"]["simulate"] = dict([second, first, *rest])
    assert broken(now, after) == ["library simulate: the order was method, data, is data, method"]
