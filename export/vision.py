"""torchvision's models beside any build of torch.

Where a CPU build of torch is pinned, the torchvision wheel from the package index was compiled against another build
and its operators cannot load; its import then fails with "operator torchvision::nms does not exist", although no model
used here calls it. Declaring the two schemas that torchvision registers fake kernels for lets the import go through,
and where the compiled operators do load, the declaration is refused and nothing changes. DESIGN section 7.
"""

from __future__ import annotations

import torch

__all__ = ["models"]

_library = torch.library.Library("torchvision", "FRAGMENT")  # must outlive the import: dropping it drops the schemas
for _name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _name):
        _library.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from torchvision import models  # noqa: E402
