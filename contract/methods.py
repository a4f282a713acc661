"""The methods table: the one place that says what each method trains, sends, merges and answers.

A method is one entry of `METHODS`. Reading along its row tells the whole data flow: which objective trains on the
device and with which head; which extractor's features are summarised, and into which statistic; which rule merges
the contributions; which global state comes back; how a device then answers; and each hyper-parameter with its
default and the source of that default. Adding a method touches this table, one objective in `export/`, and, only if
it needs a new one, one statistic or one rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from contract.errors import MethodError, near_names

__all__ = ["METHODS", "Calibration", "Head", "Hyper", "Kind", "Method", "Value", "Weighting", "calibration", "method"]

Value = int | float | str
Head = Literal["local", "frozen", "none"]
Kind = Literal["class-means", "learned-prototypes", "hyper-knowledge", "participation", "feature-gram"]
Weighting = Literal["count", "client", "share", "printed", "twice"]


@dataclass(frozen=True)
class Hyper:
    """One hyper-parameter: its default, where that default comes from, and what values make sense.

    Attributes:
        default: also fixes the type: int, float or str.
        source: paper, equation, table or public code that the default is taken from.
        choices: the allowed names, for a str.
        low: the smallest allowed number.
        high: the largest allowed number.
    """

    default: Value
    source: str
    choices: tuple[str, ...] = ()
    low: float = 0.0
    high: float = float("inf")

    def check(self, name: str, value: object) -> Value:
        """`value` as this hyper-parameter's type.

        Raises:
            MethodError: when it is not of that type, not among the choices, or out of range.
        """
        if isinstance(self.default, str):
            if value not in self.choices:
                raise MethodError(f"{name}", expected="one of " + ", ".join(self.choices), got=value)
            return str(value)
        kind = type(self.default)
        try:
            number = kind(str(value))
        except ValueError:
            raise MethodError(f"{name}", expected=f"a {kind.__name__}", got=value) from None
        if not (self.low <= number <= self.high and math.isfinite(number)):
            raise MethodError(f"{name}", expected=f"{self.low:g} to {self.high:g}", got=value)
        return number


@dataclass(frozen=True)
class Method:
    """One row of the table.

    Attributes:
        title: the name as its paper writes it.
        objective: name of the training objective in `export/objectives.py`; None when nothing is trained.
        heads: the heads the objective allows, default first.
        statistic: what a contribution carries; `participation` is no class row at all, only that the round was done.
        extractor: whose features are summarised: the device's own `local` weights, or the `bundle`'s, which every
            device shares. Gram sums are only meaningful over one shared extractor.
        unit_features: whether features are put on the unit sphere before they are summarised and classified.
        rule: how contributions merge; None when there is nothing to merge.
        weighting: the weight w_ij of device i's row of class j in Σ_i w_ij r_ij / Σ_i w_ij, unless the hyper-parameter
            `aggregation` says otherwise: its `count` n_ij, its `share` n_ij / n_i, 1 for each `client` that holds the
            class; `printed` is the share, divided by the number of clients as FedHP's eq. 5 prints it, and `twice` the
            count, divided by the number of clients that hold the class once more, as FedProto's eq. 4 does.
        global_state: what comes back to the devices.
        inference: how a device answers.
        hyper: hyper-parameters by name.
        source: the paper and its equations.
    """

    name: str
    title: str
    objective: str | None
    heads: tuple[Head, ...]
    statistic: Kind
    extractor: Literal["local", "bundle"]
    unit_features: bool
    rule: Literal["weighted-mean", "ridge"] | None
    global_state: Literal["prototypes", "hyper-knowledge", "head"] | None
    inference: Literal["nearest-prototype", "linear", "head"]
    source: str
    hyper: Mapping[str, Hyper] = field(default_factory=lambda: MappingProxyType({}))
    weighting: Weighting = "count"

    @property
    def trains(self) -> bool:
        """Whether a round of it trains anything on the device."""
        return self.objective is not None

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

    def weighting_of(self, hyper: Mapping[str, Value]) -> Weighting:
        """How contributions are weighted under these hyper-parameters, settled for a bundle: its own method's or, in an
        FFC round, another's, whose `aggregation` says nothing about sums."""
        chosen = hyper.get("aggregation", self.weighting) if "aggregation" in self.hyper else self.weighting
        return next((known for known in get_args(Weighting) if known == chosen), self.weighting)

    def step_inputs(self, hyper: Mapping[str, Value]) -> tuple[str, ...]:
        """What the training step reads besides the inputs that every method's step has (`contract.bundle`)."""
        if self.global_state == "hyper-knowledge":
            return ("soft_predictions",)
        return ("class_priors",) if hyper.get("pu_weight") else ()


