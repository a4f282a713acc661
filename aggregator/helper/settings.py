"""The settings of a helper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from protofleet.aggregator.database.engines import place_of
from protofleet.contract.errors import UsageError
from protofleet.contract.mqtt.address import Address
from protofleet.contract.privacy.sealing import check_least
from protofleet.contract.settings.common import BROKER, CA, CERT, BrokerSettings, QuietSettings
from protofleet.contract.settings.options import Option

__all__ = ["HelperSettings"]


def _file(label: str, value: str) -> str:
    if not isinstance(place_of(value), Path):
        raise UsageError(label, expected="a SQLite file", got="a server's URL")
    return value


def _least(label: str, value: int) -> int:
    return check_least(value)


@dataclass(frozen=True, kw_only=True, repr=False)
class HelperSettings(BrokerSettings, QuietSettings, command="helper"):
    """The settings of `protofleet helper`. All that has no default is required, unless a key is made."""

    broker: Annotated[str, Option(BROKER, url=True)] = ""
    key: Annotated[str, Option("The helper's key file; its .pub is for aggregator and devices.")] = ""
    store: Annotated[str, Option("SQLite file of what was opened; made when absent.", check=_file, metavar="FILE")] = ""
    devices: Annotated[
        str, Option("TOML file: a table [devices] of names and public keys, of whom alone sums are.", metavar="FILE")
    ] = ""
    least: Annotated[int, Option("No sum over fewer devices is ever opened; 2 or more.", check=_least)] = 0
    trust: Annotated[
        tuple[str, ...] | None,
        Option("Ed25519 public key file of the aggregator, again for each further key; nobody else's asking is heard."),
    ] = None
    new_key: Annotated[
        str | None, Option("Make a key file and its .pub, and end.", metavar="FILE", only_typed=True)
    ] = None
    ca: Annotated[str | None, Option(CA)] = None
    cert: Annotated[str | None, Option(CERT)] = None
    cert_key: Annotated[str | None, Option("PEM file of our certificate's key.")] = None

    @property
    def address(self) -> Address:
        """The broker's address.

        Raises:
            UsageError: the URL cannot be read, or a certificate file is of no use.
        """
        return Address.parse(self.broker, ca_file=self.ca, cert_file=self.cert, key_file=self.cert_key)

    def check(self) -> None:
        super().check()
        missing = [f"--{name}" for name in ("key", "store", "broker", "devices", "least") if not getattr(self, name)]
        if missing and self.new_key is None:
            raise UsageError("protofleet helper", expected=" and ".join(missing), got="none", hint="--help")
