"""`protofleet pki`: certificates for a fleet, and the broker's files, which stop a client from acting as another.

Each command says which folder must be copied where. The directory holds the key that signs everything. Keep it on the
operator's own machine, not on the broker and not on a device.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofleet.contract.console.tables import show_table
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, beside, write_json
from protofleet.contract.printable import counted
from protofleet.pki import names
from protofleet.pki.authority import AUTHORITY_DAYS, CERTIFICATE_DAYS, LIST_DAYS, PLACE, Office, establish
from protofleet.pki.expiry import entries, on, warnings
from protofleet.pki.register import Book, Member, read_book

__all__ = ["pki_app"]

SCHEMA = "protofleet.pki/1"
pki_app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Certificates for a fleet, and the broker's files.",
)

_Dir = Annotated[Path, typer.Option("--dir", help="The authority's directory.")]
_Fleets = Annotated[list[str] | None, typer.Option("--fleet", help="Its fleet; again for further ones.")]
_Days = Annotated[
    int | None,
    typer.Option(min=1, max=3650, help="The certificate is good so long.  [default: as pki init said]"),
]
_HERE = Path("pki")


@pki_app.command("init")
def init_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A new directory.")],
    broker: Annotated[
        list[str],
        typer.Option(help="Host name or address that devices reach the broker by; again, or with commas, for more."),
    ],
    fleet: Annotated[list[str] | None, typer.Option(help="A fleet's id; again for more.  [default: fleet]")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The broker's port.")] = 8883,
    place: Annotated[str, typer.Option(help="Where the broker's files lie on its machine.")] = PLACE,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Certificates are good so long.")] = CERTIFICATE_DAYS,
    crl_days: Annotated[int, typer.Option(min=1, max=3650, help="A revocation list is good so long.")] = LIST_DAYS,
    ca_days: Annotated[int, typer.Option(min=1, max=7300, help="The authority is good so long.")] = AUTHORITY_DAYS,
) -> int:
    """Make an authority, and certificates for the broker and the aggregator."""
    hosts = [host.strip() for given in broker for host in given.split(",") if host.strip()]
    if not hosts:
        raise UsageError("--broker", expected="a host name or an address", got="none", hint="--broker broker.local")
    if not place.startswith("/") or not place.isprintable() or place != place.strip():
        raise UsageError("--place", expected="an absolute path", got=repr(place)[:80], hint=PLACE)
    if max(days, crl_days) > ca_days:
        raise UsageError("--ca-days", expected="no less than --days and --crl-days", got=ca_days)
    terms = {"days": days, "list_days": crl_days, "authority_days": ca_days}
    book = establish(directory, hosts, fleet or ["fleet"], port=port, place=place, **terms)
    _say(f"authority {book.authorities[0].id} until {on(book.authorities[0].until)}, certificates for {days} days")
    _say(f"broker: copy {directory}/broker to the machine it runs on, as {place} (deploy/README.md)")
    for name in (name for name, member in book.members.items() if member.role == "aggregator"):
        if not name.endswith(f".{names.ROLLOUT}"):
            _say(f"{name}: copy {directory}/{name} to where it runs")
    _say(f"keep {directory}/authority to yourself: its key signs everything")
    return 0


@pki_app.command("device")
def device_command(
    device: Annotated[str, typer.Argument(metavar="ID", help="The device's --id.")],
    fleet: _Fleets = None,
    days: _Days = None,
    directory: _Dir = _HERE,
) -> int:
    """Give a device its certificate; of one that has one, change its fleets."""
    name = names.check_device(device)
    with Office.open(directory) as office:
        member = Member(role="device", fleets=_given(fleet, office.book))
        _admitted(office, name, office.admit(name, member, days))
    return _after(directory)


@pki_app.command("aggregator")
def aggregator_command(
    fleet: Annotated[str | None, typer.Option(help="A fleet's id.  [default: the first one]")] = None,
    workers: Annotated[
        int, typer.Option(min=0, max=1_000, help="Instead: a certificate for each of so many aggregate --worker.")
    ] = 0,
    directory: _Dir = _HERE,
) -> int:
    """Add a fleet, with a certificate for its aggregator; or give back one that was revoked."""
    with Office.open(directory) as office:
        if workers:
            for name in office.add_workers(fleet or office.book.fleets[0], workers):
                _admitted(office, name, True, tells_broker=False)
            _tell_broker(directory)
            return _after(directory)
        _admitted(office, office.add_fleet(fleet or office.book.fleets[0]), True)
    return _after(directory)


@pki_app.command("helper")
def helper_command(
    fleet: Annotated[str | None, typer.Option(help="Of which fleet.  [default: the first one]")] = None,
    directory: _Dir = _HERE,
) -> int:
    """Give a fleet's helper its certificate: to hear what the aggregator asks of it, and to answer."""
    with Office.open(directory) as office:
        first = office.book.fleets[0]
        name = names.of_fleet("helper", fleet or first, first)
        _admitted(office, name, office.admit(name, Member(role="helper", fleets=(fleet or first,))))
    return _after(directory)


