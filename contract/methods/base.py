"""What a method is: one class that owns all that is true of it, wherever it runs.

A method is one file in this folder, or a class of an installed package. Read from top to bottom it tells the whole
data flow, and every room asks it; no other file knows a method by name:

    what it trains       `objective`, `heads`, `state`, `update_of`, `step_inputs`, `inputs`, `start`
    what it sends        `statistic`, `extractor`, `summarise`, `mechanism`
    how that merges      `weighting`, `merge`
    what comes back      `global_rows`, `next_rows`
    how a device answers `answers`, `shared_answers`
    what it costs        `loss`, the fields of its statistic, `solves` (`hw_profiles/workload`)

A statistic is made of declared fields only (`contract/statistics.py`), so a method cannot send anything else. The
objective is torch, and lives in `export/objectives/`. `Hyper` is a hyper-parameter with the source of its default.

A device gives a method a `Local`: its samples as features and counts, never as images.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from contract.answers import Answer, linear_answer, nearest_answer
from contract.errors import MethodError, near_names
from contract.mechanism import Mechanism
from contract.messages import ClassRows
from contract.rules import Rule, Source, Weighting, merge
from contract.secret_noise import SecretNoise
from contract.state import GlobalState
from contract.statistics import ClassMeans, Participation, Statistic

__all__ = [
    "Extractor",
    "Head",
    "Hyper",
    "Local",
    "LossTerm",
    "Merged",
    "Method",
    "RowWidth",
    "Solves",
    "StartState",
    "Update",
    "Value",
    "newer_rows",
    "noised",
    "sgd",
]

Value = int | float | str
Head = Literal["local", "frozen", "none"]
Extractor = Literal["local", "bundle"]
Solves = Literal["none", "ridge"]
LossTerm = Literal[
    "cross-entropy",
    "squared-error",
    "prototype-distance",
    "all-prototypes",
    "anchors",
    "soft-predictions",
    "mean-features",
]
RowWidth = Literal["features", "classes", "one"]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True)
class Hyper:
    """One hyper-parameter: its default, where that default comes from, and what values make sense.

    Attributes:
        default: also fixes the type: int, float or str.
        source: paper, equation, table or public code that the default is taken from.
        choices: the allowed names, for a str; for a number, words that may stand in its place.
        low: the smallest allowed number.
        high: the largest allowed number.
        number: whether a number is taken although the default is one of the words.
    """

    default: Value
    source: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = float("inf")
    number: bool = False

    def check(self, name: str, value: object) -> Value:
        """`value` as this hyper-parameter's type.

        Raises:
            MethodError: when it is not of that type, not among the choices, or out of range.
        """
        if value in self.choices:
            return str(value)
        words = ", ".join(self.choices)
        if isinstance(self.default, str) and not self.number:
            raise MethodError(f"{name}", expected=f"one of {words}", got=value)
        kind = int if isinstance(self.default, int) else float
        beside = f", or {words}" if words else ""
        try:
            number = kind(str(value))
        except ValueError:
            wanted = f"a{' whole' if kind is int else ''} number{beside}"
            raise MethodError(f"{name}", expected=wanted, got=value) from None
        if not (self.low <= number <= self.high and math.isfinite(number)):
            raise MethodError(f"{name}", expected=f"{self.low:g} to {self.high:g}{beside}", got=value)
        return number


def sgd(source: str, *, lr: float, momentum: float, weight_decay: float, epochs: int) -> dict[str, Hyper]:
    """The hyper-parameters of local training by SGD, which most methods that train have."""
    return {
        "lr": Hyper(lr, source, low=1e-9, high=100.0),
        "momentum": Hyper(momentum, source, high=0.9999),
        "weight_decay": Hyper(weight_decay, source),
        "epochs": Hyper(epochs, source, low=1, high=10_000),
    }


def noised() -> dict[str, Hyper]:
    """The hyper-parameters of methods that send nothing without noise (`contract/noised_sums.py`)."""
    return {
        "noise_multiplier": Hyper(
            3.731, "ours: ε = 1 at δ = 1e-5 for one release (Balle and Wang, ICML 2018)", low=1e-3, high=1e6
        ),
        "delta": Hyper(1e-5, "of (ε, δ), as stated", low=1e-12, high=0.5),
    }


@dataclass(frozen=True)
class Update:
    """How training moves one tensor.

    Attributes:
        optimizer: SGD or Adam.
        lr: its own learning rate; None for the step's.
        momentum: of SGD.
        weight_decay: added to the gradient as wd · p.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0


