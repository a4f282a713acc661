"""The client's settings: from the command line, from a TOML file, or from both, the command line winning.

The file has the options' names as keys, without the dashes in front and with _ for -:

    bundle = "fashion.bundle"
    broker = "mqtts://broker.example:8883"
    id     = "pi-3"
    data   = "/var/lib/camera/labelled"
    state  = "/var/lib/protofleet"

A key that is no option is refused, and the nearest options are named: a misspelt key that is silently ignored is a
device that does something else than its owner thinks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from protofleet.contract.console.sizes import read_size
from protofleet.contract.console.verbosity import check_loudness
from protofleet.contract.errors import UsageError, near_names
from protofleet.contract.files.atomic_files import read_toml
from protofleet.contract.identity.tokens import read_token
from protofleet.contract.printable import undisclosed_if_url
from protofleet.contract.wire.topics import check_device, check_id
from protofleet.edge_client.hardware.providers import check_provider

__all__ = ["ClientConfig", "read_settings"]


class ClientConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One client's settings; see `protofleet client --help` for each."""

    bundle: str
    broker: str
    id: str
    state: str
    data: str = ""
    fleet: str = "fleet"
    test: str | None = None
    hold_out: float | None = None
    report_accuracy: bool | None = None
    tell_drift: bool | None = None
    activations: int = 1024
    threads: int = 1
    memory_limit: str | None = None
    micro_batch: int | None = None
    provider: str = "auto"
    portable_step: bool = False
    until_finished: bool = False
    patience: float | None = None
    keepalive: int = 60
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    trust: str | tuple[str, ...] | None = None
    identity: str | None = None
    token: str | None = None
    helper_key: str | None = None
    rollout: bool = True
    policy: str | None = None
    accept_looser_policy: bool = False
    method: str | None = None
    withdraw: bool = False
    json: str | None = None
    quiet: bool = False
    verbose: bool = False


def read_settings(file: str | None, options: Mapping[str, Any]) -> ClientConfig:
    """The settings of a TOML file, if there is one, overridden by the options that were given (not None).

    Raises:
        UsageError: the file cannot be read, a key is unknown, a value is of the wrong kind or missing.
    """
    values: dict[str, Any] = {} if file is None else _settings_of(file)
    values |= {name: value for name, value in options.items() if value is not None}
    where = "protofleet client" if file is None else f"protofleet client with {file}"
    needed = (
        ("bundle", "broker", "id", "state") if values.get("withdraw") else ("bundle", "broker", "id", "data", "state")
    )
    missing = [name for name in needed if name not in values]
    if missing:
        raise UsageError(where, expected=" and ".join(f"--{name}" for name in missing), got="none", hint="--help")
    try:
        config = msgspec.convert(values, ClientConfig)
    except msgspec.ValidationError as error:
        raise UsageError(where, expected="settings of the right kind", got=error, hint="--help") from None
    check_loudness(config.quiet, config.verbose)
    check_device(config.id, "--id")
    check_id(config.fleet, "--fleet")
    check_provider(config.provider)
    if config.memory_limit is not None:
        read_size(config.memory_limit, "--memory-limit")
    if config.trust is not None and not (config.trust and all(config.trust)):  # which would be to believe everybody
        raise UsageError("--trust", expected="a public key file, or several", got="none", hint="no --trust at all")
    if config.token is not None:
        read_token(config.token)
    limits: list[tuple[str, float, float, float]] = [("activations", config.activations, 0, 1e9)]
    limits += [("threads", config.threads, 1, 256), ("keepalive", config.keepalive, 10, 3600)]
    limits += [] if config.micro_batch is None else [("micro-batch", config.micro_batch, 1, 4095)]
    limits += [] if config.patience is None else [("patience", config.patience, 0.1, 1e6)]
    limits += [] if config.hold_out is None else [("hold-out", config.hold_out, 0.0, 0.5)]
    for name, value, low, high in limits:
        if not low <= value <= high:
            raise UsageError(f"--{name}", expected=f"{low:g} to {high:g}", got=value)
    if config.test is not None and config.hold_out:
        raise UsageError(
            "--hold-out with --test", expected="one of them", got="both", hint="--test alone holds none out"
        )
    return config


def _settings_of(file: str) -> dict[str, Any]:
    values = read_toml(file, f"--config {file}")
    known = ClientConfig.__struct_fields__
    if "accept_looser_policy" in values:
        got = "accept_looser_policy in the file"
        raise UsageError(f"--config {file}", expected="--accept-looser-policy on the command line, once", got=got)
    for name in values:
        if name not in known:
            got, hint = undisclosed_if_url(name), near_names(name, known)
            raise UsageError(f"--config {file}: unknown key", expected="an option's name", got=got, hint=hint)
    return values