_FEDPROTO = "FedProto (Tan et al., AAAI 2022)"
_FEDPU = "FedPU (Lin et al., ICML 2022)"
_FEDHP = "FedHP (Fonio et al., ESANN 2024)"
_FEDPR = "FedPR (Qiao et al.)"
_FEDHKD = "FedHKD (Chen, Wang, Vikalo, ICLR 2023)"
_SPHEREFED = "SphereFed (Dong et al., ECCV 2022)"


def _sgd(source: str, *, lr: float, momentum: float, weight_decay: float, epochs: int) -> dict[str, Hyper]:
    """The hyper-parameters of local training, which every method that trains has."""
    return {
        "lr": Hyper(lr, source, low=1e-9, high=100.0),
        "momentum": Hyper(momentum, source, high=0.9999),
        "weight_decay": Hyper(weight_decay, source),
        "epochs": Hyper(epochs, source, low=1, high=10_000),
    }


_CALIBRATION = {
    "ridge": Hyper(0.3, "decision 078: of trace/D, safe at any N/D; the paper's 0 is the limit", high=1e6),
    "project": Hyper(0, "ours: D' of an agreed random projection, to cut the Gram's bytes; 0 for none", high=65_536),
    "project_seed": Hyper(0, "ours: of that projection", high=2**32 - 1),
}