@dataclass(frozen=True, eq=False)
class StartState:
    """A tensor of the training step that is neither the backbone's nor the head's.

    Attributes:
        shape: what the cost models and the step's trace ask for.
        values: gives what it is at the start, float of that shape; may take a while.
        trained: whether a step moves it.
    """

    shape: tuple[int, ...]
    values: Callable[[], NDArray[np.floating]]
    trained: bool


class Merged(Protocol):
    """What a round's statistics come to.

    Attributes:
        present: (C,) which classes someone held.
    """

    @property
    def present(self) -> NDArray[np.bool_]: ...


class Local(Protocol):
    """What a device offers a method in a round: features of its own samples, under its present weights.

    Only samples that may be told of are in it: classes with fewer examples than the aggregator's `min_samples` are left
    out, unless the method's statistic says nothing of counts (`Statistic.COUNTED`), and those that were forgotten.

    Attributes:
        hyper: the round's method's hyper-parameters, settled.
        classes, width: C and D.
        params: the device's present weights by state-tensor name.
        counts: (C,) int64, its labelled samples of each class.
        asked: (C,) bool, the classes that may be told of whatever the samples: all that were not forgotten.
        min_samples: no group of fewer may be told of.
    """

    min_samples: int
    asked: NDArray[np.bool_]
    hyper: Mapping[str, Value]
    classes: int
    width: int
    params: Mapping[str, Float32]
    counts: NDArray[np.int64]

    def features(self, extractor: Extractor) -> Iterator[tuple[Float32, NDArray[np.int64]]]:
        """Blocks of features (n, D) and their labels (n,), by its own weights or the bundle's."""

    def class_means(self) -> ClassMeans:
        """The class means of its own features; computed once for each weights."""

    def own_head(self) -> Float64 | None:
        """The head that a method with a personal one makes of all the device's samples (`personal_head`); None where it
        has none, or where samples were never seen. Computed once for each weights."""

    def noise(self) -> np.random.Generator:
        """A generator that this round's random choices are drawn from: fixed by a secret of the device, so that a round
        that is repeated gives the same bytes. Not for noise that is to hide anything."""

    def secret_noise(self, *of: bytes | NDArray[np.generic]) -> SecretNoise:
        """Normal noise that nobody without the device's secret can tell from chance, for these very numbers: other ones
        get other noise, the same ones in the same round the same."""


