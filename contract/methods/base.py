"""The base class of a method. One class owns all that is true of a method, in every room.

A method is one file in this folder, or a class of an installed package. No other file knows a method by its name. Read
from top to bottom, the class tells the whole flow of data:

    what it trains       `objective`, `heads`, `state`, `update_of`, `step_inputs`, `inputs`, `start`
    what it sends        `statistic`, `extractor`, `summarise`, `mechanism`
    how that merges      `weighting`, `merge`
    what comes back      `global_rows`, `next_rows`
    how a device answers `answers`, `shared_answers`
    what it costs        `loss`, the fields of its statistic, `solves` (`hw_profiles/workload`)

Guarantees:

- A method sends only declared fields, because a statistic consists of nothing else (`contract/sums/statistics.py`).
- A method never gets images. A device gives it a `Local`: its samples as features and counts.

The objective is written in torch and lives in `export/objectives/`. `Hyper` is one hyper-parameter, with the source of
its default.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.errors import MethodError, near_names
from protofleet.contract.heads.answers import Answer, linear_answer, nearest_answer
from protofleet.contract.methods.optimizers import Update
from protofleet.contract.names import known
from protofleet.contract.privacy.mechanism import Mechanism
from protofleet.contract.privacy.secret_noise import SecretNoise
from protofleet.contract.sums.factor import most_rows
from protofleet.contract.sums.merge_rules import WEIGHTINGS, Rule, Source, Weighting, merge
from protofleet.contract.sums.statistics import ClassMeans, Participation, Statistic
from protofleet.contract.wire.encodings import ENCODINGS, Encoding
from protofleet.contract.wire.global_state import GlobalState
from protofleet.contract.wire.messages import ClassRows

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
        choices: the allowed names, for a str. For a number: the words that are allowed instead of it.
        low: the smallest allowed number.
        high: the largest allowed number.
        number: whether a number is allowed although the default is one of the words.
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
        alternatives = ", ".join(self.choices)
        if isinstance(self.default, str) and not self.number:
            raise MethodError(f"{name}", expected=f"one of {alternatives}", got=value)
        kind = int if isinstance(self.default, int) else float
        or_words = f", or {alternatives}" if alternatives else ""
        try:
            number = kind(str(value))
        except ValueError:
            a_number = f"a{' whole' if kind is int else ''} number{or_words}"
            raise MethodError(f"{name}", expected=a_number, got=value) from None
        if not (self.low <= number <= self.high and math.isfinite(number)):
            raise MethodError(f"{name}", expected=f"{self.low:g} to {self.high:g}{or_words}", got=value)
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
    """The hyper-parameters of methods that send nothing without noise (`contract/privacy/noised_sums.py`)."""
    return {
        "noise_multiplier": Hyper(
            3.731, "ours: ε = 1 at δ = 1e-5 for one release (Balle and Wang, ICML 2018)", low=1e-3, high=1e6
        ),
        "delta": Hyper(1e-5, "of (ε, δ), as stated", low=1e-12, high=0.5),
    }


@dataclass(frozen=True, eq=False)
class StartState:
    """A tensor of the training step that is neither the backbone's nor the head's.

    Attributes:
        shape: its shape, for the cost models and the trace of the step.
        values: computes its start values, float of that shape. This may take a while.
        trained: whether a training step moves it.
    """

    shape: tuple[int, ...]
    values: Callable[[], NDArray[np.floating]]
    trained: bool


class Merged(Protocol):
    """The merged statistic of a round.

    Attributes:
        present: (C,) whether any device had samples of a class.
    """

    @property
    def present(self) -> NDArray[np.bool_]: ...


class Local(Protocol):
    """A device's data for a method in a round: features of its own samples, under its present weights.

    Only samples that may be sent are in it. Left out are:

    - classes with fewer examples than the aggregator's `min_samples`, unless the method's statistic says nothing of
      counts (`Statistic.COUNTED`);
    - classes that were forgotten.

    Attributes:
        hyper: the resolved hyper-parameters of the round's method.
        classes, width: C and D.
        params: the device's present weights by state-tensor name.
        counts: (C,) int64, its labelled samples of each class.
        asked: (C,) bool, the classes that were not forgotten. They may be sent whatever the samples are.
        min_samples: a statistic over fewer samples than this may not be sent.
        factor_rows: up to so many samples, a factor may be sent in place of a triangle; 0 for none.
    """

    min_samples: int
    asked: NDArray[np.bool_]
    hyper: Mapping[str, Value]
    classes: int
    width: int
    params: Mapping[str, Float32]
    counts: NDArray[np.int64]

    factor_rows: int

    def features(self, extractor: Extractor) -> Iterator[tuple[Float32, NDArray[np.int64]]]:
        """Blocks of features (n, D) and their labels (n,), by its own weights or the bundle's."""

    def class_means(self) -> ClassMeans:
        """The class means of its own features, computed once for given weights."""

    def own_head(self) -> Float64 | None:
        """The personal head of the device's samples (`Method.personal_head`), computed once for given weights.

        None if the method has no personal head, or if the device has never had samples.
        """

    def noise(self) -> np.random.Generator:
        """A generator for this round's random choices. It is not for noise that must hide anything.

        A secret of the device fixes its seed, so a repeated round gives the same bytes.
        """

    def secret_noise(self, *of: bytes | NDArray[np.generic]) -> SecretNoise:
        """Normal noise for the numbers `of`. Without the device's secret nobody can tell it from chance.

        Other numbers get other noise. The same numbers in the same round get the same noise.
        """


