"""`protofleet lab results`: every page and chart of a folder of ledgers, made again without running anything.

    FOLDER/NAME.json   the ledgers (`table_ledger.py`): read; NAME-quick.json are of quick fractions, which stand
    beside what
                       has not been run
    FOLDER/NAME.md     their pages, and NAME-….svg, their charts (`render.py`): written
    FOLDER/NAME-joules.md, …-joules.svg   of a table that asks for it: what it costs boards (`cost_page.py`)
    FOLDER/README.md   every published number of every table beside ours, what was not run with its command
    FOLDER/presets.md  the settings by source, side by side (`presets.py`)

`take` puts a table's run into the folder, in the place of the cells that it has run again. `differing` says which
files are not what the ledgers make of them. Ledgers of other commands are left alone, but for the claims of `hardware
cost`, which the list of published numbers shows too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.json_output import write_text
from protofleet.lab.paper_tables.config import TABLES, Table, read_table
from protofleet.lab.paper_tables.cost_page import joules_pages, wants_joules
from protofleet.lab.paper_tables.presets import presets_page
from protofleet.lab.paper_tables.render import MADE, hours, number, pages, quick_words
from protofleet.lab.paper_tables.table_ledger import Sheet, is_ledger, merged, read_sheet, write_json
from protofleet.lab.paper_tables.verdicts import NOT_REPRODUCED, NOT_RUN, WITHIN, Claim, claims_of, command_for

__all__ = ["differing", "made", "take", "write", "write_sheet"]

_HARDWARE = "hardware-training-cost.json"
_QUICK = "-quick"  # how the name of a quick fraction's ledger ends


def made(folder: Path) -> dict[str, str]:
    """Every file that the folder's ledgers make, by its name.

    Raises:
        StoreError: there is no such folder, or a ledger cannot be read.
        UsageError: a ledger is broken, of a later Protofleet, or not what its name says.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}", expected="a folder of ledgers", got="none")
    sheets = {path.stem: _named_sheet(path) for path in sorted(folder.glob("*.json")) if is_ledger(path)}
    texts: dict[str, str] = {}
    for stem, sheet in sheets.items():
        texts |= _pages(stem, sheet, read_table(sheet.table)[1] if sheet.table in TABLES else None)
    lists = {"README.md": _every_number(folder, list(sheets.values())), "presets.md": presets_page()}
    return texts | lists


def differing(folder: Path) -> list[str]:
    """The names of the files that are missing or not what the ledgers make, and of pages whose ledger is gone.

    Raises:
        StoreError, UsageError: as `made`.
    """
    texts = made(folder)
    return [*_differing(folder, texts), *_left_over(folder, texts)]


def _left_over(folder: Path, texts: Mapping[str, str]) -> list[str]:
    """Pages that were made from a ledger that is gone, and their charts."""
    left = [path for path in sorted(folder.glob("*.md")) if path.name not in texts and _is_made(path)]
    charts = [path.name for page in left for path in sorted(folder.glob(f"{page.stem}-*.svg"))]
    return [*(path.name for path in left), *(name for name in charts if name not in texts)]


def _is_made(page: Path) -> bool:
    return page.is_file() and MADE in page.read_text(encoding="utf-8", errors="replace")


def _differing(folder: Path, texts: Mapping[str, str]) -> list[str]:
    def is_there(name: str) -> bool:
        path = folder / name
        return path.is_file() and path.read_bytes() == texts[name].encode()

    return [name for name in texts if not is_there(name)]


def write(folder: Path) -> list[Path]:
    """Write what differs; the paths of it.

    Raises:
        StoreError, UsageError: as `made`; or the disk refuses.
    """
    texts = made(folder)
    changed = _differing(folder, texts)
    for name in changed:
        write_text(folder / name, texts[name], option="lab results")
    return [folder / name for name in changed]


def take(folder: Path, *ledgers: Path) -> list[Path]:
    """Put ledgers' cells into the folder, all of them or, where one is refused, none; the paths of the folder's own.

    Raises:
        StoreError, UsageError: one cannot be read, or is of another table, preset or fraction than its name says.
    """
    sheets: dict[Path, Sheet] = {}
    for ledger in ledgers:
        newer, place = _named_sheet(ledger, "--take"), folder / ledger.name
        before = sheets.get(place) or (read_sheet(place) if place.exists() else None)
        sheets[place] = newer if before is None else merged(before, newer)
    for place, sheet in sheets.items():
        write_json(place, sheet)
    return list(sheets)


def write_sheet(out: Path, sheet: Sheet, table: Table) -> list[Path]:
    """Write a run's ledger, its page and its charts; returns the paths.

    Raises:
        StoreError, UsageError: when the disk refuses.
    """
    stem = _stem(sheet, table)
    write_json(out / f"{stem}.json", sheet)
    texts = _pages(stem, sheet, table)
    for name, text in texts.items():
        write_text(out / name, text, option="--out")
    return [out / f"{stem}.json", *(out / name for name in texts)]