class Method(ABC):
    """One method. A class attribute is a fact; a method of the class is a step of the data's way.

    Attributes:
        name: in commands, manifests and messages; lower case, at most 32 characters.
        title: the name as its paper writes it.
        source: the paper and its equations.
        summary: what it is, in a few words.
        sends: what a device sends in a round, in words.
        inference: how a device answers, in words.
        way: the way of answering, of those that `answers` and `shared_answers` give, that is the method's own.
        hyper: hyper-parameters by name.
        objective: what training minimises: a file of `export/objectives/`, or `package.module:function`; None when
            nothing is trained.
        heads: the heads the objective allows, default first.
        loss: what the loss consists of, for the cost models.
        statistic: what a contribution carries.
        extractor: whose features are summarised: the device's own `local` weights, or the `bundle`'s, which every
            device shares. Gram sums are only meaningful over one shared extractor.
        unit_features: whether features are put on the unit sphere before they are summarised and classified.
        weighting: the weight w_ij of device i's row of class j in Σ_i w_ij r_ij / Σ_i w_ij, unless the hyper-parameter
            `aggregation` says otherwise: its `count` n_ij, its `share` n_ij / n_i, 1 for each `client` that holds the
            class; `printed` is the share, divided by the number of clients as FedHP's eq. 5 prints it, and `twice` the
            count, divided by the number of clients that hold the class once more, as FedProto's eq. 4 does.
        global_rows: what comes back to the devices: kinds of class rows, each of `features` or `classes` numbers, or of
            `one`.
        shared_state: state tensors that must be equal in all bundles of one fleet.
        privacy: what a contribution says about the samples behind it, in words.
        encoding: how its numbers travel unless the aggregator is told otherwise.
        solves: what the aggregator computes of the merged statistic, for the cost models: a head by `ridge` regression,
            or nothing that counts.
        solved_with: hyper-parameters that the aggregator alone uses, in making a head of the merged statistic: with
            others of these it can make another head of the same contributions, which devices need not know of.
        warm_prototypes: whether a device's own class mean may stand for a prototype that nobody has sent yet.
        has_personal_head: whether a device makes itself a head of its own samples that it can answer with, too.
        closes_runs: whether a run of another method may end with one round of it.
        rounds: how many a run has when a person names none.
        stands: whether its sums can stand without rounds: they are over the bundle's extractor, add up and can be taken
            out again, and what comes back follows from them alone (`aggregator/standing.py`).
        first_run: hyper-parameters for a first short run on a small data set.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    source: ClassVar[str]
    summary: ClassVar[str]
    sends: ClassVar[str]
    inference: ClassVar[str]
    way: ClassVar[str]
    hyper: ClassVar[Mapping[str, Hyper]] = MappingProxyType({})
    objective: ClassVar[str | None] = None
    heads: ClassVar[tuple[Head, ...]] = ("none",)
    loss: ClassVar[tuple[LossTerm, ...]] = ()
    statistic: ClassVar[type[Statistic]] = Participation
    extractor: ClassVar[Extractor] = "local"
    unit_features: ClassVar[bool] = False
    weighting: ClassVar[Weighting] = "count"
    global_rows: ClassVar[Mapping[str, RowWidth]] = MappingProxyType({})
    shared_state: ClassVar[tuple[str, ...]] = ()
    privacy: ClassVar[str] = "nothing of the samples"
    encoding: ClassVar[Literal["f64", "f32", "f16", "int8", "int32"]] = "f32"
    solves: ClassVar[Solves] = "none"
    solved_with: ClassVar[tuple[str, ...]] = ()
    warm_prototypes: ClassVar[bool] = False
    has_personal_head: ClassVar[bool] = False
    closes_runs: ClassVar[bool] = False
    first_run: ClassVar[Mapping[str, Value]] = MappingProxyType({})
    rounds: ClassVar[int] = 5
    stands: ClassVar[bool] = False

    # ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def trains(self) -> bool:
        """Whether a round of it trains anything on the device."""
        return self.objective is not None

    @property
    def shares(self) -> bool:
        """Whether devices train with what comes back of the others: not where nothing is trained, or nothing sent."""
        return self.trains and bool(self.global_rows)

    def settle(self, given: Mapping[str, object]) -> dict[str, Value]:
        """Every hyper-parameter of this method: the defaults, overridden by `given` and checked.

        Raises:
            MethodError: for a name this method does not have, or a value out of range.
        """
        for name in given:
            if name not in self.hyper:
                raise MethodError(
                    f"{self.name} has no hyper-parameter {name!r}",
                    hint=near_names(name, self.hyper) if self.hyper else None,
                )
        return {name: hyper.check(name, given.get(name, hyper.default)) for name, hyper in self.hyper.items()}

    def settled_in(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        """Its hyper-parameters in a bundle of any method: those the bundle has, settled there, and its defaults."""
        return {name: hyper.get(name, known.default) for name, known in self.hyper.items()}

    def groups(self, hyper: Mapping[str, Value]) -> int:
        """How many rows a device sends of each class, where its statistic has room for several."""
        return 1

    def variants(self, width: int) -> tuple[Mapping[str, Value], ...]:
        """Settings that are worth comparing before a fleet starts, of a method that trains nothing: what differs from
        the defaults, for features of width D. Each word that may stand where a default is one makes another."""
        words = {name: hyper.choices for name, hyper in self.hyper.items() if not hyper.number}
        others = [{name: word} for name, known in words.items() for word in known if word != self.hyper[name].default]
        return ({}, *others)

    def row_kinds(self, hyper: Mapping[str, Value], classes: int, width: int) -> dict[str, int]:
        """What comes back, by kind: how many numbers a row of it has."""
        sizes = {"features": self.row_width(hyper, width), "classes": classes, "one": 1}
        return {kind: sizes[named] for kind, named in self.global_rows.items()}

    def check(self, hyper: Mapping[str, Value], classes: int, width: int) -> None:  # noqa: B027
        """Whether these settled hyper-parameters fit C classes and features of width D.

        Raises:
            MethodError: when they do not.
        """

    def row_width(self, hyper: Mapping[str, Value], width: int) -> int:
        """The width of its rows of features, and of its triangle, for features of width D."""
        return width

    def preparation(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        """The hyper-parameters that say what is done to features before they are summed."""
        return {}

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        """What all bundles of one fleet must agree in, by what it is."""
        return {"weighting": self.weighting_of(hyper)}

    # ── training on the device ──────────────────────────────────────────────────────────────────────────────────────

    def state(self, classes: int, width: int, seed: int) -> dict[str, StartState]:
        """Tensors of the training step beside the backbone's and the head's, by name."""
        return {}

    def update_of(self, name: str, hyper: Mapping[str, Value]) -> Update:
        """How training moves the trained tensor `name`."""
        if hyper.get("optimizer") == "adam":
            return Update("adam", weight_decay=float(hyper.get("weight_decay", 0.0)))
        return Update("sgd", None, float(hyper.get("momentum", 0.0)), float(hyper.get("weight_decay", 0.0)))

    def step_inputs(self, hyper: Mapping[str, Value]) -> dict[str, tuple[Literal["classes", "features"], ...]]:
        """What the training step reads besides the inputs that every step has (`contract.bundle`): names and shapes."""
        return {}

    def inputs(self, counts: NDArray[np.int64], state: GlobalState, classes: int, width: int) -> dict[str, Float32]:
        """Values of the step's inputs that come from the global state and from what the device knows of its labels.

        Args:
            counts: (C,) labelled samples of each class.

        Raises:
            WireError: when the global state is not of this fleet.
        """
        prototypes, mask = state.dense("prototypes", classes, width)
        return {"prototypes": prototypes, "prototype_mask": mask}

    def start(self, params: Mapping[str, Float32], given: Mapping[str, Float32]) -> dict[str, Float32]:
        """Weights that a round starts from instead of the device's own: those that the global state replaces."""
        return {}

    def uses_unlabelled(self, hyper: Mapping[str, Value]) -> bool:
        """Whether it trains on samples without a label."""
        return False

    def mean_over_samples(self, hyper: Mapping[str, Value]) -> bool:
        """Whether its loss of a batch is the mean of those of its samples, so that a batch can be trained in parts."""
        return not self.uses_unlabelled(hyper)

    # ── what leaves the device ──────────────────────────────────────────────────────────────────────────────────────

    def summarise(self, local: Local) -> Statistic:
        """The statistic of a device's samples."""
        return self.statistic.zero(local.classes, self.row_width(local.hyper, local.width))

    def mechanism(self, hyper: Mapping[str, Value]) -> Mechanism | None:
        """The noise that `summarise` adds; None for none."""
        return None

    # ── on the aggregator ───────────────────────────────────────────────────────────────────────────────────────────

    @property
    def merged(self) -> type:
        """What `merge` gives."""
        return self.statistic

    def weighting_of(self, hyper: Mapping[str, Value]) -> Weighting:
        """How contributions are weighted under these hyper-parameters."""
        chosen = hyper.get("aggregation", self.weighting) if "aggregation" in self.hyper else self.weighting
        return next((known for known in get_args(Weighting) if known == chosen), self.weighting)

    def merge(self, source: Source, rule: Rule, hyper: Mapping[str, Value]) -> Merged:
        """What a round's statistics come to: one statistic, or what else a method makes of them.

        Args:
            source: called for each pass over them.
            rule: of the aggregator's choice, where the statistic is class means; other sums always add up.

        Raises:
            StatisticError: when there is none, or they differ in kind or shape.
        """
        return merge(source, rule if self.statistic.is_class_means() else "mean", self.weighting_of(hyper))

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """What a round's merged statistic makes of the global state: the kinds of rows that are new.

        Args:
            previous: rows of the state that the round started from, by kind.
            hyper: the bundle's, with what the aggregator was told to take instead.
        """
        return {}

    def told(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        """What was chosen in the making of the result, in a few words; empty where nothing was."""
        return ""

    def doubt(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        """Why what a round gave may be bad, in one line; empty where nothing speaks against it."""
        return ""

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def alone_way(self, head: str) -> str:
        """How a device that hears from nobody answers: by its head, or where there is none, by its own prototypes; of
        a method that trains nothing, as with the others.

        Args:
            head: the bundle's.
        """
        if not self.trains:
            return self.way
        return "own_prototype" if head == "none" else "head"

    def own_prototypes(self, local: Local) -> tuple[Float64, NDArray[np.bool_]]:
        """The prototypes that a device has itself: (C, D), and (C,) which there are."""
        means = local.class_means()
        return means.means, means.present

    def personal_head(self, local: Local) -> Float64 | None:
        """Where `has_personal_head`, a head (C, D) of the device's own samples and features, which never leaves it."""
        return None

    def answers(self, local: Local, state: GlobalState | None) -> dict[str, Answer]:
        """The ways of answering from the device's own features, by name.

        - `head`: its own head;
        - `prototype`: the nearest prototype, arg min_j ‖f(x) − c_j‖₂ (FedProto, eq. 2), over the global prototypes,
          and its own for classes that have no global one;
        - `prototype_among_own`: the same among the classes that it holds, as in FedProto's public code;
        - `own_prototype`: the nearest of the prototypes that it has itself.

        A way that could name no class is not among them.
        """
        mine, known = self.own_prototypes(local)
        prototypes, present = mine, known
        if state is not None and state.prototypes is not None:
            shared, shared_present = state.prototypes.dense(local.classes, local.width)
            prototypes = np.where(shared_present[:, None], shared, prototypes)
            present = present | shared_present
        among = {"prototype": (prototypes, present), "prototype_among_own": (prototypes, present & (local.counts > 0))}
        among["own_prototype"] = mine, known
        answers: dict[str, Answer] = {way: nearest_answer(*rows) for way, rows in among.items() if rows[1].any()}
        if "head.weight" in local.params:
            answers["head"] = linear_answer(local.params["head.weight"], local.params.get("head.bias"))
        return answers

    def shared_answers(
        self, state: GlobalState, classes: int, width: int, hyper: Mapping[str, Value]
    ) -> dict[str, Answer]:
        """The ways of answering from features of the bundle's extractor, by name; none before there is anything."""
        return {}


def newer_rows(previous: ClassRows | None, rows: Float64, present: NDArray[np.bool_]) -> ClassRows:
    """Rows (C, W) of the classes that someone held, and the previous rows of the others."""
    if previous is None:
        return ClassRows.of(rows, present)
    before, held = previous.dense(*rows.shape)
    return ClassRows.of(np.where(present[:, None], rows, before), held | present)
