"""The commands `protofleet forget` and `protofleet fleet …`: what an operator sees in a store, and asks of a fleet.

`list`, `show` and `log` read the store and change nothing. `backup` and `restore` copy it. Everything else is an order
(`aggregator/store/operator_orders.py`): it is in the store when the command returns 0. A running aggregator takes it up
within about a second, and the command waits for that. If none runs, the next one takes it up, and the command says that
it is NOT yet done.
"""

from __future__ import annotations

import getpass
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from protofleet.aggregator.database import PLACE, Place, bring_up, place_of, read_only
from protofleet.aggregator.enrolment.gate import OF_THE_DEVICE
from protofleet.aggregator.monitoring.device_table import EVENTS_OF_ONE, accuracy_of, device_events
from protofleet.aggregator.overview.fleet_state import (
    accuracy_in_words,
    event_in_words,
    gateway_in_words,
    heard_in_words,
    presence_in_words,
    proposal_in_words,
    read_state,
    state_facts,
    state_in_lines,
)
from protofleet.aggregator.overview.fleet_text import (
    beside_record,
    drift_in_short,
    drift_in_words,
    intruder_in_words,
    key_name,
    order_in_words,
    read_known,
    record_in_words,
    standing_in_words,
    when,
)
from protofleet.aggregator.overview.standing_suspects import standing_suspects, sums_stand
from protofleet.aggregator.store.backup import WRITTEN_TO, back_up, restore
from protofleet.aggregator.store.durable_store import as_written
from protofleet.aggregator.store.finding_tables import found_in_short, found_in_words
from protofleet.aggregator.store.operator_orders import await_done, give
from protofleet.aggregator.store.order_table import Order, orders
from protofleet.aggregator.store.schema import KIND
from protofleet.aggregator.store.standing_tables import Record
from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.json_output import JSON_HELP, beside, check_target, write_json
from protofleet.contract.printable import counted, printable
from protofleet.contract.wire.topics import check_id

__all__ = [
    "DeviceName",
    "JsonFile",
    "StorePlace",
    "WaitSeconds",
    "ask",
    "check_telling",
    "fleet_app",
    "forget_command",
    "operator",
    "tell",
    "told_of",
]

SCHEMA = "protofleet.fleet/1"
fleet_app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="See the devices of a store, and tell its aggregator what to do.",
)

StorePlace = Annotated[
    Any, typer.Option(parser=place_of, metavar=PLACE, help="The aggregator's store; it may be running.")
]
DeviceName = Annotated[str, typer.Argument(metavar="DEVICE", help="Its id.")]
_ADevice = Annotated[str | None, typer.Argument(metavar="DEVICE", help="Its id.")]
_Class = Annotated[
    str | None, typer.Option("--class", metavar="NAME", help="In place of DEVICE: a class of the fleet's bundle.")
]
WaitSeconds = Annotated[float, typer.Option(help="Seconds to wait for a running aggregator to have done it.")]
JsonFile = Annotated[Path | None, typer.Option(help=JSON_HELP.format("what was found or done"))]
WAIT_S = 15.0
_INTRUDERS = _NEWEST = 20  # lines
_UNTIL_THEN = {  # what an operator must not believe
    "forget": "all that came from it is still held and still counts",
    "forget class": "all that is held of it still counts",
    "remove": "what it sends is still taken",
    "revoke": "what its key signs is still taken",
    "rollback": "devices keep what they have",
}


def forget_command(
    store: StorePlace, device: _ADevice = None, name: _Class = None, wait: WaitSeconds = WAIT_S, json: JsonFile = None
) -> int:
    """Take all that came from a device or of a class out of the fleet, make anew what comes back, and take no more."""
    return _order_of_one("forget", store, device, name, wait, json)


