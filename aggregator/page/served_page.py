"""The operator's page beside an aggregator, or alone, for as long as a block lasts."""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from protofleet.aggregator.database import Place
from protofleet.aggregator.page.fleet_page import FleetPage
from protofleet.aggregator.page.page_orders import PageOrders, tokens_of
from protofleet.aggregator.settings import AggregateSettings
from protofleet.contract.mqtt.certificates import Expiry
from protofleet.contract.page.page_address import read_page
from protofleet.contract.page.page_server import PageServer

__all__ = ["page_alone", "served_page"]


@contextlib.contextmanager
def served_page(settings: AggregateSettings, expiring: Callable[[], Sequence[Expiry]]) -> Iterator[None]:
    """The page of an aggregator, in its own process.

    Args:
        expiring: the certificates of its connection.

    Raises:
        UsageError: the port is taken, or a file is of no use.
    """
    orders = None
    if settings.allow_control is not None:
        orders = PageOrders(settings.store, tokens_of(Path(settings.allow_control), _operator()))
    # A file's lock is this process's, and must not be looked at here. A server says itself who has it.
    runs = None if settings.worker else lambda: True
    page = FleetPage(settings.store, settings.fleet, runs=runs, expiring=expiring, orders=orders)
    files = settings.page_cert, settings.page_key
    with _serving(page, settings.page or "", files):
        yield


@contextlib.contextmanager
def page_alone(store: Place, fleet: str, at: str, files: tuple[str | None, str | None]) -> Iterator[FleetPage]:
    """The page of a store that another process may have: it only shows.

    Raises:
        UsageError: the port is taken, or a file is of no use.
    """
    page = FleetPage(store, fleet)
    with _serving(page, at, files):
        yield page


@contextlib.contextmanager
def _serving(page: FleetPage, at: str, files: tuple[str | None, str | None]) -> Iterator[None]:
    server = PageServer(read_page(at), page, certificate=files)
    page.start()
    server.start()
    try:
        yield
    finally:
        server.stop()
        page.stop()


def _operator() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "operator"
