"""SphereFed (Dong et al., ECCV 2022, eq. 4 and 5): unit features against a frozen orthonormal head."""

from __future__ import annotations

from typing import ClassVar

from protofleet.contract.methods import METHODS
from protofleet.lab.algorithms.base import Algorithm

__all__ = ["SphereFed"]


class SphereFed(Algorithm):
    name = "spherefed"
    summary = "unit features against a frozen head, backbones averaged"
    source = "Dong et al., ECCV 2022, eq. 4 and 5"
    objective = "spherefed"
    head = "frozen"
    hyper: ClassVar = {name: METHODS["spherefed"].hyper[name] for name in ("lr", "momentum", "weight_decay", "epochs")}