@fleet_app.command("list")
def list_command(store: StorePlace, json: JsonFile = None) -> int:
    """The devices that a store knows."""
    state = read_state(store)
    known = state.known
    records, drift, rollouts, policies = known.records, known.drift, known.said, known.policies
    devices = [
        asdict(record) | beside_record(known, record.device) | {"state": state_facts(state, record.device)}
        for record in records.values()
    ]
    intruders = [asdict(intruder) for intruder in known.intruders]
    forgotten, drifting = known.classes_forgotten, known.classes_drifting
    content = {"schema": SCHEMA, "devices": devices, "classes_forgotten": forgotten, "classes_drifting": drifting}
    content |= {"classes_proposed": state.proposed, "gateways": state.gateways}
    write_json(json, content | {"intruders": intruders, "aggregator_runs": state.runs})
    columns = {
        "device": [printable(device) for device in records],
        "state": [presence_in_words(state, device) for device in records],
        "heard": [heard_in_words(state, device) for device in records],
        "standing": [standing_in_words(r) for r in records.values()],
        "rounds": [str(r.rounds) for r in records.values()],
        "drift": [drift_in_short(drift, device) for device in records],
        "rollout": [printable(rollouts.get(device, "")) for device in records],
        "found": [found_in_short(known.findings.get(device)) for device in records],
        "policy": [printable(policies.get(device, "")) for device in records],
        "key": [key_name(known.keys, device) or "" for device in records],
        "refused": [r.refused for r in records.values()],
    }
    rare = ("state", "heard", "standing", "rollout", "found", "policy", "key")
    columns = {name: cells for name, cells in columns.items() if name not in rare or any(cells)}
    text_columns = [index for index, name in enumerate(columns) if name != "rounds"]
    show_table(beside(json), tuple(columns), list(zip(*columns.values(), strict=True)), words=text_columns)
    for name, members in state.gateways.items():
        _say(json, f"{printable(name)}: {gateway_in_words(members)}")
    for name, why in drifting.items():
        _say(json, f"drift suspected of class {name}: {why['now']:.1f} times as far, usually {why['usual']:.1f}")
    for intruder in known.intruders[:_INTRUDERS]:
        _say(json, intruder_in_words(intruder))
    for name, by in list(state.proposed.items())[:_NEWEST]:
        _say(json, f"{proposal_in_words(name, by)}; protofleet export --extend makes it one")
    if forgotten:
        _say(json, f"forgotten classes: {', '.join(forgotten)}; protofleet fleet admit --class NAME takes one in again")
    return 0


@fleet_app.command("show")
def show_command(device: DeviceName, store: StorePlace, json: JsonFile = None) -> int:
    """What a store knows of one device, and what was asked about it."""
    state = read_state(store)
    known = state.known
    drift, rollouts = known.drift, known.said
    with read_only(store, KIND) as db, as_written(store):
        events, accuracy = device_events(db, device, EVENTS_OF_ONE), accuracy_of(db, device)
    intruders = [intruder for intruder in known.intruders if intruder.device == device]
    record = known.records.get(device)
    log = [order for order in known.orders if order.device == device]
    if (
        record is None
        and not log
        and device not in rollouts
        and device not in {intruder.device for intruder in intruders}
    ):
        raise _unknown(store, device, known.records)
    record = record or Record(device)
    write_json(
        json,
        {
            "schema": SCHEMA,
            **asdict(record),
            **beside_record(known, device),
            "orders": [asdict(order) for order in log],
            "key": key_name(known.keys, device),
            "intruders": [asdict(intruder) for intruder in intruders],
            "state": state_facts(state, device),
            "accuracy": accuracy,
            "events": [asdict(event) for event in events],
            "aggregator_runs": state.runs,
        },
    )
    lines = [f"{device}: {record_in_words(record)}"]
    lines += state_in_lines(state, device)
    lines += [accuracy_in_words(accuracy)] if accuracy else []
    lines += [f"received {when(record.received_at)}, {record.received_bytes:,} bytes"] if record.present else []
    lines += [f"refused: {record.refused}"] if record.refused else []
    lines += [drift_in_words(drift[device])] if device in drift else []
    lines += [found_in_words(known.findings[device], told=device in known.told)] if device in known.findings else []
    lines += [f"key {key}" for key in [key_name(known.keys, device)] if key]
    lines += [intruder_in_words(intruder) for intruder in intruders]
    lines += [f"rollout: version {printable(rollouts[device])}"] if rollouts.get(device) else []
    lines += [f"refused by its policy, {printable(known.policies[device])}"] if device in known.policies else []
    for line in (*lines, *map(event_in_words, reversed(events[:_NEWEST])), *map(order_in_words, log)):
        _say(json, line)
    return 0


@fleet_app.command("log")
def log_command(store: StorePlace, json: JsonFile = None) -> int:
    """Who asked for what, when, and between which global versions it took effect."""
    log = read_known(store).orders
    write_json(json, {"schema": SCHEMA, "orders": [asdict(order) for order in log]})
    for order in log:
        _say(json, order_in_words(order))
    return 0


