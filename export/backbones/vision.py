"""torchvision beside any build of torch.

**The problem.** If a CPU build of torch is pinned, the torchvision wheel from the package index was compiled against
another build, and its operators cannot load. Its import fails with "operator torchvision::nms does not exist", although
no classifier calls that operator.

**The solution.** torchvision registers fake kernels for two schemas. When both are declared first, a second import
succeeds. `make_importable` does that once: for Protofleet's own backbones, and before a user's module that may import
torchvision or timm.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import torch

__all__ = ["make_importable", "models"]

_declared: list[torch.library.Library] = []  # must outlive the import: dropping one drops its schemas


def make_importable() -> None:
    """After this `import torchvision` works wherever it is installed; without it nothing happens."""
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # the compiled operators did not load: only then, since nobody may declare an operator twice
        _declare()
        importlib.import_module("torchvision")


def models() -> ModuleType:
    """`torchvision.models`.

    Raises:
        ModuleNotFoundError: without torchvision.
    """
    make_importable()
    return importlib.import_module("torchvision.models")


def _declare() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _declared.append(library)
