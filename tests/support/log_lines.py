"""What is said, as records: checked one by one, sorted by device, or drawn as the aggregator's commands draw it."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from rich.console import Console

from protofleet.aggregator.metrics.console import Drawn, Progress

__all__ = ["drawing", "each_record", "said_by_device"]


class _Each(logging.Handler):
    def __init__(self, take: Callable[[logging.LogRecord], object]) -> None:
        super().__init__()
        self._take = take

    def emit(self, record: logging.LogRecord) -> None:
        self._take(record)


@contextmanager
def each_record(take: Callable[[logging.LogRecord], object], level: int = logging.DEBUG) -> Iterator[None]:
    """Give each record to `take`, as to a handler of a program that embeds us; what it raises ends who spoke."""
    logger, handler = logging.getLogger("protofleet"), _Each(take)
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def said_by_device() -> Iterator[dict[str, list[str]]]:
    """The sentences of level INFO or more that devices of this process say, by the field `device` of their records."""
    said: dict[str, list[str]] = defaultdict(list)

    def take(record: logging.LogRecord) -> None:
        if record.name.startswith("protofleet.edge_client"):
            said[vars(record)["device"]].append(record.getMessage())

    with each_record(take, logging.INFO):
        yield said


def drawing(file: IO[str], width: int = 400, *, verbose: bool = False) -> Progress:
    """A listener whose lines are drawn into a file, beside the process's own loggers."""
    logger = logging.Logger("drawing", logging.DEBUG if verbose else logging.INFO)
    logger.addHandler(Drawn(lambda: Console(file=file, force_terminal=False, width=width)))
    return Progress(logger)
