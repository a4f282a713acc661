"""Write docs/api.md from the public names of `import protofleet`: `python docs/write_api.py`.

A test compares the file with what this prints: a name, an argument or a default that changes is seen in review, and is
written down as docs/stability.md promises.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).parent.parent))

import protofleet

PAGE = Path(__file__).parent / "api.md"
_HEAD = """# The public names, with their signatures

Written by `python docs/write_api.py`, and compared by a test. What they are for is shown in [library.md](library.md);
what of this stays the same, and for how long, is in [stability.md](stability.md).
"""


def reference() -> str:
    """The whole page."""
    return _HEAD + "".join(f"\n## {name}\n\n{_of(name)}" for name in sorted(protofleet.__all__) if name[0] != "_")


def _of(name: str) -> str:
    found = getattr(protofleet, name)
    if not inspect.isclass(found) and not inspect.isfunction(found):  # a union of what may come
        lines = [f"{each.__name__}{_signature(each)}" for each in get_args(found)]
        return "One of these.\n\n" + _block(lines)
    said = (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
    lines = [f"{name}{_signature(found)}"]
    if inspect.isclass(found):
        for member, value in members(found):
            lines.append(f"{name}.{member}{_signature(value) if inspect.isfunction(value) else ''}")
    return f"{said}\n\n{_block(lines)}"


def _block(lines: Sequence[str]) -> str:
    return "```python\n" + "".join(f"{line}\n" for line in lines) + "```\n"


def members(cls: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties by name, sorted: our own, not what Python gives a class."""
    fields = {field.name for field in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set()
    ours = [base for base in cls.__mro__ if base.__module__.startswith("protofleet")]
    for name in sorted({name for base in ours for name in vars(base)} - fields):
        value = inspect.getattr_static(cls, name)
        if not name.startswith("_"):
            yield name, value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _signature(found: Callable[..., object]) -> str:
    """As it would be written; a default that is no plain value is an ellipsis."""
    signature = inspect.signature(found)
    parts, last = [], None
    for each in signature.parameters.values():
        if each.kind is each.KEYWORD_ONLY and last not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            parts.append("*")
        last = each.kind
        if each.name == "self":
            continue
        stars = {each.VAR_POSITIONAL: "*", each.VAR_KEYWORD: "**"}.get(each.kind, "")
        kind = "" if each.annotation is each.empty else f": {_written(each.annotation)}"
        default = "" if each.default is each.empty else f" = {_default(each.default)}"
        parts.append(f"{stars}{each.name}{kind}{default}")
    given = signature.return_annotation
    back = "" if given in (signature.empty, None, "None") else f" -> {_written(given)}"
    line = f"({', '.join(parts)}){back}"
    return line if len(line) <= 100 else "(\n" + "".join(f"    {part},\n" for part in parts) + f"){back}"


def _written(annotation: object) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _default(value: object) -> str:
    plain = value is None or isinstance(value, bool | int | float | str | bytes | tuple)
    return repr(value) if plain else "..."


if __name__ == "__main__":
    PAGE.write_text(reference())