_TABLE = (
    Method(
        name="fedproto",
        title="FedProto",
        objective="fedproto",
        heads=("local", "frozen"),
        statistic="class-means",
        extractor="local",
        unit_features=False,
        rule="weighted-mean",
        global_state="prototypes",
        inference="nearest-prototype",
        source=f"{_FEDPROTO}, eq. 1, 2, 4, 5, 6",
        hyper=MappingProxyType(
            {
                **_sgd(f"{_FEDPROTO}, setting", lr=0.01, momentum=0.5, weight_decay=0.0, epochs=1),
                "lambda": Hyper(1.0, f"{_FEDPROTO}, eq. 5; 1 for MNIST, 0.1 for CIFAR-10"),
                "distance": Hyper("squared", f"{_FEDPROTO}, eq. 6 and its public code", ("squared", "l2", "l1")),
                "reading": Hyper("sample", "public code: distance per sample", ("sample", "class_mean")),
                "aggregation": Hyper(
                    "count",
                    f"{_FEDPROTO}, eq. 4 without its second division, with it: twice; client: its public code",
                    ("count", "client", "twice"),
                ),
                "pu_weight": Hyper(0.0, f"{_FEDPU}: weight of the risk of unlabelled samples; 0 leaves them out"),
            }
        ),
    ),
    Method(
        name="fedhp",
        title="FedHP",
        objective="fedhp",
        heads=("none",),
        statistic="learned-prototypes",
        extractor="local",
        unit_features=False,
        rule="weighted-mean",
        weighting="share",
        global_state="prototypes",
        inference="nearest-prototype",
        source=f"{_FEDHP}, eq. 1 to 5",
        hyper=MappingProxyType(
            {
                **_sgd(f"{_FEDHP}, setting", lr=0.01, momentum=0.9, weight_decay=1e-4, epochs=5),
                "prototype_lr": Hyper(0.005, f"{_FEDHP}, setting: Adam on the prototypes", low=1e-9, high=100.0),
                "lambda": Hyper(0.1, f"{_FEDHP}, eq. 4"),
                "anchor_pull": Hyper("mean", f"decision 009, fluke's code; sum: {_FEDHP}, eq. 2", ("mean", "sum")),
                "aggregation": Hyper("share", f"{_FEDHP}, eq. 5, normalised as in fluke's code", ("share", "printed")),
            }
        ),
    ),
    Method(
        name="fedpr",
        title="FedPR",
        objective="fedproto",
        heads=("local",),
        statistic="class-means",
        extractor="local",
        unit_features=False,
        rule="weighted-mean",
        weighting="client",
        global_state="prototypes",
        inference="nearest-prototype",
        source=f"{_FEDPR}, eq. 2, 3, 4, without its averaged weights",
        hyper=MappingProxyType(
            {
                **_sgd(f"{_FEDPR}, setting", lr=0.01, momentum=0.5, weight_decay=0.0, epochs=1),
                "lambda": Hyper(1.0, f"{_FEDPR}, eq. 4"),
                "distance": Hyper("squared", f"{_FEDPR}, eq. 4, over D", ("squared", "l2", "sum")),
            }
        ),
    ),
    Method(
        name="fedhkd",
        title="FedHKD*",
        objective="fedhkd",
        heads=("local",),
        statistic="hyper-knowledge",
        extractor="local",
        unit_features=False,
        rule="weighted-mean",
        global_state="hyper-knowledge",
        inference="head",
        source=f"{_FEDHKD}, FedHKD*: hyper-knowledge without its averaged weights",
        hyper=MappingProxyType(
            {
                "lr": Hyper(1e-3, f"{_FEDHKD}, public code: Adam", low=1e-9, high=100.0),
                "weight_decay": Hyper(0.0, f"{_FEDHKD}, public code"),
                "epochs": Hyper(5, f"{_FEDHKD}, setting", low=1, high=10_000),
                "optimizer": Hyper("adam", f"{_FEDHKD}, public code", ("adam", "sgd")),
                "momentum": Hyper(0.0, "of the optimizer sgd", high=0.9999),
                "lambda": Hyper(0.1, f"{_FEDHKD}, public code: of the soft predictions' distance"),
                "gamma": Hyper(0.1, f"{_FEDHKD}, public code: of the features' distance"),
                "temperature": Hyper(0.5, f"{_FEDHKD}, public code", low=1e-3, high=1e3),
                "clip": Hyper(1.0, f"{_FEDHKD}: bound of a feature's norm, where noise is added", low=1e-9, high=1e9),
                "noise": Hyper(0.0, f"{_FEDHKD}: noise multiplier of the Gaussian mechanism; 0 for none", high=1e6),
                "noise_on": Hyper("all", "ours: soft predictions too; features: as published", ("all", "features")),
                "delta": Hyper(1e-5, "of (ε, δ), as stated", low=1e-12, high=0.5),
            }
        ),
    ),
    Method(
        name="spherefed",
        title="SphereFed",
        objective="spherefed",
        heads=("frozen",),
        statistic="participation",
        extractor="local",
        unit_features=True,
        rule=None,
        global_state=None,
        inference="head",
        source=f"{_SPHEREFED}, eq. 4, 5",
        hyper=MappingProxyType(
            {
                **_sgd(f"{_SPHEREFED}, Tab. 16", lr=0.5, momentum=0.9, weight_decay=1e-5, epochs=10),
                **_CALIBRATION,
            }
        ),
    ),
    Method(
        name="ffc",
        title="FFC",
        objective=None,
        heads=("none",),
        statistic="feature-gram",
        extractor="bundle",
        unit_features=True,
        rule="ridge",
        global_state="head",
        inference="linear",
        source=f"{_SPHEREFED}, eq. 6 to 12",
        hyper=MappingProxyType(_CALIBRATION),
    ),
)

METHODS: Mapping[str, Method] = MappingProxyType({entry.name: entry for entry in _TABLE})


def method(name: str) -> Method:
    """The row of that name.

    Raises:
        MethodError: when there is none; the line names the nearest.
    """
    try:
        return METHODS[name]
    except KeyError:
        raise MethodError(
            "unknown method", expected="a method of the table", got=name, hint=near_names(name, METHODS)
        ) from None


@dataclass(frozen=True)
class Calibration:
    """How a bundle's FFC rounds are done, whatever its own method.

    Attributes:
        ridge: λ in units of trace/D.
        project: D' of the projection that devices apply to unit features before they sum, 0 for none.
        project_seed: of that projection.
    """

    ridge: float
    project: int
    project_seed: int

    def width(self, features: int) -> int:
        """The width of the Gram and of the head, for features of width D."""
        return self.project or features


def calibration(hyper: Mapping[str, Value]) -> Calibration:
    """The FFC settings of a bundle with these hyper-parameters: FFC's defaults where its method has none."""
    values = {name: hyper.get(name, known.default) for name, known in _CALIBRATION.items()}
    return Calibration(float(values["ridge"]), int(values["project"]), int(values["project_seed"]))
