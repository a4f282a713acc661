"""The units and the container file of `deploy/`: what systemd says of them, and that they name what there is."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from brokers import Embedded
from watched import strace

from protofleet.aggregator.settings import AggregateSettings
from protofleet.contract.files.atomic_files import whole_file
from protofleet.contract.settings.sources import read_settings
from protofleet.edge_client.settings import ClientSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNITS = ("protofleet-client.service", "protofleet-aggregator.service")
EXPOSURE = 15  # tenths of `systemd-analyze security`: what is left is the network, and the host's files to read


def analyzed(*words: object) -> subprocess.CompletedProcess[str]:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A unit as shipped, but for a command that is there."""
    made = tmp_path / request.param
    with whole_file(made) as file:
        text = (DEPLOY / request.param).read_text()
        assert text.count("ExecStart=/opt/protofleet/bin/protofleet ") == 1
        file.write(text.replace("/opt/protofleet/bin/protofleet", sys.executable).encode())
    return made


def test_systemd_takes_the_unit_and_finds_little_to_complain_of(unit: Path) -> None:
    verified = analyzed("verify", "--man=no", unit)
    assert (verified.returncode, verified.stderr) == (0, "")
    rated = analyzed("security", "--offline=yes", "--no-pager", f"--threshold={EXPOSURE}", unit)
    assert rated.returncode == 0, rated.stdout


def test_a_unit_that_allows_more_is_found_out(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("SystemCallFilter=", "#").replace("IPAddressDeny=any", ""))
    assert analyzed("security", "--offline=yes", "--no-pager", f"--threshold={EXPOSURE}", unit).returncode != 0


@pytest.mark.parametrize("name", [*UNITS, "Containerfile"])
def test_what_is_started_has_the_options_that_it_is_given(name: str) -> None:
    text = (DEPLOY / name).read_text()
    commands = (ROOT / "docs" / "commands.md").read_text()
    command = "aggregate" if "aggregator" in name else "client"
    (described,) = re.findall(rf"^## protofleet {command}\n(.*?)(?=^## |\Z)", commands, re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if re.match(r"ExecStart=|Environment=\"|CMD ", line)]
    given = {option for line in lines for option in re.findall(r"--[a-z][a-z-]+", line)}
    assert given, name
    assert given <= set(re.findall(r"--[a-z][a-z-]+", described))


def calls_of(*groups: str) -> set[str]:
    """The system calls of systemd's groups."""
    found = set[str]()
    for group in groups:
        lines = analyzed("syscall-filter", group).stdout.splitlines()
        words = [word for word in map(str.strip, lines) if word and not word.startswith("#")]
        found |= {word for word in words if not word.startswith("@")}
        found |= calls_of(*(word for word in words if word.startswith("@") and word != group))
    return found


@pytest.mark.slow
def test_a_round_needs_no_call_that_the_units_deny_and_no_memory_that_they_deny(tmp_path: Path) -> None:
    """Both commands from start to SIGTERM, with `MemoryDenyWriteExecute=` by the kernel's own means, under strace."""
    lines = (DEPLOY / UNITS[0]).read_text().splitlines()
    named = [line.partition("=")[2] for line in lines if line.startswith("SystemCallFilter=")]
    assert named == ["@system-service", "~@privileged @resources"]
    shipped = ROOT / "lab" / "demo" / "shipped"
    with np.load(shipped / "images.npz") as images:
        np.savez(tmp_path / "a.npz", x=images["dealt_x"][:60], y=images["dealt_y"][:60])
    guarded = tmp_path / "guarded.py"
    guarded.write_text(
        "import ctypes, os, sys\n"
        "assert ctypes.CDLL(None).prctl(65, 1, 0, 0, 0) == 0  # PR_SET_MDWE, Linux 6.3\n"
        "os.execvp(sys.argv[1], sys.argv[1:])\n"
    )
    broker = Embedded()
    broker.start()
    common = ["--bundle", shipped / "fleet.bundle", "--broker", broker.url]
    started = {
        "aggregate": [*common, "--store", tmp_path / "s", "--every", "1h", "--window", "2s"],
        "client": [*common, "--id", "d", "--data", tmp_path / "a.npz", "--state", tmp_path / "d"],
    }
    running = []
    try:
        for name, words in started.items():
            watched = [strace(), "-f", "-qq", "-c", "-o", tmp_path / f"{name}.calls", sys.executable, guarded]
            command = [*watched, sys.executable, "-m", "protofleet", name, *words]
            running.append(subprocess.Popen([str(word) for word in command], stderr=subprocess.DEVNULL))
        deadline = time.monotonic() + 120
        while not (tmp_path / "d" / "history.jsonl").exists():
            assert time.monotonic() < deadline
            assert all(process.poll() is None for process in running)
            time.sleep(0.2)
        for process in running:
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGTERM)
        assert [process.wait(60) for process in running] == [143, 143]
    finally:
        for process in running:
            process.kill()
        broker.stop()
    allowed, denied = calls_of("@system-service"), calls_of("@privileged", "@resources")
    for name in started:
        rows = [line.split() for line in (tmp_path / f"{name}.calls").read_text().splitlines()[2:]]
        used = {row[-1] for row in rows if len(row) >= 4 and row[-1].isidentifier()} - {"total"}
        assert {"openat", "sendto", "fdatasync"} <= used  # it sees what it is meant to see
        assert used <= allowed
        # of these it gets EPERM: numpy's library then leaves memory where it lies, and SQLite asks only as root
        assert used & denied <= {"mbind", "set_mempolicy", "fchown"}


def test_the_configuration_that_they_name_is_one() -> None:
    config = read_settings(ClientSettings, {}, file=str(DEPLOY / "client.toml"))
    unit = (DEPLOY / UNITS[0]).read_text()
    assert "/etc/protofleet/client.toml" in unit
    assert f"StateDirectory={Path(config.state).name}" in unit
    assert not config.until_finished
    asked = read_settings(AggregateSettings, {}, file=str(DEPLOY / "aggregate.toml"))
    unit = (DEPLOY / UNITS[1]).read_text()
    assert "--config /etc/protofleet/aggregate.toml" in unit
    assert f"StateDirectory={asked.store.parent.name}" in unit
    assert asked.policy.stays
