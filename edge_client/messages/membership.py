"""Who a process is in a fleet: what a device and a gateway have in common before either has said a word."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.mqtt.link import Address
from protofleet.edge_client.identity.signing_identity import Identity

__all__ = ["Membership"]


@dataclass(frozen=True)
class Membership:
    """Who a process is in a fleet.

    Attributes:
        address: where the broker is.
        fleet, name: as in the topics.
        bundle: the fleet's bundle.
        trusted: public keys, 32 bytes each: nothing else is believed; none where signatures are not looked at.
        identity: the key that the member signs with.
        token: with which it is to be enrolled first.
        keepalive_s: how long an idle connection says nothing.
        stays: whether it waits for the next run when one is finished.
    """

    address: Address
    fleet: str
    name: str
    bundle: Bundle
    trusted: Collection[bytes] = ()
    identity: Identity = field(default_factory=Identity)
    token: bytes | None = None
    keepalive_s: int = 60
    stays: bool = True
