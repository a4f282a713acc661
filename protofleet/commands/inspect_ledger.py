"""The ledger of a device for `protofleet inspect`: each release, and the total ε.

ε is at the δ of the device's last start. It is computed where `dp-accounting` is installed.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.printable import counted, printable
from protofleet.edge_client.privacy.accountant import Accountant
from protofleet.edge_client.privacy.ledger import BESIDE, FILE, Entry, Spent, Terms, read_ledger

__all__ = ["describe_ledger", "is_ledger", "show_ledger"]

_SQLITE = b"SQLite format 3\0"
_DAY_S = 86_400
_RELATIONS = {"add-remove": "one sample more or fewer", "replace": "one sample replaced"}
_COLUMNS = ("when", "what", "fleet", "round", "method", "statistic", "encoding", "bytes", "cost add/remove, replace")


def is_ledger(file: Path) -> bool:
    """Whether this is a state directory, or a database."""
    try:
        if file.is_dir():
            return True
        with file.open("rb") as stream:
            return stream.read(len(_SQLITE)) == _SQLITE
    except OSError:
        return False


def describe_ledger(file: Path) -> dict[str, Any]:
    """The content of a ledger, or of a state directory's ledger, as values for JSON.

    Raises:
        StoreError: it cannot be read.
        UsageError: there is none, or it is another kind of file.
    """
    path = file / FILE if file.is_dir() else file
    if file.is_dir() and not path.is_file():
        raise UsageError(str(file), expected=f"a state directory, with {FILE} in it", got="a folder without")
    entries, spent, terms = read_ledger(path)
    return {
        "kind": "ledger",
        "path": str(path),
        "releases": [_release(entry) for entry in entries],
        "spent": asdict(spent),
        **asdict(terms),
        "spent_epsilon": _epsilons(spent, terms),
    }


def _release(entry: Entry) -> dict[str, Any]:
    facts = asdict(entry)
    return facts | {"run": entry.run.hex(), "digest": entry.digest.hex()}


def _epsilons(spent: Spent, terms: Terms) -> dict[str, Any]:
    """ε by neighbouring relation; None where no ε holds, or it cannot be computed here."""
    epsilons: dict[str, Any] = dict.fromkeys(_RELATIONS)
    if terms.delta is None:
        return epsilons
    accountant = Accountant(terms.delta)
    try:
        accountant.look_ahead([(spent.of(name)[0], 0.0) for name in _RELATIONS if not spent.of(name)[1]])
        return {name: None if spent.of(name)[1] else accountant.epsilon(spent.of(name)[0]) for name in _RELATIONS}
    except UsageError as error:
        return epsilons | {"why": str(error)}


def show_ledger(facts: dict[str, Any], console: Console) -> None:
    """Show the ledger to a person."""
    shown = [_row(release) for release in facts["releases"]]
    if shown:
        show_table(console, _COLUMNS, shown, words=[0, 1, 2, 3, 4, 5, 6])
    for line in _lines(facts):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def _lines(facts: dict[str, Any]) -> list[str]:
    spent, releases = Spent(**facts["spent"]), facts["releases"]
    shown = [release for release in releases if release["what"] == "shown"]
    answered = {
        release["at"] // _DAY_S for release in releases if release["what"] == "answer"
    }  # a row for each address
    releases = [release for release in releases if release["what"] not in BESIDE]
    size = sum(release["payload_bytes"] for release in releases)
    lines = [f"{counted(len(releases), 'release')}, {size:,} bytes, repetitions not counted: {facts['path']}"]
    if shown:
        rows = f"{counted(len(shown), 'row')}, one for each browser, address and hour"
        lines.append(f"photos were shown on this device's page: {rows}; no ε is stated of them")
    if answered:
        days = counted(len(answered), "day")
        lines.append(f"answers were published for Home Assistant on {days}, which no ε is stated of")
    for name, of_any in _RELATIONS.items():
        relation = of_any + (" by another of its class" if name == "replace" and spent.is_by_class else "")
        epsilon, bare = facts["spent_epsilon"][name], spent.of(name)[1]
        if bare:
            lines.append(f"for {relation}: no ε holds, {counted(bare, 'release')} without")
        elif epsilon is not None:
            budget = f" of {facts['epsilon']:g}" if facts["epsilon"] is not None and facts["neighbours"] == name else ""
            lines.append(f"for {relation}: ε = {epsilon:.3g}{budget} at δ = {facts['delta']:g}")
    return lines + ([facts["spent_epsilon"]["why"]] if "why" in facts["spent_epsilon"] else [])


def _when(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # a time that no clock can show
        return "an unknown time"


def _row(release: dict[str, Any]) -> tuple[str, ...]:
    cost = release["cost"]
    round_name = f"{release['run']} {release['round']}" if release["run"] else ""
    costs = ", ".join("no ε" if cost[name] is None else f"{cost[name]:.3g}" for name in ("add_remove", "replace"))
    cells = (
        release["what"],
        release["fleet"],
        round_name,
        release["method"],
        release["statistic"],
        release["encoding"],
    )
    return (_when(release["at"]), *map(printable, cells), f"{release['payload_bytes']:,}", costs)