@fleet_app.command("suspects")
def suspects_command(
    store: StorePlace,
    vouch: Annotated[
        list[str] | None,
        typer.Option(help="A trusted device: who contradicts it is treated as lying. Repeatable."),
    ] = None,
    json: JsonFile = None,
) -> int:
    """Who may mean no good: devices whose class means contradict those of others, where sums stand; what spoke against
    devices when rounds closed; and intruders, who spoke without or against a device's enrolment."""
    sure = [check_id(name, "--vouch") for name in vouch or ()]
    known = read_known(store)
    with read_only(store, KIND) as db, as_written(store):
        devices, suspects = standing_suspects(db, sure) if sure or sums_stand(db) else (len(known.records), [])
    intruders = [asdict(suspect) for suspect in known.intruders]
    content = {"schema": SCHEMA, "devices": devices, "suspects": [asdict(suspect) for suspect in suspects]}
    write_json(json, content | {"findings": known.findings, "intruders": intruders})
    for suspect in suspects:
        few = "" if suspect.accused else ", fewer than may lie"
        _say(json, f"{suspect.device}: {suspect.words()}{few}; protofleet forget {suspect.device} takes it out")
    for device, newest in known.findings.items():
        _say(json, f"{device}: {found_in_words(newest)}")
    for intruder in known.intruders:
        _say(json, intruder_in_words(intruder))
    suspected = len({suspect.device for suspect in suspects} | set(known.findings))
    turned_away = sum(suspect.cause not in OF_THE_DEVICE for suspect in known.intruders)
    more = f", {counted(turned_away, 'intruder')} turned away" if turned_away else ""
    _say(json, f"{counted(suspected, 'device')} of {devices} suspected{more}")
    return 0


@fleet_app.command("admit")
def admit_command(
    store: StorePlace, device: _ADevice = None, name: _Class = None, wait: WaitSeconds = WAIT_S, json: JsonFile = None
) -> int:
    """Let a device in again that was forgotten, removed or has withdrawn, or a class that was forgotten."""
    return _order_of_one("admit", store, device, name, wait, json)


@fleet_app.command("remove")
def remove_command(device: DeviceName, store: StorePlace, wait: WaitSeconds = WAIT_S, json: JsonFile = None) -> int:
    """Take nothing more from a device; what it gave stays, unlike with forget."""
    return ask("remove", store, device, wait, json)


@fleet_app.command("pause")
def pause_command(store: StorePlace, wait: WaitSeconds = WAIT_S, json: JsonFile = None) -> int:
    """Make nothing new of what devices send, which is taken and kept, until it is resumed."""
    return ask("pause", store, "", wait, json)


@fleet_app.command("resume")
def resume_command(store: StorePlace, wait: WaitSeconds = WAIT_S, json: JsonFile = None) -> int:
    """Go on after a pause."""
    return ask("resume", store, "", wait, json)


@fleet_app.command("rollback")
def rollback_command(
    store: StorePlace,
    device: Annotated[
        str | None, typer.Argument(metavar="DEVICE", help="Take back every round since its first contribution.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Take back so many of the last rounds.  [default: 1]")] = None,
    wait: WaitSeconds = WAIT_S,
    json: JsonFile = None,
) -> int:
    """Give devices again what they had before the last rounds, of which nothing is kept."""
    if device is not None and rounds is not None:
        raise UsageError("DEVICE and --rounds", expected="one of them", got="both")
    if device is not None:
        return ask("rollback", store, device, wait, json, known=True)
    number = 1 if rounds is None else rounds
    if number < 1:
        raise UsageError("--rounds", expected="1 or more", got=number)
    return ask("rollback", store, "", wait, json, detail=str(number))


@fleet_app.command("open-round")
def open_round_command(store: StorePlace, wait: WaitSeconds = WAIT_S, json: JsonFile = None) -> int:
    """Open a round now, where rounds come by schedule or by news."""
    return ask("open-round", store, "", wait, json)


@fleet_app.command("close-round")
def close_round_command(store: StorePlace, wait: WaitSeconds = WAIT_S, json: JsonFile = None) -> int:
    """End the open round with the contributions that it has."""
    return ask("close-round", store, "", wait, json)


@fleet_app.command("backup")
def backup_command(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The backup, one file; an earlier one is replaced.")],
    store: StorePlace,
    json: JsonFile = None,
) -> int:
    """Write the store as it is now into one file, while the aggregator runs."""
    check_target(json)  # what is done is told
    written = back_up(store, out, operator())
    write_json(json, {"schema": SCHEMA, "backup": asdict(written)})
    line = f"backup of {store}: {out}, {written.file_bytes:,} bytes; it holds what the store holds, for its owner alone"
    _say(json, line + (f"; not in the store's record: {written.unrecorded}" if written.unrecorded else ""))
    return 0


