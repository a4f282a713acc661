"""Ray's workers: on a running cluster, or on this machine alone while a command runs.

Without an address, Ray's processes are started here, on 127.0.0.1. They have no dashboard, and all their files lie in a
directory that is removed at the end. Ray's usage statistics, which go to its makers once an hour, are switched off for
every process that is started here. A cluster that somebody else started keeps its own setting.

The site and the common values lie in Ray's object store, which the processes of one machine map. Ray itself computes a
task again when its worker is lost. Every machine of a cluster needs the same version of Protofleet.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from protofleet.contract.errors import UsageError, WorkerError
from protofleet.contract.extras import install_command
from protofleet.contract.methods import METHODS, load_method
from protofleet.lab.workers.shared_arrays import pack, sendable, unpack
from protofleet.lab.workers.workers import Results, SiteWorkers, Task, cores

__all__ = ["ray_workers"]

_LOST_IN_A_ROW = 3
_TICK_S = 0.2
_ANSWER_S = 5.0
_LONGEST_PLACE = 40  # characters: Ray lays sockets below, whose paths may have 107
_HTTP2_SETTINGS = b"\x04"  # the type of the first frame of whoever speaks HTTP/2, as Ray does
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + _HTTP2_SETTINGS + bytes(5)
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else it warns of what a later version will do
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}
_ALONE = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # Ray's word for: every process binds to the loopback address alone


@contextmanager
def ray_workers(jobs: int | None, address: str | None, threads: int) -> Iterator[RayWorkers]:
    """Open workers of Ray.

    Args:
        jobs: tasks at a time; None for the number of cores of the machine or the cluster.
        address: HOST:PORT of a cluster. None starts Ray here, and stops it at the end.

    Raises:
        UsageError: Ray is not installed, or the address is not valid.
        WorkerError: the address does not answer.
    """
    with _environment(_QUIET | (_ALONE if address is None else {})):
        try:
            import ray
        except ImportError:
            hint = install_command("ray")
            raise UsageError("--engine ray", expected="Ray", got="none installed", hint=hint) from None
        if address is not None:
            _check_address(address)
        elif ray.is_initialized():  # a run in one of its workers, which spreads its clients
            yield RayWorkers(ray, jobs or 1, threads)
            return
        with _begun(ray, jobs, address):
            yield RayWorkers(ray, jobs or int(ray.cluster_resources().get("CPU", 1)), threads)


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """Set these environment variables within the block, for Ray and the processes that it starts."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _begun(ray: Any, jobs: int | None, address: str | None) -> Iterator[None]:
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    place, before = None, {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if address is None:
        above = tempfile.gettempdir()
        place = tempfile.mkdtemp(prefix="protofleet-", dir=above if len(above) < _LONGEST_PLACE else "/tmp")
        options |= {"num_cpus": jobs or cores(), "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
        options |= {"_temp_dir": place}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ray.init(address or "local", **options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise _no_answer(address, str(error).splitlines()[0]) from None
        _ours_again(before)
        _say_on_stderr()
        yield
    finally:
        ray.shutdown()
        if place is not None:
            shutil.rmtree(place, ignore_errors=True)


def _check_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UsageError("--address", expected="HOST:PORT", got=address, hint="--address 10.0.0.1:6379")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as link:
            link.settimeout(_ANSWER_S)
            link.sendall(_HTTP2_GREETING)
            answer = link.recv(9)
    except OSError as error:
        raise _no_answer(address, error.strerror or str(error)) from None
    if answer[3:4] != _HTTP2_SETTINGS:  # Ray itself would wait for minutes
        raise _no_answer(address, "something else")


def _no_answer(address: str | None, got: str) -> WorkerError:
    if address is None:
        return WorkerError("--engine ray", expected="Ray on this machine", got=got, hint="--engine processes")
    hint = "ray start --head --node-ip-address 127.0.0.1 there"
    return WorkerError(f"--address {address}", expected="a Ray cluster that answers", got=got, hint=hint)


def _ours_again(before: dict[signal.Signals, Any]) -> None:
    """Restore our own handler of SIGTERM, which Ray replaces when it starts."""
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)


def _say_on_stderr() -> None:
    """Send Ray's lines to standard error. It reports a lost worker on standard output, where `--json -` writes."""
    from ray._private import worker

    print_line = getattr(worker, "print_to_stdstream", None)
    if print_line is not None:
        worker.print_to_stdstream = lambda data, *rest, **more: print_line({**data, "is_err": True}, *rest, **more)


class RayWorkers:
    """`protofleet.lab.workers.workers.Workers` on Ray."""

    engine = "ray"

    def __init__(self, ray: Any, jobs: int, threads: int) -> None:
        self.jobs, self.threads, self._ray = jobs, threads, ray
        self._perform = ray.remote(num_cpus=1, max_retries=_LOST_IN_A_ROW)(_perform)

    @contextmanager
    def at_site(self, site: Any) -> Iterator[SiteWorkers]:
        """As `Workers` has it."""
        try:
            kept = self._ray.put(site)
        except (TypeError, AttributeError, ValueError) as error:
            raise UsageError(
                "--engine ray", expected="a network and a method that can be sent to another process", got=error
            ) from None
        yield _AtSite(self._ray, self._perform, self.jobs, self.threads, kept)


@dataclass(frozen=True)
class _AtSite:
    ray: Any
    perform: Any
    jobs: int
    threads: int
    site: Any

    def as_done(
        self,
        task: Task,
        common: Any,
        items: Iterable[Any],
        *,
        ahead: int = 1,
        on_wait: Callable[[], None] | None = None,
    ) -> Results:
        everyones, todo = self.ray.put(pack(common)), enumerate(items)
        given = (pack(task), sys.path, METHODS.of_others(), self.threads)
        under_way: dict[Any, int] = {}
        try:
            while True:
                while len(under_way) < self.jobs + ahead and (entry := next(todo, None)) is not None:
                    place, item = entry  # references in lists are handed on; a worker fetches what it has not got
                    reference = self.perform.remote(*given, [self.site], [everyones], pack(item))
                    under_way[reference] = place
                if not under_way:
                    return
                done, _ = self.ray.wait(list(under_way), timeout=None if on_wait is None else _TICK_S)
                if on_wait is not None:
                    on_wait()
                for each in done:
                    yield under_way.pop(each), self._result(each)
        finally:
            for each in under_way:
                self.ray.cancel(each, force=True)

    def _result(self, reference: Any) -> Any:
        try:
            value = unpack(self.ray.get(reference))
        except (self.ray.exceptions.WorkerCrashedError, self.ray.exceptions.OutOfMemoryError) as error:
            raise WorkerError(
                "Ray's workers",
                expected="some that live until a task is done",
                got=f"{type(error).__name__}, {_LOST_IN_A_ROW + 1} times",
                hint="fewer --jobs, if memory is short",
            ) from None
        except self.ray.exceptions.RayError as error:
            text = str(error).strip().splitlines()
            raise WorkerError("Ray", expected="what came of a task", got=text[-1] if text else error) from None
        if isinstance(value, Exception):
            raise value
        return value


# ── in a worker ─────────────────────────────────────────────────────────────────────────────────────────────────────

_here: dict[str, tuple[str, Any]] = {}


def _perform(
    task: bytes,
    modules: list[str],
    methods: tuple[str, ...],
    threads: int,
    site: list[Any],
    common: list[Any],
    item: bytes,
) -> bytes:
    sys.path += [place for place in modules if place not in sys.path]  # of a method of one's own, perhaps
    from protofleet.lab.workers.threads import limit_threads  # which loads torch, once for each worker

    limit_threads(threads)
    for place in methods:
        load_method(place)
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nobody writes to it
    try:
        return pack(unpack(task)(_loaded("site", site[0]), _loaded("common", common[0], unpack), unpack(item)))
    except Exception as error:
        return pack(sendable(error))


def _loaded(kind: str, reference: Any, read: Callable[[Any], Any] = lambda value: value) -> Any:
    """A common value, fetched once for all its tasks."""
    import ray

    key = reference.hex()
    if kind not in _here or _here[kind][0] != key:
        _here.pop(kind, None)
        _here[kind] = (key, read(ray.get(reference)))
    return _here[kind][1]
