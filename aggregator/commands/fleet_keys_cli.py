"""`protofleet fleet invite | enrol | revoke`: whose key speaks for a device. Here `fleet` has all its commands.

`invite` prints a one-time token. No file of ours holds the token: the order has the public key that is made of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from protofleet.aggregator.commands.fleet_cli import WAIT_S, ask, check_telling, fleet_app, operator, told_of
from protofleet.aggregator.commands.fleet_cli import DeviceName as _Device
from protofleet.aggregator.commands.fleet_cli import JsonFile as _Json
from protofleet.aggregator.commands.fleet_cli import StorePlace as _Store
from protofleet.aggregator.commands.fleet_cli import WaitSeconds as _Wait
from protofleet.aggregator.store.operator_orders import await_done, give
from protofleet.contract.console.durations import in_words, seconds
from protofleet.contract.errors import UsageError
from protofleet.contract.identity.allowlist import read_allowlist
from protofleet.contract.identity.signatures import invitation_key
from protofleet.contract.identity.signing_keys import read_public_key
from protofleet.contract.identity.tokens import draw_token, token_text
from protofleet.contract.wire.topics import check_device

__all__ = ["fleet_app"]


@fleet_app.command("invite")
def invite_command(
    device: _Device,
    store: _Store,
    expires: Annotated[str, typer.Option(metavar="DURATION", help="How long the token holds: 90m, 1d.")] = "1d",
    wait: _Wait = WAIT_S,
) -> int:
    """Print a one-time token with which a device enrols its key: protofleet client --token TOKEN."""
    check_telling(wait, None)
    check_device(device, "DEVICE")
    lasts_s = seconds("--expires", expires)
    if lasts_s <= 0:
        raise UsageError("--expires", expected="above 0", got=expires)
    token = draw_token()
    detail = f"{invitation_key(token).hex()} {int(time.time() + lasts_s)}"
    order, running = give(store, "invite", device, operator(), detail=detail)
    if running:
        order = await_done(store, order, wait)
    typer.echo(told_of(order, running, wait), err=True)
    if (order.outcome or "").startswith("refused"):
        return 1
    hint = f"protofleet client --token enrols {device} with it, once, within {in_words(lasts_s)}"
    typer.echo(f"{hint}; it is shown this once", err=True)
    print(token_text(token))
    return 0


@fleet_app.command("enrol")
def enrol_command(
    store: _Store,
    device: Annotated[str | None, typer.Argument(metavar="DEVICE", help="Its id.")] = None,
    key: Annotated[str | None, typer.Option(help="File with the device's Ed25519 public key.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("--from", metavar="TOML", help="In place of both: [devices] with id = 'hex of its key'."),
    ] = None,
    wait: _Wait = WAIT_S,
    json: _Json = None,
) -> int:
    """Enrol a device whose public key is known, or all of a file."""
    if (file is None) == (device is None or key is None):
        raise UsageError("fleet enrol", expected="DEVICE and --key KEY, or --from TOML", got="neither, or both")
    if file is None:
        assert device is not None
        assert key is not None
        return ask("enrol", store, device, wait, json, detail=read_public_key(key, "--key").hex())
    keys = read_allowlist(file, "--from")
    if not keys:
        raise UsageError(f"--from {file}", expected="[devices] with id = 'hex of its key'", got="no device")
    return max(ask("enrol", store, name, wait, json, detail=public_key.hex()) for name, public_key in keys.items())


@fleet_app.command("revoke")
def revoke_command(device: _Device, store: _Store, wait: _Wait = WAIT_S, json: _Json = None) -> int:
    """Take nothing more that a device's key has signed: of a board that is lost. Invite it again to give it another."""
    return ask("revoke", store, device, wait, json)