def _stem(sheet: Sheet, table: Table) -> str:
    """How the ledger's name begins."""
    preset = f"-{sheet.preset}" if sheet.preset != table.preset else ""
    return f"{sheet.table}{preset}{_QUICK if sheet.quick else ''}"


def _named_sheet(path: Path, option: str = "lab results") -> Sheet:
    """A ledger that is what its name says; of a table that is not known here, a quick run or a whole one.

    Raises:
        StoreError, UsageError: it cannot be read, or it is another.
    """
    sheet = read_sheet(path)
    if bool(sheet.quick) != path.stem.endswith(_QUICK):
        expected = f"a name that ends with {_QUICK}.json for a quick run, and for no other"
        raise UsageError(option, expected=expected, got=f"{path}: {sheet.quick or 'a whole run'}")
    if sheet.table in TABLES and (stem := _stem(sheet, read_table(sheet.table)[1])) != path.stem:
        raise UsageError(option, expected=f"the name {stem}.json for what the ledger holds", got=f"{path}")
    return sheet


def _pages(stem: str, sheet: Sheet, table: Table | None) -> dict[str, str]:
    """The table's page, and that of what it costs boards."""
    texts = pages(stem, sheet, table)
    if table is None or not wants_joules(sheet, table):
        return texts
    more = f"What it costs a board, modelled: [{stem}-joules.md]({stem}-joules.md).\n"
    return texts | {f"{stem}.md": f"{texts[f'{stem}.md']}\n{more}"} | joules_pages(stem, sheet, table)


# ── every published number ──────────────────────────────────────────────────────────────────────────────────────────


def _every_number(folder: Path, sheets: Sequence[Sheet]) -> str:
    sections: list[str] = []
    every: list[Claim] = []
    again: list[Claim] = []  # by other settings than the table's usual ones, where they have been run
    for name in TABLES:
        _, table = read_table(name)
        mine = [sheet for sheet in sheets if sheet.table == name and not sheet.quick]
        if not any(sheet.preset == table.preset for sheet in mine):
            mine.insert(0, _nothing(name, table))
        for sheet in sorted(mine, key=lambda sheet: sheet.preset != table.preset):
            quick = next((other for other in sheets if _is_fraction(other, sheet)), None)
            claims = claims_of(table, sheet, sheet.preset, quick)
            if sheet.preset != table.preset:
                claims = [claim for claim in claims if claim.verdict != NOT_RUN]
                again += claims
            else:
                every += claims
            sections += _section(folder, name, table, sheet, claims)
    return "\n".join([*_top(every, again), *sections, *_causes(folder), *_hardware(folder)]).rstrip() + "\n"


def _is_fraction(quick: Sheet, whole: Sheet) -> bool:
    return bool(quick.quick) and (quick.table, quick.preset) == (whole.table, whole.preset)


def _nothing(name: str, table: Table) -> Sheet:
    """A table of which nothing has been run."""
    title, source = table.title, table.source
    return Sheet(schema="", table=name, title=title, source=source, notes=[], cells=[], preset=table.preset)


def _top(claims: Sequence[Claim], again: Sequence[Claim]) -> list[str]:
    claims, again = (_once(part) for part in (claims, again))
    missing = {(claim.row, claim.column, claim.hours) for claim in claims if claim.verdict == NOT_RUN}
    left = sum(value for _, _, value in missing if value is not None)
    others = [f"Some also by other settings of the same tables (`--preset`): {_counts(again)}."] if again else []
    return [
        "# Every published number, beside ours",
        "",
        f"**{len(claims)} published numbers: {_counts(claims)}.**",
        *others,
        f"What has not been run would take at most {hours(left)} on one core, by runs that were timed, or a guess.",
        "",
        "Made by `protofleet lab results` from the ledgers (`*.json`) beside it and the tables' definitions; nothing",
        "is run. Accuracies are percent, gains percent of the other row's accuracy, parameters what one client sends",
        "in a round. ± beside ours is half the 95 % interval of its mean over seeds: a published number *inside our",
        "interval* is no miss, and with two seeds the interval is wide. *Within 1 point* is of these percentages, and",
        "at most a tenth of the published error; *within the paper's spread* is its own ±, *within a tenth* of a",
        "number of parameters, which some papers print in round thousands. *One seed* is no verdict. A number that a",
        "row gives by another reading of the paper is counted once, at the row of the paper. *Not run* is also what",
        "was run with settings that the table no longer has. Ledgers of 0.1 do not name their code.",
    ]


def _once(claims: Sequence[Claim]) -> list[Claim]:
    """Each published number once."""
    return [claim for claim in claims if not claim.is_again]


def _counts(claims: Sequence[Claim]) -> str:
    ordered = Counter(claim.verdict for claim in claims).most_common()
    return ", ".join(f"{count} {verdict}" for verdict, count in ordered)


