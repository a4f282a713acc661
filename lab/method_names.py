"""The names of what the lab can run, found without loading torch, so that a wrong one is answered at once.

What `lab/algorithms/` holds is read from its files, not imported: an algorithm is a class over `Algorithm`, over
however many others, whose body gives it a `name`.
"""

from __future__ import annotations

import ast
from pathlib import Path

from contract.errors import UsageError, near_names
from contract.methods import METHODS, Method, load_method, method

__all__ = ["LOCAL", "algorithm_names", "check_method_name", "usual_rounds"]

LOCAL = "local"  # training without the others
_FOLDER = Path(__file__).parent / "algorithms"


def check_method_name(name: str, option: str = "--method") -> str:
    """The name of a method that the lab can run; one of your own, `package.module:Class`, is loaded, and has its own.

    Args:
        option: what the error names.

    Raises:
        UsageError: there is no such method.
        MethodError: there is no such class, or it is no method.
    """
    if ":" in name:
        return load_method(name).name
    known = (*METHODS, LOCAL, *algorithm_names())
    if name not in known:
        raise UsageError(option, expected="a method of the lab", got=name, hint=near_names(name, known))
    return name


def algorithm_names() -> tuple[str, ...]:
    """The names of `lab.algorithms.ALGORITHMS`."""
    bases: dict[str, list[str]] = {}
    named: dict[str, str | None] = {}
    for path in sorted(_FOLDER.glob("*.py")):
        for each in ast.parse(path.read_bytes()).body:
            if isinstance(each, ast.ClassDef):
                bases[each.name] = [base.id for base in each.bases if isinstance(base, ast.Name)]
                named[each.name] = _name_of(each)

    def is_algorithm(name: str) -> bool:
        return name == "Algorithm" or any(map(is_algorithm, bases.get(name, ())))

    return tuple(name for of, name in named.items() if name is not None and is_algorithm(of))


def _name_of(found: ast.ClassDef) -> str | None:
    """What the class's body gives as its `name`."""
    for line in found.body:
        targets = line.targets if isinstance(line, ast.Assign) else []
        if any(isinstance(each, ast.Name) and each.id == "name" for each in targets):
            return str(ast.literal_eval(line.value))  # type: ignore[attr-defined]
    return None


def usual_rounds(name: str) -> int:
    """How many rounds a federation of this method has when a person names none: 1 where it trains nothing."""
    return method(name).rounds if ":" in name or name in METHODS else Method.rounds
