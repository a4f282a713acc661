"""Renders a table's ledger: on the screen, as `NAME.md`, and as charts. Its only input is `table_ledger.py`.

Every rendering shows the published number beside ours with the difference, the number of seeds, the spread, the wall
time of a run, and the bytes that one client sends. Accuracies are in percent. A quick run is labelled as one. A page
begins with what is reproduced, what is not and why, and what has not been run (`verdicts.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table as Shown

from protofleet.hw_profiles.charts.curves import Line, curves
from protofleet.hw_profiles.charts.marks import standalone
from protofleet.hw_profiles.charts.scatter import Mark, scatter
from protofleet.hw_profiles.units import nice_bytes
from protofleet.lab.paper_tables.config import Table
from protofleet.lab.paper_tables.cost_page import KINDS
from protofleet.lab.paper_tables.more_tables import metrics_table, seeds_table
from protofleet.lab.paper_tables.table_ledger import Sheet, SheetCell
from protofleet.lab.paper_tables.verdicts import NOT_REPRODUCED, NOT_RUN, ONE_SEED, Claim, claims_of, command_for

__all__ = ["MADE", "head_lines", "hours", "number", "pages", "quick_words", "show"]

MADE = "This page is made from its ledger by `protofleet lab results`."
_LEGEND = "± is the standard deviation over seeds, up/round what one client sends in a round, time/run wall time"
_HEADINGS = ("", "", "ours", "paper", "diff.", "seeds", "up/round", "time/run")


def show(sheet: Sheet) -> Group:
    """The table for a screen."""
    shown = Shown(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, heading in enumerate(_HEADINGS):
        shown.add_column(heading, justify="left" if index < 2 else "right", no_wrap=index > 1)
    before = None
    for cell in sheet.cells:
        if before not in (None, cell.column):
            shown.add_section()
        before = cell.column
        shown.add_row(*_texts(cell))
    lines = [f"[bold]{sheet.title}[/bold]", f"[dim]{sheet.source}[/dim]"]
    warnings = (_validation(sheet), _quick(sheet) if sheet.quick else "")
    lines += [f"[yellow]{warning}[/yellow]" for warning in warnings if warning]
    return Group("", *lines, "", shown, "", *(f"[dim]{note}[/dim]" for note in _notes(sheet)))


def pages(stem: str, sheet: Sheet, table: Table | None = None) -> dict[str, str]:
    """The texts of the page and its charts, by file name.

    Args:
        table: the definition, for the first lines; None for one that is not known.
    """
    charts = _charts(sheet)
    lines = [
        f"# {sheet.title}",
        "",
        *(head_lines(sheet, table) if table is not None else []),
        sheet.source + ". " + _origin(sheet),
        "",
    ]
    lines += ["| " + " | ".join(_HEADINGS) + " |", "| --- | --- |" + " ---: |" * (len(_HEADINGS) - 2)]
    lines += ["| " + " | ".join(_texts(cell)) + " |" for cell in sheet.cells]
    lines += ["", f"Accuracy in percent; {_LEGEND}.", ""]
    lines += [f"- {note}" for note in _notes(sheet)]
    lines += [*seeds_table(sheet), *metrics_table(sheet)]
    lines += ["", *(f"![{which}]({stem}-{which}.svg)" for which in charts)]
    text = "\n".join(lines).rstrip() + "\n"
    return {f"{stem}.md": text, **{f"{stem}-{which}.svg": svg for which, svg in charts.items()}}


# ── the first lines ─────────────────────────────────────────────────────────────────────────────────────────────────


def head_lines(sheet: Sheet, table: Table) -> list[str]:
    """The first lines of a page: reproduced, not reproduced, or not run, and why."""
    opening = [f"**{validation}**", ""] if (validation := _validation(sheet)) else []
    if sheet.quick:
        return [*opening, f"**{_quick(sheet)}**", ""]
    claims = claims_of(table, sheet, sheet.preset)
    opening += [*(f"- {line}" for line in table.found), ""] if table.found else []
    if not claims:
        return opening or ["**Nothing to reproduce**: no numbers are published for this setting.", ""]
    counted = [claim for claim in claims if not claim.is_again]
    reproduced = [claim for claim in counted if claim.held]
    missed = [claim for claim in claims if claim.verdict == NOT_REPRODUCED]
    single = [claim for claim in claims if claim.verdict == ONE_SEED]
    missing = [claim for claim in claims if claim.verdict == NOT_RUN]
    verdict = (
        "Reproduced"
        if len(reproduced) == len(counted)
        else "Partly reproduced"
        if reproduced
        else "Not reproduced"
        if missed
        else "Without a verdict"
        if single
        else "Not run"
    )
    count = f"{len(reproduced)} of {len(counted)} published numbers"
    lines = [*opening, f"**{verdict}: {count}**{_how(reproduced)}.", ""]
    lines += [f"- Not reproduced: {text}" for text in _by_row(missed)]
    lines += [f"- One seed, no verdict: {text}" for text in _by_row(single)]
    lines += [f"- Not run: {text}" for text in _by_row(missing)]
    runnable = [claim for claim in missing if claim.row_there]
    if runnable:
        preset = sheet.preset if sheet.preset != table.preset else ""
        command = command_for(sheet.table, [claim.row for claim in runnable], preset=preset)
        lines.append(f"- To run them: `{command}`, about {hours(_sum(missing))} on one core; {quick_words(table)}")
    return [*lines, *([""] if missed or single or missing else [])]


def quick_words(table: Table) -> str:
    """What `--quick` would run of the table."""
    return f"with `--quick` {table.quick.says}." if table.quick else "there is no quick fraction."


def hours(value: float | None) -> str:
    """Hours in words."""
    if value is None:
        return "at a cost that nothing here has measured"
    return f"{value * 60:.0f} minutes" if value < 1.5 else f"{value:,.0f} hours"


def number(claim: Claim, value: float, *, sign: bool = False) -> str:
    """A number as it is printed: the published one, ours, or their difference."""
    return claim.quantity.printed(value, sign)


def _how(reproduced: Sequence[Claim]) -> str:
    kinds = list(dict.fromkeys(claim.verdict for claim in reproduced))
    counts = [f"{sum(claim.verdict == kind for claim in reproduced)} {kind}" for kind in kinds]
    return f" ({', '.join(counts)})" if counts else ""


def _by_row(claims: Sequence[Claim]) -> list[str]:
    """A line for each row, with its columns and why."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for claim in claims:
        rows.setdefault((claim.row, claim.what, claim.why), []).append(claim.column + _apart(claim))
    lines = []
    for (row, what, why), texts in rows.items():
        subject = f"{row}, {what}" if what != "accuracy" else row
        lines.append(f"{subject}: {', '.join(texts)}" + (f". {why[0].upper()}{why[1:]}." if why else "."))
    return lines


