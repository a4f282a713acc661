"""A site of a fleet for tests: a broker of its own, a gateway, and devices that know nothing of what stands above."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from brokers import Embedded, TestBroker
from fleets import FLEET, Fleet, Processes

__all__ = ["STANDING", "Site", "site_of"]

STANDING = ("--standing", "--every", "0.2s")


@dataclass(kw_only=True)
class Site(Fleet):
    """What `Fleet` is, on the site's broker; its `store.sqlite` is the gateway's."""

    above: Processes
    name: str
    broker: TestBroker

    def gateway(self, bundle: Path, url: str, *options: object) -> None:
        told = ("--bundle", bundle, "--broker", self.url, "--store", self.folder / "store.sqlite", "--fleet", FLEET)
        told += ("--above", url, "--id", self.name, "--state", self.folder / "up", "--every", "0.2s")
        self.start("gateway", "gateway", *told, *options)


@contextmanager
def site_of(fleet: Fleet, name: str, broker: TestBroker | None = None) -> Iterator[Site]:
    """A site below a fleet, on the embedded broker unless another is given; what still runs at the end is ended."""
    folder, broker = fleet.folder / name, broker or Embedded()
    folder.mkdir()
    broker.start()
    made = Site(folder=folder, url=broker.url, above=fleet, name=name, broker=broker)
    try:
        yield made
    finally:
        made.end()
        broker.stop()
