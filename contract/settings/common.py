"""Settings that several commands have: the broker's address, how much is said, and where the summary goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from protofleet.contract.console.durations import seconds
from protofleet.contract.console.logs import LOG_FORMAT_HELP, LOG_FORMATS
from protofleet.contract.console.verbosity import QUIET_HELP, VERBOSE_HELP, check_loudness
from protofleet.contract.mqtt.address import Address
from protofleet.contract.settings.options import CommandSettings, Option, chosen
from protofleet.contract.wire.topics import check_device, check_id

__all__ = [
    "BrokerSettings",
    "LogSettings",
    "QuietSettings",
    "SpokenSettings",
    "checked_device",
    "checked_fleet",
    "duration",
]

BROKER = "mqtt://[user:password@]host[:port], or mqtts://."
CA, CERT, KEY = (
    f"PEM file of {what}." for what in ("the authority that signed the broker", "our certificate", "our key")
)


def checked_fleet(label: str, value: str) -> str:
    """A fleet's id."""
    return check_id(value, label)


def checked_device(label: str, value: str) -> str:
    """A device's id."""
    return check_device(value, label)


def duration(label: str, value: Any) -> float:
    """A duration in seconds, of `90s`, `10m`, `6h` or a number."""
    return seconds(label, value)


@dataclass(frozen=True, kw_only=True, repr=False)
class LogSettings(CommandSettings):
    """How a command writes what it says."""

    log_format: Annotated[str, Option(LOG_FORMAT_HELP, check=chosen(*LOG_FORMATS))] = "text"


@dataclass(frozen=True, kw_only=True, repr=False)
class QuietSettings(LogSettings):
    """How little a command says while it works."""

    quiet: Annotated[bool, Option(QUIET_HELP, flags=("--quiet", "-q"))] = False


@dataclass(frozen=True, kw_only=True, repr=False)
class SpokenSettings(QuietSettings):
    """How much a command says while it works: by default what a person wants to follow."""

    verbose: Annotated[
        bool, Option(VERBOSE_HELP.format("each message, and counts at the end"), flags=("--verbose", "-v"))
    ] = False

    def check(self) -> None:
        super().check()
        check_loudness(self.quiet, self.verbose)


@dataclass(frozen=True, kw_only=True, repr=False)
class BrokerSettings(CommandSettings):
    """The broker of a fleet, and the files to connect with."""

    broker: Annotated[str, Option(BROKER, url=True)]
    fleet: Annotated[str, Option("The fleet's id, in every topic.", check=checked_fleet)] = "fleet"
    ca: Annotated[str | None, Option(CA)] = None
    cert: Annotated[str | None, Option(CERT)] = None
    key: Annotated[str | None, Option(KEY)] = None

    @property
    def address(self) -> Address:
        """The broker's address.

        Raises:
            UsageError: the URL cannot be read, or a certificate file is of no use.
        """
        return Address.parse(self.broker, ca_file=self.ca, cert_file=self.cert, key_file=self.key)