class Method(ABC):
    """One method. A class attribute is a fact; a function of the class is one step of the data flow.

    Attributes:
        name: the name in commands, manifests and messages; lower case, at most 32 characters.
        title: the name as its paper writes it.
        source: the paper and its equations.
        summary: a description in a few words.
        sends: what a device sends in a round, in words.
        inference: how a device answers, in words.
        way: the method's own way of answering: one of those that `answers` and `shared_answers` return.
        hyper: hyper-parameters by name.
        objective: what training minimises: a file of `export/objectives/`, or `package.module:function`. None if
            nothing is trained.
        heads: the heads that the objective allows, default first.
        loss: the terms of the loss, for the cost models.
        statistic: the kind of statistic in a contribution.
        extractor: the weights that make the features: the device's own (`local`), or the `bundle`'s, which every device
            shares. Gram sums only make sense over one shared extractor.
        unit_features: whether features are put on the unit sphere before they are summarised and classified.
        weighting: the weight w_ij of device i's row of class j in Σ_i w_ij r_ij / Σ_i w_ij, unless the hyper-parameter
            `aggregation` says otherwise. It is the `count` n_ij, the `share` n_ij / n_i, or 1 for each `client` that
            holds the class. `printed` is the share, divided by the number of clients, as FedHP's eq. 5 prints it.
            `twice` is the count, divided once more by the number of clients that hold the class, as in FedProto's
            eq. 4.
        global_rows: what comes back to the devices: kinds of class rows, each of `features` or `classes` numbers, or of
            `one`.
        shared_state: state tensors that must be equal in all bundles of one fleet.
        privacy: what a contribution says about the samples behind it, in words.
        encoding: how its numbers travel, unless the aggregator is told otherwise.
        solves: what the aggregator computes of the merged statistic, for the cost models: a head by `ridge` regression,
            or nothing that takes time.
        solved_with: hyper-parameters that only the aggregator uses, to make a head of the merged statistic. With other
            values it can make another head of the same contributions. Devices need not know the values.
        warm_prototypes: whether a device's own class mean may replace a prototype that nobody has sent yet.
        has_personal_head: whether a device makes a head of its own samples, with which it can answer, too.
        closes_runs: whether a run of another method may end with one round of this method.
        rounds: how many rounds a run has if a person names no number.
        stands: whether its sums can stand without rounds. This needs three things: the sums are over the bundle's
            extractor; they add up and can be taken out again; what comes back follows from them alone
            (`aggregator/merging/exact_sums.py`).
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
        """Whether devices train with rows that come back from other devices."""
        return self.trains and bool(self.global_rows)

    def resolve(self, given: Mapping[str, object]) -> dict[str, Value]:
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

    def resolved_in(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        """Its hyper-parameters in a bundle of any method: the bundle's values where it has them, else the defaults."""
        return {name: hyper.get(name, parameter.default) for name, parameter in self.hyper.items()}

    def groups(self, hyper: Mapping[str, Value]) -> int:
        """How many rows of each class a device sends, where its statistic has room for several."""
        return 1

    def variants(self, width: int) -> tuple[Mapping[str, Value], ...]:
        """Settings that are worth comparing before a fleet starts, for a method that trains nothing.

        Each is what differs from the defaults, for features of width D. By default they are no difference, and each
        other word of a hyper-parameter whose values are words.
        """
        named = {name: parameter for name, parameter in self.hyper.items() if not parameter.number}
        others = [{name: word} for name, hyper in named.items() for word in hyper.choices if word != hyper.default]
        return ({}, *others)

    def row_kinds(self, hyper: Mapping[str, Value], classes: int, width: int) -> dict[str, int]:
        """The kinds of rows that come back, and how many numbers a row of each kind has."""
        sizes = {"features": self.row_width(hyper, width), "classes": classes, "one": 1}
        return {kind: sizes[named] for kind, named in self.global_rows.items()}

    def check(self, hyper: Mapping[str, Value], classes: int, width: int) -> None:  # noqa: B027
        """Whether these resolved hyper-parameters fit C classes and features of width D.

        Raises:
            MethodError: when they do not.
        """

    def factor_rows(self, hyper: Mapping[str, Value], width: int, encoding: Encoding) -> int:
        """Up to so many samples of width D, a factor stands for a triangle in this encoding; 0 where it has none."""
        if not self.statistic.takes_factor():
            return 0
        return most_rows(self.row_width(hyper, width), ENCODINGS[encoding].number_bytes)

    def row_width(self, hyper: Mapping[str, Value], width: int) -> int:
        """The width of its rows of features, and of its triangle, for features of width D."""
        return width

    def preparation(self, hyper: Mapping[str, Value]) -> dict[str, Value]:
        """The hyper-parameters of what is done to features before they are summed."""
        return {}

    def agreement(self, hyper: Mapping[str, Value]) -> dict[str, object]:
        """The values that must be equal in all bundles of one fleet, by their names."""
        return {"weighting": self.weighting_of(hyper)}

    # ── training on the device ──────────────────────────────────────────────────────────────────────────────────────

    def state(self, classes: int, width: int, seed: int) -> dict[str, StartState]:
        """The tensors of the training step besides those of the backbone and the head, by name."""
        return {}

    def update_of(self, name: str, hyper: Mapping[str, Value]) -> Update:
        """How training moves the trained tensor `name`."""
        return Update.of(hyper)

    def step_inputs(self, hyper: Mapping[str, Value]) -> dict[str, tuple[Literal["classes", "features"], ...]]:
        """The names and shapes of further inputs of the training step, besides those of every step
        (`protofleet.contract.bundle.bundle_file`)."""
        return {}

    def inputs(self, counts: NDArray[np.int64], state: GlobalState, classes: int, width: int) -> dict[str, Float32]:
        """The values of the step's inputs that come from the global state, or from the device's labels.

        Args:
            counts: (C,) labelled samples of each class.

        Raises:
            WireError: when the global state is not of this fleet.
        """
        prototypes, mask = state.dense("prototypes", classes, width)
        return {"prototypes": prototypes, "prototype_mask": mask}

    def start(self, params: Mapping[str, Float32], given: Mapping[str, Float32]) -> dict[str, Float32]:
        """The weights that the global state replaces at the start of a round."""
        return {}

    def uses_unlabelled(self, hyper: Mapping[str, Value]) -> bool:
        """Whether it trains on samples without a label."""
        return False

    def mean_over_samples(self, hyper: Mapping[str, Value]) -> bool:
        """Whether the loss of a batch is the mean over its samples, so that a batch can be trained in parts."""
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
        """The type that `merge` returns."""
        return self.statistic

    def weighting_of(self, hyper: Mapping[str, Value]) -> Weighting:
        """How contributions are weighted under these hyper-parameters."""
        chosen = hyper.get("aggregation", self.weighting) if "aggregation" in self.hyper else self.weighting
        return known(WEIGHTINGS, str(chosen), "aggregation")

    def merge(self, source: Source, rule: Rule, hyper: Mapping[str, Value]) -> Merged:
        """Merge a round's statistics into one, or into what else a method makes of them.

        Args:
            source: called for each pass over the statistics.
            rule: the aggregator's choice, where the statistic is class means. Other sums always add up.

        Raises:
            StatisticError: when there is no statistic, or when they differ in kind or shape.
        """
        return merge(source, rule if self.statistic.is_class_means() else "mean", self.weighting_of(hyper))

    def next_rows(
        self, previous: Mapping[str, ClassRows], merged: Merged, hyper: Mapping[str, Value]
    ) -> dict[str, ClassRows]:
        """The new rows of the global state, by kind, from a round's merged statistic.

        Args:
            previous: rows of the state that the round started from, by kind.
            hyper: the bundle's hyper-parameters, with those that the aggregator was told to use instead.
        """
        return {}

    def told(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        """The choices that were made for the result, in a few words; empty where there were none."""
        return ""

    def doubt(self, merged: Merged, hyper: Mapping[str, Value]) -> str:
        """Why the result of a round may be bad, in one line; empty where there is no reason."""
        return ""

    # ── answers ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def alone_way(self, head: str) -> str:
        """The way of answering of a device that hears from nobody.

        It is the device's head, or its own prototypes where it has no head. With a method that trains nothing, it is
        the same way as in a fleet.

        Args:
            head: the bundle's head.
        """
        if not self.trains:
            return self.way
        return "own_prototype" if head == "none" else "head"

    def own_prototypes(self, local: Local) -> tuple[Float64, NDArray[np.bool_]]:
        """The device's own prototypes (C, D), and for which classes it has one (C,)."""
        means = local.class_means()
        return means.means, means.present

    def personal_head(self, local: Local) -> Float64 | None:
        """A head (C, D) of the device's own samples and features, if `has_personal_head`. It stays on the device."""
        return None

    def answers(self, local: Local, state: GlobalState | None) -> dict[str, Answer]:
        """The ways of answering from the device's own features, by name.

        - `head`: its own head;
        - `prototype`: the nearest prototype, arg min_j ‖f(x) − c_j‖₂ (FedProto, eq. 2), over the global prototypes,
          and its own for classes that have no global one;
        - `prototype_among_own`: the same among the classes that it holds, as in FedProto's public code;
        - `own_prototype`: the nearest of its own prototypes.

        A way that could name no class is left out.
        """
        own, own_present = self.own_prototypes(local)
        prototypes, present = own, own_present
        if state is not None and state.prototypes is not None:
            shared, shared_present = state.prototypes.dense(local.classes, local.width)
            prototypes = np.where(shared_present[:, None], shared, prototypes)
            present = present | shared_present
        among = {"prototype": (prototypes, present), "prototype_among_own": (prototypes, present & (local.counts > 0))}
        among["own_prototype"] = own, own_present
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
    """The new rows (C, W) of the classes that are present, and the previous rows of all others."""
    if previous is None:
        return ClassRows.of(rows, present)
    before, before_present = previous.dense(*rows.shape)
    return ClassRows.of(np.where(present[:, None], rows, before), before_present | present)