@fleet_app.command("restore")
def restore_command(
    backup: Annotated[Path, typer.Argument(metavar="BACKUP", help="What fleet backup wrote.")],
    store: Annotated[
        Any, typer.Option(parser=place_of, metavar=PLACE, help="The store to make; no aggregator may run on it.")
    ],
    force: Annotated[bool, typer.Option("--force", help="Take the place of a store that is there.")] = False,
    json: JsonFile = None,
) -> int:
    """Make a store of a backup, as a new run, which devices join by themselves."""
    check_target(json)
    restored = restore(backup, store, operator(), force=force)
    write_json(json, {"schema": SCHEMA, "restored": asdict(restored)})
    again = "what was forgotten since is not known here: forget it again"
    if restored.again is not None and restored.replaced:
        again = f"{counted(restored.again, 'order')} of the store before to be done again"
    _say(json, f"{store} restored as of {when(restored.made_at, 'an unknown time')}, run {restored.run}; {again}")
    _say(json, "next: start the aggregator as before, without --new-run; its devices join by themselves")
    return 0


def _order_of_one(
    what: str, store: Place, device: str | None, name: str | None, wait_s: float, json: Path | None
) -> int:
    """An order of a device that the store knows, or of a class; whether there is such a one the aggregator says."""
    if (device is None) == (name is None):
        got = "neither" if device is None else "both"
        raise UsageError("DEVICE and --class", expected="one of them", got=got)
    if name is not None:
        return ask(f"{what} class", store, "", wait_s, json, detail=name)
    return ask(what, store, device or "", wait_s, json, known=True)


def ask(
    what: str, store: Place, device: str, wait_s: float, json: Path | None, *, known: bool = False, detail: str = ""
) -> int:
    """Record an order and wait until it is done, where somebody does it; 1 when it cannot be done.

    Args:
        known: whether it makes sense only of a device that the store knows.
        detail: what else the order is about: a class, a stage.
    """
    check_telling(wait_s, json)
    if known:
        bring_up(store, KIND)
        records = read_known(store).records
        if device not in records:
            raise _unknown(store, device, records)
    order, running = give(store, what, device, operator(), detail=detail)
    return tell(order, running, store, wait_s, json)


def check_telling(wait_s: float, json: Path | None) -> None:
    """That what will become of an order can be waited for and told, before it is recorded.

    Raises:
        UsageError: the time is none, or the report cannot be written.
    """
    check_target(json)
    if not 0 <= wait_s <= 1e6:  # NaN is not
        raise UsageError("--wait", expected="0 to 1e+06 seconds", got=wait_s)


def tell(order: Order, running: bool, store: Place, wait_s: float, json: Path | None) -> int:
    """Wait until an order is done, where an aggregator runs that does it, and say what became of it; 1 when it cannot
    be done."""
    if running:
        order = await_done(store, order, wait_s)
    refused = (order.outcome or "").startswith("refused")
    backups = _backups(store) if order.what in ("forget", "forget class") and not refused else []
    write_json(json, {"schema": SCHEMA, "order": asdict(order), "aggregator_runs": running, "backups": backups})
    _say(json, told_of(order, running, wait_s))
    if backups:
        _say(json, f"backups hold it until you destroy them: {', '.join(backups)}")
    return int(refused)


def told_of(order: Order, running: bool, wait_s: float) -> str:
    """What became of an order, for a person.

    Args:
        wait_s: how long an aggregator that runs was waited for.
    """
    line = order_in_words(order)
    if order.done_at is not None:
        return line
    why = "no aggregator runs on this store; the next one that is started on it does it"
    if running:
        why = f"the aggregator on this store has not done it within {wait_s:g} s; protofleet fleet log tells when"
    still = _UNTIL_THEN.get(order.what)
    return f"{line}: {why}" + (f". Until then {still}" if still else "")


def _backups(store: Place) -> list[str]:
    """Where backups of a store were written, as far as it knows."""
    with read_only(store, KIND) as db:
        outcomes = [order.outcome or "" for order in orders(db, "WHERE what = 'backup'")]
    return list(
        dict.fromkeys(outcome.removeprefix(WRITTEN_TO) for outcome in outcomes if outcome.startswith(WRITTEN_TO))
    )


def operator() -> str:
    """Who runs this command, for the record."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        return f"user {os.getuid()}"


def _unknown(store: Place, device: str, records: dict[str, Any]) -> UsageError:
    hint = near_names(device, records) if records else "protofleet fleet list"
    return UsageError(f"DEVICE in {store}", expected="a device that the store knows", got=device, hint=hint)


def _say(json: Path | None, line: str) -> None:
    beside(json).print(line, highlight=False, markup=False, soft_wrap=True)
