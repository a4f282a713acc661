"""The commands `protofleet aggregate` and `protofleet broker`: options in, progress lines and an exit code out."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from protofleet.aggregator.commands.common_options import Enrolled, LimitBytes, MaxSamples, MetricsAt, Quiet, Verbose
from protofleet.aggregator.database import PLACE, place_of
from protofleet.aggregator.ingest.validation import MAX_SAMPLES
from protofleet.aggregator.metrics.console import Progress
from protofleet.aggregator.metrics.metrics_server import LOOPBACK, parse_metrics
from protofleet.aggregator.rounds.round_machine import DEADLINE_S
from protofleet.aggregator.screening.outliers import SUSPECTS
from protofleet.aggregator.server.broker import MAX_PAYLOAD_BYTES, EmbeddedBroker
from protofleet.aggregator.server.service import Service, settings_of
from protofleet.contract.console.interrupt import Terminated, interruptible
from protofleet.contract.console.verbosity import VERBOSE_HELP, check_loudness
from protofleet.contract.errors import LinkError, UsageError
from protofleet.contract.files.json_output import JSON_HELP, is_stdout, write_json
from protofleet.contract.methods import METHOD_HELP
from protofleet.contract.mqtt.address import parse_listen
from protofleet.contract.mqtt.link import Address
from protofleet.contract.sums.merge_rules import RULES

__all__ = ["aggregate_command", "broker_command", "until_stopped"]

_EVERYWHERE = ("0.0.0.0", "::")
_OPEN_WARNING = (
    "[yellow]warning[/yellow]: anyone who reaches it may publish and read: this broker has no passwords, "
    "no ACL and no TLS; see deploy/ for one that has"
)


def aggregate_command(
    bundle: Annotated[
        list[Path],
        typer.Option(
            help="The fleet's bundle; again for each further backbone that devices may have, and for any it extends."
        ),
    ],
    broker: Annotated[str, typer.Option(help="mqtt://host[:port] or mqtts://host[:port].")],
    store: Annotated[
        Any,
        typer.Option(
            parser=place_of,
            metavar=PLACE,
            help="Where the run is held: a SQLite file, or postgresql://user@host/db; made, or resumed.",
        ),
    ],
    fleet: Annotated[str, typer.Option(help="The fleet's id, in every topic.")] = "fleet",
    method: Annotated[str | None, typer.Option(help=f"Of the rounds: {METHOD_HELP}  [default: the bundle's]")] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds of that method.  [default: 5, 1 where it trains nothing]")
    ] = None,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="End with one FFC round.  [default: where there is one bundle]",
        ),
    ] = None,
    min_clients: Annotated[int, typer.Option(help="Contributions that close a round, and devices that open it.")] = 1,
    every: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION",
            help="Stay, and open a round so often: 30m, 6h, 1d.  [default: never]  With --standing: how long a head "
            "stays at least.  [default: 60s]",
        ),
    ] = None,
    when_new: Annotated[
        int,
        typer.Option(help="Stay, and open a round when --min-clients devices have so many new photos each; 0: never."),
    ] = 0,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="DURATION", help="How long each of these rounds is open, whoever sleeps meanwhile.  [default: 1h]"
        ),
    ] = None,
    open_clients: Annotated[
        int | None,
        typer.Option(help="Devices online that open a round.  [default: --min-clients; 1 with --every or --when-new]"),
    ] = None,
    max_clients: Annotated[int, typer.Option(help="Contributions that close a window before its end; 0: none do.")] = 0,
    deadline: Annotated[
        float, typer.Option(help="Seconds a round waits for devices that say nothing; 0 for as long as it takes.")
    ] = DEADLINE_S,
    fraction: Annotated[float, typer.Option(help="Share of the devices sampled in each round.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    min_samples: Annotated[int, typer.Option(help="Classes with fewer examples are withheld, or refused.")] = 1,
    max_samples: MaxSamples = MAX_SAMPLES,
    max_share: Annotated[
        float | None,
        typer.Option(
            help="Largest share of a round's samples that one device counts for, 0.01 to 1.  [default: 0.5; of n "
            "devices 3/n where that is less, but for those of --vouch]"
        ),
    ] = None,
    suspects: Annotated[
        str,
        typer.Option(
            help="Devices whose class means contradict those of too many others: " + ", ".join(SUSPECTS) + "."
        ),
    ] = "leave-out",
    vouch: Annotated[
        list[str] | None,
        typer.Option(
            help="A trusted device: devices that contradict it are treated as lying. With photos of all classes, best: "
            "one or two find liars that go unseen without them. Repeatable."
        ),
    ] = None,
    ridge: Annotated[
        str | None,
        typer.Option(help="Of a head made of sums, in units of trace/D, or auto: chosen from them.  [default: auto]"),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(help="Of FFC's head: ridge, or discriminant, for unequal classes.  [default: ridge]"),
    ] = None,
    rule: Annotated[str, typer.Option(help="How class means merge: " + ", ".join(RULES) + ".")] = "mean",
    encoding: Annotated[str, typer.Option(help="Class means on the wire: f64, int32, f32, f16 or int8.")] = "f32",
    sums_encoding: Annotated[str, typer.Option(help="Sums (FFC's) on the wire: f64, int32, f32 or f16.")] = "f64",
    limit_bytes: LimitBytes = 65_536,
    patience: Annotated[
        float | None,
        typer.Option(
            help="Seconds to wait for the broker at the start.  [default: 60; for ever with --every or --when-new]"
        ),
    ] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed the broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of our certificate.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of our key.")] = None,
    crl: Annotated[
        str | None, typer.Option(help="PEM file of the broker's revocation list; warn before it expires.")
    ] = None,
    standing: Annotated[
        bool,
        typer.Option(
            "--standing",
            help="No rounds: a device's newest sums stand until it replaces or withdraws them (ncm, ffc).",
        ),
    ] = False,
    gateway: Annotated[
        list[str] | None,
        typer.Option(help="A gateway, by its id, that may send sums for the devices behind it. Repeatable."),
    ] = None,
    helper: Annotated[
        str | None,
        typer.Option(help="Blinded rounds: public key file of the helper who opens their sums (docs/blinded.md)."),
    ] = None,
    least: Annotated[
        int | None, typer.Option(help="Devices that a blinded sum has at least, as --min-clients.  [default: 10]")
    ] = None,
    sign: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="Ed25519 private key file that signs all that is published: client --trust."),
    ] = None,
    enrolled: Enrolled = False,
    worker: Annotated[
        bool,
        typer.Option(
            "--worker",
            help="One of any number of such processes, on any machines, with one --store postgresql://… and broker; "
            "one of them leads at a time.",
        ),
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End another aggregator that serves this fleet, instead of refusing.")
    ] = False,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Go on from this store as a new run: for a store from a backup.")
    ] = False,
    metrics: MetricsAt = None,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the run's summary, after every round,"))] = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Run rounds: announce, receive, commit, merge. With --every or --when-new, until it is stopped."""
    check_loudness(quiet, verbose)
    if calibrate and standing:
        raise UsageError("--calibrate with --standing", expected="one of them", got="both: there are no rounds")
    settings = settings_of(
        method=method,
        rounds=rounds,
        calibrate=standing or len(bundle) == 1 if calibrate is None else calibrate,
        min_clients=min_clients,
        deadline=deadline,
        fraction=fraction,
        seed=seed,
        min_samples=min_samples,
        max_samples=max_samples,
        max_share=max_share,
        suspects=suspects,
        vouch=vouch or (),
        ridge=ridge,
        form=form,
        rule=rule,
        encoding=encoding,
        sums_encoding=sums_encoding,
        limit_bytes=limit_bytes,
        every=every,
        when_new=when_new,
        window=window,
        open_clients=open_clients,
        max_clients=max_clients,
        standing=standing,
        helper=helper,
        least=least,
        enrolled=enrolled,
        gateways=gateway or (),
    )
    address = Address.parse(broker, ca_file=ca, cert_file=cert, key_file=key, crl_file=crl)
    served = None if metrics is None else parse_metrics(metrics)
    service = Service(bundle, address, store, fleet, settings, patience, take_over, new_run, served, sign, worker)
    console = Console(stderr=True, quiet=quiet)

    def on_summary(content: dict[str, Any], finished: bool) -> None:
        if finished or not is_stdout(json):
            write_json(json, content)

    def run() -> None:
        service.run(Progress(console, verbose=verbose), on_summary)

    return until_stopped(run, console, f"the run goes on with the same --store {store}")


