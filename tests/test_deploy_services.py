"""The units and the container file of `deploy/`: what systemd says of them, and that they name what there is."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from contract.files import whole_file
from edge_client.config import settle_config

ROOT = Path(__file__).parent.parent
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


def test_the_configuration_that_they_name_is_one() -> None:
    config = settle_config(str(DEPLOY / "client.toml"), {})
    unit = (DEPLOY / UNITS[0]).read_text()
    assert "/etc/protofleet/client.toml" in unit
    assert f"StateDirectory={Path(config.state).name}" in unit
    assert not config.until_finished
