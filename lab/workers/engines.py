"""Opens workers by name: this process alone, a process for each core, or a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType

from protofleet.contract.errors import UsageError
from protofleet.contract.names import named
from protofleet.lab.workers.workers import OneProcess, Workers, cores

__all__ = ["ENGINES", "open_workers"]


@contextmanager
def open_workers(
    engine: str = "processes", jobs: int | None = None, *, address: str | None = None, threads: int = 1
) -> Iterator[Workers]:
    """Open workers, which end with the block.

    Args:
        engine: a name from `ENGINES`.
        jobs: number of workers; None for one for each core. One of `processes` means this process alone.
        address: address of a running Ray cluster.
        threads: threads of each worker, within an operator.

    Raises:
        UsageError: an unknown engine, no jobs, Ray where it is not installed, or an address without Ray.
        WorkerError: the address does not answer.
    """
    opened = named(ENGINES, engine, "--engine")
    for option, value in (("--jobs", jobs), ("--threads", threads)):
        if value is not None and value < 1:
            raise UsageError(option, expected="1 or more", got=value)
    with opened(jobs, address, threads) as workers:
        yield workers


@contextmanager
def _processes(jobs: int | None, address: str | None, threads: int) -> Iterator[Workers]:
    """On this machine."""
    if address is not None:
        raise UsageError("--address", expected="--engine ray beside it", got="none")
    number = max(cores() // threads, 1) if jobs is None else jobs
    if number == 1:
        yield OneProcess(threads)
        return
    from protofleet.lab.workers.processes import processes

    with processes(number, threads) as workers:
        yield workers


@contextmanager
def _ray(jobs: int | None, address: str | None, threads: int) -> Iterator[Workers]:
    """On a Ray cluster, or Ray's processes on this machine."""
    from protofleet.lab.workers.ray_workers import ray_workers

    with ray_workers(jobs, address, threads) as workers:
        yield workers


ENGINES: Mapping[str, Callable[[int | None, str | None, int], AbstractContextManager[Workers]]] = MappingProxyType(
    {"processes": _processes, "ray": _ray}
)
