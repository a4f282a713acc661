"""The plan as one versioned value: what `protofleet plan --json` writes.

    fleet        name, currency, photos, how it connects
    goal         the accuracy and the deadline that were asked for
    taken        the number of the choice that is taken, None where none meets the goal for certain
    sentence     what is taken, or why nothing is
    doubts       figures whose unit may be wrong, rates of the user's with watts of a default's
    choices      each way with each number of rounds a day: answers, money, megabytes, when it ends, each group's bill
    alternatives every board and radio of every group, for each choice
    figures      radios, prices and boards as used, each with its source and whether it is the user's
    wire         how bytes were measured
    assumptions  what all this rests on

A figure is `{value, low, high}`, or null where it has no ground; `gaps` says why.
"""

from __future__ import annotations

from typing import Any

from protofleet.hw_profiles.plan.bill import Bill
from protofleet.hw_profiles.plan.choice import Choice, cheapest, choices, every_bill
from protofleet.hw_profiles.plan.device_work import way_work
from protofleet.hw_profiles.plan.figures import Figures
from protofleet.hw_profiles.plan.fleet_file import Fleet
from protofleet.hw_profiles.plan.wire_bytes import Traffic, payload_down, payload_up, table
from protofleet.hw_profiles.plan.wording import seconds
from protofleet.hw_profiles.ranges import Range
from protofleet.hw_profiles.units import few

__all__ = ["SCHEMA", "plan_report"]

SCHEMA = 1
_BEYOND = 1.5  # times the smallest or largest payload that was counted
_ALIKE = 0.01


def plan_report(fleet: Fleet) -> dict[str, Any]:
    """Everything `protofleet plan` knows, as JSON-ready values.

    Raises:
        UsageError: a way trains by another method than its bundle's.
        BundleError: a bundle cannot be read.
    """
    found = choices(fleet)
    taken = cheapest(found)
    return {
        "schema": SCHEMA,
        "command": "plan",
        "fleet": {
            "name": fleet.name,
            "currency": fleet.currency,
            "devices": sum(group.count for group in fleet.groups),
            "samples": fleet.samples,
            "keepalive_s": fleet.keepalive_s if fleet.stays_connected else None,
            "stays_connected": fleet.stays_connected,
        },
        "goal": vars(fleet.goal),
        "taken": None if taken is None else found.index(taken),
        "sentence": _sentence(fleet, found, taken),
        "doubts": list(fleet.doubts),
        "choices": [_choice(one) for one in found],
        "alternatives": [
            [[_bill(one) for one in group] for group in every_bill(fleet, choice.way, choice.rounds_a_day)]
            for choice in found
        ],
        "figures": _figures(fleet),
        "wire": {key: table()[key] for key in ("command", "measured", "broker", "how", "worst_left_out")},
        "assumptions": _assumptions(fleet),
    }


def _sentence(fleet: Fleet, found: list[Choice], taken: Choice | None) -> str:
    """What is taken, what it costs and why, and what is slowest in it; or why nothing is taken."""
    if taken is not None and taken.money is not None:
        meet = [one for one in found if one.meets == "yes" and one.money is not None]
        least = f", the least of {len(meet)} choices that meet the goal" if len(meet) > 1 else ""
        near = taken.money.value * (1 + _ALIKE)
        alike = [
            f"{one.way.name} {_times(one.rounds_a_day)}"
            for one in meet
            if one is not taken and one.money is not None and one.money.value <= near
        ]
        beside = f" Within {100 * _ALIKE:.0f} % of it: {few(alike)}." if alike else ""
        money = _money(taken.money, fleet.currency)
        return f"Take {_named(taken)}: {money} a month{least}. {_slowest(taken)}{beside}"
    because = f" ({few(found[0].why, separator='; ')})" if found[0].why else ""
    if found[0].meets == "yes":
        return f"Every choice's money has a gap: nothing can be called cheapest{because}."
    if found[0].meets == "perhaps" and found[0].money is not None:
        money = _money(found[0].money, fleet.currency)
        return f"No choice meets the goal for certain. {_named(found[0])} perhaps does, for {money} a month{because}."
    return f"No choice is known to meet the goal. Nearest is {_named(found[0])}{because}."


def _slowest(one: Choice) -> str:
    """The board whose round takes longest; every round of what is taken has ground."""
    slowest = max(one.bills, key=lambda each: each.round_s.value if each.round_s is not None else 0.0)
    took = slowest.round_s or Range()
    between = f"{seconds(took.low)} to {seconds(took.high)}, {slowest.work.support}"
    return f"Its slowest board is {slowest.board.name}: a round in {seconds(took.value)} ({between})."


def _named(one: Choice) -> str:
    boards = ", ".join(f"{b.group.count} {b.board.name} on {b.radio.name}" for b in one.bills)
    return f"{one.way.name}, {_times(one.rounds_a_day, 'rounds')}, with {boards}"


def _times(a_day: float, what: str = "times") -> str:
    return "once a day" if a_day == 1 else f"{a_day:g} {what} a day"


def _money(money: Range, currency: str) -> str:
    return f"{money.value:,.2f} {currency} ({money.low:,.2f} to {money.high:,.2f})"


