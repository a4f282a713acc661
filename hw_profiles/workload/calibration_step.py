"""What a method's statistic costs on the device, and what follows from it on the server, as workloads.

On the device, over N local samples whose features the forward pass has just given, from what the statistic declares:

    unit features    features are put on the unit sphere first, where the method has them there    3·N·D operations
    row width D'     features are projected first, where that is agreed                            one product
    Rows             a row of each sample is added to its class's sum; probabilities are a softmax over the head's
                     answers first                                                                 N·D additions
    Triangle         Σ z zᵀ (D x D), the Gram matrix of SphereFed's eq. 9                          one product over N

On the server, from what the method `solves`: nothing that counts, or a head by ridge regression: A + λI factored (D³/3
operations) and solved for C right-hand sides (SphereFed eq. 10). The Cholesky factorisation runs on the array as blocks
of 32 columns: a panel, then a rank-32 update of what is left.

A `Calibrating` is both together, with the bytes between them; `baselines` has CCVR's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from protofleet.contract.bundle.uplink_bytes import counted_bytes, sent_bytes
from protofleet.contract.methods import Method, Value
from protofleet.contract.sums.statistics import Field, Rows, Triangle
from protofleet.contract.wire.codec import MAX_MESSAGE_BYTES
from protofleet.hw_profiles.workload.model import Gemm, Layer, Tensor, Workload

__all__ = [
    "Calibrating",
    "Sheet",
    "cholesky",
    "method_calibration",
    "ridge_solve",
    "statistic_bytes",
    "statistic_work",
    "triangle_numbers",
]

_PANEL = 32


@dataclass(frozen=True)
class Calibrating:
    """Calibrating the classifier once: the device's work beside its forward pass, what goes up, the server's work."""

    method: str
    statistic: str
    device: Workload
    uplink_bytes: int
    server: Workload


@dataclass(frozen=True)
class Sheet:
    """A workload of one phase under construction."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)

    def tensor(self, name: str, *shape: int) -> str:
        """A new array by that name."""
        self.tensors[name] = Tensor(name, shape, "activation")
        return name

    def add(
        self, name: str, reads: tuple[str, ...], writes: tuple[str, ...], gemms: tuple[Gemm, ...] = (), ops: int = 0
    ) -> None:
        """A layer of matrix products, or of additions where there are none."""
        op, kind = ("MatMul", "linear") if gemms else ("Add", "reduce")
        self.layers.append(Layer(name, op, kind, "statistic", reads, writes, gemms, ops))  # type: ignore[arg-type]

    def workload(self, name: str, batch: int, outputs: tuple[str, ...] = ()) -> Workload:
        """What was written down."""
        return Workload(name, batch, tuple(self.layers), self.tensors, outputs)


def method_calibration(
    method: Method,
    samples: int,
    classes: int,
    width: int,
    *,
    hyper: Mapping[str, Value] | None = None,
    normalised: bool = False,
) -> Calibrating:
    """A round of a method that trains nothing, over N samples of C classes and features of width D.

    Args:
        hyper: settled; None for the method's defaults.
        normalised: whether the graph already ends in unit features.
    """
    rows = method.row_width(method.resolve({}) if hyper is None else hyper, width)
    fields, unit = method.statistic.FIELDS, method.unit_features and not normalised
    device = statistic_work(fields, samples, classes, width, row_width=rows, unit=unit)
    up, server = statistic_bytes(method, classes, rows, hyper), server_work(method.solves, classes, rows)
    return Calibrating(method.name, method.statistic.NAME, device, up, server)


