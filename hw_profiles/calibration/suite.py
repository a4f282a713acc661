"""The suite: 306 graphs, half of inference, half of training, with what each asks of a runtime.

A board with the base install makes the graphs (`graph_bytes`), but cannot read shapes from them without onnx.
What they ask for, which is the same everywhere, ships as `suite.json`, written by

    python -m protofleet.hw_profiles.calibration.suite

whenever a graph or an amount changes; a test compares it with the graphs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from protofleet.hw_profiles.calibration.amounts import AMOUNTS, amounts_of
from protofleet.hw_profiles.calibration.graph_bytes import SmallGraph
from protofleet.hw_profiles.calibration.inference_suite import INFERENCE_KINDS, inference_graph
from protofleet.hw_profiles.calibration.training_suite import TRAINING_KINDS, training_graph

__all__ = ["PARTS", "WHOLE", "Case", "Part", "cases", "suite_operators", "suite_table"]

Part = Literal["inference", "training"]
PARTS: tuple[Part, ...] = ("inference", "training")
WHOLE = ("network", "step")
_BETWEEN = (8 << 20, 64 << 20)  # beyond a core's own cache, and beyond one that is shared


@dataclass(frozen=True, eq=False)
class Case:
    """One graph of the suite, and its amounts (K,)."""

    part: Part
    kind: str
    index: int
    amounts: NDArray[np.float64]

    def graph(self) -> SmallGraph:
        """The graph, made anew."""
        return (
            inference_graph(self.kind, self.index)
            if self.part == "inference"
            else training_graph(self.kind, self.index)
        )

    @property
    def whole(self) -> bool:
        """Whether it is a whole network or step, of which intervals are made."""
        return self.kind in WHOLE

    @property
    def between(self) -> int:
        """Bytes of something else that are read before each run: the whole ones are run as a device runs its own."""
        return 0 if self.whole else _BETWEEN[self.index % 2]


@cache
def cases() -> tuple[Case, ...]:
    """All graphs, in order, with what ships of them."""
    rows = _shipped()["rows"]
    found = []
    for part, kind, index in _names():
        amounts = np.zeros(len(AMOUNTS))
        for name, amount in rows[f"{part} {kind} {index}"].items():
            amounts[AMOUNTS.index(name)] = amount
        found.append(Case(part, kind, index, amounts))
    return tuple(found)


def suite_operators(part: Part) -> frozenset[str]:
    """The operators that its graphs have."""
    return frozenset(_shipped()["operators"][part])


def suite_table() -> dict[str, object]:
    """What `suite.json` holds, from the graphs themselves. Needs the onnx package."""
    from protofleet.hw_profiles.workload.constant_folding import fold_weights
    from protofleet.hw_profiles.workload.from_onnx import read_workload

    rows: dict[str, dict[str, float]] = {}
    operators: dict[Part, set[str]] = {part: set() for part in PARTS}
    for part, kind, index in _names():
        case = Case(part, kind, index, np.zeros(0))
        data = case.graph().to_bytes()
        if part == "inference":
            workload = fold_weights(read_workload(data, name=f"{kind} {index}"))
        else:  # as a bundle's step: what is stored in it is a constant
            workload = read_workload(data, name=f"{kind} {index}", roles={})
        operators[part] |= {layer.op for layer in workload.layers}
        amounts = amounts_of(workload, training=part == "training", between=case.between)
        rows[f"{part} {kind} {index}"] = {
            name: float(f"{value:.9g}") for name, value in zip(AMOUNTS, amounts, strict=True) if value
        }
    return {"operators": {part: sorted(found) for part, found in operators.items()}, "rows": rows}


def _names() -> Iterator[tuple[Part, str, int]]:
    for kind, (_, count, *_) in INFERENCE_KINDS.items():
        yield from (("inference", kind, index) for index in range(count))
    for kind, (_, count) in TRAINING_KINDS.items():
        yield from (("training", kind, index) for index in range(count))


@cache
def _shipped() -> dict[str, dict[str, dict[str, float]]]:
    text = resources.files("protofleet.hw_profiles.calibration").joinpath("suite.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def main() -> None:
    """Write the file beside this module."""
    table = suite_table()
    rows = ",\n  ".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in table["rows"].items())  # type: ignore[attr-defined]
    text = f'{{\n "operators": {json.dumps(table["operators"])},\n "rows": {{\n  {rows}\n }}\n}}\n'
    Path(__file__).with_name("suite.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
