"""Commands run under `strace` in a home of their own: what they connect to, look up, and write."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

# Files and devices that are no one's data: terminals, random bytes, shared memory, the process's own entries.
_NO_FILES = ("/dev/", "/proc/", "/sys/", "pipe:", "socket:", "/memfd:")
_LOOKED_UP_IN = ("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf")
_SENDS = ("connect", "sendto", "sendmsg", "sendmmsg")
_MAKES = ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "link", "linkat", "symlink", "symlinkat")
# A question mark: on a processor that has no such call (aarch64 has neither open nor mkdir) strace goes on without.
_CALLS = ",".join(f"?{call}" for call in (*_SENDS, *_MAKES, "open", "openat", "openat2", "creat"))
_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')


def strace() -> str:
    """The tool; without it the test is skipped, in CI it fails."""
    found = shutil.which("strace")
    if found is None:
        if os.environ.get("PROTOFLEET_CI"):
            pytest.fail("strace is not installed, and this is CI")
        pytest.skip("needs strace")
    return found


_LEFT_OUT = ("XDG_", "HF_", "CI", "BUILD_", "GITHUB_", "GITLAB_", "JENKINS_", "TEAMCITY_", "TF_BUILD", "TRAVIS")
_LEFT_OUT += ("TORCHINDUCTOR_",)  # torch sets it in a process that has exported, as a test before this one may


@dataclass
class Watched:
    """One command under strace, in `folder`: `home` is its home, `tmp` its directory for temporary files."""

    folder: Path
    words: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def start(self) -> Watched:
        """Start it."""
        self.home.mkdir(parents=True)
        self.tmp.mkdir()
        # As at home: libraries report less where a variable says that this is a CI's machine.
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
        environment |= {"HOME": str(self.home), "TMPDIR": str(self.tmp), "OMP_NUM_THREADS": "1"}
        environment |= {"PYTHONDONTWRITEBYTECODE": "1", **self.environment}  # compiled code is pip's to write
        watch = [strace(), "-f", "--seccomp-bpf", "-qq", "-y", "-s", "4096", "-e", f"trace={_CALLS}", "-o", self._trace]
        with open(self.folder / "said", "wb") as said:
            self.process = subprocess.Popen([*map(str, watch), *self.words], stdout=said, stderr=said, env=environment)
        return self

    @classmethod
    def protofleet(cls, folder: Path, *words: object, **environment: str) -> Watched:
        """`protofleet WORDS`, not yet started."""
        folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, (sys.executable, "-m", "protofleet", *map(str, words)), environment=environment)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def said(self) -> str:
        return (self.folder / "said").read_text(errors="replace")

    @property
    def _trace(self) -> Path:
        return self.folder / "trace"

    def finish(self, timeout_s: float = 120.0) -> int:
        """Its exit code."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    # ── what it did ─────────────────────────────────────────────────────────────────────────────────────────────────

    def connections(self) -> set[str]:
        """`host:port` of every address that something was sent or connected to."""
        found = set()
        for line in self._lines():
            if "sin_port=" not in line and "sin6_port=" not in line:
                continue
            port = re.search(r"sin6?_port=htons\((\d+)\)", line)
            host = re.search(r'inet_(?:addr\(|pton\(AF_INET6, )"([^"]+)"', line)
            if port is None or host is None:
                raise AssertionError(line)
            found.add(f"{host[1]}:{port[1]}")
        return found

    def lookups(self) -> list[str]:
        """Whatever resolves a host's name does one of these first."""
        return [line for line in self._lines() if any(f'"{name}"' in line for name in _LOOKED_UP_IN)]

    def written(self) -> set[str]:
        """Every path that was made, or opened for writing."""
        found = set()
        for line in self._lines():
            call = re.match(r"\d+ +(\w+)\(", line)
            if call is None or re.search(r"= -1 E", line):
                continue
            if call[1].startswith("open") and not re.search(r"O_(WRONLY|RDWR|CREAT|TMPFILE)", line):
                continue
            if call[1] in _SENDS:
                continue
            found.add(_path(line))
        return {path for path in found if not path.startswith(_NO_FILES)}

    def written_outside(self, *allowed: Path) -> set[str]:
        """What was written elsewhere than in these places and in the directory for temporary files."""
        inside = [*allowed, self.tmp]
        return {path for path in self.written() if not any(Path(path).is_relative_to(place) for place in inside)}

    def left(self) -> list[Path]:
        """Files in its home, and temporary files that it did not clean up."""
        return [path for place in (self.home, self.tmp) for path in place.rglob("*")]

    def _lines(self) -> list[str]:
        return self._trace.read_text(errors="replace").splitlines()


def _path(line: str) -> str:
    """The last path that a call names, absolute."""
    names = _NAME.findall(line)
    assert names, line
    base = re.findall(r"(?:AT_FDCWD|\d+)<([^>]*)>", line.split('"')[0])
    return os.path.normpath(os.path.join(base[-1] if base else "/", names[-1]))
