"""The commands `protofleet aggregate` and `protofleet broker`: options in, progress lines and an exit code out."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated, get_args

import typer
from rich.console import Console

from aggregator.broker import MAX_PAYLOAD_BYTES, EmbeddedBroker, parse_listen
from aggregator.content import MAX_SAMPLES
from aggregator.coordinator import Coordinator, Settings
from aggregator.events import RunFinished
from aggregator.progress import Progress
from aggregator.report import Summary
from aggregator.rounds import DEADLINE_S, Policy
from aggregator.rules import ROBUST, RULES, check_rule
from aggregator.server import Server
from aggregator.store import SqliteStore
from contract.bundle import Manifest, read_bundle
from contract.errors import LinkError, UsageError, near_names
from contract.fleet import check_fleet
from contract.interrupt import interruptible
from contract.link import Address
from contract.loudness import QUIET_HELP, VERBOSE_HELP, check_loudness
from contract.messages import Encoding
from contract.report import JSON_HELP, is_stdout, write_json
from contract.topics import check_id

__all__ = ["aggregate_command", "broker_command"]

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_OPEN_WARNING = (
    "[yellow]warning[/yellow]: anyone who reaches this address may publish and read: this broker has no passwords, "
    "no ACL and no TLS; see deploy/ for one that has"
)


def aggregate_command(
    bundle: Annotated[
        list[Path], typer.Option(help="The fleet's bundle; again for each further backbone that devices may have.")
    ],
    broker: Annotated[str, typer.Option(help="mqtt://host[:port] or mqtts://host[:port].")],
    store: Annotated[Path, typer.Option(help="SQLite file that holds the run; made when absent, resumed when not.")],
    fleet: Annotated[str, typer.Option(help="The fleet's id, in every topic.")] = "fleet",
    rounds: Annotated[int, typer.Option(help="Rounds of the bundle's method.")] = 5,
    calibrate: Annotated[
        bool | None,
        typer.Option(
            "--calibrate/--no-calibrate",
            help="End with one FFC round.  [default: where there is one bundle]",
        ),
    ] = None,
    min_clients: Annotated[int, typer.Option(help="Devices that open a round, contributions that close it.")] = 1,
    deadline: Annotated[
        float, typer.Option(help="Seconds a round waits for devices that say nothing; 0 for as long as it takes.")
    ] = DEADLINE_S,
    fraction: Annotated[float, typer.Option(help="Share of the devices sampled in each round.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    min_samples: Annotated[int, typer.Option(help="Classes with fewer examples are withheld, or refused.")] = 1,
    max_samples: Annotated[
        int, typer.Option(help="Refuse a device that says it has more samples than this.")
    ] = MAX_SAMPLES,
    max_share: Annotated[
        float, typer.Option(help="Largest share of a round's samples that one device counts for, 0.5 to 1.")
    ] = 0.5,
    ridge: Annotated[
        float | None, typer.Option(help="Ridge of FFC's closed form, in units of trace/D.  [default: the bundle's]")
    ] = None,
    rule: Annotated[str, typer.Option(help="How class means merge: " + ", ".join(RULES) + ".")] = "mean",
    encoding: Annotated[str, typer.Option(help="Class means on the wire: f64, f32, f16 or int8.")] = "f32",
    ffc_encoding: Annotated[str, typer.Option(help="FFC's sums on the wire: f64, f32 or f16.")] = "f64",
    limit_bytes: Annotated[int, typer.Option(help="Largest message; larger contributions travel in chunks.")] = 65_536,
    patience: Annotated[float, typer.Option(help="Seconds to wait for the broker at the start.")] = 60.0,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signed the broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of our certificate.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of our key.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="End another aggregator that serves this fleet, instead of refusing.")
    ] = False,
    new_run: Annotated[
        bool, typer.Option("--new-run", help="Go on from this store as a new run: for a store from a backup.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help=JSON_HELP.format("the run's summary, after every round,"))] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("what became of each message, and counts at the end")),
    ] = False,
) -> int:
    """Run rounds: announce, receive, commit, merge."""
    check_loudness(quiet, verbose)
    check_id(fleet, "--fleet")
    settings = Settings(
        rounds=rounds,
        calibrate=len(bundle) == 1 if calibrate is None else calibrate,
        policy=_policy(min_clients, deadline, fraction, seed),
        rule=check_rule(rule, ROBUST[0]),
        encoding=_encoding("--encoding", encoding, get_args(Encoding)),
        ffc_encoding=_encoding("--ffc-encoding", ffc_encoding, ("f64", "f32", "f16")),
        min_samples=_at_least("--min-samples", min_samples, 1),
        max_samples=_at_least("--max-samples", max_samples, 1),
        max_share=_between("--max-share", max_share, 0.5, 1.0),
        ridge=None if ridge is None else _between("--ridge", ridge, 0.0, 1e6),
        limit_bytes=limit_bytes,
    )
    address = Address.parse(broker, ca_file=ca, cert_file=cert, key_file=key)
    manifest, hashes = _identity(bundle)
    console = Console(stderr=True, quiet=quiet)

    def run() -> None:
        with SqliteStore(store, _together(hashes), fleet) as opened:
            if new_run:
                opened.begin_new_run()
            now = time.monotonic()
            coordinator = Coordinator(opened, manifest, hashes[0], settings, now=now, others=hashes[1:])
            progress = Progress(console, verbose=verbose)
            summary = Summary(opened, fleet, hashes[0])

            def on_round(finished: bool) -> None:
                version = coordinator.state.version
                content = summary.content(finished=finished, global_version=version)
                if finished or not is_stdout(json):
                    write_json(json, content)
                if finished:
                    totals = content["totals"]
                    progress(RunFinished(len(content["rounds"]), totals["committed"], totals["uplink_bytes"]))

            if not is_stdout(json):  # now, so that a path that cannot be written is known now
                write_json(json, summary.content(finished=False, global_version=coordinator.state.version))
            Server(
                coordinator,
                address,
                fleet,
                listener=progress,
                on_round=on_round,
                patience_s=patience,
                take_over=take_over,
            ).run()

    return _until_stopped(run, console, f"the run goes on with the same --store {store}")


def broker_command(
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 for a free one.")] = "127.0.0.1:1883",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)] = False,
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
            console.print(f"broker on {running.url}, Ctrl-C ends it", highlight=False, soft_wrap=True)
            if host not in _LOOPBACK:
                console.print(_OPEN_WARNING, highlight=False, soft_wrap=True)
            if verbose:
                about = f"process {running.pid}, messages up to {MAX_PAYLOAD_BYTES:,} bytes, nothing is kept on disk"
                console.print(about, highlight=False, soft_wrap=True)
            while running.running:
                time.sleep(0.2)
            raise LinkError(f"broker on {running.url}", expected="it to go on", got="its process ended")

    code = _until_stopped(run, console, "broker stopped")
    return 0 if code == 130 else code


class _Terminated(KeyboardInterrupt):
    """SIGTERM: as Ctrl-C, with its own exit code."""


def _until_stopped(action: Callable[[], None], console: Console, farewell: str) -> int:
    """Run `action`; Ctrl-C and SIGTERM end it with one line and the exit code they have by custom."""
    before = signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        with interruptible():
            action()
    except _Terminated:
        return _part(console, f"terminated: {farewell}", 143)
    except KeyboardInterrupt:
        return _part(console, f"interrupted: {farewell}", 130)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _part(console: Console, line: str, code: int) -> int:
    """One last line, past a console that the signal may have caught with half of another line in its buffer."""
    Console(stderr=True, quiet=console.quiet).print(line, highlight=False, soft_wrap=True)
    return code


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise _Terminated


def _identity(paths: list[Path]) -> tuple[Manifest, tuple[bytes, ...]]:
    """What the server needs of the fleet's bundles; their graphs and weights do not stay in memory."""
    bundles = [(path, read_bundle(path)) for path in paths]
    check_fleet(bundles)
    return bundles[0][1].manifest, tuple(bundle.sha256 for _, bundle in bundles)


