"""docs/secure-fleet.md is run: TLS, signatures, enrolment, a policy that refuses, a board that is revoked."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from brokers import free_port, require_mosquitto
from commands import ROOT

BLOCKS = re.findall(r"^```sh\n(.*?)^```", (ROOT / "docs" / "secure-fleet.md").read_text(), re.MULTILINE | re.DOTALL)


def test_the_blocks_are_a_shell_script() -> None:
    assert subprocess.run(["bash", "-n"], input="\n".join(BLOCKS), text=True).returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_runs_as_it_stands(tmp_path: Path) -> None:
    """But for a port that is free, a network as it is initialised, and a Mosquitto that may stay root."""
    require_mosquitto()
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for name, call in (("protofleet", "-m protofleet"), ("python", "")):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {call} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    port = str(free_port())
    script = "\n".join(BLOCKS).replace("8883", port).replace(" --weights pretrained", "")
    script = script.replace("pki init pki", f"pki init pki --port {port}")
    if os.geteuid() == 0:
        script = script.replace("mkdir broker-data", "mkdir broker-data; echo user root >> broker/mosquitto.conf")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}:/usr/sbin"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    trap = "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n"
    command = ["timeout", "600", "bash", "-euo", "pipefail"]
    done = subprocess.run(
        command, input=trap + script, text=True, capture_output=True, cwd=tmp_path, env=environment, check=False
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    logs = {name: (tmp_path / name / "client.log").read_text() for name in ("kitchen", "porch", "porch-2")}
    assert "round 2 (ncm) is refused: the policy allows 1 in a day" in logs["kitchen"]
    assert "round 2 (ncm): releases per day" in said
    assert "the broker refuses our certificate: it is revoked" in " ".join(said.split())
    assert "enrolled as porch" in logs["porch-2"]
    assert not any("Traceback" in text for text in (said, *logs.values(), (tmp_path / "aggregator.log").read_text()))
