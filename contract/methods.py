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
from typing import Literal

from contract.errors import MethodError, near_names

__all__ = ["METHODS", "Head", "Hyper", "Method", "Value", "method"]

Value = int | float | str
Head = Literal["local", "frozen", "none"]


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
        objective: name of the training objective in `export/objectives.py`; None when nothing is trained.
        heads: the heads the objective allows, default first.
        statistic: what a contribution carries; None when nothing is sent.
        extractor: whose features are summarised: the device's own `local` weights, or the `bundle`'s, which every
            device shares. Gram sums are only meaningful over one shared extractor.
        unit_features: whether features are put on the unit sphere before they are summarised and classified.
        rule: how contributions merge.
        global_state: what comes back to the devices.
        inference: how a device answers.
        hyper: hyper-parameters by name.
        source: the paper and its equations.
    """

    name: str
    objective: str | None
    heads: tuple[Head, ...]
    statistic: Literal["class-means", "feature-gram"] | None
    extractor: Literal["local", "bundle"]
    unit_features: bool
    rule: Literal["count-weighted-mean", "ridge"] | None
    global_state: Literal["prototypes", "head"] | None
    inference: Literal["nearest-prototype", "linear", "head"]
    source: str
    hyper: Mapping[str, Hyper] = field(default_factory=lambda: MappingProxyType({}))

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


_FEDPROTO = "FedProto (Tan et al., AAAI 2022)"
_SPHEREFED = "SphereFed (Dong et al., ECCV 2022)"

_TABLE = (
    Method(
        name="fedproto",
        objective="fedproto",
        heads=("local", "frozen"),
        statistic="class-means",
        extractor="local",
        unit_features=False,
        rule="count-weighted-mean",
        global_state="prototypes",
        inference="nearest-prototype",
        source=f"{_FEDPROTO}, eq. 1, 2, 4, 5, 6",
        hyper=MappingProxyType(
            {
                "lr": Hyper(0.01, f"{_FEDPROTO}, setting", low=1e-9, high=100.0),
                "momentum": Hyper(0.5, f"{_FEDPROTO}, setting", high=0.9999),
                "weight_decay": Hyper(0.0, f"{_FEDPROTO}, setting"),
                "epochs": Hyper(1, f"{_FEDPROTO}, setting", low=1, high=10_000),
                "lambda": Hyper(1.0, f"{_FEDPROTO}, eq. 5; 1 for MNIST, 0.1 for CIFAR-10"),
                "distance": Hyper("squared", f"{_FEDPROTO}, eq. 6 and its public code", ("squared", "l2", "l1")),
                "reading": Hyper("sample", "public code: distance per sample", ("sample", "class_mean")),
            }
        ),
    ),
    Method(
        name="spherefed",
        objective="spherefed",
        heads=("frozen",),
        statistic=None,
        extractor="local",
        unit_features=True,
        rule=None,
        global_state=None,
        inference="head",
        source=f"{_SPHEREFED}, eq. 4, 5",
        hyper=MappingProxyType(
            {
                "lr": Hyper(0.5, f"{_SPHEREFED}, Tab. 16", low=1e-9, high=100.0),
                "momentum": Hyper(0.9, f"{_SPHEREFED}, Tab. 16", high=0.9999),
                "weight_decay": Hyper(1e-5, f"{_SPHEREFED}, Tab. 16"),
                "epochs": Hyper(10, f"{_SPHEREFED}, Tab. 16", low=1, high=10_000),
            }
        ),
    ),
    Method(
        name="ffc",
        objective=None,
        heads=("none",),
        statistic="feature-gram",
        extractor="bundle",
        unit_features=True,
        rule="ridge",
        global_state="head",
        inference="linear",
        source=f"{_SPHEREFED}, eq. 6 to 12",
        hyper=MappingProxyType(
            {"ridge": Hyper(1e-6, "relative to trace/D; the paper's 0 is the limit", high=1e6)},
        ),
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
