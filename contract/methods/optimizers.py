"""The optimizers of a training step, in one table: what each keeps of a trained tensor, and what its step takes.

A further one is its line in `OPTIMIZERS`, its update in `export/steps/optimizers.py`, and its name in the methods that
may be set to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from protofleet.contract.names import named

__all__ = ["OPTIMIZERS", "Optimizer", "Update"]


@dataclass(frozen=True)
class Optimizer:
    """One of them.

    Attributes:
        title: for reports.
        operations: scalar operations of each number; a square root counts 3.
        kept: what begins the names of the tensors that it keeps of each trained one.
        steps: the name of its count of steps, a scalar; None where it needs none.
    """

    title: str
    operations: int
    kept: tuple[str, ...] = ()
    steps: str | None = None


_SGD, _MOMENTUM = Optimizer("SGD", 2), Optimizer("SGD", 4, ("momentum",))
_ADAM = Optimizer("Adam", 16, ("adam.mean", "adam.square"), "adam.steps")
OPTIMIZERS: Mapping[str, Callable[[float], Optimizer]] = MappingProxyType(  # of a momentum
    {"sgd": lambda momentum: _MOMENTUM if momentum else _SGD, "adam": lambda momentum: _ADAM}
)
_HAVE_MOMENTUM = ("sgd",)


@dataclass(frozen=True)
class Update:
    """How training moves one tensor.

    Attributes:
        optimizer: the name of one of `OPTIMIZERS`.
        lr: its own learning rate; None for the step's.
        momentum: of SGD.
        weight_decay: added to the gradient as wd · p.
    """

    optimizer: str = "sgd"
    lr: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0

    @classmethod
    def of(cls, hyper: Mapping[str, bool | int | float | str]) -> Update:
        """The update that hyper-parameters name: `optimizer`, `momentum`, `weight_decay`; none of momentum for Adam."""
        name = str(hyper.get("optimizer", "sgd"))
        momentum = float(hyper.get("momentum", 0.0)) if name in _HAVE_MOMENTUM else 0.0
        return cls(name, None, momentum, float(hyper.get("weight_decay", 0.0)))

    @property
    def rule(self) -> Optimizer:
        """What it keeps and takes.

        Raises:
            UsageError: there is no optimizer of that name.
        """
        return named(OPTIMIZERS, self.optimizer, "optimizer")(self.momentum)

    @property
    def operations(self) -> int:
        """Scalar operations of each number, those of weight decay among them."""
        return self.rule.operations + 2 * bool(self.weight_decay)
