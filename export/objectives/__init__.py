"""What a training step minimises: one file per objective, written once, in torch.

The lab calls these eagerly; `export` traces the same functions into the graph that a device runs. Each file has one
function, `loss(scene, hyper)`: a `Scene`, everything there is at one step, and the method's settled hyper-parameters go
in, a scalar comes out. Each is zero for a batch of padding only. Sources are cited with the reading that is the default
where paper and public code disagree.

A method says its objective by the file's name, or as `package.module:function`, where the method is a package of its
own (`contract/methods/`).
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from torch import Tensor

from contract.errors import MethodError
from contract.methods import Value
from export.objectives.scene import Scene, unit_features

__all__ = ["Objective", "Scene", "find_objective", "objective_names", "unit_features"]

Objective = Callable[[Scene, Mapping[str, Value]], Tensor]
_NOT_OBJECTIVES = ("scene",)


def objective_names() -> tuple[str, ...]:
    """The objectives of this folder."""
    return tuple(found.name for found in pkgutil.iter_modules(__path__) if found.name not in _NOT_OBJECTIVES)


def find_objective(name: str) -> Objective:
    """The objective of that name.

    Args:
        name: a file of this folder, or `package.module:function`.

    Raises:
        MethodError: when there is none.
    """
    module, _, function = name.partition(":") if ":" in name else (f"{__name__}.{name}", "", "loss")
    try:
        found: Objective = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the code of another raises while it is imported
        expected = "a file of export/objectives or package.module:function"
        raise MethodError(f"objective {name}", expected=expected, got=f"{type(error).__name__}: {error}") from None
    return found
