"""`protofleet client`: the command line of a device. It is read here, and then `process.py` takes over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from protofleet.contract.console.verbosity import QUIET_HELP, VERBOSE_HELP
from protofleet.contract.files.json_output import JSON_HELP
from protofleet.contract.methods import LOAD_HELP
from protofleet.edge_client.hardware.providers import PROVIDER_HELP
from protofleet.edge_client.run.process import become, run
from protofleet.edge_client.settings import read_settings

__all__ = ["client_command"]

MEMORY_HELP = "Memory that this process may take, e.g. 400MB: train in parts where that fits, or refuse the bundle."
MICRO_HELP = "Train each batch in parts of N, which the bundle was exported with.  [default: only where memory asks]"


def client_command(
    bundle: Annotated[str | None, typer.Option(help="The fleet's bundle file.")] = None,
    broker: Annotated[str | None, typer.Option(help="mqtt://[user:password@]host[:port], or mqtts://.")] = None,
    id: Annotated[str | None, typer.Option(help="This device's id: a-z, 0-9 and -, unique in the fleet.")] = None,
    data: Annotated[
        str | None,
        typer.Option(help="Labelled images: a folder per class, a .csv of path,label, a .npz of x and y, parquet."),
    ] = None,
    state: Annotated[str | None, typer.Option(help="Directory for weights and outbox; survives restarts.")] = None,
    fleet: Annotated[str | None, typer.Option(help="The fleet's id.  [default: fleet]")] = None,
    test: Annotated[str | None, typer.Option(help="Labelled images to test with after each round.")] = None,
    hold_out: Annotated[
        float | None,
        typer.Option(
            help="Share of --data kept from training to test with, 0 for none.  [default: 0.1; 0 with --test]"
        ),
    ] = None,
    report_accuracy: Annotated[
        bool | None,
        typer.Option(
            "--report-accuracy/--no-report-accuracy",
            help="Tell the aggregator how many are named right.  [default: without noise or helper]",
        ),
    ] = None,
    tell_drift: Annotated[
        bool | None,
        typer.Option(
            "--tell-drift/--no-tell-drift",
            help="Tell the aggregator how unlike earlier photos new ones are.  [default: without noise or helper]",
        ),
    ] = None,
    activations: Annotated[
        int | None,
        typer.Option(
            metavar="MB",
            help="Disk for what a frozen trunk makes of the photos, where only the tail is trained.  [default: 1024]",
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(help="Threads for training.  [default: 1]")] = None,
    memory_limit: Annotated[str | None, typer.Option(metavar="SIZE", help=MEMORY_HELP)] = None,
    micro_batch: Annotated[int | None, typer.Option(metavar="N", help=MICRO_HELP)] = None,
    provider: Annotated[str | None, typer.Option(help=PROVIDER_HELP)] = None,
    portable_step: Annotated[
        bool | None,
        typer.Option("--portable-step", help="Try no other form of the training step that the bundle may hold."),
    ] = None,
    until_finished: Annotated[
        bool | None,
        typer.Option("--until-finished", help="End with the run, instead of waiting for the next one."),
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(help="Seconds to wait for a broker at the start.  [default: for ever; 60 with --until-finished]"),
    ] = None,
    keepalive: Annotated[
        int | None,
        typer.Option(
            help="Seconds after which an idle connection says that it is there; the broker misses this device after "
            "half as much again.  [default: 60]"
        ),
    ] = None,
    ca: Annotated[str | None, typer.Option(help="PEM file of the authority that signs the broker.")] = None,
    cert: Annotated[str | None, typer.Option(help="PEM file of this device's certificate.")] = None,
    key: Annotated[str | None, typer.Option(help="PEM file of this device's private key.")] = None,
    trust: Annotated[
        list[str] | None,
        typer.Option(
            help="Ed25519 public key file, again for each further key; refuse bundles and messages that none of them "
            "signed."
        ),
    ] = None,
    identity: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="Ed25519 private key file that this device signs with.  [default: its own, once --token made one]",
        ),
    ] = None,
    token: Annotated[
        str | None, typer.Option(help="One-time token of protofleet fleet invite: enrol this device with its key.")
    ] = None,
    helper_key: Annotated[
        str | None,
        typer.Option(help="Public key file of a helper; take part in rounds whose sums it opens, and in no others."),
    ] = None,
    rollout: Annotated[
        bool | None,
        typer.Option(
            "--rollout/--no-rollout",
            help="Go over to bundles that the aggregator rolls out.  [default: where a key is trusted]",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="TOML file of what this device may release, whatever the fleet asks for."),
    ] = None,
    accept_looser_policy: Annotated[
        bool | None,
        typer.Option(
            "--accept-looser-policy",
            help="Start although the policy lets more be released than at the last start, and remember its terms.",
        ),
    ] = None,
    method: Annotated[str | None, typer.Option(help=LOAD_HELP)] = None,
    withdraw: Annotated[
        bool | None,
        typer.Option("--withdraw", help="Take this device's sums out of the standing ones, and end; no --data."),
    ] = None,
    config: Annotated[str | None, typer.Option(help="TOML file with any of these options by name.")] = None,
    json: Annotated[str | None, typer.Option(help=JSON_HELP.format("a summary at the end"))] = None,
    quiet: Annotated[bool | None, typer.Option("--quiet", "-q", help=QUIET_HELP)] = None,
    verbose: Annotated[
        bool | None,
        typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("each message, and counts at the end")),
    ] = None,
) -> int:
    """Run one device: take part in the fleet's rounds, run after run, until it is stopped."""
    given = dict(locals()) | {"trust": tuple(trust or ()) or None}
    settings = read_settings(given.pop("config"), given)
    if Path(sys.argv[0]).name in ("protofleet", "__main__.py"):
        become(settings)
    return run(settings)  # called from within another program, which must not be replaced