def statistic_work(
    fields: Sequence[Field],
    samples: int,
    classes: int,
    width: int,
    *,
    row_width: int | None = None,
    unit: bool = False,
) -> Workload:
    """Summing these fields over `samples` features of width D. The forward pass is not in it.

    Args:
        row_width: D', where features are projected first.
        unit: whether they are put on the unit sphere first.
    """
    sheet, rows = Sheet(), row_width or width
    z = sheet.tensor("features", samples, width)
    if unit and fields:
        given, z = z, sheet.tensor("unit_features", samples, width)
        sheet.add("unit features", (given,), (z,), ops=3 * samples * width)
    if rows != width and fields:
        given, z = z, sheet.tensor("projected", samples, rows)
        sheet.add("projection", (given, sheet.tensor("directions", width, rows)), (z,), (Gemm(samples, rows, width),))
    sums = [_class_sums(sheet, f, z, samples, classes, rows) for f in fields if isinstance(f, Rows)]
    for triangle in (f for f in fields if isinstance(f, Triangle)):
        sums.append(sheet.tensor(triangle.name, rows, rows))
        sheet.add(triangle.name, (z,), (sums[-1],), (Gemm(rows, rows, samples),))
    return sheet.workload("statistic", samples, tuple(sums))


def _class_sums(sheet: Sheet, rows: Rows, z: str, samples: int, classes: int, width: int) -> str:
    """One field that holds a row for each class: what is summed, then the sums."""
    summed, columns = z, rows.columns(classes, width)
    if rows.holds == "probabilities":
        head, summed = (
            sheet.tensor(f"{rows.name}.head", columns, width),
            sheet.tensor(f"{rows.name}.soft", samples, columns),
        )
        sheet.add(
            f"{rows.name}: softmax", (z, head), (summed,), (Gemm(samples, columns, width),), 8 * samples * columns
        )
    sums = sheet.tensor(rows.name, classes, columns)
    sheet.add(f"{rows.name}: class sums", (summed,), (sums,), ops=samples * columns)
    return sums


def server_work(solves: Literal["none", "ridge"], classes: int, width: int) -> Workload:
    """What the server computes once all statistics are in and merged."""
    return ridge_solve(classes, width) if solves == "ridge" else Sheet().workload("server", 1)


def ridge_solve(classes: int, width: int) -> Workload:
    """A head by ridge regression from sums of features: (A + λI) Wᵀ = b."""
    sheet = Sheet()
    gram, sums = sheet.tensor("gram", width, width), sheet.tensor("class_sums", classes, width)
    head = sheet.tensor("head", classes, width)
    sheet.add("factor", (gram,), (gram,), cholesky(width), width * width)
    sheet.add("solve", (gram, sums), (head,), _triangular(width, classes) * 2)
    return sheet.workload("ridge server", 1)


def statistic_bytes(method: Method, classes: int, width: int, hyper: Mapping[str, Value] | None = None) -> int:
    """What one device that holds every class sends, encoded as it travels; what no message can hold is only counted.

    Args:
        width: of its rows of features.
        hyper: settled; None for the method's defaults.
    """
    groups = method.groups(method.resolve({}) if hyper is None else hyper)
    counted = counted_bytes(method, classes, width, groups)
    return counted if counted > MAX_MESSAGE_BYTES else sent_bytes(method, classes, width, groups)


def triangle_numbers(width: int) -> int:
    """How many numbers the upper half of a symmetric D x D matrix has."""
    return width * (width + 1) // 2


def cholesky(width: int) -> tuple[Gemm, ...]:
    """Left to right in panels of 32 columns: the rank-32 updates of the trailing matrix, which are most of D³/3."""
    gemms = []
    for start in range(0, width, _PANEL):
        left = width - start
        panel = min(_PANEL, left)
        gemms.append(Gemm(left, panel, panel))  # the panel itself, as a product of its height
        if left > panel:
            gemms.append(Gemm(left - panel, max(1, (left - panel) // 2), panel))  # the lower half of the update
    return tuple(gemms)


def _triangular(width: int, columns: int) -> tuple[Gemm, ...]:
    """Forward substitution for `columns` right-hand sides, in the same panels."""
    return tuple(Gemm(_PANEL, columns, max(1, start + _PANEL)) for start in range(0, width, _PANEL))
