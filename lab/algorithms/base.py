"""The two parts of a federation that averages weights: an algorithm, and the rule by which its server merges weights.

Both are classes with hooks. A new one is one file in this folder. A federation (`lab/engine/weight_averaging.py`) holds
one object of each and calls these hooks in every round:

    rule.told(client)                  what the server sends to a client beside the weights
      rule.correction(told, start)     what changes the client's gradients at each step
      algorithm.guide()                what clients train against beside their samples
          … the client trains …
      algorithm.summarise(model, …)    the statistic sent beside the weights; with `afterwards`, of the merged weights
    rule.trained(client, …)            updates the client's own state; returns the bytes that it sends for that
    algorithm.gather(statistic)        the server keeps the statistic; returns its bytes
    algorithm.assign(…)                which of several models each client belongs to
    rule.merge(start, outcomes)        the next global weights; one rule object for each model
    algorithm.merge()                  turns the round's statistics into the next global ones
    algorithm.install(model)           puts the part that belongs to the model into it
    algorithm.answers(features)        further ways to classify test images, beside the head

The indented hooks are the client's side. They may run in another process (`lab/engine/client_training.py`), on other
objects of the same classes. Those get the algorithm's state by `state` and `restore`, and of the rule what `told`
returns. A checkpoint uses `state` and `restore`, too.

Any algorithm can run over any rule: its hyper-parameter `base` names the rule. So SphereFed on FedNova is `spherefed`
with `base=fednova`.

No message on Protofleet's wire can carry weights. So all of this exists in the lab only, for comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofleet.contract.errors import MethodError, near_names
from protofleet.contract.methods import DEFAULT, METHODS, Hyper, Value, closing_method
from protofleet.contract.methods.base import LossTerm
from protofleet.contract.sums.statistics import Statistic
from protofleet.edge_client.data import LocalData
from protofleet.lab.training.local_training import EagerModel, Fitted, Guide, LabHead

__all__ = ["RULES", "Algorithm", "Correction", "CrossEntropy", "Outcome", "State", "WeightRule", "average"]

State = dict[str, Tensor]
Features = NDArray[np.float32]
Correction = Callable[[Mapping[str, Tensor]], None]
"""Changes the gradients of a step in place, given the trained parameters by name."""

_TRAINING = {
    "lr": Hyper(0.01, "common setting", low=1e-9, high=100.0),
    "momentum": Hyper(0.5, "common setting", high=0.9999),
    "weight_decay": Hyper(0.0, "common setting"),
    "epochs": Hyper(1, "common setting", low=1, high=10_000),
    "optimizer": Hyper("sgd", "of the clients", ("sgd", "adam")),
    "schedule": Hyper("constant", "of lr over rounds; cosine: SphereFed, Tab. 16", ("constant", "cosine")),
    "halve_every": Hyper(0, "steps of a round after which lr halves, again and again; 0: never"),
    "clip_norm": Hyper(0.0, "of a step's gradients, at most; 0: no bound"),
}
_CLOSING = {
    **{name: closing_method().hyper[name] for name in closing_method().solved_with},
    "form": replace(closing_method().hyper["form"], default="ridge"),  # eq. 12, as the papers close their runs
    "ccvr_virtual": Hyper(2000, "virtual features of a class, Luo et al., NeurIPS 2021; SphereFed: 500", low=1),
    "ccvr_lr": Hyper(0.01, "ours; SphereFed, Tab. 16: 0.00001", low=1e-9),
    "ccvr_epochs": Hyper(10, "ours", low=1),
}
# What only rounds over the air have: how prototypes are weighted, and FFC's projection.
_ON_THE_WIRE = ("aggregation", "project", "project_seed", "delta")


@dataclass(frozen=True, eq=False)
class Outcome:
    """The result of one client's local training.

    Attributes:
        client: its number, from 0.
        state: floating-point tensors by name.
        pull: as in `protofleet.lab.training.local_training.Fitted`.
    """

    client: int
    state: State
    samples: int
    pull: float
    loss: float


RULES: dict[str, type[WeightRule]] = {}  # by name; filled by the folder's `__init__`


class WeightRule:
    """How the server merges the clients' weights. This class is FedAvg, and the base of every other rule.

    A rule sees the weights w that the clients started from, each client's weights w_i and its share p_i of the samples,
    and returns Σ p_i w_i (McMahan et al., AISTATS 2017). Rules differ for trained tensors only. Every rule averages the
    running statistics of BatchNorm by p_i. All sums are float64.

    Args:
        hyper: resolved.
        trained: names of the tensors that training moves and clients send.
        clients: how many there are.

    Attributes:
        name: the name that `base=NAME` takes.
        source: its paper.
        hyper: hyper-parameters that only this rule reads, by name.
        correction_ops: scalar operations of `correction` on each trained number in each step, for the cost models.
    """

    name: ClassVar[str] = "fedavg"
    source: ClassVar[str] = "McMahan et al., AISTATS 2017"
    hyper: ClassVar[Mapping[str, Hyper]] = {}
    correction_ops: ClassVar[int] = 0

    def __init__(self, hyper: Mapping[str, Value], trained: frozenset[str], clients: int) -> None:
        self.settled, self._trained, self._clients = hyper, trained, clients

    def told(self, client: int) -> Any:
        """What the server sends to a client beside the weights, for its `correction`; None for nothing.

        It consists of values and tensors in dictionaries, lists and tuples.
        """
        return None

    def correction(self, told: Any, start: Mapping[str, Tensor]) -> Correction | None:
        """A function that changes a client's gradients; None for no change.

        `told` and the weights `start` lie on the device of the gradients (`lab/training/torch_device.py`). All other
        hooks of a rule compute on the CPU.
        """
        return None

    def trained(self, client: int, start: Mapping[str, Tensor], state: Mapping[str, Tensor], fitted: Fitted) -> int:
        """Take over that a client trained from `start` to `state`; returns the bytes it sends beside its weights."""
        return 0

    def merge(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        """The next weights; `start` where no client took part."""
        if not outcomes:
            return dict(start)
        return average([outcome.state for outcome in outcomes], [outcome.samples for outcome in outcomes])

    def state(self) -> dict[str, Any]:
        """Everything beside the weights that later rounds depend on."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


