"""What a training step trains, as a value for the cost models. It comes from a method's class, never from its name.

    head            trained, frozen, or skipped altogether: what becomes of the classifier
    loss            the terms of the loss, each of which `loss_terms` costs once
    unit_features   whether features are put on the unit sphere first
    state           tensors that a method has beside the backbone's and the head's, trained or not
    update_of       the optimizer of each trained tensor

`method_training` reads any method, and `bundle_training` a bundle's own. Papers' algorithms that send weights are no
methods of ours. `baselines` has those that ours are compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from protofleet.contract.bundle.bundle_file import Manifest
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import Head, Method, Value, method
from protofleet.contract.methods.base import LossTerm
from protofleet.contract.methods.optimizers import Update
from protofleet.hw_profiles.workload.calibration_step import statistic_bytes
from protofleet.hw_profiles.workload.model import Tensor

__all__ = ["HeadUse", "Training", "bundle_training", "method_training"]

HeadUse = Literal["trained", "frozen", "skipped"]
_USE: Mapping[Head, HeadUse] = {"local": "trained", "frozen": "frozen", "none": "skipped"}


@dataclass(frozen=True)
class Training:
    """What a step trains.

    Attributes:
        classes: C.
        bias: whether a trained head has one.
        unit_features: whether the step has to put features on the unit sphere: not where the graph ends in such.
        state: further tensors of the step, of role `parameter` where they are trained, `frozen` otherwise.
        uplink_bytes: bytes that a device sends in a round.

    Raises:
        UsageError: for fewer than one class.
    """

    name: str
    classes: int
    head: HeadUse
    loss: tuple[LossTerm, ...]
    update_of: Callable[[str], Update]
    bias: bool = False
    unit_features: bool = False
    state: tuple[Tensor, ...] = ()
    uplink_bytes: int = 0

    def __post_init__(self) -> None:
        if self.classes < 1:
            raise UsageError("classes", expected="a positive integer", got=self.classes)


def method_training(
    trained: Method,
    classes: int,
    width: int,
    *,
    hyper: Mapping[str, Value] | None = None,
    head: Head | None = None,
    normalised: bool = False,
) -> Training:
    """A step of a method on features of width D.

    Args:
        hyper: settled; None for the method's defaults.
        head: None for the method's first.
        normalised: whether the graph already ends in unit features.
    """
    settled = trained.resolve({}) if hyper is None else hyper
    chosen = trained.heads[0] if head is None else head
    return Training(
        trained.name,
        classes,
        _USE[chosen],
        trained.loss,
        partial(trained.update_of, hyper=settled),
        bias=chosen == "local",
        unit_features=trained.unit_features and not normalised,
        state=_state(trained, classes, width),
        uplink_bytes=statistic_bytes(trained, classes, trained.row_width(settled, width), settled),
    )


def bundle_training(manifest: Manifest, classes: int | None = None) -> Training:
    """The step that a bundle was exported with.

    Args:
        classes: C in place of the bundle's own.
    """
    own = method(manifest.method)
    return method_training(
        own,
        classes or manifest.classes,
        manifest.features,
        hyper=own.resolved_in(manifest.hyper),
        head=manifest.head,
        normalised=own.unit_features,
    )


def _state(trained: Method, classes: int, width: int) -> tuple[Tensor, ...]:
    """Shapes alone: the values may take a method a while to find."""
    own = trained.state(classes, width, seed=0)
    return tuple(Tensor(n, s.shape, "parameter" if s.trained else "frozen") for n, s in own.items())
