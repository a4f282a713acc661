"""`fleet.toml`: read, checked, frozen. `example.toml` beside this file is a whole one, with every table explained.

The tables of `defaults.toml` (radios and prices, dated, each with its source) lie below the user's, figure by figure.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from protofleet.contract.errors import UsageError
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.methods import METHODS, Method
from protofleet.contract.names import named
from protofleet.contract.printable import as_written
from protofleet.hw_profiles.devices.schema import Device
from protofleet.hw_profiles.plan.figures import (
    ACCURACY,
    BATTERY,
    BOARD,
    PRICES,
    RADIO,
    Figures,
    Limits,
    check_keys,
    doubts,
    parse_figure,
    parse_figures,
    unusual,
)
from protofleet.hw_profiles.ranges import Range

__all__ = ["Fleet", "Goal", "Group", "Radio", "Way", "example", "read_fleet"]

_FLEET = (
    *("name", "bundle", "currency", "samples", "rounds_a_day", "keepalive_s", "stays_connected", "connections_a_day"),
    *("goal", "way", "devices", "boards", "radios", "prices"),
)
_DEVICES = "a device of `profile --list`"
_MOST_CHOICES = 100_000


@dataclass(frozen=True)
class Radio:
    """A radio and what it costs: seconds, watts beyond the board's, money; see `figures.RADIO`."""

    name: str
    figures: Figures


@dataclass(frozen=True)
class Group:
    """Devices of one role. Several boards or radios are alternatives: all of the group get the same.

    Attributes:
        battery_wh: None on the mains.
    """

    name: str
    count: int
    boards: tuple[Device, ...]
    radios: tuple[Radio, ...]
    battery_wh: Range | None
    battery_source: str


@dataclass(frozen=True)
class Way:
    """A bundle and the method of its rounds: how many rounds it takes, and what accuracy that gives.

    Attributes:
        bundle: the file.
        method: None for the bundle's own.
        accuracy: None where the file gives none.
    """

    name: str
    bundle: Path
    method: Method | None
    rounds: int
    accuracy: Range | None
    accuracy_source: str


@dataclass(frozen=True)
class Goal:
    """What a choice must meet; None where it does not matter. Accuracy is from 0 to 1."""

    accuracy: float | None = None
    deadline_h: float | None = None


@dataclass(frozen=True)
class Fleet:
    """A checked fleet file.

    Attributes:
        samples: photos of a device, all used in each round.
        rounds_a_day: alternatives.
        stays_connected: or else a device connects for each round and sleeps between rounds.
        connections_a_day: of a device that stays, since connections break.
        boards: price and watts by device's name.
        dated: when the defaults were looked up.
        doubts: what the plan asks about figures of the file: units, a rate of the user's with watts of a default's.
    """

    name: str
    currency: str
    samples: int
    rounds_a_day: tuple[float, ...]
    keepalive_s: float
    stays_connected: bool
    connections_a_day: float
    groups: tuple[Group, ...]
    ways: tuple[Way, ...]
    goal: Goal
    boards: Mapping[str, Figures]
    prices: Figures
    dated: str
    doubts: tuple[str, ...] = ()


def example() -> str:
    """A whole fleet file, as text."""
    return _shipped("example.toml")


def read_fleet(path: Path, devices: Mapping[str, Device]) -> Fleet:
    """The fleet of a file.

    Args:
        devices: by name, shipped ones and the user's.

    Raises:
        UsageError: the file cannot be read, or something in it is missing, unknown or out of range.
    """
    table = read_toml(path, f"fleet file {path}", hint="protofleet plan --example > fleet.toml")
    return parse_fleet(table, path, devices)


def parse_fleet(table: dict[str, Any], path: Path, devices: Mapping[str, Device]) -> Fleet:
    """As `read_fleet`, of a table that was read."""
    where = path.name
    check_keys(table, _FLEET, where)
    defaults = tomllib.loads(_shipped("defaults.toml"))
    currency = _word(table, "currency", where, defaults["currency"])
    radios = _radios(table.get("radios", {}), defaults["radios"], where)
    boards = {
        named(devices, name, f"{where}: boards", _DEVICES).name: parse_figures(
            one, BOARD, f"{where}: boards.{name}", given=True
        )
        for name, one in _tables(table.get("boards", {}), f"{where}: boards").items()
    }
    usual_prices = parse_figures(defaults["prices"], PRICES, "defaults: prices", given=False)
    prices = usual_prices.replaced_by(parse_figures(table.get("prices", {}), PRICES, f"{where}: prices", given=True))
    fleet = Fleet(
        name=_word(table, "name", where, path.stem),
        currency=currency,
        samples=int(_number(table, "samples", where, Limits(1, 1e7), 1000, whole=True)),
        rounds_a_day=_numbers(table, "rounds_a_day", where, Limits(0.001, 86_400), 1.0),
        keepalive_s=_number(table, "keepalive_s", where, Limits(10, 3600), 60.0),
        stays_connected=_flag(table, "stays_connected", where, True),
        connections_a_day=_number(table, "connections_a_day", where, Limits(0, 86_400), 1.0),
        groups=tuple(_group(one, at, devices, radios) for one, at in _list(table, "devices", where)),
        ways=tuple(_way(one, at, table, path) for one, at in _list(table, "way", where)),
        goal=_goal(table.get("goal", {}), f"{where}: goal"),
        boards=boards,
        prices=prices,
        dated=defaults["dated"],
    )
    _check_together(fleet, where, defaults["currency"])
    return replace(fleet, doubts=tuple(dict.fromkeys(_doubts(fleet, defaults))))