@pki_app.command("other")
def other_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Such as dashboard, or kitchen.answers beside kitchen.")],
    read: Annotated[list[str] | None, typer.Option(help="A topic filter it may read; again for more.")] = None,
    write: Annotated[list[str] | None, typer.Option(help="A topic it may write; again for more.")] = None,
    directory: _Dir = _HERE,
) -> int:
    """Give a certificate to something else, for topics outside of the fleets': to show answers, or to publish them."""
    may_read, may_write = (tuple(map(names.check_topic, given or ())) for given in (read, write))
    if not may_read and not may_write:
        raise UsageError("other", expected="--read or --write", got="neither", hint="--read answers/+")
    with Office.open(directory) as office:
        member = Member(role="other", read=may_read, write=may_write)
        _admitted(office, name, office.admit(names.check_other(name), member))
    return _after(directory)


@pki_app.command("revoke")
def revoke_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of whoever is not to be let in any more.")],
    directory: _Dir = _HERE,
) -> int:
    """Let nobody of that name in any more, whichever of its certificates it shows."""
    with Office.open(directory) as office:
        office.revoke(name)
    _say(f"{name} is revoked, from the moment at which the broker has read its files again")
    _tell_broker(directory)
    return _after(directory)


@pki_app.command("renew")
def renew_command(
    renewed: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Devices, aggregator, helper, broker.")
    ] = None,
    due: Annotated[bool, typer.Option("--due", help="All that expire soon, or are of the old authority.")] = False,
    crl: Annotated[bool, typer.Option("--crl", help="The revocation list.")] = False,
    days: _Days = None,
    directory: _Dir = _HERE,
) -> int:
    """Give new keys and certificates in place of those that expire; the old ones stay good until then."""
    if not (renewed or due or crl):
        raise UsageError("renew", expected="a name, --due or --crl", got="none", hint="protofleet pki list")
    if days is not None and not (renewed or due):
        raise UsageError("--days", expected="a name or --due beside it", got="--crl alone", hint="pki init --crl-days")
    with Office.open(directory) as office:
        wanted = list(dict.fromkeys(renewed or ()))
        if due:
            wanted += [name for name in _due(office.book) if name not in wanted]
        for name in wanted:
            office.renew(name, days)
            _admitted(office, name, True, tells_broker=False)
        office.renew_lists()
        until = min(authority.list_until for authority in office.book.authorities)
    _say(f"revocation list until {on(until)}")
    _tell_broker(directory)
    return _after(directory)