def _section(folder: Path, name: str, table: Table, sheet: Sheet, claims: Sequence[Claim]) -> list[str]:
    if not claims:
        return []
    preset = sheet.preset if sheet.preset != table.preset else ""
    stem = f"{name}-{preset}" if preset else name
    title = f"[{stem}]({stem}.md)" if (folder / f"{stem}.json").exists() else stem
    lines = ["", f"## {title}: {table.title}", "", f"{table.source}."]
    lines += [f"Settings: {sheet.preset}, {table.presets[sheet.preset].says}."] if sheet.preset else []
    lines += ["", "| row | column | what | published | ours | diff. | seeds | verdict |"]
    lines += ["| --- | --- | --- | ---: | ---: | ---: | ---: | --- |"]
    lines += [_line(name, table, preset, claim) for claim in claims]
    return lines


def _line(name: str, table: Table, preset: str, claim: Claim) -> str:
    published = number(claim, claim.published) + (f" ± {claim.spread:.2f}" if claim.spread is not None else "")
    ours = "" if claim.ours is None else number(claim, claim.ours)
    ours += "" if claim.half is None else f" ± {claim.half:.2f}"
    difference = "" if claim.difference is None else number(claim, claim.difference, sign=True)
    seeds = str(claim.seeds) if claim.seeds else ""
    verdict = " ".join(_verdict(name, table, preset, claim).split()).replace("|", "\\|")
    texts = (claim.row, claim.column, claim.what, published, ours, difference, seeds, verdict)
    return f"| {' | '.join(texts)} |"


def _verdict(name: str, table: Table, preset: str, claim: Claim) -> str:
    why = f": {claim.why}" if claim.why else ""
    if claim.verdict != NOT_RUN:
        return f"{claim.verdict}{why}"
    if not claim.row_there:
        return f"{NOT_RUN}{why}"
    command = command_for(name, [claim.row], [claim.column], preset)
    quick = f"`--quick`: {table.quick.says}" if table.quick else "no quick fraction"
    if claim.quick_failure:
        quick += f", came to nothing: {claim.quick_failure}"
    elif claim.quick is not None:
        quick += f", gave {number(claim, claim.quick, sign=claim.quantity.is_gain)}"
    return f"{NOT_RUN}{why}; `{command}`, {hours(claim.hours)}, seeds {table.seeds}; {quick}"


def _causes(folder: Path) -> list[str]:
    """Tables that test a cause, on the validation split: what was found."""
    lines = ["", "## Why: tables that test a cause", ""]
    lines += [
        "Hypotheses were stated before the runs and stand on the pages; the validation split decides. No number of a"
    ]
    lines += ["published table is of these runs."]
    for name in TABLES:
        _, table = read_table(name)
        if table.settings.validation:
            has_run = (folder / f"{name}.json").exists()
            lines += ["", f"### {f'[{name}]({name}.md)' if has_run else name}: {table.title}", ""]
            lines += [f"- {line}" for line in table.found if has_run]
            lines += [] if has_run and table.found else [_to_be_told(name, table, has_run)]
    return lines


def _to_be_told(name: str, table: Table, has_run: bool) -> str:
    command = f"`{command_for(name, ())}`"
    return f"Run by {command}; nothing is concluded yet." if has_run else f"Not run: {command}; {quick_words(table)}"


def _hardware(folder: Path) -> list[str]:
    """SphereFed's claims about an accelerator, by every assumption under which they were worked out."""
    path = folder / _HARDWARE
    if not path.exists():
        return []
    claims = _hardware_claims(path)
    lines = ["", "## [hardware-training-cost](hardware-training-cost.md): what SphereFed saves on an accelerator", ""]
    lines += [
        "Dong et al., ECCV 2022: percent saved of a round's memory and latency, and by FFC of CCVR's latency. The"
    ]
    lines += ["paper names no assumptions; each line is of one.", ""]
    lines += ["| claim | published | ours | assumption | verdict |", "| --- | ---: | ---: | --- | --- |"]
    for claim in claims:
        published, ours = claim.paper_percent, claim.mobilenetv2_percent
        verdict = WITHIN if abs(ours - published) <= 1.0 else NOT_REPRODUCED
        lines.append(f"| {claim.claim} | {published:.1f} | {ours:.2f} | {claim.assumption} | {verdict} |")
    return lines


class _HardwareClaim(msgspec.Struct, frozen=True):
    claim: str
    assumption: str
    paper_percent: float
    mobilenetv2_percent: float


class _HardwareLedger(msgspec.Struct, frozen=True):
    claims: list[_HardwareClaim]


def _hardware_claims(path: Path) -> list[_HardwareClaim]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_HardwareLedger).claims
    except OSError as error:
        raise StoreError(f"{path}", expected="the ledger of hardware cost", got=error.strerror) from None
    except ValueError as error:
        raise UsageError(f"{path}", expected="the ledger of hardware cost", got=error) from None
