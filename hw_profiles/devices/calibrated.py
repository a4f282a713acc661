"""What a board's own measurements add to its device file: `[calibration]`, as `profile --calibrate` writes it.

    format, runtime, board, processor, measured      of what and when
    others, under_load, throttled, governor, …       what was watched meanwhile
    operators                                        of the graphs that were measured, by part
    [[calibration.fit]]   part, threads, graphs, and the nanoseconds of one unit of each amount; the error of graphs
                          that were left out, and how wide an interval holds 8 of 10 of them
    digest                of all that: a number that was changed by hand is no measurement any more

A reader takes exactly the format that it knows.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protofleet.contract.errors import UsageError

__all__ = ["FORMAT", "BoardFit", "Calibration", "calibration_text", "parse_calibration"]

FORMAT = 3
_PARTS = ("inference", "training")
_TEXTS = ("runtime", "board", "processor", "measured", "governor")
_LARGEST_NS = 1e9


@dataclass(frozen=True)
class BoardFit:
    """One fit: nanoseconds of a unit of each amount.

    Attributes:
        part: `inference` or `training`.
        median, p90: error of graphs that were left out.
        half_width: of the 80 % interval, natural logarithm.
    """

    part: str
    threads: int
    graphs: int
    median: float
    p90: float
    half_width: float
    costs_ns: Mapping[str, float] = field(hash=False)


@dataclass(frozen=True)
class Calibration:
    """A board as it was measured.

    Attributes:
        others: processors that other processes took meanwhile; None where the system does not tell.
        throttled: whether the processor was held back; None where the system does not tell.
        operators: that the graphs had, by part.
    """

    runtime: str
    board: str
    processor: str
    measured: str
    governor: str
    under_load: bool
    others: float | None
    throttled: bool | None
    operators: Mapping[str, tuple[str, ...]] = field(hash=False)
    fits: tuple[BoardFit, ...] = ()

    def fit(self, part: str, threads: str) -> BoardFit:
        """The fit of a part for `1` thread, or of the most threads that were measured."""
        found = sorted((fit for fit in self.fits if fit.part == part), key=lambda fit: fit.threads)
        return found[0] if threads == "1" else found[-1]


def calibration_text(calibration: Calibration) -> str:
    """The TOML of the section, its digest last."""
    table = _table(calibration)
    lines = ["[calibration]"]
    for key, value in table.items():
        if key not in ("operators", "fit"):
            lines.append(f"{key} = {_toml(value)}")
    lines.append(f"digest = {_toml(_digest(table))}")
    lines += [
        "",
        "[calibration.operators]",
        *(f"{part} = {_toml(names)}" for part, names in table["operators"].items()),
    ]
    for fit in table["fit"]:
        lines += ["", "[[calibration.fit]]"]
        lines += [f"{key} = {_toml(value)}" for key, value in fit.items() if key != "costs_ns"]
        lines += ["[calibration.fit.costs_ns]"]
        lines += [f"{json.dumps(name)} = {_toml(value)}" for name, value in fit["costs_ns"].items()]
    return "\n".join(lines) + "\n"


def parse_calibration(table: object, where: str) -> Calibration:
    """The checked section of a device file.

    Raises:
        UsageError: another format, a value that is missing or absurd, or one that was changed after it was measured.
    """
    if not isinstance(table, dict):
        raise UsageError(f"{where}: [calibration]", expected="a table", got=repr(table))
    if table.get("format") != FORMAT:
        raise UsageError(
            f"{where}: calibration.format", expected=FORMAT, got=table.get("format", "none"),
            hint="profile --calibrate with this version, or a newer protofleet",
        )  # fmt: skip
    try:
        found = _read(table)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(
            f"{where}: [calibration]", expected="what profile --calibrate writes",
            got=f"{type(error).__name__}: {error}", hint="profile --calibrate anew",
        ) from None  # fmt: skip
    if table.get("digest") != _digest(_table(found)):
        raise UsageError(
            f"{where}: [calibration]", expected="the numbers that were measured",
            got="another digest: it was edited", hint="profile --calibrate anew, or the file as it was written",
        )  # fmt: skip
    return found


def _read(table: Mapping[str, Any]) -> Calibration:
    fits = tuple(
        BoardFit(
            str(fit["part"]), int(fit["threads"]), int(fit["graphs"]), float(fit["median"]), float(fit["p90"]),
            float(fit["half_width"]), {str(name): float(ns) for name, ns in fit["costs_ns"].items()},
        )
        for fit in table["fit"]
    )  # fmt: skip
    for fit in fits:
        numbers = (*fit.costs_ns.values(), fit.half_width)
        if fit.part not in _PARTS or fit.threads < 1 or not all(0 < n < _LARGEST_NS for n in numbers):
            raise ValueError(f"fit of {fit.part}, {fit.threads} threads: a cost that is none")
    if {fit.part for fit in fits} != set(_PARTS):
        raise ValueError(f"fits of {', '.join(sorted({fit.part for fit in fits})) or 'nothing'}")
    texts = {key: str(table[key]) for key in _TEXTS}
    others = table.get("others")
    throttled = table.get("throttled")
    return Calibration(
        **texts,
        under_load=bool(table["under_load"]),
        others=None if others is None else float(others),
        throttled=None if throttled is None else bool(throttled),
        operators={part: tuple(map(str, table["operators"][part])) for part in _PARTS},
        fits=fits,
    )


def _table(calibration: Calibration) -> dict[str, Any]:
    """The section without its digest, numbers as they are written."""
    table: dict[str, Any] = {"format": FORMAT, **{key: getattr(calibration, key) for key in _TEXTS}}
    table["under_load"] = calibration.under_load
    if calibration.others is not None:
        table["others"] = _short(calibration.others)
    if calibration.throttled is not None:
        table["throttled"] = calibration.throttled
    table["operators"] = {part: list(names) for part, names in calibration.operators.items()}
    table["fit"] = [
        {
            "part": fit.part,
            "threads": fit.threads,
            "graphs": fit.graphs,
            **{key: _short(getattr(fit, key)) for key in ("median", "p90", "half_width")},
            "costs_ns": {name: _short(ns) for name, ns in fit.costs_ns.items()},
        }
        for fit in calibration.fits
    ]
    return table


def _short(value: float) -> float:
    return float(f"{value:.6g}") if math.isfinite(value) else value


def _digest(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]


def _toml(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, float) else repr(value)
