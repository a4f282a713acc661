"""The device's process: settings in, one device out, an exit code back.

Reads the bundle and the data, opens the state directory, restores the weights, and runs the client until its run is
finished (0), something is wrong (one line; 1 for a failure, 2 for bad input) or a signal ends it (130 for Ctrl-C, 143
for SIGTERM: the goodbye is said, and nothing is lost).

`become` replaces the present process by one that runs nothing but this: same process id, same standard streams, but
without what parsed the command line. Typer, rich and pydantic take 12 MB that a small board would carry for months
(docs/decisions/021). The settings travel in an anonymous file, so that a broker's password shows up nowhere.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec

from contract.errors import ProtofleetError, UsageError
from contract.interrupt import hold_back
from contract.report import is_stdout, write_json
from contract.terminal import keep_printable, printable
from edge_client.config import ClientConfig, read_public_key

if TYPE_CHECKING:  # loaded after `become`, and only when they are needed
    from contract.bundle import Manifest
    from edge_client.journal import Journal
    from edge_client.privacy import Accountant

__all__ = ["become", "main", "run"]


class _Stop(BaseException):
    """A signal asked us to end. Not an Exception, so that nothing but the end of the process catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def become(settings: ClientConfig) -> NoReturn:
    """Replace this process by the device's; never returns."""
    descriptor = os.memfd_create("settings", 0)  # inherited, since no close-on-exec is asked for
    os.write(descriptor, msgspec.json.encode(settings))
    os.lseek(descriptor, 0, os.SEEK_SET)
    threads = str(settings.threads)
    environment = {
        "MALLOC_ARENA_MAX": "1",  # glibc would give each thread a heap of its own
        "MALLOC_MMAP_THRESHOLD_": "524288",  # fixed: glibc would raise it, and keep what training needed in its heap
        "OPENBLAS_NUM_THREADS": threads,  # numpy's BLAS would reserve a buffer for each core
        "OMP_NUM_THREADS": threads,
        **os.environ,
    }
    sys.stdout.flush()
    sys.stderr.flush()
    hold_back()  # until the new process can answer Ctrl-C
    same_path = [] if sys.path[:1] == [os.getcwd()] else ["-P"]  # import from where this process imported from
    os.execve(
        sys.executable,
        [sys.executable, *same_path, "-m", "edge_client", settings.id, str(descriptor)],
        environment,
    )


def main(arguments: list[str]) -> int:
    """The process that `become` starts: `arguments` are the device id, for who looks at `ps`, and a descriptor."""
    keep_printable(sys.stdout, sys.stderr)
    with os.fdopen(int(arguments[1]), "rb") as file:
        settings = msgspec.json.decode(file.read(), type=ClientConfig)
    try:
        return run(settings)
    except ProtofleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def run(settings: ClientConfig) -> int:
    """Run one device; returns 0 when its run is finished, 128 + n when signal n ended it.

    Raises:
        ProtofleetError: each with its exit code.
    """

    def log(line: str) -> None:
        if not settings.quiet:
            print(f"{settings.id}: {printable(line)}", file=sys.stderr, flush=True)

    # Loaded before signals raise: ONNX Runtime's extension makes an ImportError of whatever is raised while it loads.
    importlib.import_module("edge_client.client")
    importlib.import_module("edge_client.device")
    try:
        with _signals():
            _run(settings, log)
    except _Stop as stop:
        log(f"stopped by {stop}, nothing is lost")
        return 128 + stop.number
    return 0


def _run(settings: ClientConfig, log: Callable[[str], None]) -> None:
    from contract.bundle import read_bundle
    from contract.link import Address
    from edge_client.client import Client
    from edge_client.data import load_data
    from edge_client.device import Device
    from edge_client.journal import Journal
    from edge_client.measured import measured_metrics

    address = Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key)
    trusted = None if settings.trust is None else read_public_key(settings.trust)
    bundle = read_bundle(settings.bundle, public_key=trusted)
    data = load_data(settings.data, bundle.manifest, log=log)
    test = None if settings.test is None else load_data(settings.test, bundle.manifest, purpose="test", log=log)
    state = Path(settings.state)
    with Journal(state, fleet=settings.fleet, device=settings.id, bundle=bundle.sha256) as journal:
        device = Device(bundle, data, settings.id, test=test, threads=settings.threads, secret=journal.secret())
        device.restore(journal.weights())
        accountant = _accountant(settings, bundle.manifest, journal)
        log(f"{len(data):,} samples of {int(device.own_classes.sum())} classes, bundle {bundle.sha256.hex()[:12]}")
        client = Client(
            device=device,
            journal=journal,
            bundle=bundle,
            address=address,
            fleet=settings.fleet,
            device_id=settings.id,
            patience_s=settings.patience,
            measured=measured_metrics(state, bundle.sha256),
            accountant=accountant,
            log=log,
            detail=log if settings.verbose else None,
        )
        if not is_stdout(settings.json):
            write_json(settings.json, client.summary())  # now, so that a path that cannot be written is known now
        try:
            client.run()
        finally:
            write_json(settings.json, client.summary())
        ended = journal.outcomes()
        log(f"done: {ended['sent']} contributions, {ended['committed']} committed")


def _accountant(settings: ClientConfig, manifest: Manifest, journal: Journal) -> Accountant | None:
    """For a bundle whose method adds noise; without any, there is no ε to keep a budget of."""
    from edge_client.privacy import Accountant, Mechanism

    mechanism = Mechanism.of(manifest.hyper)
    if not mechanism.noise:
        if settings.epsilon is not None:
            raise UsageError(
                f"--epsilon {settings.epsilon:g}",
                expected="a bundle whose method adds noise",
                got=f"{manifest.method} without",
                hint="export --method fedhkd --set noise=…",
            )
        return None
    done = journal.rounds_done(manifest.method)
    return Accountant(
        mechanism,
        float(manifest.hyper["delta"]),
        settings.epsilon,
        done,
        method=manifest.method,
        bare=journal.rounds_done() - done,
    )


@contextmanager
def _signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise `_Stop` once; what they interrupt is safe at any instruction, as after kill -9."""

    def stop(number: int, _: object) -> None:
        signal.signal(number, signal.SIG_IGN)
        raise _Stop(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
