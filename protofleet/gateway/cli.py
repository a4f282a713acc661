"""The command `protofleet gateway`: options in, progress lines and an exit code out."""

from __future__ import annotations

from protofleet.aggregator.commands.aggregate_cli import serve
from protofleet.contract.settings.command_line import command_of
from protofleet.gateway.service import Gateway
from protofleet.gateway.settings import GatewaySettings

__all__ = ["gateway_command"]


@command_of(GatewaySettings)
def gateway_command(settings: GatewaySettings) -> int:
    """Aggregate a site, and send what its devices sum up as one contribution, until it is stopped."""
    farewell = f"the site goes on with the same --store {settings.store} and --state {settings.state}"
    return serve(Gateway(settings), settings, farewell, gateway=settings.id)