def _apart(claim: Claim) -> str:
    return "" if claim.difference is None else f" ({number(claim, claim.difference, sign=True)})"


def _sum(claims: Sequence[Claim]) -> float | None:
    """Of runs, each once: a gain or a number of bytes comes with the accuracy's."""
    by_cell = {(claim.row, claim.column): claim.hours for claim in claims}
    known = [value for value in by_cell.values() if value is not None]
    return sum(known) if known else None


# ── the page ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _origin(sheet: Sheet) -> str:
    commands = "; ".join(f"`{command}`" for command in sheet.commands or [sheet.command])
    preset = f"Settings: {sheet.preset}. " if sheet.preset else ""
    data = f"Data: {sheet.data}. " if sheet.data else ""
    return f"{data}{preset}Run by {commands}, with {', '.join(sheet.code)}. {MADE}"


def _texts(cell: SheetCell) -> tuple[str, ...]:
    mean = (
        "diverged"
        if cell.failures and cell.accuracy is None
        else "–"
        if cell.accuracy is None
        else _percent(cell.accuracy)
    )
    spread = cell.std_over_seeds
    difference = "" if cell.difference is None else f"{cell.difference * 100:+.2f}"
    return (
        cell.row,
        cell.column,
        mean + (f" ± {spread * 100:.2f}" if spread is not None else ""),
        "" if cell.published is None else _percent(cell.published),
        difference,
        str(cell.runs),
        nice_bytes(cell.uplink_bytes_per_client_round) if cell.uplink_bytes_per_client_round else "",
        _time(cell.seconds) if cell.seconds else "",
    )


def _notes(sheet: Sheet) -> list[str]:
    notes = [f"{cell.row}: {cell.note}" for cell in sheet.cells if cell.note]
    failed = [f"{cell.row}, {cell.column}: {line}" for cell in sheet.cells for line in cell.failures]
    return [*dict.fromkeys([*sheet.notes, *notes]), *failed]


def _validation(sheet: Sheet) -> str:
    """Which rows are of the validation split, in words; empty for none."""
    if not sheet.validated:
        return ""
    every = len(sheet.validated) == len({cell.row for cell in sheet.cells})
    which = "" if every else ", the rows " + ", ".join(sheet.validated)
    return f"Of the validation split{which}: training images that no client trains on; no test image was looked at."


def _quick(sheet: Sheet) -> str:
    return f"quick: {sheet.quick}; not comparable with the published numbers"


# ── charts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _charts(sheet: Sheet) -> dict[str, str]:
    """By name: for each column, curves over rounds and accuracy against bytes, as the table asks."""
    charts = {}
    columns = list(dict.fromkeys(cell.column for cell in sheet.cells))
    for place, column in enumerate(columns, start=1):
        suffix = f"-{place}" if len(columns) > 1 else ""
        mine = [cell for cell in sheet.cells if cell.column == column and cell.accuracy is not None]
        over_rounds = [cell for cell in mine if len(cell.curve) > 1]
        if "curves" in sheet.charts and over_rounds:
            charts[f"curves{suffix}"] = standalone(_curves(over_rounds, f"accuracy over rounds, {column}"))
        if "bytes" in sheet.charts and mine:
            charts[f"bytes{suffix}"] = standalone(_bytes(mine, f"accuracy against bytes from one client, {column}"))
    return charts


def _bytes(cells: Sequence[SheetCell], title: str) -> str:
    marks = [
        Mark(cell.row, KINDS.get(cell.family, "pooled"), cell.uplink_bytes_per_client, cell.accuracy or 0.0)
        for cell in cells
    ]
    return scatter(marks, title)


def _curves(cells: Sequence[SheetCell], title: str) -> str:
    """Rounds at even distances that every row has measured; bands are a standard deviation over seeds either way."""
    every = max(cell.rounds_apart for cell in cells)
    common = sorted(set.intersection(*({int(name) for name in cell.curve} for cell in cells)))
    even = [place for place in common if place % every == 0]
    rounds = even if len(even) > 1 else common
    kinds = tuple(KINDS.values())
    lines = [
        Line(
            cell.row,
            kinds[(place + 1) % len(kinds)],
            [cell.curve[str(place)] for place in rounds],
            dashed=place >= len(kinds),
            band=[cell.curve_std.get(str(place), 0.0) for place in rounds] if cell.curve_std else (),
        )
        for place, cell in enumerate(cells)
    ]
    return curves(lines, [str(place) for place in rounds], title)


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.2f}"


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