@pki_app.command("rotate-ca")
def rotate_command(
    finish: Annotated[bool, typer.Option("--finish", help="Drop the old one, when all have been renewed.")] = False,
    leave_behind: Annotated[
        bool, typer.Option("--leave-behind", help="Drop it although some have not been: they are shut out.")
    ] = False,
    ca_days: Annotated[int, typer.Option(min=1, max=7300, help="The new one is good so long.")] = AUTHORITY_DAYS,
    directory: _Dir = _HERE,
) -> int:
    """Replace the authority: a new one beside the old one, both trusted, and later only the new one."""
    if leave_behind and not finish:
        raise UsageError("--leave-behind", expected="--finish beside it", got="none")
    with Office.open(directory) as office:
        if finish:
            left = office.finish_rotation(leave_behind=leave_behind)
            _say(f"authority {office.book.authorities[0].id} alone is trusted now, and the broker has its certificate")
            if left:
                _say(f"shut out until they are renewed: {', '.join(left)}")
        else:
            office.rotate(ca_days)
            _say(f"authority {office.book.authorities[-1].id} signs from now on; both are trusted")
            count = counted(len(office.left_behind()), "certificate")
            _say(f"next: the broker's files; then protofleet pki renew --due ({count}), and copying each to its place")
    _tell_broker(directory)
    return _after(directory)


@pki_app.command("list")
def list_command(
    every: Annotated[bool, typer.Option("--all", help="Every certificate, not only the newest of each name.")] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the list"))] = None,
    directory: _Dir = _HERE,
) -> int:
    """Who has a certificate, until when, and who is revoked."""
    book, now = read_book(directory), int(time.time())
    listed = list(entries(book, now, every=every))
    write_json(json, {"schema": SCHEMA, "fleets": book.fleets, "entries": [_dated(asdict(entry)) for entry in listed]})
    roles = [entry.role if entry.name in book.members and entry.role != entry.name else "" for entry in listed]
    rows = [(e.name, role, " ".join(e.fleets), on(e.until), e.words) for e, role in zip(listed, roles, strict=True)]
    show_table(beside(json), ("name", "role", "fleets", "until", ""), rows, words=range(5))
    return _after(directory)


# ── what is said ────────────────────────────────────────────────────────────────────────────────────────────────────


def _given(fleets: list[str] | None, book: Book) -> tuple[str, ...]:
    return tuple(dict.fromkeys(fleets or [book.fleets[0]]))


def _due(book: Book) -> list[str]:
    """The names whose certificates must be renewed now. An aggregator's second one is renewed with the first."""
    now = int(time.time())
    states = {entry.name: entry.state for entry in entries(book, now) if entry.name in book.members}
    return [
        name
        for name, state in states.items()
        if state in ("soon", "expired", "old", "gone")
        and not name.endswith(f".{names.ROLLOUT}")
        and not (name == names.BROKER and state == "old")
    ]


def _admitted(office: Office, name: str, is_new: bool, *, tells_broker: bool = True) -> None:
    newest = office.book.newest(name)
    if is_new and newest is not None:
        _say(f"{name}: until {on(newest.until)}; copy {office.folder(name)} to where it runs")
    else:
        fleets = ", ".join(office.book.members[name].fleets)
        _say(f"{name}: " + (f"in {fleets} from now on" if fleets else "has other topics from now on"))
    if tells_broker:
        _tell_broker(office.directory)


def _tell_broker(directory: Path) -> None:
    _say(f"then copy {directory}/broker to the broker, and have it read the files: systemctl reload mosquitto")


def _after(directory: Path) -> int:
    """Warn about everything that expires soon, after any command."""
    for line in warnings(read_book(directory), int(time.time())):
        Console(stderr=True).print(f"[yellow]warning[/yellow]: {line}", highlight=False, soft_wrap=True)
    return 0


def _say(line: str) -> None:
    Console().print(line, markup=False, highlight=False, soft_wrap=True)


def _dated(content: dict[str, Any]) -> dict[str, Any]:
    """The entry with its times in ISO 8601."""
    times = {name: content[name] for name in ("since", "until", "revoked") if content[name] is not None}
    return content | {name: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time_s)) for name, time_s in times.items()}