def broker_command(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 for a free one.")] = "127.0.0.1:1883",
    quiet: Quiet = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("the broker's process and limits"))
    ] = False,
) -> int:
    """Run the embedded MQTT broker."""
    check_loudness(quiet, verbose)
    console = Console(stderr=True, quiet=quiet)
    host, port = parse_listen(listen)

    def run() -> None:
        with EmbeddedBroker(host, port) as running:
            further = " and every other address of this machine" if host in _EVERYWHERE else ""
            console.print(f"broker on {running.url}{further}, Ctrl-C ends it", highlight=False, soft_wrap=True)
            if host not in LOOPBACK:
                console.print(_OPEN_WARNING, highlight=False, soft_wrap=True)
            if verbose:
                about = f"process {running.pid}, messages up to {MAX_PAYLOAD_BYTES:,} bytes, nothing is kept on disk"
                console.print(about, highlight=False, soft_wrap=True)
            while running.running:
                time.sleep(0.2)
            raise LinkError(f"broker on {running.url}", expected="it to go on", got="its process ended")

    code = until_stopped(run, console, "broker stopped")
    return 0 if code == 130 else code


def until_stopped(action: Callable[[], None], console: Console, farewell: str) -> int:
    """Run `action`; Ctrl-C and SIGTERM end it with one line and the exit code they have by custom."""
    try:
        with interruptible(terminable=True):
            action()
    except Terminated:
        return _part(console, f"terminated: {farewell}", 143)
    except KeyboardInterrupt:
        return _part(console, f"interrupted: {farewell}", 130)
    return 0


def _part(console: Console, line: str, code: int) -> int:
    """One last line, past a console that the signal may have caught with half of another line in its buffer."""
    Console(stderr=True, quiet=console.quiet).print(line, highlight=False, soft_wrap=True)
    return code
