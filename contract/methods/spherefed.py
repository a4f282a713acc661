"""SphereFed: unit features are trained against a frozen orthonormal head, which is then calibrated in closed form.

Dong et al., "SphereFed: Hyperspherical Federated Learning", ECCV 2022, eq. 4 and 5. The paper averages the backbones'
weights, which no message of Protofleet can carry; with averaged weights it is an algorithm of the lab
(`lab/algorithms/spherefed.py`). Here a device trains its own backbone, sends only that it did, and takes part in the
closing FFC round (`ffc.py`).

    loss        mean over batch and classes of (W z − onehot(y))², z = f(x)/‖f(x)‖, W Wᵀ = I
    answer      the frozen head, on unit features; or the device's own closed-form head (`personal`)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.heads.answers import Answer, linear_answer
from protofleet.contract.methods.base import Head, Hyper, Local, LossTerm, Method, Value, sgd
from protofleet.contract.methods.ffc import CALIBRATION, FFC, personal_head
from protofleet.contract.wire.global_state import GlobalState

__all__ = ["SphereFed"]

_PAPER = "SphereFed (Dong et al., ECCV 2022)"


class SphereFed(Method):
    name = "spherefed"
    title = "SphereFed"
    source = f"{_PAPER}, eq. 4, 5"
    summary = "unit features against a frozen head"
    sends = "only that it had taken part"
    inference = "frozen head"
    way = "head"
    objective = "spherefed"
    heads: ClassVar[tuple[Head, ...]] = ("frozen",)
    loss: ClassVar[tuple[LossTerm, ...]] = ("squared-error",)
    unit_features = True
    has_personal_head = True
    first_run: ClassVar[Mapping[str, Value]] = MappingProxyType({"epochs": 1, "lr": 0.1})
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType(
        {**sgd(f"{_PAPER}, Tab. 16", lr=0.5, momentum=0.9, weight_decay=1e-5, epochs=10), **CALIBRATION}
    )

    def check(self, hyper: Mapping[str, Value], classes: int, width: int) -> None:
        FFC().check(hyper, classes, width)

    def personal_head(self, local: Local) -> NDArray[np.float64]:
        """FFC's closed form over the features that the device has trained. Grams of different extractors are never
        summed, so this head is of its own sums alone, and stays on the device."""
        return personal_head(local)

    def answers(self, local: Local, state: GlobalState | None) -> dict[str, Answer]:
        """Beside the others `personal`: the closed-form head of the device's own samples and features."""
        answers, own = super().answers(local, state), local.own_head()
        return answers if own is None else {**answers, "personal": linear_answer(own)}
