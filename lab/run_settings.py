"""A run's settings as a TOML file. The command line overrides them when read, and every default is written.

    method = "fedproto"            the names of a table's settings (`lab/paper_tables/config.py`), and
    data   = "fashion_mnist_subset"   data, seed, input
    seed   = 0
    [hyper]
    lr = 0.02

`resolved_text` writes all settings of a run. Read again they give the same experiment.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from protofleet.contract.errors import UsageError
from protofleet.contract.files.atomic_files import read_toml
from protofleet.export.backbones.backbone_names import check_weights_name
from protofleet.export.cli import read_shape
from protofleet.lab.data.shift import check_shift
from protofleet.lab.method_names import findable_name, usual_rounds
from protofleet.lab.paper_tables.config import Settings

if TYPE_CHECKING:
    from protofleet.lab.engine.experiment import Experiment

__all__ = ["RunSettings", "experiment_of", "read_settings", "resolved_text"]


_NAMES = {"samples": "only"}
_COURSE = ("rounds", "fraction", "evaluate_every", "rule")


class RunSettings(Settings, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A table's settings and those of a single run. `input` is HxWxc."""

    data: str | None = None
    seed: int | None = None
    input: str | None = None


def read_settings(path: Path) -> RunSettings:
    """A file's settings.

    Raises:
        UsageError: it cannot be read, is no TOML, or has a name that is no setting.
    """
    table = read_toml(path, f"--settings {path}")
    try:
        return msgspec.convert(table, RunSettings)
    except ValueError as error:  # msgspec's word for a setting that is none
        raise UsageError(f"--settings {path}", expected="settings of a run", got=error) from None


def experiment_of(given: Mapping[str, Any], explicit: Collection[str]) -> Experiment:
    """The experiment of `lab run`. The command line overrides the file of --settings, which overrides the defaults.

    Args:
        given: every option's value by its name.
        explicit: the options that the command line names.

    Raises:
        UsageError, MethodError: a setting is wrong, or they do not fit together.
    """
    file = read_settings(given["settings"]) if given["settings"] is not None else RunSettings()
    settled = _options(given, explicit).over(file).over(_options(given, set(given) - set(explicit)))
    assert isinstance(settled, RunSettings)
    settled.check_names()  # before torch is loaded, which takes seconds
    shape = None if settled.input is None else read_shape(settled.input)
    if settled.weights is not None:
        check_weights_name(settled.weights, settled.backbone or "")
    if settled.shift is not None and settled.severity is not None:
        check_shift(settled.shift, settled.severity)
    if settled.partition == "source" and "+" not in (settled.data or ""):
        raise UsageError("--partition source", expected="several data sets", got=settled.data, hint="--data A+B")
    rounds = usual_rounds(settled.method or "") if settled.rounds is None else settled.rounds
    settled = msgspec.structs.replace(settled, rounds=rounds, closings=_closings(given, explicit, file, settled))
    if (settled.evaluate_every or 0) < 1:
        raise UsageError("--evaluate-every", expected="1 or more", got=settled.evaluate_every)
    experiment = settled.experiment(settled.data or "", settled.seed or 0)
    course = replace(experiment.course, rounds=rounds)
    return replace(experiment, course=course, input_shape=shape, save_weights=given["save_weights"])


def _options(given: Mapping[str, Any], names: Collection[str]) -> RunSettings:
    """These options as settings."""
    named = {_NAMES.get(name, name): given[name] for name in names}
    settings = {name: value for name, value in named.items() if name in RunSettings.__struct_fields__}
    if settings.get("backbone") is not None:
        several = tuple(name.strip() for name in settings["backbone"].split(","))
        settings |= {"backbone": several[0], "backbones": several if len(several) > 1 else ()}
    settings |= {"personal": tuple(settings["personal"])} if settings.get("personal") else {"personal": None}
    settings |= {"weights": str(settings["weights"])} if settings.get("weights") else {}
    settings["hyper"] = _hyper(given["set"] or []) if "set" in names else {}
    return RunSettings(**settings)


def _closings(
    given: Mapping[str, Any], explicit: Collection[str], file: RunSettings, settled: RunSettings
) -> tuple[str, ...]:
    """The closings: FFC by default, except with several backbones, and CCVR on request."""
    closings = list(file.closings if file.closings is not None else () if settled.backbones else ("ffc",))
    if "calibrate" in explicit and given["calibrate"] is not None:
        closings = [*(name for name in closings if name != "ffc"), *(["ffc"] if given["calibrate"] else [])]
    return tuple(dict.fromkeys([*closings, *(["ccvr"] if given["ccvr"] else [])]))


def _hyper(given: Sequence[str]) -> dict[str, int | float | str]:
    hyper: dict[str, int | float | str] = {}
    for entry in given:
        name, equals, value = entry.partition("=")
        if not equals or not name:
            raise UsageError("--set", expected="KEY=VALUE", got=entry, hint="--set lr=0.02")
        hyper[name.strip()] = value.strip()
    return hyper


def resolved_text(experiment: Experiment) -> str:
    """All settings of the experiment as TOML."""
    from protofleet.lab.algorithms import ALGORITHMS

    resolved, shape, measures = experiment.resolved(), experiment.input_shape, asdict(experiment.measures)
    closings = [*experiment.measures.closings, *(["ffc"] if experiment.course.calibrate else [])]
    asked = {name: list(value) if isinstance(value, tuple) else value for name, value in measures.items()}
    whole: dict[str, Any] = {
        "data": experiment.data,
        "seed": experiment.course.seed,
        "input": "x".join(map(str, shape)) if shape else None,
        **{name: resolved[name] for name in Settings.__struct_fields__ if name in resolved},
        "method": findable_name(experiment.method),
        **{name: resolved["course"][name] for name in _COURSE},
        **asked,
        "closings": list(dict.fromkeys(closings)),
        **{name: value for name, value in resolved["partition"].items() if name != "scheme"},
        "partition": experiment.partition.scheme,
        "weights": str(experiment.weights) if experiment.weights else None,
    }
    fixed = getattr(ALGORITHMS.get(experiment.method), "fixed", {})
    hyper = {name: value for name, value in whole.pop("hyper").items() if name not in fixed}
    return _lines(whole) + "\n[hyper]\n" + _lines(hyper)


def _lines(values: Mapping[str, Any]) -> str:
    """`name = value` for each that there is; TOML writes strings, numbers, truth values and lists as JSON does."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items() if value is not None)
