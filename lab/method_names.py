"""The names of everything that the lab can run, found without loading torch. So a wrong name is refused at once.

The files of `lab/algorithms/` are read, not imported. An algorithm is a direct or indirect subclass of `Algorithm`
whose body sets `name`.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from protofleet.contract.methods import METHODS, Method, load_method, method, place_of
from protofleet.contract.names import known

__all__ = [
    "LOCAL", "algorithm_names", "check_method_name", "findable_name", "sends_class_means", "usual_rounds", "usual_way",
]  # fmt: skip

LOCAL = "local"  # training without the others
_FOLDER = Path(__file__).parent / "algorithms"


def check_method_name(name: str, option: str = "--method") -> str:
    """Check the name of a method for the lab. A method of your own, `package.module:Class`, is loaded.

    Args:
        option: the option that an error names.

    Raises:
        UsageError: there is no such method.
        MethodError: there is no such class, it is no method, or the package that has it is broken.
    """
    if ":" in name:
        return load_method(name).name
    if name in METHODS.installed():
        return method(name).name  # a broken package says what is wrong with it
    return known((*METHODS, LOCAL, *algorithm_names()), name, option, "a method of the lab")


@cache  # a table asks for each of its cells
def algorithm_names() -> tuple[str, ...]:
    """The names of `protofleet.lab.algorithms.ALGORITHMS`; read once."""
    bases: dict[str, list[str]] = {}
    named: dict[str, str | None] = {}
    for path in sorted(_FOLDER.glob("*.py")):
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ClassDef):
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                named[node.name] = _name_of(node)

    def is_algorithm(name: str) -> bool:
        return name == "Algorithm" or any(map(is_algorithm, bases.get(name, ())))

    return tuple(name for class_name, name in named.items() if name is not None and is_algorithm(class_name))


def _name_of(definition: ast.ClassDef) -> str | None:
    """The value of `name` in the class's body; None without one."""
    for line in definition.body:
        targets = line.targets if isinstance(line, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "name" for target in targets):
            return str(ast.literal_eval(line.value))  # type: ignore[attr-defined]
    return None


def usual_rounds(name: str) -> int:
    """The default number of rounds of a method: 1 where it trains nothing."""
    found = _method_of(name)
    return Method.rounds if found is None else found.rounds


def usual_way(name: str) -> str:
    """The way by which a method's own answers are given; those of a baseline are given by its head."""
    found = _method_of(name)
    return "head" if found is None else found.way


def findable_name(name: str) -> str:
    """The name by which another process finds a method: `package.module:Class` where no package that says so has it."""
    found = _method_of(name)
    if found is None or name in METHODS.installed() or place_of(found) not in METHODS.of_others():
        return name
    return place_of(found)


def sends_class_means(name: str) -> bool:
    """Whether a method's devices send class means, which `--rule` is about; a baseline's clients do not."""
    found = _method_of(name)
    return found is not None and found.statistic.is_class_means()


def _method_of(name: str) -> Method | None:
    """The method of that name or class; None for a baseline."""
    return method(name) if ":" in name or name in METHODS else None
