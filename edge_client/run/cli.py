"""`protofleet client`: the command line of a device. It is read here, and then `process.py` takes over."""

from __future__ import annotations

import sys
from pathlib import Path

from protofleet.contract.settings.command_line import command_of
from protofleet.edge_client.run.process import become, run
from protofleet.edge_client.settings import ClientSettings

__all__ = ["client_command"]


@command_of(ClientSettings)
def client_command(settings: ClientSettings) -> int:
    """Run one device: take part in the fleet's rounds, run after run, until it is stopped."""
    if Path(sys.argv[0]).name in ("protofleet", "__main__.py"):
        become(settings)
    return run(settings)  # called from within another program, which must not be replaced
