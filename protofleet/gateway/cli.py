"""The command `protofleet gateway`: options in, progress lines and an exit code out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from protofleet.aggregator.commands.aggregate_cli import until_stopped
from protofleet.aggregator.commands.common_options import Enrolled, LimitBytes, MaxSamples, MetricsAt, Quiet, Verbose
from protofleet.aggregator.database import PLACE, place_of
from protofleet.aggregator.ingest.validation import MAX_SAMPLES
from protofleet.aggregator.metrics.console import Progress
from protofleet.aggregator.metrics.metrics_server import parse_metrics
from protofleet.aggregator.rounds.round_machine import Policy
from protofleet.aggregator.server.service import settings_of
from protofleet.contract.console.verbosity import check_loudness
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP, is_stdout, write_json
from protofleet.contract.methods import METHOD_HELP
from protofleet.contract.mqtt.link import Address
from protofleet.edge_client.settings import read_settings
from protofleet.gateway.service import Gateway

__all__ = ["gateway_command"]


def gateway_command(
    bundle: Annotated[list[Path], typer.Option(help="The fleet's bundle; again for any it extends.")],
    broker: Annotated[str, typer.Option(help="Of the site, where its devices are: mqtt://host[:port] or mqtts://.")],
    store: Annotated[
        Any,
        typer.Option(
            parser=place_of,
            metavar=PLACE,
            help="Where the site's sums are held: a SQLite file, or postgresql://user@host/db; made, or resumed.",
        ),
    ],
    above: Annotated[str, typer.Option(help="Broker of the aggregator above: mqtt://host[:port] or mqtts://.")],
    id: Annotated[str, typer.Option(help="This gateway's id above, which aggregate --gateway names: a-z, 0-9 and -.")],
    state: Annotated[str, typer.Option(help="Directory for what goes up; survives restarts.")],
    fleet: Annotated[str, typer.Option(help="The fleet's id, in every topic of the site.")] = "fleet",
    above_fleet: Annotated[str | None, typer.Option(help="The fleet's id above.  [default: --fleet]")] = None,
    method: Annotated[str | None, typer.Option(help=f"Whose sums: {METHOD_HELP}  [default: the bundle's]")] = None,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="How long sums stay above at least, before newer ones go up.  [default: 60s]"
        ),
    ] = None,
    min_clients: Annotated[
        int, typer.Option(help="In rounds: devices that a round of the site waits for, up to its deadline.")
    ] = 1,
    min_samples: Annotated[
        int, typer.Option(help="Classes with fewer examples stay on a device; never fewer than announced above.")
    ] = 1,
    max_samples: MaxSamples = MAX_SAMPLES,
    limit_bytes: LimitBytes = 65_536,
    keepalive: Annotated[int, typer.Option(help="Seconds that the connection above may be silent, 10 to 3600.")] = 60,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed the site's broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of our certificate on the site.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of our key on the site.")] = None,
    above_ca: Annotated[str | None, typer.Option(help="The same of the broker above.")] = None,
    above_cert: Annotated[str | None, typer.Option(help="PEM file of our certificate above.")] = None,
    above_key: Annotated[str | None, typer.Option(help="PEM file of our key above.")] = None,
    sign: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Ed25519 private key file that signs what the site is told: client --trust."),
    ] = None,
    enrolled: Enrolled = False,
    trust: Annotated[
        str | None, typer.Option(metavar="KEY", help="Ed25519 public key file: believe nothing else from above.")
    ] = None,
    identity: Annotated[
        str | None, typer.Option(metavar="KEY", help="Ed25519 private key file that signs what goes up.")
    ] = None,
    token: Annotated[str | None, typer.Option(help="One-time token with which to be enrolled above.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End another aggregator that serves this site, instead of refusing.")
    ] = False,
    metrics: MetricsAt = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("what stands, after every change,"))] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Aggregate a site, and send what its devices sum up as one contribution, until it is stopped."""
    check_loudness(quiet, verbose)
    upward = {"bundle": str(bundle[0]), "broker": above, "id": id, "state": state, "data": "-", "method": method}
    upward |= {"fleet": above_fleet or fleet, "ca": above_ca, "cert": above_cert, "key": above_key}
    upward |= {"trust": trust, "identity": identity, "token": token}
    config = read_settings(None, {**upward, "keepalive": keepalive})
    settings = settings_of(
        method=method,
        min_samples=min_samples,
        max_samples=max_samples,
        limit_bytes=limit_bytes,
        every=every,
        standing=True,
        enrolled=enrolled,
    )
    if min_clients < 1:
        raise UsageError("--min-clients", expected="1 or more", got=min_clients)
    settings = replace(settings, policy=Policy(min_clients))
    address = Address.parse(broker, ca_file=ca, cert_file=cert, key_file=key)
    if (broker, fleet) == (above, above_fleet or fleet):
        got = f"both {address}, fleet {fleet}"
        raise UsageError("--broker and --above", expected="two brokers, or two fleets", got=got, hint="--above-fleet")
    console = Console(stderr=True, quiet=quiet)

    def log(line: str) -> None:
        console.print(escape(line), highlight=False, soft_wrap=True)

    served = None if metrics is None else parse_metrics(metrics)
    gateway = Gateway(
        bundle,
        address,
        store,
        fleet,
        settings,
        take_over=take_over,
        metrics=served,
        sign=sign,
        above=config,
        log=log,
    )

    def on_summary(content: dict[str, Any], finished: bool) -> None:
        if finished or not is_stdout(json):
            write_json(json, content)

    def run() -> None:
        gateway.run(Progress(console, verbose=verbose), on_summary)

    return until_stopped(run, console, f"the site goes on with the same --store {store} and --state {state}")