def _choice(one: Choice) -> dict[str, Any]:
    work = way_work(one.way)
    return {
        "way": one.way.name,
        "bundle": one.way.bundle.name,
        "method": work.method.name,
        "rounds": one.way.rounds,
        "rounds_a_day": one.rounds_a_day,
        "accuracy": _range(one.way.accuracy),
        "accuracy_source": one.way.accuracy_source,
        "contribution_bytes": payload_up(work.manifest, work.method),
        "state_bytes": payload_down(work.manifest, work.method),
        "meets": one.meets,
        "meets_accuracy": one.accuracy,
        "meets_deadline": one.deadline,
        "works": one.works,
        "why": list(one.why),
        "finish_h": _range(one.finish_h),
        "money_a_month": _range(one.money),
        "megabytes_a_month": _range(one.megabytes),
        "groups": [_bill(each) for each in one.bills],
    }


def _bill(one: Bill) -> dict[str, Any]:
    return {
        "group": one.group.name,
        "count": one.group.count,
        "board": one.board.name,
        "radio": one.radio.name,
        "support": one.work.support,
        "support_reasons": list(one.work.reasons),
        "error": one.work.error,
        "fits_memory": one.work.fits,
        "computing_s": _range(one.work.seconds),
        "round_s": _range(one.round_s),
        "joules_a_round": _range(one.joules_a_round),
        "joules_a_day": _range(one.joules_a_day),
        "battery_days": _range(one.battery_days),
        "bytes_a_round": _traffic(one.traffic_a_round),
        "bytes_a_day": _traffic(one.traffic_a_day),
        "megabytes_a_month": _range(one.megabytes_a_month),
        "money_a_month": _range(one.money),
        "money_data": _range(one.money_data),
        "money_electricity": _range(one.money_electricity),
        "money_boards": _range(one.money_boards),
        "gaps": list(one.gaps),
    }


def _range(figure: Range | None) -> dict[str, float] | None:
    return None if figure is None else {"value": figure.value, "low": figure.low, "high": figure.high}


def _traffic(traffic: Traffic) -> dict[str, Any]:
    return {"up": _range(traffic.up), "down": _range(traffic.down)}


def _figures(fleet: Fleet) -> list[dict[str, Any]]:
    tables: dict[str, Figures] = {}
    for group in fleet.groups:
        for radio in group.radios:
            tables[f"radios.{radio.name}"] = radio.figures
        for board in group.boards:
            tables[f"boards.{board.name}"] = fleet.boards.get(board.name, Figures())
    tables["prices"] = fleet.prices
    rows = [
        {
            "figure": f"{where}.{name}",
            **(_range(value) or {}),
            "source": figures.sources[name],
            "yours": name in figures.given,
        }
        for where, figures in tables.items()
        for name, value in figures.values.items()
    ]
    for group in fleet.groups:
        if group.battery_wh is not None:
            line = {"figure": f"{group.name}.battery_wh", **(_range(group.battery_wh) or {})}
            rows.append(line | {"source": group.battery_source, "yours": True})
    return rows


def _assumptions(fleet: Fleet) -> list[str]:
    wire = table()
    worst = 100 * max(wire["worst_left_out"].values())
    connects = (
        f"stays connected, pings every {fleet.keepalive_s:g} s and connects {_times(fleet.connections_a_day)}"
        if fleet.stays_connected
        else "connects for each round, and is asleep between rounds"
    )
    boards = {board.name for group in fleet.groups for board in group.boards}
    unpriced = sorted(name for name in boards if "price" not in fleet.boards.get(name, Figures()).values)
    lines = [
        "computing: the latency model of `protofleet profile`, fp32 on ONNX Runtime and all cores, with its 80 % "
        "interval and support, or the array model; the sums over features, reading photos and the server are not in it",
        f"bytes: encoded contribution and state of a device that has every class, and what a real broker over TLS made "
        f"of such payloads ({wire['command']}, {wire['measured']}); a case that the fit had not seen was off by at "
        f"most {worst:.1f} %, which is the bound; nothing is lost or sent twice",
        f"a device {connects}; every device takes part in every round with all its {fleet.samples:,} photos",
        "energy: the whole board's power, waiting included, and the radio's while it wakes, sends, receives, listens",
        f"a month has 365.25 / 12 days; radios and prices that are not yours are of {fleet.dated}",
        "bounds of parts are added: they are wider than 80 % where parts do not err together",
    ]
    for way in fleet.ways:
        work = way_work(way)
        for what, encoded in (
            ("payload_up", payload_up(work.manifest, work.method)),
            ("payload_down", payload_down(work.manifest, work.method)),
        ):
            counted = [int(case[what]) for case in wire["cases"]]
            if not min(counted) / _BEYOND <= encoded <= max(counted) * _BEYOND:
                lines.append(
                    f"{way.name}: {encoded:,} bytes {what[8:]}, beyond the {min(counted):,} to {max(counted):,} that "
                    "were counted on the wire: its traffic is extrapolated"
                )
    silent = [radio.name for group in fleet.groups for radio in group.radios if "idle_w" not in radio.figures.values]
    if silent and fleet.stays_connected:
        lines.append(
            f"no idle_w of {', '.join(dict.fromkeys(silent))}: what a radio draws between its exchanges, beyond the "
            "board's waiting, is not in the bill"
        )
    if unpriced:
        lines.append(f"no price in the file, so not in the bill: {', '.join(unpriced)}")
    return lines