class Algorithm:
    """A federation that averages weights: the clients' objective, what they keep, and what they send beside weights.

    Args:
        classes, width: C and D.
        hyper: resolved.
        clients: how many there are.

    Attributes:
        name, summary, source: its name, a line for a person, and its paper.
        objective: the method of `contract/methods/` whose objective clients minimise. Its hyper-parameters apply, too.
        head: see `protofleet.lab.training.local_training.EagerModel`.
        kept: prefix of the names of tensors that each client keeps. They are never averaged.
        centres: the hyper-parameter that gives the number of models; None for one model.
        base: the default rule for merging weights; the hyper-parameter `base` replaces it.
        fixed: hyper-parameters of the objective that this algorithm fixes.
        hyper: hyper-parameters of this algorithm alone, or with another default here.
        loss_terms: terms of the loss, for the cost models; by default those of the objective's method.
        statistic: the type that `summarise` gives, for the cost models; None for nothing.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    source: ClassVar[str]
    objective: ClassVar[str] = DEFAULT
    head: ClassVar[LabHead] = "local"
    kept: ClassVar[str | None] = None
    centres: ClassVar[str | None] = None
    base: ClassVar[str] = "fedavg"
    fixed: ClassVar[Mapping[str, Value]] = {}
    hyper: ClassVar[Mapping[str, Hyper]] = {}
    loss_terms: ClassVar[tuple[LossTerm, ...]] = ()
    statistic: ClassVar[type[Statistic] | None] = None

    def __init__(self, classes: int, width: int, hyper: Mapping[str, Value], clients: int) -> None:
        """Most algorithms hold nothing."""

    # ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def loss(cls) -> str:
        """The name of the training objective: one of `export/objectives/`, or one of the lab alone."""
        return (METHODS[cls.objective].objective or "") if cls.objective in METHODS else cls.objective

    @classmethod
    def costed_terms(cls) -> tuple[LossTerm, ...]:
        """The terms of the loss, for the cost models.

        Raises:
            MethodError: neither the class nor its objective's method states them.
        """
        terms = cls.loss_terms or (METHODS[cls.objective].loss if cls.objective in METHODS else ())
        if not terms:
            raise MethodError(f"{cls.name}: loss_terms", expected="what its loss consists of", got="none")
        return terms

    @classmethod
    def options(cls, base: str | None = None) -> dict[str, Hyper]:
        """Every hyper-parameter over that base: of the clients' training, the server's rule and the objective."""
        rule = RULES[base or cls.base]
        row = METHODS[cls.objective].hyper if cls.objective in METHODS else {}
        own = {name: hyper for name, hyper in row.items() if name not in (*_TRAINING, *_CLOSING, *_ON_THE_WIRE)}
        choice = Hyper(cls.base, RULES[cls.base].source, tuple(RULES))
        every = {**_TRAINING, "base": choice, **rule.hyper, **_CLOSING, **own, **cls.hyper}
        return {name: hyper for name, hyper in every.items() if name not in cls.fixed}

    @classmethod
    def resolve(cls, given: Mapping[str, object]) -> dict[str, Value]:
        """Every hyper-parameter: the defaults, overridden by `given` and checked.

        Raises:
            MethodError: for a name this algorithm does not have over its base, or a value out of range.
        """
        base = str(cls.options()["base"].check("base", given.get("base", cls.base)))
        options = cls.options(base)
        for name in given:
            if name not in options:
                raise MethodError(
                    f"{cls.name} over {base} has no hyper-parameter {name!r}", hint=near_names(name, options)
                )
        return {name: hyper.check(name, given.get(name, hyper.default)) for name, hyper in options.items()} | cls.fixed

    # ── hooks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def guide(self) -> Guide | None:
        """What clients train against; None before the server has anything."""
        return None

    def summarise(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> Any:
        """A client's statistic of `share` by a model that it has just trained, or received; None for nothing."""
        return None

    @property
    def afterwards(self) -> bool:
        """Whether clients summarise with the merged weights, after receiving them, instead of their own."""
        return False

    def gather(self, statistic: Any) -> int:
        """Keep a client's statistic for `merge`; returns its bytes."""
        return 0

    def assign(self, outcomes: Sequence[Outcome], models: list[State], member: NDArray[np.int64], seed: int) -> None:
        """With several models: assign each participant to a model. Changes `models` and `member`."""

    def merge(self) -> None:
        """Turn the round's statistics into the next global ones."""

    def install(self, model: EagerModel) -> None:
        """Put the global values that belong to the model into it."""

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        """Class numbers (N,) of features (N, D), by way of answering."""
        return {}

    def state(self) -> dict[str, Any]:
        """The global values between two rounds, beside the model's own tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""


class CrossEntropy(Algorithm):
    """Base of the algorithms whose clients minimise the plain cross-entropy of the head."""

    fixed: ClassVar[Mapping[str, Value]] = {"lambda": 0.0, "distance": "squared", "reading": "sample"}
    loss_terms: ClassVar[tuple[LossTerm, ...]] = ("cross-entropy",)


def average(states: Sequence[Mapping[str, Tensor]], samples: Sequence[float]) -> State:
    """Σ n_i w_i / Σ n_i for each tensor, summed in float64, in the tensors' own dtype."""
    shares = [n / sum(samples) for n in samples]
    averaged = {}
    for name, like in states[0].items():
        total = torch.zeros(like.shape, dtype=torch.float64)
        for state, share in zip(states, shares, strict=True):
            total.add_(state[name], alpha=share)
        averaged[name] = total.to(like.dtype)
    return averaged
