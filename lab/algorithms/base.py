"""What a federation that averages weights is made of: an algorithm, and the rule by which its server merges weights.

Both are classes with hooks; a new one is one file in this folder. A federation (`lab/engine/weight_averaging.py`) holds
one object of each and calls, in every round:

    rule.told(client)                  what a client hears beside the weights
      rule.correction(told, start)     what is added to its gradients at each of its steps
      algorithm.guide()                what clients train against beside their samples
          … the client trains …
      algorithm.summarise(model, …)    the statistic that travels beside its weights; `afterwards`: of the merged ones
    rule.trained(client, …)            a client's own state moves on; returns the bytes it sends for that
    algorithm.gather(statistic)        the server keeps the statistic; returns its bytes
    algorithm.assign(…)                which of several models each client belongs to
    rule.merge(start, outcomes)        the next global weights, one rule object for each model
    algorithm.merge()                  the round's statistics become the next global ones
    algorithm.install(model)           what of them belongs into the model
    algorithm.answers(features)        how test images are classified, beside the head

What is set in is the client's side, and may run in another process (`lab/engine/client_training.py`), on objects of the
same classes that know the same: an algorithm's state by `state` and `restore`, of a rule what `told` gives. `state` and
`restore` are a checkpoint's, too. Any algorithm can run over any rule: its hyper-parameter `base` names the
rule, so SphereFed on FedNova is `spherefed` with `base=fednova`.

On Protofleet's wire no message can carry weights, so all of this exists in the lab only, to be compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from contract.errors import MethodError, near_names
from contract.methods import DEFAULT, METHODS, Hyper, Value, closing_method
from contract.methods.base import LossTerm
from contract.statistics import Statistic
from edge_client.data import LocalData
from lab.engine.local_training import EagerModel, Fitted, Guide, LabHead

__all__ = ["Algorithm", "Correction", "CrossEntropy", "Outcome", "State", "WeightRule", "average"]

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
    "ccvr_virtual": Hyper(2000, "virtual features of a class, Luo et al., NeurIPS 2021; SphereFed: 500", low=1),
    "ccvr_lr": Hyper(0.01, "ours; SphereFed, Tab. 16: 0.00001", low=1e-9),
    "ccvr_epochs": Hyper(10, "ours", low=1),
}
# What only rounds over the air have: how prototypes are weighted, and FFC's projection.
_ON_THE_WIRE = ("aggregation", "project", "project_seed", "delta")


@dataclass(frozen=True, eq=False)
class Outcome:
    """What one client's local training left.

    Attributes:
        client: its number, from 0.
        state: its floating-point tensors by name.
        pull: as in `lab.engine.local_training.Fitted`.
    """

    client: int
    state: State
    samples: int
    pull: float
    loss: float


class WeightRule:
    """What the server does with the clients' weights: FedAvg, and the base of every other rule.

    A rule sees the weights w that the clients started from, each client's weights w_i and its share p_i of the samples,
    and returns Σ p_i w_i (McMahan et al., AISTATS 2017). Rules differ for trained tensors only: running statistics of
    BatchNorm are averaged by p_i whatever the rule. All sums are float64.

    Args:
        hyper: settled.
        trained: names of the tensors that training moves and clients send.
        clients: how many there are.

    Attributes:
        name, source: as `base=NAME` takes it; its paper.
        hyper: hyper-parameters that only this rule reads, by name.
        correction_ops: for the cost models: scalar operations of `correction` on each trained number in each step.
    """

    name: ClassVar[str] = "fedavg"
    source: ClassVar[str] = "McMahan et al., AISTATS 2017"
    hyper: ClassVar[Mapping[str, Hyper]] = {}
    correction_ops: ClassVar[int] = 0

    def __init__(self, hyper: Mapping[str, Value], trained: frozenset[str], clients: int) -> None:
        self.settled, self._trained, self._clients = hyper, trained, clients

    def told(self, client: int) -> Any:
        """What this client hears beside the weights, for its `correction`: values and tensors, in dictionaries, lists
        and tuples; None for nothing."""
        return None

    def correction(self, told: Any, start: Mapping[str, Tensor]) -> Correction | None:
        """What changes the gradients of a client that was `told` this and starts from the weights `start`. Both lie
        where the gradients do (`lab/engine/torch_device.py`); everything else of a rule computes on the processor."""
        return None

    def trained(self, client: int, start: Mapping[str, Tensor], state: Mapping[str, Tensor], fitted: Fitted) -> int:
        """Client `client` went from `start` to `state`; returns the bytes that it sends beside its weights."""
        return 0

    def merge(self, start: Mapping[str, Tensor], outcomes: Sequence[Outcome]) -> State:
        """The next weights; `start` where no client took part."""
        if not outcomes:
            return dict(start)
        return average([each.state for each in outcomes], [each.samples for each in outcomes])

    def state(self) -> dict[str, Any]:
        """What later rounds depend on, beside the weights."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


