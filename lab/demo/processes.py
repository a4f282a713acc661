"""The demo's processes: started with a log each, watched, and all ended, whatever happens.

`Fleet` is a context manager. Each process runs one `protofleet` command, appends to `LOGS/NAME.log`, and has a session
of its own. So Ctrl-C in the terminal reaches only the demo. The demo then ends the others: SIGTERM first, and SIGKILL
for those left after a few seconds. If the demo itself is killed, `protofleet.lab.demo.child_process` ends them.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType

from protofleet.contract.errors import LinkError, UsageError

__all__ = ["Fleet", "free_port", "wait_for_port"]

_GRACE_S = 4.0


class Fleet:
    """Named child processes.

    Args:
        logs: directory for `NAME.log`; created if absent.
        on_start: receives each command line.
        extra: options for every lasting command.
    """

    def __init__(
        self, logs: Path, *, on_start: Callable[[str], None] = lambda line: None, extra: Sequence[str] = ()
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._on_start, self._extra = logs, on_start, tuple(extra)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start `protofleet COMMAND…` as `name`. A process that was ended may be started again."""
        self._launch(name, [*command, *self._extra])

    def _launch(self, name: str, arguments: Sequence[str]) -> None:
        self._on_start(f"protofleet {shlex.join(arguments)}")
        argv = [sys.executable, "-m", "protofleet.lab.demo.child_process", str(os.getpid()), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def run(self, name: str, command: Sequence[str], *, patience_s: float = 60.0) -> None:
        """Run `protofleet COMMAND…` to its end, without the options of lasting commands.

        Raises:
            LinkError: the command fails, or does not end in time.
        """
        self._launch(name, command)
        try:
            self._processes[name].wait(patience_s)
        except subprocess.TimeoutExpired:
            raise LinkError(
                name, expected=f"its end within {patience_s:.0f} s", hint=f"its log {self.log(name)}"
            ) from None
        self.ended(name)
        del self._processes[name]

    def runs(self, name: str) -> bool:
        """Whether the process was started and not ended by us."""
        return name in self._processes

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process. An ended process is ignored."""
        self._processes[name].send_signal(number)

    def end(self, *names: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End these processes and forget them. Those left after a few seconds get SIGKILL."""
        ending = [self._processes[name] for name in names]
        for process in ending:
            process.send_signal(how)
        _wait_for(ending)
        for name in names:  # until now `stop` would have ended them
            del self._processes[name]

    def log(self, name: str) -> Path:
        """The log of `name`."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of `name`."""
        return self._processes[name].pid

    def ended(self, name: str) -> bool:
        """Whether `name` has ended successfully.

        Raises:
            LinkError: it failed. One line gives its last words and its log.
        """
        code = self._processes[name].poll()
        if code is not None and code != 0:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            raise LinkError(f"{name} ended early ({how})", got=self._last_line(name), hint=f"its log {self.log(name)}")
        return code == 0

    def check(self, lasting: Sequence[str] = ()) -> None:
        """Raise if a process has failed, or if one of `lasting` has ended at all."""
        for name in self._processes:
            if self.ended(name) and name in lasting:
                raise LinkError(f"{name} ended early", got=self._last_line(name), hint=f"its log {self.log(name)}")

    def stop(self) -> None:
        """End every process that still runs, devices before the aggregator before the broker."""
        running = [process for process in reversed(self._processes.values()) if process.poll() is None]
        for process in running:
            process.terminate()
        _wait_for(running)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the ending
        try:
            self.stop()
        finally:
            signal.signal(signal.SIGINT, before)

    def _last_line(self, name: str) -> str:
        lines = self.log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "no word")


def _wait_for(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.05, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now."""
    with closing(socket.socket()) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def wait_for_port(fleet: Fleet, name: str, port: int, *, patience_s: float = 20.0) -> None:
    """Return once `name` accepts connections on `port`.

    Raises:
        LinkError: the process ends, or does not accept in time.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        fleet.check(lasting=(name,))
        try:
            with closing(socket.create_connection(("127.0.0.1", port), timeout=1.0)):
                return
        except OSError:
            time.sleep(0.05)
    raise LinkError(f"{name} on port {port}", expected="it to listen", got="silence", hint=f"its log {fleet.log(name)}")


def check_port(port: int) -> None:
    """Refuse a port that is in use.

    Raises:
        UsageError: no process can listen on the port.
    """
    try:
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UsageError("--port", expected="a free port", got=f"{port}: {error}", hint="0 for any") from None