def _doubts(fleet: Fleet, defaults: Mapping[str, Any]) -> Iterator[str]:
    """What the figures' ranges cannot refuse."""
    for group in fleet.groups:
        if group.battery_wh is not None:
            yield from unusual(group.battery_wh, BATTERY, f"{group.name}.battery_wh")
        for radio in group.radios:
            own, where = radio.figures, f"radios.{radio.name}"
            usual = parse_figures(defaults["radios"].get(radio.name, {}), RADIO, where, given=False)
            yield from doubts(own, usual, RADIO, where)
            for way in ("up", "down"):
                if f"{way}_mbit_s" in own.given and f"{way}_w" in own.values and f"{way}_w" not in own.given:
                    watts, rate = own.values[f"{way}_w"].value, usual.values[f"{way}_mbit_s"].value
                    yield (
                        f"{where}.{way}_mbit_s is yours, {where}.{way}_w is not: the default {watts:g} W is a radio's "
                        f"at {rate:g} Mbit/s, and joules are wrong by as much as yours differs; give {way}_w"
                    )
    if fleet.currency == defaults["currency"]:
        yield from doubts(
            fleet.prices, parse_figures(defaults["prices"], PRICES, "prices", given=False), PRICES, "prices"
        )


def _check_together(fleet: Fleet, where: str, currency: str) -> None:
    for group in fleet.groups:
        priced = [board.name for board in group.boards if "price" in _board(fleet, board).values]
        if len(group.boards) > 1 and len(priced) < len(group.boards):
            missing = next(board.name for board in group.boards if board.name not in priced)
            raise UsageError(
                f"{where}: boards.{missing}.price", expected="the price of every board that is a choice", got="none"
            )
    for board in (board for group in fleet.groups for board in group.boards if board.power is not None):
        for name in ("idle_w", "asleep_w"):
            most, waiting = board.power.active_high_w, _board(fleet, board).get(name)
            if waiting.value > most:
                at = f"{where}: boards.{board.name}.{name}"
                raise UsageError(at, expected=f"at most the {most:g} W of its computing", got=f"{waiting.value:g}")
    for key, names in (("devices", [group.name for group in fleet.groups]), ("way", [way.name for way in fleet.ways])):
        if len(set(names)) < len(names):
            raise UsageError(f"{where}: {key}.name", expected=f"a name for each [[{key}]]", got=", ".join(names))
    if fleet.goal.accuracy is not None and all(way.accuracy is None for way in fleet.ways):
        raise UsageError(f"{where}: way.accuracy", expected="an accuracy, since the goal has one", got="none")
    if fleet.currency != currency:
        figures = {f"prices.{name}": fleet.prices for name in ("electricity_kwh",)}
        for radio in {radio.name: radio for group in fleet.groups for radio in group.radios}.values():
            figures |= {f"radios.{radio.name}.{n}": radio.figures for n in radio.figures.values if n[:5] == "price"}
        for name, one in figures.items():
            if name.rpartition(".")[2] not in one.given:
                raise UsageError(
                    f"{where}: {name}", expected=f"your price in {fleet.currency}", got=f"the default in {currency}"
                )
    alternatives = sum(len(g.boards) * len(g.radios) for g in fleet.groups) * len(fleet.ways) * len(fleet.rounds_a_day)
    if alternatives > _MOST_CHOICES:
        raise UsageError(where, expected=f"at most {_MOST_CHOICES} choices", got=alternatives)


def _board(fleet: Fleet, board: Device) -> Figures:
    return fleet.boards.get(board.name, Figures())


def _group(table: object, where: str, devices: Mapping[str, Device], radios: Mapping[str, Radio]) -> Group:
    own = check_keys(table, ("name", "kind", "count", "radio", "battery_wh"), where)
    kinds, names = _words(own, "kind", where), _words(own, "radio", where)
    battery, source = None, ""
    if "battery_wh" in own:
        battery, source = parse_figure(own["battery_wh"], BATTERY, f"{where}.battery_wh")
    return Group(
        name=_word(own, "name", where, " or ".join(kinds)),
        count=int(_number(own, "count", where, Limits(1, 1e8), None, whole=True)),
        boards=tuple(named(devices, kind, f"{where}.kind", _DEVICES) for kind in kinds),
        radios=tuple(named(radios, radio, f"{where}.radio") for radio in names),
        battery_wh=battery,
        battery_source=source,
    )


