"""Options that more than one command of an aggregator has: `aggregate`, and `gateway`, which is one on a site."""

from typing import Annotated

import typer

from protofleet.contract.console.verbosity import QUIET_HELP, VERBOSE_HELP

__all__ = ["Enrolled", "LimitBytes", "MaxSamples", "MetricsAt", "Quiet", "Verbose"]

MaxSamples = Annotated[int, typer.Option(help="Refuse a device that says it has more samples than this.")]
LimitBytes = Annotated[int, typer.Option(help="Largest message; larger contributions travel in chunks.")]
Enrolled = Annotated[
    bool, typer.Option("--enrolled", help="Take only what enrolled devices have signed (protofleet fleet invite).")
]
MetricsAt = Annotated[
    str | None,
    typer.Option(
        metavar="[HOST:]PORT", help="Serve metrics for Prometheus; PORT alone: to this machine.  [default: none]"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help=QUIET_HELP)]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help=VERBOSE_HELP.format("what became of each message, and counts at the end")),
]
