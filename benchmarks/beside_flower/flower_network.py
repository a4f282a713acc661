"""A network of Flower's own processes on loopback: an environment, a SuperLink, SuperNodes, runs; and its end.

`environment` makes a virtual environment with a named version of flwr from the package index, and this checkout beside
it. `FlowerNetwork` starts what that version calls a deployment, insecure, with Flower's telemetry, its look for newer
versions and its installing of dependencies switched off. Versions differ in their options: which there are is read off
`--help`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from importlib.metadata import version as installed
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).parents[2]
APP = Path(__file__).parent / "flower_app"
OURS = ("numpy", "onnxruntime", "paho-mqtt", "cbor2", "safetensors", "msgspec", "pillow")  # as they are here
CONNECTION = "local"
TESTED = ("1.41.0", "1.22.0")  # the newest that the package index had whole, and the oldest


def environment(folder: Path, flwr: str, timeout_s: float = 600.0) -> Path:
    """The python of an environment with this version of flwr, and the versions of what we need that are installed here.

    Args:
        flwr: a version, or empty for the newest that the package index has whole.
        timeout_s: for pip.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        wanted = [f"flwr=={flwr}" if flwr else "flwr>=1.22", *(f"{name}=={installed(name)}" for name in OURS)]
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        done = subprocess.run(
            [python, "-m", "pip", "install", *quiet, *wanted], capture_output=True, text=True, timeout=timeout_s
        )
        if done.returncode:
            shutil.rmtree(folder)
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no word"]
            raise SystemExit(f"error: pip install flwr {flwr}, expected success, got {last[0]}, try --flower-python")
        (site,) = (folder / "lib").glob("python*/site-packages")
        (site / "protofleet-checkout.pth").write_text(f"{ROOT}\n")
    return python


def flower_version(python: Path) -> str:
    """Of the flwr in an environment."""
    code = "from importlib.metadata import version; import protofleet.flower; print(version('flwr'))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=120, env=_variables())
    if done.returncode:
        last = (done.stderr.splitlines() or ["nothing"])[-1]
        raise SystemExit(f"error: {python}, expected flwr and what Protofleet needs, got {last}")
    return done.stdout.strip()


