"""What `protofleet inspect` shows of a device's ledger: each release, and what ε they come to.

ε is at the δ that the device last started with, and computed where `dp-accounting` is installed.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from contract.errors import UsageError
from contract.tables import show_table
from contract.terminal import counted, printable
from edge_client.ledger import FILE, Entry, Spent, Terms, read_ledger
from edge_client.privacy import Accountant

__all__ = ["describe_ledger", "is_ledger", "show_ledger"]

_SQLITE = b"SQLite format 3\0"
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
    """What a ledger, or the one of a state directory, holds, as JSON-ready values.

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
    found = asdict(entry)
    return found | {"run": entry.run.hex(), "digest": entry.digest.hex()}


def _epsilons(spent: Spent, terms: Terms) -> dict[str, Any]:
    """ε by relation; null where none holds, or it cannot be computed here."""
    found: dict[str, Any] = dict.fromkeys(_RELATIONS)
    if terms.delta is None:
        return found
    accountant = Accountant(terms.delta)
    try:
        accountant.look_ahead([(spent.of(name)[0], 0.0) for name in _RELATIONS if not spent.of(name)[1]])
        return {name: None if spent.of(name)[1] else accountant.epsilon(spent.of(name)[0]) for name in _RELATIONS}
    except UsageError as error:
        return found | {"why": str(error)}


def show_ledger(facts: dict[str, Any], console: Console) -> None:
    """The same for a person."""
    shown = [_row(each) for each in facts["releases"]]
    if shown:
        show_table(console, _COLUMNS, shown, words=[0, 1, 2, 3, 4, 5, 6])
    for line in _lines(facts):
        console.print(printable(line), highlight=False, markup=False, soft_wrap=True)


def _lines(facts: dict[str, Any]) -> list[str]:
    spent, releases = Spent(**facts["spent"]), facts["releases"]
    size = sum(each["payload_bytes"] for each in releases)
    lines = [f"{counted(len(releases), 'release')}, {size:,} bytes, repetitions not counted: {facts['path']}"]
    for name, of_any in _RELATIONS.items():
        words = of_any + (" by another of its class" if name == "replace" and spent.is_by_class else "")
        epsilon, bare = facts["spent_epsilon"][name], spent.of(name)[1]
        if bare:
            lines.append(f"for {words}: no ε holds, {counted(bare, 'release')} without")
        elif epsilon is not None:
            of = f" of {facts['epsilon']:g}" if facts["epsilon"] is not None and facts["neighbours"] == name else ""
            lines.append(f"for {words}: ε = {epsilon:.3g}{of} at δ = {facts['delta']:g}")
    return lines + ([facts["spent_epsilon"]["why"]] if "why" in facts["spent_epsilon"] else [])


def _when(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # no clock has ever said that
        return "an unknown time"


def _row(each: dict[str, Any]) -> tuple[str, ...]:
    cost = each["cost"]
    of = f"{each['run']} {each['round']}" if each["run"] else ""
    costs = ", ".join("no ε" if cost[name] is None else f"{cost[name]:.3g}" for name in ("add_remove", "replace"))
    words = (each["what"], each["fleet"], of, each["method"], each["statistic"], each["encoding"])
    return (_when(each["at"]), *map(printable, words), f"{each['payload_bytes']:,}", costs)
