"""The objectives: what a training step minimises. One file each, written once, in torch.

The lab calls them eagerly. `export` traces the same functions into the graph that a device runs.

- Each file has one function, `loss(scene, hyper)`. It takes a `Scene`, which holds everything of one step, and the
  method's resolved hyper-parameters. It returns a scalar.
- The loss of a batch of padding only is zero.
- Where paper and public code disagree, the file cites the source of the default.

A method names its objective by the file, or as `package.module:function` if the method is a package of its own
(`contract/methods/`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import wraps

from torch import Tensor

from protofleet.contract.errors import MethodError
from protofleet.contract.methods import Value
from protofleet.contract.methods.moved_imports import new_import
from protofleet.export.objectives.loss_terms import Scene, unit_features

__all__ = ["Objective", "Scene", "find_objective", "unit_features"]

Objective = Callable[[Scene, Mapping[str, Value]], Tensor]


def find_objective(name: str) -> Objective:
    """The objective of that name.

    Args:
        name: a file of this folder, or `package.module:function`.

    Returns:
        The function. It raises MethodError where the loss reads a hyper-parameter that the method does not have.

    Raises:
        MethodError: when there is none.
    """
    module, _, function = name.partition(":") if ":" in name else (f"{__name__}.{name}", "", "loss")
    try:
        objective: Objective = getattr(importlib.import_module(module), function)
    except Exception as error:  # whatever the code of another raises while it is imported
        expected = "a file of export/objectives or package.module:function"
        raise MethodError(
            f"objective {name}", expected=expected, got=f"{type(error).__name__}: {error}", hint=new_import(error)
        ) from None

    @wraps(objective)
    def checked(scene: Scene, hyper: Mapping[str, Value]) -> Tensor:
        try:
            return objective(scene, hyper)
        except KeyError as error:
            missing = error.args[0] if error.args else ""
            if missing in hyper or not isinstance(missing, str):
                raise
            raise MethodError(
                f"objective {name}",
                expected=f"a hyper-parameter `{missing}` of the method, which its loss reads",
                got=", ".join(sorted(hyper)) or "none",
                hint="add it to the method's `hyper`, as `{**FedProto.hyper, …}` does",
            ) from None

    return checked