def _together(hashes: tuple[bytes, ...]) -> bytes:
    """What a store calls its bundle: the one, or all of them together whatever their order."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256(b"".join(sorted(hashes))).digest()


def _policy(min_clients: int, deadline_s: float, fraction: float, seed: int) -> Policy:
    _at_least("--min-clients", min_clients, 1)
    if not 0 <= deadline_s < 10**9:
        raise UsageError("--deadline", expected="seconds, 0 or more", got=deadline_s)
    if not 0 < fraction <= 1:
        raise UsageError("--fraction", expected="above 0, up to 1", got=fraction)
    if not 0 <= seed < 2**32:
        raise UsageError("--seed", expected="0 to 4294967295", got=seed)
    return Policy(min_clients, deadline_s, fraction, seed)


def _at_least(option: str, value: int, lowest: int) -> int:
    if not lowest <= value < 2**32:
        raise UsageError(option, expected=f"{lowest} or more", got=value)
    return value


def _between(option: str, value: float, low: float, high: float) -> float:
    if not low <= value <= high:  # NaN is not
        raise UsageError(option, expected=f"{low:g} to {high:g}", got=value)
    return value


def _encoding(option: str, given: str, allowed: tuple[Encoding, ...]) -> Encoding:
    for encoding in allowed:
        if given == encoding:
            return encoding
    raise UsageError(option, expected="an encoding", got=given, hint=near_names(given, allowed))
