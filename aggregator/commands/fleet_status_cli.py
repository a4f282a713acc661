"""The commands `protofleet status` and `protofleet watch`: how a fleet is, from its store, which they only read.

`status` says it once, for a person or as JSON; `watch` is a page of the terminal that says it again every few seconds.
Where there is no terminal, `watch` prints the page once. With `--notify` it goes on, and tells who begins to need care
(`notices.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from protofleet.aggregator.commands.fleet_cli import SCHEMA, JsonFile, StorePlace
from protofleet.aggregator.commands.notices import Notices, senders_of
from protofleet.aggregator.database import Place
from protofleet.aggregator.overview.fleet_state import (
    Care,
    FleetState,
    event_in_words,
    heard_in_words,
    presence_in_words,
    read_state,
)
from protofleet.aggregator.overview.fleet_text import fleet_of
from protofleet.aggregator.page.served_page import page_alone
from protofleet.contract.console import durations, logs
from protofleet.contract.errors import ProtofleetError
from protofleet.contract.files.json_output import beside, write_json
from protofleet.contract.page.page_address import check_page_files
from protofleet.contract.printable import printable

__all__ = ["status_command", "watch_command"]

_CARES = 20  # lines
_LEAST_S, _MOST_S = 0.2, 3_600.0


def status_command(store: StorePlace, json: JsonFile = None) -> int:
    """Say in one sentence whether all is well with a fleet, and who needs care."""
    state = read_state(store)
    cares = state.cares
    content = {
        "schema": SCHEMA,
        "well": not cares,
        "sentence": state.sentence,
        "aggregator_runs": state.runs,
        "devices": len(state.taken),
        "online": state.online if state.runs else None,
        "cares": [asdict(care) for care in cares],
        "events": [asdict(event) for event in state.known.events],
    }
    write_json(json, content)
    console = beside(json)
    lines = [state.sentence, *(care.line for care in cares[:_CARES])]
    if len(cares) > _CARES:
        lines.append(f"and {len(cares) - _CARES} more; protofleet fleet list has all devices")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return 0


# arguments: each is an option, as typer reads them
def watch_command(
    store: StorePlace,
    every: Annotated[str, typer.Option(metavar="TIME", help="How often the store is read.")] = "2s",
    notify: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Tell there who begins to need care: https://…, mqtts://BROKER/TOPIC or mailto:NAME@HOST. Repeatable.",
        ),
    ] = None,
    page: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS:]PORT",
            help="In a browser instead. For this machine alone, or for a network: 0.0.0.0:8080.",
        ),
    ] = None,
    page_cert: Annotated[
        str | None, typer.Option(metavar="FILE", help="PEM file of a certificate of the page's, for https.")
    ] = None,
    page_key: Annotated[str | None, typer.Option(metavar="FILE", help="PEM file of its private key.")] = None,
) -> int:
    """Watch a fleet in the terminal, or in a browser: whether all is well, its devices, and what happens. Ctrl-C ends
    it."""
    check_page_files(page, page_cert, page_key)
    every_s = min(max(durations.seconds("--every", every), _LEAST_S), _MOST_S)
    console, failures = Console(), list[str]()
    notices = Notices(senders_of(notify or ()), failures.append)
    state = read_state(store)
    if page is not None:
        logs.set_up("text")
        with page_alone(store, fleet_of(store), page, (page_cert, page_key)):
            _tell(_looks(store, state, notices, every_s), console, failures)
    if not console.is_terminal and not notify:
        console.print(_page(state, rows=len(state.devices), lines=_CARES))
        return 0
    looks = _looks(store, state, notices, every_s)
    if not console.is_terminal:
        _tell(looks, console, failures)
    with Live(_fitted(state, console), console=console, screen=True, auto_refresh=False) as live:
        for newest, wrong in looks:
            said = [Text(line, style="red") for line in (wrong, *failures[-1:]) if line]
            live.update(Group(*said, _fitted(newest, console)), refresh=True)
    return 0


def _tell(looks: Iterator[object], console: Console, failures: list[str]) -> None:
    """Look without end; only what could not be told is said."""
    for _ in looks:
        for line in failures:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        failures.clear()


def _looks(store: Place, state: FleetState, notices: Notices, every_s: float) -> Iterator[tuple[FleetState, str]]:
    """The newest state that could be read, and why there is none newer, again and again; places are told of each."""
    wrong = ""
    while True:
        cares, sentence = (state.cares, state.sentence) if not wrong else ([_unreadable(wrong)], _UNREADABLE)
        notices.turn(cares, sentence, time.monotonic(), time.time())
        yield state, wrong
        time.sleep(every_s)
        try:
            state, wrong = read_state(store), ""
        except ProtofleetError as error:  # a server that restarts, a file that is put back: the page stays, says so
            wrong = printable(str(error))


_UNREADABLE = "Nobody knows how the fleet is."


def _unreadable(error: str) -> Care:
    return Care("", "aggregator-hangs", f"the store cannot be read: {error}")


def _fitted(state: FleetState, console: Console) -> Group:
    """As much as the terminal has lines for: who needs care first."""
    lines = max(3, console.height // 4)
    return _page(state, rows=max(3, console.height - 2 * lines - 4), lines=lines)


def _page(state: FleetState, *, rows: int, lines: int) -> Group:
    cares = state.cares
    needy = {care.device for care in cares}
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("device", "state", "heard", "bundle", "step ms", "MB", "up kB", "down kB", "refused"):
        words = heading in ("device", "state", "heard", "bundle")
        table.add_column(heading, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    ordered = sorted(state.devices.items(), key=lambda each: (each[0] not in needy, each[1].online, each[0]))
    for device, row in ordered[:rows]:
        step_ms, memory = row.figures.get("train_step_ms"), row.figures.get("peak_rss_bytes")
        cells = (
            printable(device),
            presence_in_words(state, device),
            heard_in_words(state, device),
            printable(row.bundle),
            "" if step_ms is None else f"{step_ms:.3g}",
            "" if memory is None else f"{memory / 1e6:.0f}",
            f"{row.up_bytes / 1e3:,.0f}",
            f"{row.down_bytes / 1e3:,.0f}",
            str(row.refused or ""),
        )
        style = "red" if device in needy else "" if row.online and state.runs else "dim"
        table.add_row(*(Text(cell) for cell in cells), style=style)
    hidden = len(ordered) - rows
    more = [Text(f"and {hidden} more devices", style="dim")] if hidden > 0 else []
    said = [Text(care.line, style="red", no_wrap=True, overflow="ellipsis") for care in cares[:lines]]
    log = [
        Text(event_in_words(event), style="dim", no_wrap=True, overflow="ellipsis")
        for event in state.known.events[:lines]
    ]
    head = Text(state.sentence, style="bold red" if cares else "bold green")
    return Group(head, *said, table, *more, *log)
