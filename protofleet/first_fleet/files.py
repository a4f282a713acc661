"""A fleet's folder: its bundle, and a settings file for broker, aggregator and each device.

    fleet/fleet.bundle
    fleet/passwords          what the fleet's broker asks for: one user, with a password that is drawn here
    fleet/broker.toml        protofleet broker    --config fleet/broker.toml
    fleet/aggregator.toml    protofleet aggregate --config fleet/aggregator.toml
    fleet/device-1.toml      protofleet client    --config fleet/device-1.toml

Files that hold the password are for their owner alone. Keys are the options' names with _ for -. Paths are absolute, so
that the commands run from any folder. A folder that has a fleet already is never written over.
"""

from __future__ import annotations

import secrets
import shlex
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protofleet.contract.bundle.bundle_file import Bundle
from protofleet.contract.errors import StoreError, UsageError
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.methods import Value
from protofleet.contract.mqtt.address import EVERYWHERE, LOOPBACK, in_url, parse_listen
from protofleet.contract.settings.toml_text import toml_value
from protofleet.export.bundles.fleet_bundle import fleet_bundle

__all__ = ["Choice", "FleetFiles", "check_folder", "write_fleet"]

FLEET, FIRST, SECOND = "photos", "device-1", "device-2"
_PASSWORD_BYTES = 18  # drawn at random; 24 letters of base64
_EVERY = "5s"  # how long a head stays at least, where sums stand


@dataclass(frozen=True)
class Choice:
    """How the fleet learns.

    Attributes:
        name: of a method whose sums stand.
        hyper: what the bundle is made with, where that differs from the method's defaults.
        solved_with: what the aggregator solves a head with, where that differs.
    """

    name: str = "ncm"
    hyper: Mapping[str, Value] = field(default_factory=dict)
    solved_with: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class FleetFiles:
    """What was written: the fleet's folder, where its broker listens, and where the first device's photos are.

    Attributes:
        password: with which members of the fleet connect, as user `photos`.
    """

    folder: Path
    listen: str
    photos: Path
    password: str = field(repr=False)

    @property
    def bundle(self) -> Path:
        return self.folder / "fleet.bundle"

    @property
    def state(self) -> Path:
        """The first device's state directory."""
        return self.folder / FIRST

    @property
    def commands(self) -> tuple[tuple[str, ...], ...]:
        """The arguments of `protofleet`, for broker, aggregator and the first device."""
        files = {"broker": "broker", "aggregate": "aggregator", "client": FIRST}
        return tuple((command, "--config", str(self.folder / f"{name}.toml")) for command, name in files.items())

    @property
    def is_open(self) -> bool:
        """Whether other machines reach the broker."""
        return parse_listen(self.listen)[0] not in LOOPBACK

    def second_device(self) -> str:
        """One line for another machine: it fetches the bundle, and joins with the photos of its own folder `photos`.

        It holds the fleet's password, in a variable: arguments can be read by everybody on a machine.
        """
        host, _ = parse_listen(self.listen)
        name = socket.gethostname() if host in (*EVERYWHERE, *LOOPBACK) else host
        broker = f"PROTOFLEET_CLIENT_BROKER={shlex.quote(self.broker_url(name))}"
        client = ["protofleet", "client", "--fleet", FLEET]
        client += ["--bundle", "fleet.bundle", "--id", SECOND, "--data", "photos", "--state", SECOND]
        return f"scp {shlex.quote(f'{in_url(name)}:{self.bundle}')} . && {broker} {shlex.join(client)}"

    def broker_url(self, host: str) -> str:
        """Where the broker is for who knows its machine by that name, with user and password."""
        return f"mqtt://{FLEET}:{self.password}@{in_url(host)}:{parse_listen(self.listen)[1]}"


def check_folder(folder: Path) -> None:
    """Refuse a folder that holds anything.

    Raises:
        UsageError: it does, or it is no folder.
    """
    try:
        taken = folder.exists() and (not folder.is_dir() or any(folder.iterdir()))
    except OSError as error:
        raise UsageError(f"--out {folder}", expected="a new folder", got=error.strerror) from None
    if taken:
        hint = f"another --out, or rm -r {shlex.quote(str(folder))}"
        raise UsageError(f"--out {folder}", expected="a new folder", got="one that is there already", hint=hint)


def write_fleet(
    folder: Path, extractor: Bundle, labels: Sequence[str], choice: Choice, *, listen: str, photos: Path | None
) -> FleetFiles:
    """Write the folder.

    Args:
        extractor: the bundle whose extractor the fleet takes.
        labels: class names.
        listen: HOST:PORT of the broker.
        photos: the first device's; None for folders that are made here, one for each class, for photos to come.

    Raises:
        StoreError, BundleError: the disk refuses. What was written by then is there.
        UsageError: `listen` is no address, or the folder is taken.
    """
    host, _ = parse_listen(listen)
    folder = folder.absolute()
    check_folder(folder)
    own = folder / "photos" if photos is None else photos.absolute()
    files = FleetFiles(folder, listen, own, secrets.token_urlsafe(_PASSWORD_BYTES))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if photos is None:
            for label in labels:
                (own / label).mkdir(parents=True)
    except OSError as error:
        raise StoreError(f"cannot write {error.filename}", got=error.strerror, hint="another --out") from None
    fleet_bundle(extractor, labels, files.bundle, method_name=choice.name, hyper=dict(choice.hyper))
    here = files.broker_url("127.0.0.1" if host in EVERYWHERE else host)
    shared = {"bundle": str(files.bundle), "broker": here, "fleet": FLEET}
    stands = {"standing": True, "every": _EVERY}
    passwords = folder / "passwords"
    _write(passwords, f"{FLEET}:{files.password}\n")
    _write_settings(folder / "broker.toml", "protofleet broker", {"listen": listen, "password_file": str(passwords)})
    aggregator = {**shared, "store": str(folder / "store.sqlite"), **stands, **choice.solved_with}
    _write_settings(folder / "aggregator.toml", "protofleet aggregate", aggregator)
    device = {**shared, "id": FIRST, "data": str(own), "state": str(files.state)}
    _write_settings(folder / f"{FIRST}.toml", "protofleet client", device)
    return files


def _write_settings(path: Path, command: str, values: Mapping[str, object]) -> None:
    lines = [f"# {command} --config THIS_FILE: its options by name, with _ for -; --help has them all"]
    lines += [f"{name} = {toml_value(value)}" for name, value in values.items()]
    _write(path, "\n".join([*lines, ""]))


def _write(path: Path, text: str) -> None:
    try:
        with whole_file(path, private=True) as file:
            file.write(text.encode())
    except OSError as error:
        raise StoreError(f"cannot write {path}", got=error.strerror, hint="another --out") from None
