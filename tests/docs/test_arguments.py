"""A function of more than ten arguments has its reason beside it: a line `# arguments: …` above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("aggregator", "contract", "edge_client", "export", "hw_profiles", "lab", "protofleet")
MOST = 10


def _long(source: str) -> Iterator[tuple[str, int, str]]:
    """Of each function with more than `MOST` arguments its name, how many it has, and the line above it."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            named = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            count = len(named) - (named[:1] in (["self"], ["cls"]))
            if count > MOST:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                yield node.name, count, lines[first - 2].strip()


def test_more_than_ten_arguments_have_a_reason_beside_them() -> None:
    files = [file for room in ROOMS for file in (ROOT / room).rglob("*.py") if file.resolve() == file.absolute()]
    assert len(files) > 500
    found = [(str(file.relative_to(ROOT)), *each) for file in files for each in _long(file.read_text())]
    assert found  # commands that typer reads have one for each option
    assert [each for each in found if not each[-1].startswith("# arguments: ")] == []


def test_a_function_without_a_reason_is_found() -> None:
    names = ", ".join(f"a{number}" for number in range(MOST + 1))
    assert list(_long(f"x = 1\ndef f({names}): ...\n")) == [("f", MOST + 1, "x = 1")]
    assert list(_long(f"class C:\n    def f(self, {names[:-5]}): ...\n")) == []
