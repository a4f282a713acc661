"""The command `protofleet helper`: options in, a line for each set, an exit code out."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofleet.aggregator.database.store_url import place_of
from protofleet.aggregator.helper.ledger import Ledger
from protofleet.aggregator.helper.opening import Helper
from protofleet.aggregator.helper.process import HelperServer
from protofleet.aggregator.helper.witness import Witness
from protofleet.contract.console.interrupt import Terminated, interruptible
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.console.verbosity import QUIET_HELP
from protofleet.contract.errors import UsageError
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import Keyring, Signer
from protofleet.contract.identity.signing_keys import read_public_key
from protofleet.contract.mqtt.link import Address
from protofleet.contract.printable import counted
from protofleet.contract.privacy.openable_sets import smaller
from protofleet.contract.privacy.sealing import check_least, make_helper_key, read_helper_key
from protofleet.contract.wire.topics import check_id

__all__ = ["helper_command"]


def _file_of(text: str) -> Path:
    place = place_of(text)
    if not isinstance(place, Path):
        raise UsageError("--store", expected="a SQLite file", got="a server's URL")
    return place


def helper_command(
    key: Annotated[
        Path | None, typer.Option(help="The helper's key file; its .pub is for aggregator and devices.")
    ] = None,
    store: Annotated[
        Any,
        typer.Option(
            parser=_file_of,
            metavar="<path>",
            help="SQLite file of what was opened; made when absent.",
            show_default=False,
        ),
    ] = None,
    broker: Annotated[str | None, typer.Option(help="mqtt://host[:port] or mqtts://host[:port].")] = None,
    devices: Annotated[
        Path | None, typer.Option(help="TOML file: a table [devices] of names and public keys, of whom alone sums are.")
    ] = None,
    least: Annotated[int | None, typer.Option(help="No sum over fewer devices is ever opened; 2 or more.")] = None,
    fleet: Annotated[str, typer.Option(help="The fleet's id, in every topic.")] = "fleet",
    trust: Annotated[
        str | None, typer.Option(help="Ed25519 public key file of the aggregator; nobody else's asking is heard.")
    ] = None,
    new_key: Annotated[
        Path | None, typer.Option("--new-key", metavar="FILE", help="Make a key file and its .pub, and end.")
    ] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed the broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of our certificate.")] = None,
    cert_key: Annotated[str | None, typer.Option(help="PEM file of our certificate's key.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
) -> int:
    """Open the sums of blinded rounds, and nothing else: run it where the aggregator's operator has no access."""
    console = Console(stderr=True, quiet=quiet)

    def log(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    if new_key is not None:
        make_helper_key(new_key)
        log(f"{new_key} is the helper's alone; {new_key}.pub is for aggregate --helper and each client --helper-key")
        return 0
    required = {"--key": key, "--store": store, "--broker": broker, "--devices": devices, "--least": least}
    missing = [option for option, value in required.items() if value is None]
    if missing or key is None or store is None or broker is None or devices is None or least is None:
        raise UsageError("protofleet helper", expected=" and ".join(missing), got="none", hint="--help")
    check_least(least)
    check_id(fleet, "--fleet")
    listed, private = devices, read_helper_key(key)
    count = len(read_allowlist(listed))
    waits = "" if count >= least else "; nothing is opened before the list has as many"
    log(f"{counted(count, 'device')} enrolled, no sum over fewer than {least} of them is opened{waits}")
    trusted = None if trust is None else Keyring([read_public_key(trust)])
    address = Address.parse(broker, ca_file=ca, cert_file=cert, key_file=cert_key)
    public = private.public.seal
    with Ledger(store, fleet=fleet, key=public, witness=Witness(key, fleet, public)) as ledger:
        few = smaller(ledger.blocks, least)
        if few:
            log(f"{counted(few, 'device')} that earlier sums show among fewer than {least} can be summed no more")
        helper = Helper(ledger, private, fleet, lambda: read_allowlist(listed), least)
        server = HelperServer(
            helper,
            Signer(private.sign),
            address,
            fleet,
            trusted=trusted,
            log=log,
            stopping=threading.Event(),
            manager=ServiceManager(),
        )
        try:
            with interruptible(terminable=True):
                server.run()
        except (Terminated, KeyboardInterrupt) as signal:
            log(f"stopped: what was opened is in {store}")
            return 143 if isinstance(signal, Terminated) else 130
    return 0
