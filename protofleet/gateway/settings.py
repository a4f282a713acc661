"""The settings of a gateway: an aggregator's on its site, and a device's above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from protofleet.aggregator.settings import AggregateSettings, ServedSettings, SumSettings
from protofleet.contract.errors import UsageError
from protofleet.contract.methods import METHOD_HELP
from protofleet.contract.settings.common import checked_device, checked_fleet, duration
from protofleet.contract.settings.options import Option, fields_of
from protofleet.edge_client.settings import ClientSettings

__all__ = ["GatewaySettings"]


@dataclass(frozen=True, kw_only=True, repr=False)
class GatewaySettings(ServedSettings, SumSettings, command="gateway"):
    """The settings of `protofleet gateway`. `ca`, `cert`, `key` are for the site's broker."""

    above: Annotated[
        str, Option("Broker of the aggregator above: mqtt://[user:password@]host[:port], or mqtts://.", url=True)
    ]
    id: Annotated[
        str,
        Option("This gateway's id above, which aggregate --gateway names: a-z, 0-9 and -.", check=checked_device),
    ]
    state: Annotated[str, Option("Directory for what goes up; survives restarts.")]
    above_fleet: Annotated[str | None, Option("The fleet's id above.", check=checked_fleet, absent="--fleet")] = None
    above_ca: Annotated[str | None, Option("PEM file of the authority that signed the broker above.")] = None
    above_cert: Annotated[str | None, Option("PEM file of our certificate above.")] = None
    above_key: Annotated[str | None, Option("PEM file of our key above.")] = None
    keepalive: Annotated[int, Option("Seconds that the connection above may be silent.", low=10, high=3600)] = 60
    trust: Annotated[
        tuple[str, ...] | None,
        Option("Ed25519 public key file, again for each further key: believe nothing else from above.", metavar="KEY"),
    ] = None
    identity: Annotated[str | None, Option("Ed25519 private key file that signs what goes up.", metavar="KEY")] = None
    token: Annotated[str | None, Option("One-time token with which to be enrolled above.", secret=True)] = None
    method: Annotated[str | None, Option(f"Whose sums: {METHOD_HELP}", absent="the bundle's")] = None
    every: Annotated[
        float | str | None,
        Option(
            "How long sums stay above at least, before newer ones go up.",
            check=duration,
            metavar="DURATION",
            absent="60s",
        ),
    ] = None
    min_clients: Annotated[
        int, Option("In rounds: devices that a round of the site waits for, up to its deadline.", low=1, high=2**32 - 1)
    ] = 1
    min_samples: Annotated[
        int,
        Option(
            "Classes with fewer examples stay on a device; never fewer than announced above.", low=1, high=2**32 - 1
        ),
    ] = 1

    def check(self) -> None:
        super().check()
        self.of_member  # noqa: B018 (which checks what a device's settings check)
        if (self.broker, self.fleet) == (self.above, self.above_fleet or self.fleet):
            got = f"both the same, fleet {self.fleet}"
            raise UsageError(
                "--broker and --above", expected="two brokers, or two fleets", got=got, hint="--above-fleet"
            )

    @property
    def of_site(self) -> AggregateSettings:
        """Of the site's aggregator, whose sums stand. `min_clients` is of rounds: `Gateway` puts it in."""
        shared = {*fields_of(ServedSettings), *fields_of(SumSettings)} - {"min_clients"}
        return AggregateSettings(**{name: getattr(self, name) for name in shared}, standing=True)

    @property
    def of_member(self) -> ClientSettings:
        """Of what it is above: a member of that fleet, without data."""
        return ClientSettings(
            bundle=self.bundle[0],
            broker=self.above,
            id=self.id,
            state=self.state,
            fleet=self.above_fleet or self.fleet,
            method=self.method,
            keepalive=self.keepalive,
            ca=self.above_ca,
            cert=self.above_cert,
            key=self.above_key,
            trust=self.trust,
            identity=self.identity,
            token=self.token,
        )
