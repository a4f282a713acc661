"""The demo's processes: started with a log each, watched, and ended, all of them, whatever happens.

`Fleet` is a context manager. Each process runs one `protofleet` command, adds to `LOGS/NAME.log`, and stands in a
session of its own, so that Ctrl-C in the terminal reaches only the demo, which then ends the others: SIGTERM first,
SIGKILL for what is left after a few seconds. A process that the demo cannot end because the demo itself was killed
ends through `lab.demo.child_process`.
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

from contract.errors import LinkError, UsageError

__all__ = ["Fleet", "free_port", "wait_for_port"]

_GRACE_S = 4.0


class Fleet:
    """Named child processes.

    Args:
        logs: directory for `NAME.log`; made if absent.
        on_start: takes each command line.
        extra: options that every command gets that lasts.
    """

    def __init__(
        self, logs: Path, *, on_start: Callable[[str], None] = lambda line: None, extra: Sequence[str] = ()
    ) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self._logs, self._on_start, self._extra = logs, on_start, tuple(extra)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start `protofleet COMMAND…` as `name`; one that was ended may be started again."""
        self._launch(name, [*command, *self._extra])

    def _launch(self, name: str, words: Sequence[str]) -> None:
        self._on_start(f"protofleet {shlex.join(words)}")
        argv = [sys.executable, "-m", "lab.demo.child_process", str(os.getpid()), *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with self.log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def run(self, name: str, command: Sequence[str], *, patience_s: float = 60.0) -> None:
        """Run `protofleet COMMAND…` to its end, without the options that every lasting command gets.

        Raises:
            LinkError: when it does not end well, or in time.
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
        """Whether it was started, and not ended by us."""
        return name in self._processes

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a process a signal; nothing is done about one that is gone."""
        self._processes[name].send_signal(number)

    def end(self, *names: str, how: signal.Signals = signal.SIGTERM) -> None:
        """End these processes, and forget them; SIGKILL for what is left after a few seconds."""
        ending = [self._processes[name] for name in names]
        for process in ending:
            process.send_signal(how)
        _wait_for(ending)
        for name in names:  # until now `stop` would have ended them
            del self._processes[name]

    def log(self, name: str) -> Path:
        """Where `name` writes what it says."""
        return self._logs / f"{name}.log"

    def pid(self, name: str) -> int:
        """The process id of `name`."""
        return self._processes[name].pid

    def ended(self, name: str) -> bool:
        """Whether `name` has ended well.

        Raises:
            LinkError: when it ended otherwise: one line with what it said last and where its log is.
        """
        code = self._processes[name].poll()
        if code is not None and code != 0:
            how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
            raise LinkError(f"{name} ended early ({how})", got=self._last_line(name), hint=f"its log {self.log(name)}")
        return code == 0

    def check(self, lasting: Sequence[str] = ()) -> None:
        """Raise when some process has failed, or one of `lasting` has ended at all."""
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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
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
        LinkError: when it ends, or does not accept in time.
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
    """Refuse a port that is taken.

    Raises:
        UsageError: when nothing can listen there.
    """
    try:
        with closing(socket.socket()) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise UsageError("--port", expected="a free port", got=f"{port}: {error}", hint="0 for any") from None
