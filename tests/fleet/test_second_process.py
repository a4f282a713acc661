"""A second process with a device's id, beside a real aggregator: the first stays, the operator is told who it was."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from aggregator_server_samples import FLEET, SETTINGS, Running, wait
from brokers import Embedded
from fleets import Processes, bundle, share
from pki_samples import Authority, GuardedMosquitto

from protofleet.aggregator.monitoring import events
from protofleet.aggregator.store.durable_store import DurableStore
from protofleet.contract.bundle.bundle_file import read_bundle
from protofleet.contract.mqtt.address import Address
from protofleet.contract.mqtt.eviction import SOON_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def _open(folder: Path) -> Iterator[tuple[Address, tuple[object, ...]]]:
    """A broker that anyone may write to: of the aggregator its address, of a device its options."""
    broker = Embedded()
    broker.start()
    yield Address.parse(broker.url), ("--broker", broker.url)
    broker.stop()


@contextmanager
def _guarded(folder: Path) -> Iterator[tuple[Address, tuple[object, ...]]]:
    """Mosquitto with the rules that are shipped: one session for each certificate, and both have the same one."""
    authority = Authority(folder / "pki", {"a": (FLEET,)}, (FLEET,))
    broker = GuardedMosquitto(authority)
    files = ("--ca", folder / "pki" / "broker" / "ca.pem", "--cert", authority.file("a"))
    yield authority.address("aggregator"), ("--broker", authority.url, *files)
    broker.close()


@pytest.mark.parametrize("broker", [_open, _guarded], ids=["each its own session", "one session for a certificate"])
@pytest.mark.parametrize("is_clone", [False, True], ids=["another board", "a copied state"])
def test_the_first_stays_and_the_operator_is_told(tmp_path: Path, broker: object, is_clone: bool) -> None:
    made, (x, y) = bundle(tmp_path / "b", "ncm"), share(0, [0, 1, 2])
    np.savez(tmp_path / "a.npz", x=x, y=y)
    fleet = Processes(tmp_path)
    with broker(tmp_path) as (address, options):  # type: ignore[operator]
        read = read_bundle(made)
        with DurableStore(tmp_path / "store", read.sha256, FLEET) as store:
            aggregator = Running(address, store, read.sha256, SETTINGS, made=read.manifest)
            words = ("client", "--fleet", FLEET, "--id", "a", "--bundle", made, "--data", tmp_path / "a.npz", *options)
            try:
                fleet.start("first", *words, "--state", tmp_path / "first")
                wait(lambda: aggregator.core.rounds.is_online("a"), 120)
                since = time.monotonic()
                if is_clone:
                    shutil.copytree(tmp_path / "first", tmp_path / "second")
                    (tmp_path / "second" / "journal.sqlite-shm").unlink(missing_ok=True)
                wait(lambda: time.monotonic() - since > SOON_S)  # of two that start at once either may go
                fleet.start("second", *words, "--state", tmp_path / "second")
                second = fleet.processes.pop("second")
                assert second.wait(240) == 2  # no unit starts it again
                assert "error: another process runs as device a" in fleet.log("second")
                wait(lambda: _told(aggregator), 60)
                assert "another process runs under its id" in _told(aggregator)[0].reason
                assert fleet.processes["first"].poll() is None
                wait(lambda: aggregator.core.rounds.is_online("a"), 60)
            finally:
                fleet.end()


def _told(aggregator: Running) -> list[events.IntruderTold]:
    found = [each for each in aggregator.events if isinstance(each, events.IntruderTold)]
    return [each for each in found if (each.device, each.cause) == ("a", "second-process")]