class FlowerNetwork:
    """A SuperLink and SuperNodes; as a context they are started, and ended.

    Args:
        python: of an environment with flwr.
        folder: for logs, Flower's own files and what the app reads and writes (`BESIDE_FLOWER`).
        nodes: SuperNodes, each of which is told the number of its partition.
        between: given the port of the SuperLink, returns the one that SuperNodes connect to instead: a proxy's.

    Attributes:
        superlink, supernodes: their processes.
        began: when the first of them was started, seconds since the epoch.
    """

    def __init__(
        self, python: Path, folder: Path, nodes: int, between: Callable[[int], int] = lambda port: port
    ) -> None:
        self._bin, self._folder, self._nodes, self._between = python.parent, folder, nodes, between
        self._env = {
            **_variables(),
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "FLWR_HOME": str(folder / "flwr-home"),
            "BESIDE_FLOWER": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.supernodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        one_port = "--port PORT" in self._help("flower-superlink")
        self._started: list[subprocess.Popen[bytes]] = []
        fleet, control, app_io = free_port(), free_port(), free_port()
        quiet = ["--disable-runtime-dependency-installation"]
        if one_port:
            control = fleet
            options = ["--host", "127.0.0.1", "--port", str(fleet)]
            options += quiet if quiet[0] in self._help("flower-superlink") else []
        else:
            options = ["--fleet-api-address", f"127.0.0.1:{fleet}", "--control-api-address", f"127.0.0.1:{control}"]
            options += ["--serverappio-api-address", f"127.0.0.1:{app_io}"]
        self._write_connection(control, one_port)
        self.began = time.time()
        try:
            self.superlink = self._start("superlink", "flower-superlink", *options)
            wait_for_port(fleet)
            wait_for_port(control)
            port = self._between(fleet)
            for number in range(self._nodes):
                own = free_port()
                listen = ["--host", "127.0.0.1", "--port", str(own)]
                if not one_port:
                    listen = ["--clientappio-api-address", f"127.0.0.1:{own}"]
                config = f"partition-id={number} num-partitions={self._nodes}"
                to = ["--superlink", f"127.0.0.1:{port}", "--node-config", config]
                self.supernodes.append(self._start(f"supernode-{number}", "flower-supernode", *to, *listen))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def run(self, kind: str, *, rounds: int, mark: str, run: bytes = b"", timeout_s: float = 300.0) -> str:
        """A run of the app to its end; what Flower said of it.

        Args:
            kind, rounds: see `flower_app/beside_flower/server.py`.
            mark: names its files: `MARK.json`, when it began and each round was closed; `MARK.npz`, what came of it.
            run: our id of the run; random when empty.

        Raises:
            RuntimeError: it has not ended in time, or left no result.
        """
        copy = self._folder / f"app-{mark}"
        shutil.copytree(APP, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if self._in_the_app:
            with open(copy / "pyproject.toml", "a") as file:
                file.write(self._in_the_app)
        config = f"kind='{kind}' rounds={rounds} nodes={self._nodes} mark='{mark}' run='{run.hex()}'"
        command = [self._bin / "flwr", "run", copy, CONNECTION, "--stream", "--run-config", config]
        with open(self._folder / f"run-{mark}.log", "wb") as log:
            subprocess.run(
                command, stdout=log, stderr=log, env=self._env, timeout=timeout_s, cwd=self._folder, check=False
            )
        said = (self._folder / f"run-{mark}.log").read_text()
        if not (self._folder / f"{mark}.json").exists():
            raise RuntimeError(f"flwr run, expected {mark}.json, got\n{said[-4000:]}{self.logs()[-6000:]}")
        return said

    def logs(self) -> str:
        """What the SuperLink and the SuperNodes have said."""
        return "".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("super*.log")))

    def wait_connected(self, timeout_s: float = 120.0) -> None:
        """Until every SuperNode has registered: each says so to the SuperLink, which logs it."""
        deadline = time.monotonic() + timeout_s
        log = self._folder / "superlink.log"
        while len(re.findall(r"ActivateNode|activate-node|CreateNode|create-node", log.read_text())) < self._nodes:
            if time.monotonic() > deadline:
                raise RuntimeError(f"SuperNodes, expected {self._nodes} connected, got fewer\n{self.logs()[-6000:]}")
            time.sleep(0.2)

    def _write_connection(self, control: int, one_port: bool) -> None:
        """Where `flwr run` finds the SuperLink: in its home; versions with several ports look into the app's file."""
        home = Path(self._env["FLWR_HOME"])
        home.mkdir(parents=True)
        line = f'address = "127.0.0.1:{control}"\ninsecure = true\n'
        (home / "config.toml").write_text(f'[superlink]\ndefault = "{CONNECTION}"\n[superlink.{CONNECTION}]\n{line}')
        named = f'[tool.flwr.federations]\ndefault = "{CONNECTION}"\n[tool.flwr.federations.{CONNECTION}]\n{line}'
        self._in_the_app = "" if one_port else f"\n{named}"

    def _help(self, command: str) -> str:
        done = subprocess.run(
            [self._bin / command, "--help"], capture_output=True, text=True, timeout=120, env=self._env
        )
        return " ".join(done.stdout.split())

    def _start(self, name: str, command: str, *options: str) -> subprocess.Popen[bytes]:
        with open(self._folder / f"{name}.log", "ab") as log:
            words = [self._bin / command, "--insecure", *options]
            process = subprocess.Popen(words, stdout=log, stderr=log, env=self._env, cwd=self._folder)
        self._started.append(process)
        return process

    def _end(self) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        while left := [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_ours(pid)]:
            for pid in left:  # what a SuperLink or a SuperNode has left behind: on a busy machine it can be many
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def _is_ours(self, pid: int) -> bool:
        """Whether a process was started with our folder in its environment, and has not ended."""
        try:
            return f"BESIDE_FLOWER={self._folder}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def tree(pid: int) -> list[int]:
    """A process and all that it has started, by what the kernel says now."""
    found, at = [pid], 0
    while at < len(found):
        for task in Path(f"/proc/{found[at]}/task").glob("*/children"):
            try:
                found += map(int, task.read_text().split())
            except OSError:
                continue
        at += 1
    return found


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_port(port: int, timeout_s: float = 120.0) -> None:
    """Until somebody listens there."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _variables() -> dict[str, str]:
    return {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


if __name__ == "__main__":
    print(environment(Path(sys.argv[1]), sys.argv[2]))