def _way(table: object, where: str, fleet: Mapping[str, Any], path: Path) -> Way:
    own = check_keys(table, ("name", "bundle", "method", "rounds", "accuracy"), where)
    bundle = _word({**fleet, **own}, "bundle", where, None)
    rule = named(METHODS, _word(own, "method", where, ""), f"{where}.method") if "method" in own else None
    accuracy, source = None, ""
    if "accuracy" in own:
        accuracy, source = parse_figure(own["accuracy"], ACCURACY, f"{where}.accuracy")
    title = f"{Path(bundle).stem}, {rule.name}" if rule else Path(bundle).stem
    return Way(
        name=_word(own, "name", where, title if "bundle" in own or rule is None else rule.name),
        bundle=path.parent / bundle,
        method=rule,
        rounds=int(_number(own, "rounds", where, Limits(1, 1e6), 1, whole=True)),
        accuracy=accuracy,
        accuracy_source=source,
    )


def _goal(table: object, where: str) -> Goal:
    own = check_keys(table, ("accuracy", "deadline_h"), where)
    accuracy = _number(own, "accuracy", where, ACCURACY, None) if "accuracy" in own else None
    deadline = _number(own, "deadline_h", where, Limits(0.001, 1e6), None) if "deadline_h" in own else None
    return Goal(accuracy, deadline)


def _radios(own: object, defaults: Mapping[str, Any], where: str) -> dict[str, Radio]:
    known = {name: parse_figures(one, RADIO, f"defaults: radios.{name}", given=False) for name, one in defaults.items()}
    for name, one in _tables(own, f"{where}: radios").items():
        at = f"{where}: radios.{name}"
        known[name] = known.get(name, Figures()).replaced_by(parse_figures(one, RADIO, at, given=True))
        for needed in ("up_mbit_s", "down_mbit_s"):
            if needed not in known[name].values:
                raise UsageError(f"{at}.{needed}", expected='{ value = …, source = "…" }', got="nothing")
    return {name: Radio(name, figures) for name, figures in known.items()}


# ── values of the file ──────────────────────────────────────────────────────────────────────────────────────────────


def _tables(table: object, where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise UsageError(where, expected="tables", got=as_written(table))
    return table


def _list(table: Mapping[str, Any], key: str, where: str) -> list[tuple[object, str]]:
    found = table.get(key)
    if not isinstance(found, list) or not found:
        raise UsageError(
            f"{where}: {key}", expected=f"one or more [[{key}]]", got=as_written(found) if found else "none"
        )
    return [(one, f"{where}: {key} {number}") for number, one in enumerate(found, 1)]


def _word(table: Mapping[str, Any], key: str, where: str, default: str | None) -> str:
    found = table.get(key, default)
    if not isinstance(found, str) or (key in table and not found.strip()):
        raise UsageError(f"{where}: {key}", expected="text", got="nothing" if found is None else as_written(found))
    return found


def _words(table: Mapping[str, Any], key: str, where: str) -> list[str]:
    found = table.get(key)
    words = [found] if isinstance(found, str) else found
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UsageError(
            f"{where}: {key}", expected="a name, or a list", got="nothing" if found is None else as_written(found)
        )
    return list(dict.fromkeys(words))


def _number(
    table: Mapping[str, Any], key: str, where: str, limits: Limits, default: float | None, *, whole: bool = False
) -> float:
    found = table.get(key, default)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not limits.low <= found <= limits.high or (whole and found != int(found)):  # type: ignore[operator]
        kind = "a whole number" if whole else "a number"
        expected = f"{kind} from {limits.low:g} to {limits.high:g}"
        raise UsageError(f"{where}: {key}", expected=expected, got="nothing" if found is None else as_written(found))
    return float(found)  # type: ignore[arg-type]


def _numbers(table: Mapping[str, Any], key: str, where: str, limits: Limits, default: float) -> tuple[float, ...]:
    found = table.get(key, default)
    several = found if isinstance(found, list) and found else [found]
    return tuple(dict.fromkeys(_number({key: one}, key, where, limits, None) for one in several))


def _flag(table: Mapping[str, Any], key: str, where: str, default: bool) -> bool:
    found = table.get(key, default)
    if not isinstance(found, bool):
        raise UsageError(f"{where}: {key}", expected="true or false", got=as_written(found))
    return found


def _shipped(name: str) -> str:
    return resources.files("protofleet.hw_profiles.plan").joinpath(name).read_text(encoding="utf-8")
