"""One device, from its files to its end: the one way in for the command and for a program that holds one.

A `Service` reads the bundle and the data, opens the state directory, restores the weights, and runs the client until
its run is finished or `stop` is called.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from contract.bundle import Manifest, read_bundle
from contract.errors import UsageError
from contract.link import Address
from contract.methods import METHODS, load_method, method
from edge_client.client import Client
from edge_client.config import ClientConfig, read_public_key
from edge_client.data import LocalData
from edge_client.data.load import from_arrays, load_data
from edge_client.device import Device
from edge_client.journal import Journal
from edge_client.measured import measured_metrics
from edge_client.privacy import Accountant

__all__ = ["Service"]

Log = Callable[[str], None]
OnSummary = Callable[[dict[str, Any], bool], None]
"""Takes what the device has done so far, and whether it has ended."""


class Service:
    """A device of one fleet.

    Args:
        settings: as the command takes them.
        arrays: images (N, H, W, c) and class numbers (N,) in memory, instead of what `settings.data` names.
    """

    def __init__(self, settings: ClientConfig, arrays: tuple[NDArray[Any], NDArray[Any]] | None = None) -> None:
        self._settings, self._arrays = settings, arrays
        self._stopping = threading.Event()

    def run(self, log: Log, on_summary: OnSummary) -> dict[str, Any]:
        """Take part until the run is finished, or `stop`; returns what the device has done.

        Args:
            log: takes one line for a person.
            on_summary: called at the beginning, so that a path that cannot be written is known then, and at the end.

        Raises:
            ProtofleetError: each with its exit code.
        """
        settings = self._settings
        address = Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key)
        if settings.method is not None:
            load_method(settings.method)
        trusted = None if settings.trust is None else read_public_key(settings.trust)
        bundle = read_bundle(settings.bundle, public_key=trusted)
        m = bundle.manifest
        state = Path(settings.state)
        images = state / "images"
        if self._arrays is None:
            data = load_data(settings.data, m, log=log, cache=images)
        else:
            data = from_arrays(*self._arrays, m)
        test = None if settings.test is None else load_data(settings.test, m, purpose="test", log=log, cache=images)
        with Journal(state, fleet=settings.fleet, device=settings.id, bundle=bundle.sha256) as journal:
            device = Device(bundle, data, settings.id, test=test, threads=settings.threads, secret=journal.secret())
            device.restore(journal.weights())
            journal.remember_bundle(Path(settings.bundle).resolve())
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
                accountant=_accountant(settings, m, journal, data.labelled),
                log=log,
                detail=log if settings.verbose else None,
                stopping=self._stopping,
            )
            on_summary(client.summary(), False)
            try:
                client.run()
            finally:
                on_summary(client.summary(), True)
            ended = journal.outcomes()
            log(f"done: {ended['sent']} contributions, {ended['committed']} committed")
            return client.summary()

    def stop(self) -> None:
        """End `run` as soon as the device waits again, from any thread: a round under way is finished first."""
        self._stopping.set()


def _accountant(settings: ClientConfig, manifest: Manifest, journal: Journal, data: LocalData) -> Accountant | None:
    """For a bundle whose method adds noise; without any, there is no ε to keep a budget of."""
    mechanism = method(manifest.method).mechanism(manifest.hyper)
    if mechanism is None:
        if settings.epsilon is not None:
            raise UsageError(
                f"--epsilon {settings.epsilon:g}",
                expected="a bundle whose method adds noise",
                got=f"{manifest.method} without",
                hint=f"export --method {_noised()} --set noise=…",
            )
        return None
    done = journal.rounds_done(manifest.method)
    return Accountant(
        mechanism,
        float(manifest.hyper["delta"]),
        settings.epsilon,
        done,
        method=manifest.method,
        counts=data.counts(manifest.classes),
        bare=journal.rounds_done() - done,
    )


def _noised() -> str:
    """The methods that can add noise."""
    return " or ".join(name for name, found in METHODS.items() if "noise" in found.hyper)