class Algorithm:
    """A federation that averages weights: what clients minimise, what stays with them, what travels beside weights.

    Args:
        classes, width: C and D.
        hyper: settled.
        clients: how many there are.

    Attributes:
        name, summary, source: its name, a line for a person, its paper.
        objective: what clients minimise: a method of `contract/methods/`, whose hyper-parameters it takes, too.
        head: see `lab.engine.local_training.EagerModel`.
        kept: tensors whose names begin so stay with each client and are never averaged.
        centres: the hyper-parameter that says how many models there are; None for one.
        base: the rule by which weights merge, unless `base` says otherwise.
        fixed: hyper-parameters of the objective that make it this algorithm's, and cannot be given.
        hyper: hyper-parameters that are only this one's, or have another default here.
        loss_terms: for the cost models: what the loss consists of; the objective's own where that is a method's.
        statistic: for them, too: what `summarise` gives; None for nothing.
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
        """Nothing to hold, for most."""

    # ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────

    @classmethod
    def loss(cls) -> str:
        """The training objective's name: of `export/objectives/`, or one that only the lab has."""
        return (METHODS[cls.objective].objective or "") if cls.objective in METHODS else cls.objective

    @classmethod
    def costed_terms(cls) -> tuple[LossTerm, ...]:
        """What the loss consists of, for the cost models.

        Raises:
            MethodError: neither the class says it nor its objective's method.
        """
        found = cls.loss_terms or (METHODS[cls.objective].loss if cls.objective in METHODS else ())
        if not found:
            raise MethodError(f"{cls.name}: loss_terms", expected="what its loss consists of", got="none")
        return found

    @classmethod
    def options(cls, base: str | None = None) -> dict[str, Hyper]:
        """Every hyper-parameter over that base: how clients train, how the server merges, the objective's own."""
        from lab.algorithms import RULES

        rule = RULES[base or cls.base]
        row = METHODS[cls.objective].hyper if cls.objective in METHODS else {}
        own = {name: hyper for name, hyper in row.items() if name not in (*_TRAINING, *_ON_THE_WIRE)}
        choice = Hyper(cls.base, RULES[cls.base].source, tuple(RULES))
        every = {**_TRAINING, "base": choice, **rule.hyper, **_CLOSING, **own, **cls.hyper}
        return {name: hyper for name, hyper in every.items() if name not in cls.fixed}

    @classmethod
    def settle(cls, given: Mapping[str, object]) -> dict[str, Value]:
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
        """What clients train against; None before there is anything."""
        return None

    def summarise(self, model: EagerModel, share: LocalData, rng: np.random.Generator) -> Any:
        """The statistic of a client that has just trained, or received, `model`, on `share`; None for nothing."""
        return None

    @property
    def afterwards(self) -> bool:
        """Whether clients summarise with the merged weights, which they then have received, and not with their own."""
        return False

    def gather(self, statistic: Any) -> int:
        """Keep what a client's `summarise` gave for `merge`; returns its bytes."""
        return 0

    def assign(self, outcomes: Sequence[Outcome], models: list[State], member: NDArray[np.int64], seed: int) -> None:
        """Of an algorithm with several models: which one each participant belongs to. Changes `models` and `member`."""

    def merge(self) -> None:
        """The round's statistics become the next global ones."""

    def install(self, model: EagerModel) -> None:
        """Put what belongs into the model there."""

    def answers(self, features: Features) -> dict[str, NDArray[np.int64]]:
        """Class numbers (N,) of features (N, D), by way of answering."""
        return {}

    def state(self) -> dict[str, Any]:
        """What is global between two rounds, beside the model's own tensors."""
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""


class CrossEntropy(Algorithm):
    """The base of those whose clients minimise the plain cross-entropy of the head."""

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
