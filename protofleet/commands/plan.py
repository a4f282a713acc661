"""`protofleet plan`: a fleet's bill, and the cheapest choice that meets an accuracy and a deadline."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json, write_text
from protofleet.contract.methods import LOAD_HELP, load_method
from protofleet.contract.printable import printable
from protofleet.hw_profiles.devices.schema import load_devices
from protofleet.hw_profiles.plan import wording
from protofleet.hw_profiles.plan.fleet_file import example, read_fleet
from protofleet.hw_profiles.plan.wording import ranged
from protofleet.hw_profiles.reports.page import check_pages

__all__ = ["plan_command"]


def plan_command(
    fleet: Annotated[
        Path | None, typer.Argument(metavar="fleet.toml", help="the fleet, its choices and its goal")
    ] = None,
    example_file: Annotated[bool, typer.Option("--example", help="print a whole fleet.toml and end")] = False,
    devices_file: Annotated[list[Path] | None, typer.Option(help="device files of your own (TOML)")] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help=JSON_HELP.format("the plan"))] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="write the plan as one HTML page")] = None,
) -> None:
    """What a fleet costs: seconds, joules, battery days, megabytes, money; the cheapest choice that meets a goal."""
    if example_file:
        typer.echo(example(), nl=False)
        return
    if fleet is None:
        raise UsageError(
            "plan", expected="a fleet file, or --example", got="neither", hint="protofleet plan --example > fleet.toml"
        )
    if method is not None:
        load_method(method)
    if html_file is not None:
        check_pages()
    read = read_fleet(fleet, load_devices(devices_file or ()))
    from protofleet.hw_profiles.plan.report import plan_report  # reads graphs, which takes onnx

    report = plan_report(read)
    write_json(json_file, report)  # before it is shown: whoever reads along may leave (`| head`)
    if html_file is not None:
        from protofleet.hw_profiles.plan.plan_page import plan_page

        write_text(html_file, plan_page(report), option="--html")
    _show(_printable(report), beside(json_file))


def _printable(value: Any) -> Any:
    """The report with every text as a terminal may show it: names and sources are those of a file."""
    if isinstance(value, Mapping):
        return {key: _printable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_printable(one) for one in value]
    return printable(value) if isinstance(value, str) else value


def _show(report: Mapping[str, Any], console: Console) -> None:
    about = report["fleet"]
    console.print(f"[bold]{escape(report['sentence'])}[/bold]", highlight=False)
    for line in report["doubts"]:
        console.print(line, style="yellow", highlight=False, markup=False)
    goal = [
        *([f"accuracy {report['goal']['accuracy']:g}"] if report["goal"]["accuracy"] is not None else []),
        *([f"ended within {report['goal']['deadline_h']:g} h"] if report["goal"]["deadline_h"] is not None else []),
    ]
    title = f"{about['name']}: {about['devices']:,} devices; {' and '.join(goal) + ' wanted' if goal else 'no goal'}"
    headings = ("choice", "meets", "accuracy", "ends after", f"{about['currency']} a month", "wire a month")
    rows = [
        (
            f"{one['way']}, {one['rounds_a_day']:g} a day",
            one["meets"],
            ranged(one["accuracy"], wording.share) if one["accuracy"] else "–",
            ranged(one["finish_h"], wording.hours, wording.NO_GROUND),
            ranged(one["money_a_month"], wording.money),
            ranged(one["megabytes_a_month"], wording.megabytes),
        )
        for one in report["choices"]
    ]
    show_table(console, headings, rows, words=(0, 1), title=title)
    for one in report["choices"]:
        if one["why"]:
            line = f"{one['way']}, {one['rounds_a_day']:g} a day: {'; '.join(one['why'])}"
            console.print(line, style="yellow", highlight=False, markup=False)
    shown = report["choices"][report["taken"] or 0]
    _show_groups(shown, about["currency"], console)
    for line in report["assumptions"]:
        console.print(f"  - {line}", style="dim", highlight=False, markup=False)
    theirs = [one for one in report["figures"] if not one["yours"]]
    for one in theirs:
        line = f"  - default {one['figure']} = {ranged(one, wording.number)}: {one['source']}"
        console.print(line, style="dim", highlight=False, markup=False)


def _show_groups(choice: Mapping[str, Any], currency: str, console: Console) -> None:
    rows = [
        (
            f"{one['group']}: {one['count']} {one['board']}",
            one["radio"],
            one["support"],
            ranged(one["round_s"], wording.seconds, wording.NO_GROUND),
            ranged(one["joules_a_round"], wording.joules),
            ranged(one["joules_a_day"], wording.joules),
            ranged(one["battery_days"], wording.days) if one["battery_days"] else "",
            ranged(one["money_a_month"], wording.money),
        )
        for one in choice["groups"]
    ]
    headings = ("devices", "radio", "ground", "round", "joules a round", "a day", "battery", f"{currency} a month")
    title = f"one device of each group, and its group's money: {choice['way']}, {choice['rounds_a_day']:g} a day"
    show_table(console, headings, rows, words=(0, 1, 2), title=title)
    for one in choice["groups"]:
        reasons = [*one["support_reasons"], *one["gaps"]]
        if reasons:
            error = f". The model's error: {one['error']}" if one["error"] else ""
            line = f"{one['group']}: {one['support']}: {'; '.join(dict.fromkeys(reasons))}{error}"
            console.print(line, style="yellow", highlight=False, markup=False)
